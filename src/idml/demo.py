"""`idml demo`: the plain loss and IDML side by side on the embedded data set, then a gallery that answers queries."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from idml.data.glyphs import load_glyphs
from idml.data.pixel_cache import load_pixels
from idml.demo_search import describe, show_search
from idml.evaluation.evaluate import tells_ambiguous
from idml.files import write_whole
from idml.html import page, table
from idml.model import load_model
from idml.training.config import TrainConfig
from idml.training.loop import train

SETTINGS: dict[str, Any] = {
    "data": "glyphs", "loss": "multi_similarity", "trunk": "conv4", "pretrained": False, "image_size": 28,
    "embedding_dim": 64, "epochs": 2, "lr": 1e-3,
}  # fmt: skip


def demo(out: Path, *, report: Callable[[dict[str, Any]], None], note: Callable[[str], None]) -> dict[str, Any]:
    """Train both, compare them on the test classes, calibrate, index and ask; write ``out``/report.html.

    A finished half is not trained again.
    """
    results: dict[str, Any] = {}
    for method in ("plain", "idml"):
        run = out / method
        finished = run / "metrics.json"
        if finished.exists():
            results[method] = json.loads(finished.read_text())
        else:
            config = TrainConfig(out=str(run), method=method, **SETTINGS)
            results[method] = train(config, resume=True, report=report, note=note)
    results["uncertainty"] = _uncertainty(out / "idml")
    results["search"] = show_search(load_glyphs().test, out / "idml", out, report=report, note=note)
    figures = list(results["plain"]["selected"])
    rows = [[m, *(f"{results[m]['selected'][f]:.1%}" for f in figures)] for m in ("plain", "idml")]
    links = "".join(f"<li><a href='{m}/report.html'>{m}</a></li>" for m in ("plain", "idml"))
    told = [[name, f"{value:.3f}"] for name, value in results["uncertainty"].items()]
    write_whole(
        out / "report.html",
        page(
            "idml demo",
            "<h1>Plain loss and IDML on glyphs</h1>",
            f"<p>{SETTINGS['loss']}, {SETTINGS['epochs']} epochs, one seed: a first look, not a result.</p>",
            table(["method", *figures], rows),
            "<h2>What ‖u‖ tells on the test classes (AUROC; 0.5 is chance)</h2>",
            table(["question", "AUROC"], told),
            describe(results["search"]),
            f"<ul>{links}<li><a href='idml/calibration.html'>calibration</a></li></ul>",
        ),
    )
    return results


def _uncertainty(run: Path) -> dict[str, float]:
    """Whether ‖u‖ is larger for mixed images, and for images with an identical twin in another class."""
    model = load_model(run)
    pixels = load_pixels(load_glyphs().test, round(model.trunk.image_size * 256 / 224))
    told = tells_ambiguous(model, pixels)
    return {
        "mixed images above clean ones": told["auroc_mixed"],
        "images with a twin above the rest": told["auroc_twins"],
    }
