"""Train on pictures that are listed in a table: columns path, label, and optionally split.

    python examples/own_data.py

Use this if your files do not lie in one sub-folder for each class, or if you want to say which of them train. The
classes of the split `test` must not be those of `train`: a metric is tested on classes that it has not seen.
"""

import csv
from pathlib import Path

import idml
from idml.data.datasets import load_dataset
from pictures import draw_pictures

folder = draw_pictures("pictures", classes=24, each=6)

# Every second class trains. Paths are relative to the table.
with Path("pictures.csv").open("w", newline="") as file:
    table = csv.writer(file)
    table.writerow(["path", "label", "split"])
    for number, group in enumerate(sorted(folder.iterdir())):
        for image in sorted(group.iterdir()):
            table.writerow([image, group.name, "train" if number % 2 == 0 else "test"])

# Look at what was understood before you train.
data = load_dataset("csv:pictures.csv")
print(f"{len(data.train)} images train, {len(data.test)} test; the first class is {data.train.classes[0]!r}")

small = {"trunk": "conv4", "pretrained": False, "image_size": 32, "embedding_dim": 32, "batch_size": 24, "lr": 1e-3}
figures = idml.train(data="csv:pictures.csv", out="runs/table", epochs=4, **small)
print(f"right first results on the test classes: {figures['selected']['recall@1']:.0%}")
