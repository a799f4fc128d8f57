"""Keep a gallery in a Milvus server, where several machines can search and change it.

    pip install 'idml[milvus]'
    IDML_MILVUS_TOKEN=user:password python examples/milvus_gallery.py milvus://db.example.org:19530/pictures

The same on the command line:

    idml index pictures --to milvus://db.example.org:19530/pictures --model pretrained
    idml calibrate milvus://db.example.org:19530/pictures --model pretrained
    idml search milvus://db.example.org:19530/pictures query.png --model pretrained
"""

import sys

import idml
from pictures import draw_pictures

address, model = sys.argv[1], "pretrained"
folder = draw_pictures("pictures", classes=24, each=4)
known = draw_pictures("asked", classes=1, each=5) / "scene 00" / "4.png"  # a new picture of a scene in the gallery

# The collection holds vectors, labels and thumbnails. The model is not in it: everybody names the same one.
print(idml.index(folder, to=address, model=model))
print(idml.calibrate(address, run=model))  # the calibration lies in the collection: all clients give the same answers

with idml.Gallery.open(address, run=model) as gallery, idml.Gallery.open(address, run=model, write=True) as elsewhere:
    (reply,) = gallery.search([known], k=3, max_error=0.2)
    print(reply)

    # Another client changes the collection; this one sees it.
    elsewhere.relabel({reply.results[0].id: "renamed elsewhere"})
    gallery.refresh()
    (reply,) = gallery.search([known], k=3, max_error=0.2)
    print("the first result is now", repr(reply.results[0].label))
