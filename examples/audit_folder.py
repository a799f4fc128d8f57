"""Find wrong labels and duplicates in a folder of pictures.

    python examples/audit_folder.py

The same on the command line, with a page to decide image by image:

    idml audit pretrained --data folder:pictures --out audit --review
"""

import csv
import shutil
from pathlib import Path

import idml
from pictures import draw_pictures

folder = draw_pictures("pictures", classes=16, each=8)

# Make three mistakes that real folders have: two pictures in the wrong sub-folder, and one copied file.
shutil.move(folder / "scene 03" / "2.png", folder / "scene 07" / "moved.png")
shutil.move(folder / "scene 11" / "5.png", folder / "scene 00" / "moved.png")
shutil.copy(folder / "scene 05" / "1.png", folder / "scene 05" / "copy.png")

# `pretrained` is the network without training; a run that was trained on such pictures can be better.
result = idml.audit("pretrained", f"folder:{folder}", out="audit")
for kind, count in result["counts"].items():
    print(f"{kind}: {count['listed']} listed")

# audit.csv has a line for each suspicious image, the most suspicious first.
with Path(result["csv"]).open(newline="") as file:
    for row in list(csv.DictReader(file))[:5]:
        print({name: row[name] for name in list(row)[:5]})
print("the page is", result["report"])
