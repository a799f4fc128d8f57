"""`idml evaluate` end to end on a run that takes a second, against loops over all distances."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from idml import IntrospectiveMetric, cli
from idml.data.augment import GRADED, MIDDLE, MIXED, View, other_class
from idml.data.datasets import Dataset, load_dataset
from idml.data.pixel_cache import load_pixels
from idml.evaluation import (
    GALLERY_AWARE,
    QUERY_ONLY,
    auroc,
    evaluate_retrieval,
    evaluate_uncertainty,
    neighbour_scores,
    paired_rise,
)
from idml.evaluation import evaluate as whole
from idml.evaluation.evaluate import evaluate_run, group_disjoint_pairs
from idml.model import Model, build_model, load_model, save_model
from idml.model.structural_matching import structural_similarities
from idml.training.config import from_dict
from idml.training.loop import train

OPTIONS = {
    "trunk": "conv4", "pretrained": False, "image_size": 16, "embedding_dim": 8, "epochs": 2, "batch_size": 8,
    "per_class": 2, "lr": 1e-3, "holdout": 0.34,
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IDML_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Twelve classes of six patterns so noisy that some are mistaken; the last class has one image."""
    root = tmp_path_factory.mktemp("pictures")
    noise = np.random.default_rng(0)
    for c in range(12):
        (root / f"class {c:02d}").mkdir()
        pattern = np.kron(noise.integers(80, 176, (4, 4, 3)), np.ones((6, 6, 1)))
        for i in range(6 if c < 11 else 1):
            pixels = (pattern + noise.normal(0, 70, pattern.shape)).clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(root / f"class {c:02d}" / f"{i}.png")
    return root


@pytest.fixture(scope="module")
def spec(pictures):
    return f"folder:{pictures}"


@pytest.fixture(scope="module")
def runs(tmp_path_factory, spec):
    folder = tmp_path_factory.mktemp("runs")
    for method, size in (("idml", 8), ("pel", 6)):
        own = {"method": method, "embedding_dim": size, **({"gamma": 0.5} if method == "idml" else {})}
        train(from_dict({"data": spec, "out": str(folder / method), **OPTIONS, **own}))
    return folder


@pytest.fixture(scope="module")
def first(runs, spec):
    """The first evaluation, by the command line."""
    with pytest.MonkeyPatch.context() as patch:
        said = []
        patch.setattr(
            "builtins.print", lambda *words, file=None, flush=False: said.append((" ".join(map(str, words)), file))
        )
        assert cli.main(["evaluate", str(runs / "idml"), "--data", spec, "--json"]) == 0
    return json.loads([line for line, file in said if file is None][-1])


@pytest.fixture(scope="module")
def embedded(runs, spec):
    """The test images' labels, and a function from a view to their embeddings, made without any cache."""
    model = load_model(runs / "idml")
    pixels = load_pixels(load_dataset(spec).test, 18)
    return pixels.images.labels, lambda view: model.embed(view.images(pixels, pixels.usable, 16))


def loops(queries, clean, labels, view):
    """Scores and right answers from all distances; a query never finds itself, a mixed one neither of its parents."""
    partner = other_class(labels, 0) if view.kind == "mixed" else torch.arange(len(labels))
    distances = torch.cdist(queries.unit.double(), clean.unit.double())
    scores = {"nearest_distance": [], "disagreement": []}
    correct = []
    for i, row in enumerate(distances.tolist()):
        near = sorted((d, j) for j, d in enumerate(row) if j not in (i, int(partner[i])))[:10]
        answers = [int(labels[j]) for _, j in near]
        scores["nearest_distance"].append(near[0][0])
        scores["disagreement"].append(sum(a != answers[0] for a in answers) / 10)
        correct.append(answers[0] in (int(labels[i]), int(labels[partner[i]])))
    return {"level": queries.level, **{name: torch.tensor(x) for name, x in scores.items()}}, torch.tensor(correct)


def test_retrieval_figures_are_those_of_the_embedded_images(first, embedded):
    labels, embed = embedded
    wanted = evaluate_retrieval(embed(View()), labels, nmi=True)
    assert {name: first[name] for name in wanted} == pytest.approx(wanted)
    assert first["singletons"] == 1
    assert first["accuracy"]["clean"]["value"] == pytest.approx(wanted["recall@1"])
    assert 0.2 < first["recall@1"] < 0.95  # there is something to rank


def test_reranked_figures_are_those_of_a_loop(runs, spec, first, embedded):
    """The first neighbours sorted by ŝ₁·ŝ₂ + Σ T·S, one pair at a time; the scores stay those of the plain search."""
    result = evaluate_run(runs / "idml", spec, rerank="diml")
    assert result["before_rerank"]["map@r"] == first["map@r"]
    assert result["uncertainty"] == first["uncertainty"]
    labels, embed = embedded
    model, pixels = load_model(runs / "idml"), load_pixels(load_dataset(spec).test, 18)
    unit = embed(View()).unit
    with torch.no_grad():
        features = model.features_with_map(View().images(pixels, pixels.usable, 16), 4).half().float()
        maps = model.semantic(features.unflatten(1, (17, -1))[:, 1:])
    maps = maps / maps.norm(dim=2, keepdim=True)
    values = torch.full((len(labels), len(labels)), -9.0)
    for i in range(len(labels)):
        for j in range(len(labels)):
            if i != j:
                matched = structural_similarities(maps[i : i + 1], unit[i : i + 1], maps[j : j + 1], unit[j : j + 1])
                values[i, j] = unit[i] @ unit[j] + matched[0]
    order = values.argsort(dim=1, descending=True)
    rows = labels.bincount()[labels] > 1
    right = labels[order] == labels[:, None]
    assert result["recall@1"] == pytest.approx(float(right[rows, 0].double().mean()))
    assert result["r_precision"] == pytest.approx(float(right[rows, :5].double().mean()))  # R = 5
    with pytest.raises(ValueError, match="unknown re-ranker 'dimm'; did you mean 'diml'"):
        evaluate_run(runs / "idml", spec, rerank="dimm")


def test_a_model_that_cannot_be_reranked_is_refused_before_anything_is_embedded(runs, spec, tmp_path, monkeypatch):
    shutil.copytree(runs / "idml", tmp_path / "run")
    save_model(build_model("conv4", embedding_dim=8, image_size=16, head="slices", slices=("a", "b")), tmp_path / "run")
    monkeypatch.setattr(whole, "measure_queries", lambda *parts: pytest.fail("images were embedded"))
    with pytest.raises(ValueError, match="needs a linear head"):
        evaluate_run(tmp_path / "run", spec, rerank="diml")


@pytest.mark.parametrize("view", [View(), MIXED, *MIDDLE], ids=str)
def test_scores_are_those_of_loops(first, embedded, view):
    labels, embed = embedded
    queries = labels.bincount()[labels] > 1
    clean = embed(View())
    scores, correct = loops(embed(view), clean, labels, view)
    before, _ = loops(clean, clean, labels, View())
    low, high = first["accuracy"][str(view)]["interval"]
    assert first["accuracy"][str(view)]["value"] == pytest.approx(float(correct[queries].double().mean()))
    assert low <= first["accuracy"][str(view)]["value"] <= high
    for name, score in scores.items():
        found = first["uncertainty"][name][str(view)]
        wanted = evaluate_uncertainty(score[queries], correct[queries])
        if view.kind != "clean":
            both = torch.cat([before[name][queries], score[queries]])
            wanted["detects"] = auroc(both, torch.arange(len(both)) >= len(both) // 2)
            wanted["rises"] = paired_rise(before[name][queries], score[queries])
        intervals = found["intervals"]
        assert {k: v for k, v in found.items() if k != "intervals"} == pytest.approx(wanted, abs=1e-4), name
        assert all(low <= high for low, high in intervals.values())


def test_all_applicable_scores_are_measured(first, runs, spec, monkeypatch):
    monkeypatch.setattr("idml.evaluation.report._show_tsne", lambda *given: "")
    assert set(first["uncertainty"]) == {*QUERY_ONLY, *GALLERY_AWARE} - {"sigma", "ensemble"}
    assert first["own_score"] == "level"
    for group, names in (("query_only", QUERY_ONLY), ("gallery_aware", GALLERY_AWARE)):
        for view, best in first["best"].items():
            values = {n: first["uncertainty"][n][view]["r_auroc"] for n in names if n in first["uncertainty"]}
            assert best[group]["score"] == max(values, key=values.get)
    assert len(first["verdict"]) == len(first["best"]) + 2
    pel = evaluate_run(runs / "pel", spec, ensemble=[runs / "idml"])  # of another size
    assert set(pel["uncertainty"]) == {*QUERY_ONLY, *GALLERY_AWARE} - {"level"}
    assert pel["own_score"] == "sigma"
    assert pel["ensemble"] == 1
    assert "σ" in Path(pel["report"]).read_text()


def test_the_votes_are_those_of_both_models(runs, spec, embedded, monkeypatch):
    labels, embed = embedded
    monkeypatch.setattr("idml.evaluation.report._show_tsne", lambda *given: "")
    result = evaluate_run(runs / "idml", spec, ensemble=[runs / "pel"])
    pixels = load_pixels(load_dataset(spec).test, 18)
    other = load_model(runs / "pel").embed(View().images(pixels, pixels.usable, 16))
    one, two = (labels[neighbour_scores(e, labels).indices[:, 0]] for e in (embed(View()), other))
    queries = labels.bincount()[labels] > 1
    wanted = evaluate_uncertainty((one != two)[queries] / 2, (one == labels)[queries])
    found = result["uncertainty"]["ensemble"]["clean"]
    assert {name: found[name] for name in wanted} == pytest.approx(wanted)


def test_a_second_call_reads_the_first_result(first, runs, spec, monkeypatch, tmp_path):
    def refuse(*given, **named):
        raise AssertionError("the model was asked again")

    for name in ("embed", "embed_features", "features"):
        monkeypatch.setattr(Model, name, refuse)
    monkeypatch.setattr("idml.evaluation.evaluate.load_model", refuse)
    again = evaluate_run(runs / "idml", spec)
    assert again == first
    elsewhere = evaluate_run(runs / "idml", spec, out=tmp_path / "new" / "place")
    assert (tmp_path / "new" / "place" / "report.html").read_bytes() == Path(first["report"]).read_bytes()
    assert {**elsewhere, "report": first["report"]} == first


def test_the_report_shows_all_parts(first):
    text = Path(first["report"]).read_text()
    assert Path(first["report"]).name == "report.html"
    for words in (
        "Retrieval",
        "The best scores",
        "Risk and coverage",
        "‖u‖ of clean, mixed",
        "Most certain",
        "Least certain",
    ):
        assert words in text
    for line in first["verdict"]:
        assert line in text
    for name in (*first["uncertainty"], *first["best"]):
        assert name in text
    pictures = re.findall(r"<img alt='([^']+)' src='data:image/png", text)
    assert sum("→" in words for words in pictures) == min(8, round(30 * (1 - first["recall@1"])))  # confident mistakes
    assert sum("t-SNE" in words for words in pictures) == 1
    assert sum("‖u‖" in words for words in pictures) == 3
    assert len(re.findall(r"<svg role='img' aria-label='[^']+'", text)) == 2
    assert text.count("<img") == len(pictures)
    assert not re.search(r"""(src|href|url)[=(]['"]?http""", text)
    assert text.endswith("</html>")


def test_the_introspective_metric(first, runs, spec, embedded, monkeypatch):
    monkeypatch.setattr("idml.evaluation.report._show_tsne", lambda *given: "")
    labels, embed = embedded
    notes, rows = [], []
    result = evaluate_run(runs / "idml", spec, metric="introspective", progress=rows.append, note=notes.append)
    wanted = evaluate_retrieval(embed(View()), labels, metric=IntrospectiveMetric(5.0, 0.5), nmi=True)
    assert {name: result[name] for name in wanted} == pytest.approx(wanted)
    assert result["nmi"] is None
    assert (result["tau"], result["gamma"]) == (5.0, 0.5)
    assert any("NMI is not defined" in line for line in notes)
    assert "not defined" in Path(result["report"]).read_text()
    assert result["key"] != first["key"]
    assert evaluate_run(runs / "idml", spec) == first
    assert "not defined" not in Path(first["report"]).read_text()  # the report is that of the last call
    assert rows
    assert all(set(row) == {"done", "images", "what"} and 0 < row["done"] <= row["images"] for row in rows)


def test_a_data_set_with_its_own_gallery_and_graded_views(runs, spec, monkeypatch):
    monkeypatch.setattr("idml.evaluation.report._show_tsne", lambda *given: "")
    data = load_dataset(spec)
    even = torch.arange(len(data.test)) % 2 == 0
    shop = Dataset("shop", data.train, data.test[even], data.test[~even])
    monkeypatch.setattr(whole, "load_dataset", lambda spec, split: shop)
    result = evaluate_run(runs / "idml", "inshop:nowhere", graded=True)
    assert list(result["best"]) == ["clean", "mixed", *map(str, GRADED)]
    model = load_model(runs / "idml")
    queries, gallery = (load_pixels(images, 18) for images in (shop.test, shop.gallery))
    wanted = evaluate_retrieval(
        model.embed(View().images(queries, queries.usable, 16)),
        shop.test.labels,
        gallery=model.embed(View().images(gallery, gallery.usable, 16)),
        gallery_labels=shop.gallery.labels,
        nmi=True,
    )
    assert {name: result[name] for name in wanted} == pytest.approx(wanted)
    assert result["accuracy"]["clean"]["value"] == pytest.approx(wanted["recall@1"])
    assert result["singletons"] == 1


def test_one_class_has_nothing_to_rank(runs, pictures, tmp_path):
    for c in ("class 00", "class 01"):
        shutil.copytree(pictures / c, tmp_path / "two" / c)
    result = evaluate_run(runs / "idml", f"folder:{tmp_path / 'two'}")
    assert result["recall@1"] == 1
    assert "mixed" not in result["accuracy"]
    assert "predicted_error" not in result["uncertainty"]
    assert any("predicted_error is left out: all 6 answers" in line for line in result["notes"])
    assert result["uncertainty"]["level"]["clean"]["r_auroc"] is None
    assert result["accuracy"]["clean"]["interval"] is None
    assert all("nothing to rank" in line for line in result["verdict"])
    shutil.copytree(pictures / "class 00", tmp_path / "single" / "a")
    shutil.copytree(pictures / "class 11", tmp_path / "single" / "b")
    with pytest.raises(ValueError, match="none of the 1 images has another image of its class to find"):
        evaluate_run(runs / "idml", f"folder:{tmp_path / 'single'}")


def test_notes_say_what_makes_figures_less_meaningful(runs, spec, tmp_path, monkeypatch):
    monkeypatch.setattr("idml.evaluation.report._show_tsne", lambda *given: "")
    run = tmp_path / "run"
    shutil.copytree(runs / "idml", run, ignore=shutil.ignore_patterns("evaluation"))
    options = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(options.replace("method: idml", "method: plain"))
    notes = []
    result = evaluate_run(run, spec, split="all", note=notes.append)
    assert notes[: len(result["notes"])] == result["notes"]
    for words in ("trained by plain", "it may have seen the test classes of 'all'", "predicted_error is left out"):
        assert any(words in line for line in result["notes"]), words
    kept = run / "evaluation" / f"{result['key']}.json"
    kept.write_bytes(kept.read_bytes()[:100])
    assert evaluate_run(run, spec, split="all") == result  # a damaged one is made again
    assert {**json.loads(kept.read_text()), "report": result["report"]} == result


@pytest.mark.parametrize(
    ("change", "arguments", "words"),
    [
        ("remove", [], "there is no model at"),
        ("cut", [], "not a sound safetensors file"),
        ("other size", [], "the model needs"),
        ("pickle", [], "is a pickle"),
        (None, ["--metric", "introspectiv"], "unknown metric 'introspectiv'; did you mean 'introspective'?"),
        (None, ["--ensemble", "nowhere"], "there is no model at nowhere"),
        (None, ["--data", "folder:nowhere"], "nowhere"),
        (None, ["--data", "csv:train.csv"], "there is no test image"),
        (None, ["--split", "2"], "the split is"),
        ("no options", ["--metric", "introspective"], "has no tau and gamma"),
        ("bad options", [], "is not a YAML file"),
        ("infinite", [], "the embeddings of 36 of 36 images hold NaN or infinity (first: 'class 00/0.png')"),
    ],
)
def test_a_mistake_gives_one_line(runs, spec, pictures, change, arguments, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "run"
    shutil.copytree(runs / "idml", run, ignore=shutil.ignore_patterns("evaluation"))
    file = run / "model.safetensors"
    shutil.copytree(pictures / "class 00", "images")
    Path("train.csv").write_text("path,label,split\nimages/0.png,a,train\nimages/1.png,b,train\n")
    if change == "remove":
        file.unlink()
    elif change == "cut":
        file.write_bytes(file.read_bytes()[:-10])
    elif change == "pickle":
        torch.save({}, file)
    elif change == "no options":
        (run / "config.yaml").unlink()
    elif change == "bad options":
        (run / "config.yaml").write_text("tau: [")
    elif change == "other size":
        file.write_bytes(file.read_bytes().replace(b'embedding_dim\\": 8', b'embedding_dim\\": 9'))
    elif change == "infinite":
        model = load_model(run)
        with torch.no_grad():
            model.semantic.weight.fill_(3e38)
        save_model(model, run)
    try:
        status = cli.main(["evaluate", str(run), *(() if "--data" in arguments else ("--data", spec)), *arguments])
    except SystemExit as stop:  # the parser's
        status = stop.code
    assert status == 2
    said = capsys.readouterr()
    assert words in said.err.splitlines()[-1]
    assert said.err.splitlines()[-1].startswith("idml evaluate: ")
    assert "Traceback" not in said.err
    assert said.out == ""
    assert not (run / "evaluation").exists()


def test_evaluation_does_not_import_training():
    for file in Path(whole.__file__).parent.glob("*.py"):
        assert "idml.training" not in file.read_text(), file


@given(st.integers(3, 40), st.integers(0, 1000))
def test_no_image_is_twice_in_a_group(n, seed):
    labels = torch.randint(3, (n,), generator=torch.Generator().manual_seed(seed))
    labels[:2] = torch.tensor([0, 1])
    partner = other_class(labels, seed)
    groups = group_disjoint_pairs(partner)
    assert torch.cat(groups).sort().values.tolist() == list(range(n))
    for rows in groups:
        both = torch.cat([rows, partner[rows]])
        assert len(both.unique()) == len(both)
