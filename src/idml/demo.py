"""`idml demo`: train on glyphs, compare with the paper's method, then index, calibrate and search a collection.

For the search, the test classes that share no image with another one are split: four fifths are the collection, the
rest are queries whose class is not in it. Two images of each class of the collection are queries too. The gallery is
calibrated on itself, so no query was used for calibration.
"""

import html
import json
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from idml import calibrate
from idml.data.datasets import Dataset, ImageSet, load_glyphs
from idml.data.sampling import random_stream
from idml.files import write_atomic
from idml.progress import Note, Progress, image_counter
from idml.report_html import page, table
from idml.search.answers import RiskTargets, State
from idml.search.gallery import Gallery, Reply, open_or_create
from idml.search.indexing import index_folder
from idml.training.config import from_dict
from idml.training.loop import train

SETTINGS: dict[str, Any] = {
    "data": "glyphs", "loss": "multi_similarity", "trunk": "conv4", "pretrained": False, "image_size": 28,
    "embedding_dim": 64, "epochs": 2, "lr": 1e-3,
}  # fmt: skip
METHODS = {"plain": "the default method", "idml": "the paper's method"}
GALLERY_OF = "plain"  # whose model the collection is searched with
_KNOWN_QUERIES = 2  # images of each class of the collection that are queries instead
_UNKNOWN_QUERIES = 2  # images of each class outside the collection that are queries


def demo(out: Path, *, quick: bool = False, report: Progress, note: Note) -> dict[str, Any]:
    """Train both, compare them on the test classes, index, calibrate and search; write ``out``/report.html.

    A finished run is not trained again. ``quick`` takes a tenth of the classes.
    """
    results: dict[str, Any] = {}
    glyphs = load_glyphs()
    if quick:
        train_part, test_part = (
            part.of_classes(range(0, len(part.classes), 10)) for part in (glyphs.train, glyphs.test)
        )
        glyphs = Dataset("glyphs", train_part, test_part, notes=("glyphs: a tenth of the classes",))
    for method in METHODS:
        run = out / method
        finished = run / "metrics.json"
        if finished.exists():
            results[method] = json.loads(finished.read_text())
        else:
            config = from_dict({**SETTINGS, "method": method, "out": str(run)})
            results[method] = train(config, resume=True, dataset=glyphs, report=report, note=note)
    results["search"] = show_search(glyphs.test, out / GALLERY_OF, out, report=report, note=note)
    figures = list(results[GALLERY_OF]["selected"])
    rows = [[f"{m} ({what})", *(f"{results[m]['selected'][f]:.1%}" for f in figures)] for m, what in METHODS.items()]
    links = "".join(f"<li><a href='{m}/report.html'>training by {m}</a></li>" for m in METHODS)
    write_atomic(
        out / "report.html",
        page(
            "idml demo",
            "<h1>A collection of letters that knows when it does not know</h1>",
            "<p>Every query is a drawing of a letter or sign. One in five shows a sign that is not in the collection. "
            "The answer is <em>match</em>, <em>unsure</em> or <em>not in the collection</em>.</p>",
            describe_search(results["search"]),
            "<h2>Retrieval on signs that were not trained on</h2>",
            f"<p>{SETTINGS['loss']}, {SETTINGS['epochs']} epochs, one seed: a first look, not a result.</p>",
            table(["method", *figures], rows),
            f"<ul>{links}<li><a href='gallery/calibration.html'>calibration</a></li></ul>",
        ),
    )
    return results


def show_search(images: ImageSet, run: Path, out: Path, *, report: Progress, note: Note) -> dict[str, Any]:
    """Write the images to folders, index, calibrate, search; return the counts and a sample of each answer."""
    parts = split_images(images)
    for name, numbers in parts.items():
        _write_images(images, numbers, out / "images" / name)
    with open_or_create(out / "gallery", run) as gallery:
        collection = out / "images" / "collection"
        index_folder(gallery, collection, progress=image_counter(report, "indexed"), note=note)
    calibrated = calibrate(out / "gallery", keep_copies=True, progress=report, note=note)
    with Gallery.open(out / "gallery") as gallery:
        replies = {
            name: _search_queries(gallery, images, parts[name], f"images/{name}") for name in ("known", "unknown")
        }
    counts = {name: _count_answers(answers) for name, answers in replies.items()}
    samples = _choose_samples(replies["known"], replies["unknown"])
    return {
        "max_error": RiskTargets().max_error,
        "calibration": calibrated["words"],
        "counts": counts,
        "samples": samples,
    }


def split_images(images: ImageSet) -> dict[str, Tensor]:
    """Return the numbers of the images of each part: collection, known and unknown (queries).

    Characters that share an image with another one are left out: nobody can tell them apart, and with many of them no
    small error rate can be promised.
    """
    groups = find_twin_groups(images)
    alone = groups.bincount()[groups] == 1
    order = torch.randperm(int(groups.max()) + 1, generator=random_stream("demo"))
    part = (order * 5) // len(order)  # of each group: 4 is unknown, the others are the collection
    place = torch.where(alone, part[groups], 5)[images.labels]
    turn = torch.zeros(len(images), dtype=torch.long)  # a random order within each class
    seen: Counter[int] = Counter()
    for i in torch.randperm(len(images), generator=random_stream("demo queries")).tolist():
        label = int(images.labels[i])
        turn[i] = seen[label]
        seen[label] += 1
    collected = place < 4
    return {
        "collection": (collected & (turn >= _KNOWN_QUERIES)).nonzero().flatten(),
        "known": (collected & (turn < _KNOWN_QUERIES)).nonzero().flatten(),
        "unknown": ((place == 4) & (turn < _UNKNOWN_QUERIES)).nonzero().flatten(),
    }


def find_twin_groups(images: ImageSet) -> Tensor:
    """Return a group number for each class; classes that share an image are in the same group."""
    group = list(range(len(images.classes)))

    def head(c: int) -> int:
        while group[c] != c:
            c = group[c]
        return c

    owner: dict[str, int] = {}
    for source, label in zip(images.sources, images.labels.tolist(), strict=True):
        other = head(owner.setdefault(source.stamp, label))
        group[head(label)] = other
    numbers: Tensor = torch.tensor([head(c) for c in range(len(group))]).unique(return_inverse=True)[1]
    return numbers


def _file_name(images: ImageSet, number: int) -> str:
    """Return a name such as "U+0041 LATIN CAPITAL LETTER A/DejaVuSans.png": the folder is the label."""
    font = Path(images.sources[number].name).stem
    return f"{images.classes[int(images.labels[number])]}/{font}.png"


def _write_images(images: ImageSet, numbers: Tensor, folder: Path) -> None:
    """Write images as files, one sub-folder per class; existing files stay."""
    for number in numbers.tolist():
        path = folder / _file_name(images, number)
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            images.sources[number].decode().save(path)


def _search_queries(gallery: Gallery, images: ImageSet, numbers: Tensor, folder: str) -> list[tuple[str, Reply]]:
    """Search for images; return the file name and the reply of each query."""
    queries = [images.sources[number].decode() for number in numbers.tolist()]
    replies = gallery.search(queries, 5)
    return [(f"{folder}/{_file_name(images, n)}", reply) for n, reply in zip(numbers.tolist(), replies, strict=True)]


def _is_right(file: str, reply: Reply) -> bool:
    return bool(reply.results) and reply.results[0].label == file.split("/")[-2]


def _count_answers(answers: list[tuple[str, Reply]]) -> dict[str, int]:
    """Count how many queries got each answer, and how many matches were wrong."""
    counts = {state.value: sum(reply.answer.state is state for _, reply in answers) for state in State}
    wrong = sum(reply.answer.state is State.MATCH and not _is_right(file, reply) for file, reply in answers)
    return {"queries": len(answers), **counts, "wrong matches": wrong}


def _choose_samples(known: list[tuple[str, Reply]], unknown: list[tuple[str, Reply]]) -> list[dict[str, Any]]:
    """Return one right answer of each kind, an unsure one, and one error if there is any, marked as such."""
    every = [*((file, reply, True) for file, reply in known), *((file, reply, False) for file, reply in unknown)]
    chosen: dict[str, dict[str, Any]] = {}
    for file, reply, inside in every:
        state = reply.answer.state
        if state is State.UNSURE:
            verdict = "unsure"
        else:
            right = inside and _is_right(file, reply) if state is State.MATCH else not inside
            verdict = f"right {state.value}" if right else "error"
        chosen.setdefault(
            verdict,
            {
                "image": file,
                "state": state.value,
                "reason": reply.answer.reason,
                "error": verdict == "error",
                "probability": reply.answer.probability,
                "found": [result.label for result in reply.results],
            },
        )
    order = ["right match", "unsure", "right not in the collection", "error"]
    return [chosen[verdict] for verdict in order if verdict in chosen]


def describe_search(result: dict[str, Any]) -> str:
    """Build the part of the demo's page that shows the answers."""
    states = [state.value for state in State]
    header = ["queries", "", *states, "wrong matches"]
    rows = []
    for name, c in result["counts"].items():
        shown = [f"{c[what]:,}" for what in ("queries", *states, "wrong matches")]
        rows.append([f"class {'' if name == 'known' else 'not '}in the collection", *shown])
    samples = []
    for s in result["samples"]:
        chance = "" if s["probability"] is None else f"{s['probability']:.2f}"
        state = f"{s['state']} (an error)" if s["error"] else s["state"]
        samples.append([s["image"], state, s["reason"], chance, ", ".join(s["found"])])
    return (
        f"<h2>Answers; at most {result['max_error']:.0%} of the matches may be wrong</h2>{table(header, rows)}"
        "<h2>What is promised</h2><ul>" + "".join(f"<li>{html.escape(x)}</li>" for x in result["calibration"]) + "</ul>"
        f"<h2>Samples</h2>{table(['query', 'answer', 'reason', 'P(right)', 'found'], samples)}"
    )
