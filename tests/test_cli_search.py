"""`idml index`, `gallery` and `search` from the command line: JSON on the last line, mistakes in one."""

import json
import shutil
import sqlite3
from contextlib import chdir, closing
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from idml import cli
from idml.model import build_model, save_model
from tracer import MOST_FOR_A_SEARCH, Tracer

CLASSES, EACH = 12, 20


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A run, a gallery calibrated on itself, and its twelve classes of twenty images, some of them easily mistaken."""
    folder = tmp_path_factory.mktemp("cli")
    torch.manual_seed(0)
    save_model(build_model("conv4", embedding_dim=16, image_size=28), folder / "run")
    noise = np.random.default_rng(0)
    for c in range(CLASSES):
        (folder / "photos" / f"c{c:02d}").mkdir(parents=True)
        pattern = np.kron(noise.integers(40, 216, (4, 4, 3)), np.ones((8, 8, 1)))
        for n in range(EACH):
            pixels = (pattern + noise.normal(0, 60, pattern.shape)).clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / "photos" / f"c{c:02d}" / f"{n}.png")
    with chdir(folder):
        assert cli.main(["index", "photos", "--to", "calibrated", "--model", "run", "--json"]) == 0
        assert cli.main(["calibrate", "calibrated", "--json"]) == 0
    return folder


@pytest.fixture
def run(place, tmp_path, monkeypatch, capsys):
    """Runs a command in a folder of its own; its exit status, its standard output and the last line of the other.

    ``notes`` has all lines of the other.
    """
    monkeypatch.chdir(tmp_path)
    for name in ("run", "photos"):
        Path(name).symlink_to(place / name)
    shutil.copytree(place / "calibrated", "calibrated")

    def call(*arguments):
        try:
            status = cli.main([*arguments])
        except SystemExit as stop:  # the parser's
            status = stop.code
        said = capsys.readouterr()
        assert "Traceback" not in said.err
        call.notes = said.err.splitlines()
        return status, said.out, said.err.splitlines()[-1:]

    return call


def result_of(answer):
    """What a command says to a program."""
    status, out, _ = answer
    assert status == 0
    return json.loads(out.splitlines()[-1])


def test_from_a_folder_to_answers(run):
    made = result_of(run("index", "photos", "--model", "run", "--to", "g", "--json"))
    assert made == {
        "new": 240, "replaced": 0, "unchanged": 0, "removed": 0, "broken": 0, "skipped": 0,
        "items": 240, "gallery": "g",
    }  # fmt: skip
    assert "240 unchanged" in run("index", "photos", "--to", "g")[1]  # the gallery has its model
    assert run("index", "photos", "--to", "g")[1].splitlines()[-1] == "next: idml calibrate g"
    query = "photos/c05/3.png"
    (reply,) = result_of(run("search", "g", query, "-k", "3", "--json"))["replies"]
    assert (reply["calibrated"], reply["promised"]) == (False, False)
    (reply,) = result_of(run("search", "calibrated", query, "-k", "3", "--json"))["replies"]
    assert (reply["image"], reply["calibrated"], reply["set_size"]) == (query, True, None)
    assert reply["state"] in ("match", "unsure", "not in the collection")
    assert len(reply["results"]) == 3
    assert reply["results"][0]["path"] == query
    assert reply["notes"] == []
    _, out, _ = run("search", "calibrated", query, "photos/c00/1.png", "-k", "2", "--max-error", "0.5")
    assert out.startswith(f"{query}: ")
    assert out.count("P(right)") == 2
    assert out.count("\n  0.0000  c") == 2  # each finds itself


def test_a_search_in_a_calibrated_gallery_runs_few_files(run):
    result_of(run("index", "photos", "--to", "calibrated", "--json"))  # as it lies here
    tracer = Tracer()
    tracer.start()
    status, out, _ = run("search", "calibrated", "photos/c05/3.png", "--max-error", "0.2")
    tracer.stop()
    assert status == 0
    assert "P(right)" in out
    assert {"calibration/confidence.py", "search/engines/sqlite.py"} <= tracer.files
    assert len(tracer.files) <= MOST_FOR_A_SEARCH, " ".join(sorted(tracer.files))


def test_lists_that_hold_a_right_image(run):
    """With --max-missed as many results as that takes; where it cannot be promised, the reason."""
    queries = [f"photos/c{c:02d}/0.png" for c in range(CLASSES)]
    replies = result_of(run("search", "calibrated", *queries, "-k", "1", "--max-missed", "0.2", "--json"))["replies"]
    sizes = [reply["set_size"] for reply in replies]
    assert all(size >= 1 for size in sizes)
    assert len({*sizes}) > 1
    assert [len(reply["results"]) for reply in replies] == sizes
    _, out, _ = run("search", "calibrated", queries[0], "--max-missed", "0.2")
    assert f"a right one is among the first {sizes[0]} (at most 20% of such lists miss)" in out
    (reply,) = result_of(run("search", "calibrated", queries[0], "--max-missed", "0.001", "--json"))["replies"]
    assert reply["set_size"] is None
    assert reply["notes"][-1].startswith("cannot promise at most 0.1 % result sets without a right image here: ")


def test_looking_after_a_gallery(run):
    result_of(run("index", "photos", "--model", "run", "--to", "g", "--json"))
    items = result_of(run("gallery", "list", "g", "--json"))["items"]
    assert len(items) == 240
    assert items[0] == {"id": items[0]["id"], "path": "photos/c00/0.png", "label": "c00"}
    assert f"{items[0]['id']}  c00  'photos/c00/0.png'" in run("gallery", "list", "g")[1]
    ids = [item["id"] for item in items[:3]]
    whole = {"items": 240, "missing": []}
    assert result_of(run("gallery", "label", "g", *ids, "--label", "new", "--json")) == {"changed": 3, **whole}
    assert run.notes[-1] == "no other image has the label 'new'"
    assert result_of(run("gallery", "label", "g", ids[0], "--label", "new", "--json")) == {"changed": 0, **whole}
    assert run.notes == []
    assert result_of(run("gallery", "label", "g", ids[0], "--json")) == {"changed": 1, **whole}
    assert run.notes == []
    labels = {item["id"]: item["label"] for item in result_of(run("gallery", "list", "g", "--json"))["items"]}
    assert [labels[id] for id in ids] == [None, "new", "new"]
    status, out, (line,) = run("gallery", "remove", "g", *ids, "unknown", "other", "--json")
    assert status == 2
    assert line == "idml gallery: g has no item 'unknown' (nor 1 more of these); 'idml gallery list g' shows all ids"
    assert json.loads(out) == {"changed": 3, "items": 237, "missing": ["unknown", "other"]}
    assert result_of(run("gallery", "verify", "g", "--json")) == {"problems": []}
    assert result_of(run("gallery", "compact", "g", "--json"))["items"] == 237
    assert result_of(run("gallery", "backup", "g", "b.sqlite", "--json")) == {"file": "b.sqlite", "items": 237}
    with closing(sqlite3.connect("g/gallery.sqlite")) as database:
        database.execute("UPDATE items SET path = x'00' WHERE position = 5")
        database.commit()
    status, out, _ = run("gallery", "verify", "g", "--json")
    assert status == 2
    assert f"gallery.sqlite, item '{items[8]['id']}': the row is damaged" in json.loads(out)["problems"][0]
    assert result_of(run("gallery", "remove", "g", items[8]["id"], "--json"))["changed"] == 1
    assert result_of(run("gallery", "verify", "g", "--json")) == {"problems": []}
    shutil.copy("b.sqlite", "g/gallery.sqlite")  # restored
    assert result_of(run("gallery", "verify", "g", "--json")) == {"problems": []}
    assert len(result_of(run("gallery", "list", "g", "--json"))["items"]) == 237


@pytest.mark.parametrize("label", ["", "  class00 ", "a\nb", "a\u2028b", "x" * 201])
@pytest.mark.parametrize(
    "command", [["gallery", "label", "calibrated", "id"], ["search", "calibrated", "photos/c05/3.png"]]
)
def test_labels_that_the_service_refuses_or_changes_are_refused(run, command, label):
    judged = ["--feedback", "wrong"] if command[0] == "search" else []
    status, out, (line,) = run(*command, *judged, "--label", label)
    assert (status, out) == (2, "")
    assert "a label is" in line
    assert "nobody has judged" in run("gallery", "feedback", "calibrated")[1]


def test_judgements_are_kept_shown_used_and_deleted(run):
    query = "photos/c05/3.png"
    assert "nobody has judged" in run("gallery", "feedback", "calibrated")[1]
    run("search", "calibrated", "photos/c05/2.png", "--feedback", "right")
    run("search", "calibrated", query, "--feedback", "right")
    assert run.notes[-2:] == [
        f"kept about {query}: it shows 'c05'",
        "'idml gallery feedback calibrated' shows and deletes judgements",
    ]
    status, _, (line,) = run("search", "calibrated", query, "--feedback", "wrong", "--label", "c05")
    assert (status, line) == (2, "idml search: the answer 'c05' cannot be wrong if it is the right label")
    run("search", "calibrated", query, "--feedback", "wrong", "--label", "new thing")
    assert "no image of the gallery has the label 'new thing': to a calibration it is an unknown class" in run.notes
    kept = result_of(run("gallery", "feedback", "calibrated", "--json"))["feedback"]
    assert [(one["right"], one["label"], one["query"]) for one in kept] == [
        (True, "c05", "2.png"),
        (False, "new thing", "3.png"),  # the judgement before about the same picture is replaced
    ]
    before = result_of(run("calibrate", "calibrated", "--json", "--unknown", "0.3"))
    assert before["queries"].endswith("2 answers that people judged")
    assert result_of(run("gallery", "feedback", "calibrated", kept[0]["id"], "--delete", "--json")) == {"deleted": 1}
    status, out, (line,) = run("gallery", "feedback", "calibrated", kept[0]["id"], "--delete")
    assert (status, out) == (2, "0 judgements deleted\n")
    assert line.startswith(f"idml gallery: there is no judgement '{kept[0]['id']}'")
    assert result_of(run("gallery", "feedback", "calibrated", "--delete", "--json")) == {"deleted": 1}
    run("search", "calibrated", query, "--feedback", "wrong")
    assert run.notes[-3:-1] == [
        f"kept about {query}: it does not show 'c05'",
        "the next calibration can use this only if --label says what is shown",
    ]
    run("gallery", "feedback", "calibrated", "--delete")


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("calibrate nowhere", "there is no gallery"),
        ("calibrate g", "has one image: index more"),
        ("calibrate g --unknown 0.95", "must be from 0 to 0.9, got 0.95"),
        ("calibrate calibrated --queries nowhere", "there is no folder 'nowhere' of queries"),
        ("calibrate calibrated --queries few/c0", "has no images in sub-folders"),
        ("calibrate calibrated --queries broken", "no image in 'broken' can be read (1 tried)"),
        ("calibrate calibrated --queries few", "needs 50 queries with a right answer, there are 0"),
        ("search g few/c0/0.png --label x", "use it with --feedback wrong"),
        ("gallery list g c0", "unexpected argument 'c0': 'idml gallery list' is about the whole gallery"),
        ("gallery remove g c0 --label x", "--label goes with the action label, not with remove"),
        ("gallery remove g c0 --delete", "--delete deletes judgements, with the action feedback, not with remove"),
        ("gallery feedback g c0", "to delete these judgements, add --delete"),
        ("index photos --model nowhere --to new", "there is no model at nowhere"),
        ("index nowhere --model run --to new", "there is no folder 'nowhere'"),
        ("index empty --model run --to new", "the folder 'empty' contains no image (.jpg, "),
        ("index empty --to g", "the folder 'empty' contains no image (.jpg, "),
        ("index photos --model run --to milvus://nowhere", "a gallery in Milvus is milvus://host:port/collection"),
        ("index photos --model pretrained --to g", "made with another model"),
        ("search g nowhere.png", "there is no image 'nowhere.png'"),
        ("search nowhere photos/c00/0.png", "there is no gallery"),
        ("search g photos/c00/0.png -k 0", "k must be a whole number above 0"),
        ("search g photos/c00/0.png --max-error 5e-324", "max_error must be at least 1e-09"),
        ("search g photos/c00/0.png --max-error 0", "max_error must be between 0 and 1"),
        ("search g photos/c00/0.png --max-missed 1", "max_missed must be between 0 and 1"),
        ("search g run/model.safetensors", "it is none of JPEG"),
        ("gallery remove g", "name the items to remove"),
        ("gallery label g unknown --label x", "there is no item 'unknown'"),
        ("gallery verify nowhere", "there is no gallery"),
        ("serve nowhere", "there is no gallery"),
        ("serve g --host 0.0.0.0", "IDML_API_KEY"),
    ],
)
def test_a_mistake_is_one_line_and_exit_status_2(run, command, words, monkeypatch):
    for name in ("IDML_API_KEY", "IDML_READ_KEY"):
        monkeypatch.delenv(name, raising=False)
    Path("few/c0").mkdir(parents=True)
    Image.new("RGB", (30, 30), "red").save("few/c0/0.png")
    Path("empty/c0").mkdir(parents=True)
    Path("broken/c00").mkdir(parents=True)
    Path("broken/c00/1.png").write_bytes(b"no image")
    result_of(run("index", "few", "--model", "run", "--to", "g", "--json"))
    status, out, (line,) = run(*command.split())
    assert (status, out) == (2, "")
    assert not Path("new").exists()  # nothing is made for nothing
    assert line.startswith(f"idml {command.split()[0]}: ")
    assert words in line


def test_two_writers(run, monkeypatch):
    """They take turns; one that holds the database too long is an error for the other."""
    from idml.search.engines import sqlite_storage
    from idml.search.gallery import Gallery

    result_of(run("index", "photos", "--model", "run", "--to", "g", "--json"))
    monkeypatch.setattr(sqlite_storage, "WAIT", 0.2)
    with Gallery.open("g", write=True):
        for command, status in (("index photos --to g", 0), ("gallery remove g x", 2), ("gallery compact g", 0)):
            assert run(*command.split())[0] == status
    with closing(sqlite3.connect("g/gallery.sqlite", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        for command in ("gallery remove g x", "gallery compact g"):
            status, out, (line,) = run(*command.split())
            assert (status, out) == (2, "")
            assert "was locked by another process for 0.2 seconds; try again later" in line
        assert len(result_of(run("gallery", "list", "g", "--json"))["items"]) == 240  # reading goes on


def test_names_from_folders_are_escaped(run):
    """A folder, a file and a label that would move the cursor, in every command that shows them."""
    evil = "bird\x1b[2J\nFAKE LINE\u202e"
    folder = Path("nasty") / evil
    folder.mkdir(parents=True)
    shutil.copy("photos/c00/0.png", folder / f"{evil}.png")
    (folder / f"broken{evil}.png").write_bytes(b"no image")
    for command in (
        ("index", "nasty", "--to", "g", "--model", "run"),
        ("gallery", "list", "g"),
        ("search", "g", str(folder / f"{evil}.png")),
        ("search", "g", str(folder / f"broken{evil}.png")),
        ("search", "g", f"missing{evil}"),
    ):
        _, out, err = run(*command)
        said = out + "".join(err)
        assert all(c.isprintable() or c == "\n" for c in said)
        assert "\nFAKE LINE" not in said
    assert run("gallery", "list", "g", "--json")[1].count("FAKE LINE") == 3  # JSON has its own escapes


def test_results_are_reranked_by_position_maps(run):
    query = "photos/c05/3.png"
    assert run("search", "calibrated", query, "--rerank", "diml")[0] == 2
    made = result_of(run("index", "photos", "--to", "calibrated", "--maps", "--json"))
    assert (made["unchanged"], made["maps"]) == (240, 240)
    assert "0 new position maps" in run("index", "photos", "--to", "calibrated", "--maps")[1]
    (reply,) = result_of(run("search", "calibrated", query, "-k", "3", "--rerank", "diml", "--json"))["replies"]
    assert (reply["calibrated"], reply["promised"], reply["probability"]) == (False, False, None)
    assert reply["results"][0]["path"] == query
    assert len(reply["results"]) == 3
    assert any("nothing is promised" in note for note in reply["notes"])
    for words, said in (
        (["--rerank", "dilm"], "unknown rerank 'dilm'; did you mean 'diml'?"),
        (["--rerank", "diml", "--feedback", "right"], "--feedback judges answers for the next calibration"),
        (["--rerank", "diml", "--max-missed", "0.1"], "a search without re-ranking"),
        (["--rerank", "diml", "-k", "0"], "k must be a whole number above 0"),
    ):
        status, _, (line,) = run("search", "calibrated", query, *words)
        assert status == 2
        assert said in line
