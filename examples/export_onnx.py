"""Export a trained model as ONNX, and find pictures with it where there is neither torch nor idml.

    python examples/export_onnx.py

The same on the command line:

    idml export runs/idml --out model.onnx
"""

from pathlib import Path

import numpy as np
import onnxruntime
from PIL import Image

import idml
from idml.model.onnx import export_onnx
from pictures import draw_pictures

folder = draw_pictures("pictures", classes=12, each=6)
options = {"trunk": "conv4", "pretrained": False, "image_size": 32, "embedding_dim": 32, "lr": 1e-3}
idml.train(data=f"folder:{folder}", out="runs/small", epochs=4, batch_size=24, **options)
written = export_onnx("runs/small", "model.onnx")
print(f"model.onnx: {written['bytes']:,} bytes, differs from torch by {written['difference']:.0e}")

# From here on only numpy, Pillow and ONNX Runtime are used.
SIZE = 32
files = sorted(folder.rglob("*.png"))
session = onnxruntime.InferenceSession("model.onnx")


def prepare(file: Path) -> np.ndarray:
    """Resize to a square and crop its centre, as the model was trained: bytes [3, SIZE, SIZE]."""
    side = round(SIZE * 256 / 224)
    image = Image.open(file).convert("RGB").resize((side, side), Image.Resampling.BILINEAR)
    edge = (side - SIZE) // 2
    return np.asarray(image.crop((edge, edge, edge + SIZE, edge + SIZE))).transpose(2, 0, 1)


semantic, uncertainty = session.run(
    ["semantic", "uncertainty"], {"images": np.stack([prepare(file) for file in files])}
)
unit = semantic / np.linalg.norm(semantic, axis=1, keepdims=True)
level = np.linalg.norm(uncertainty, axis=1)

similarity = unit @ unit.T
np.fill_diagonal(similarity, -1)
nearest = similarity.argmax(axis=1)
right = [files[n].parent == file.parent for file, n in zip(files, nearest, strict=True)]
print(f"right first results: {np.mean(right):.0%}; mean ‖u‖ {level.mean():.3f}")

# The same pictures embedded by idml: torch, and the same preparation.
by_torch = idml.load_model("runs/small").embed(files).unit.numpy()
print("the vectors of idml are the same:", bool(np.abs(by_torch - unit).max() < 1e-4))
