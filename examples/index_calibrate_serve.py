"""Index a folder, calibrate the gallery, serve it, ask it over HTTP, and stop the service.

    pip install httpx
    python examples/index_calibrate_serve.py

The same on the command line:

    idml index pictures --to gallery
    idml calibrate gallery
    idml serve gallery
    curl -F image=@query.png 'http://127.0.0.1:8000/api/search?k=3&max_error=0.05'
"""

import json
import subprocess
import sys

import httpx

import idml
from pictures import draw_pictures

folder = draw_pictures("pictures", classes=40, each=6)
known = draw_pictures("asked", classes=1, each=7) / "scene 00" / "6.png"  # a new picture of a scene in the gallery
unknown = draw_pictures("asked", classes=1, each=1, first=90) / "scene 90" / "0.png"  # a scene that is not in it

# No training: a new gallery uses the pretrained network. Labels come from the sub-folders.
print(idml.index(folder, to="gallery"))

# What may be promised here? The gallery is its own test: each image is searched among the others.
for line in idml.calibrate("gallery")["words"]:
    print("-", line)

# Search from Python.
with idml.Gallery.open("gallery") as gallery:
    for query, reply in zip((known, unknown), gallery.search([known, unknown]), strict=True):
        print(f"{query}: {reply.answer.state.value} ({reply.answer.reason}); nearest: {reply.results[0].label}")

# Search over HTTP. Port 0 takes a free one; the service says on standard error where it listens.
service = subprocess.Popen(
    [sys.executable, "-m", "idml.cli", "serve", "gallery", "--port", "0"], stderr=subprocess.PIPE, text=True
)
try:
    address = next(line.split(" served at ")[1].split()[0] for line in service.stderr if " served at " in line)
    asked = {"params": {"k": 3, "max_error": 0.05}, "files": {"image": known.read_bytes()}}
    reply = httpx.post(f"{address}api/search", timeout=60, **asked).json()
    print(json.dumps({name: reply[name] for name in ("state", "reason", "probability", "promised")}))
    print("found:", [result["label"] for result in reply["results"]])
finally:
    service.terminate()  # open requests are answered, then the gallery is closed
    service.wait()
print("the service ended with status", service.returncode)
