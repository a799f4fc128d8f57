"""An audit of made pictures, to be reviewed by the tests."""

import json
import os
import shutil

import numpy as np
from PIL import Image

from idml.audit.findings import AuditImages
from idml.audit.run import audit_run
from idml.data.datasets import load_dataset

WRONG = "=<img src=x onerror=alert(1)>.png"
FOREIGN = os.fsdecode(b"caf\xe9.png")  # a name that is not UTF-8


def pictures(root):
    """Noisy patterns of six classes, two images of which are under a wrong label and one is there twice."""
    noise = np.random.default_rng(0)
    for c in range(6):
        (root / f"class {c}").mkdir(parents=True)
        pattern = np.kron(noise.integers(60, 196, (4, 4, 3)), np.ones((12, 12, 1)))
        for i in range(6):
            pixels = (pattern + noise.normal(0, 30, pattern.shape)).clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(root / f"class {c}" / f"{i}.png")
    (root / "class 0" / "0.png").rename(root / "class 4" / WRONG)
    (root / "class 1" / "0.png").rename(root / "class 5" / FOREIGN)
    (root / "class 2" / "copy.png").write_bytes((root / "class 2" / "1.png").read_bytes())
    return root


def audited(folder, run):
    """The pictures in ``folder``/data and their audit in ``folder``/out; the SPEC and the place of the audit."""
    spec, out = f"folder:{pictures(folder / 'data')}", folder / "out"
    audit_run(run, spec, out)
    return spec, out


def copied(folder, to):
    """A copy of what `audited` made, for a test to change; the images' new stamps are those that were audited."""
    for name in ("data", "out"):
        shutil.copytree(folder / name, to / name)
    audit = json.loads((to / "out" / "audit.json").read_text())
    audit["images_version"] = AuditImages.of(load_dataset(f"folder:{to / 'data'}")).version
    (to / "out" / "audit.json").write_text(json.dumps(audit))
    return to
