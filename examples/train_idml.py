"""Train with IDML on a folder of pictures, measure the run on classes it has not seen, and use the model.

    python examples/train_idml.py

The same on the command line:

    idml train --data folder:pictures --out runs/idml --method idml --loss proxy_anchor
    idml evaluate runs/idml --data folder:pictures
"""

from pathlib import Path

import idml
from pictures import draw_pictures

# One sub-folder for each class. The first half of the classes trains, the other half tests.
folder = draw_pictures("pictures", classes=40, each=8)

# The keywords are the options of `idml train`. A small network from random weights trains in seconds; without
# `trunk` and `pretrained` a run starts from a network that was trained on ImageNet.
figures = idml.train(
    data=f"folder:{folder}",
    out="runs/idml",
    method="idml",
    loss="proxy_anchor",
    trunk="conv4",
    pretrained=False,
    image_size=32,
    embedding_dim=32,
    epochs=8,
    batch_size=32,
    lr=1e-3,
)
print("right first results on new classes:", f"{figures['selected']['recall@1']:.0%}")

# What ‖u‖ and its rivals are worth: for each view of the test images, which score ranks the wrong answers best?
result = idml.evaluate("runs/idml", f"folder:{folder}")
print("the report is", result["report"])

# The trained model gives two vectors for an image: s says what it shows, u how ambiguous it is.
model = idml.load_model("runs/idml")
files = sorted(Path(folder).glob("*/0.png"))[:4]
embeddings = model.embed(files)
for file, level in zip(files, embeddings.level.tolist(), strict=True):
    print(f"{file}: uncertainty {level:.3f}")
print("distances:", idml.IntrospectiveMetric(tau=5.0).distances(embeddings).shape)
