"""What a type checker sees of `import idml`: mypy checks this file in `make lint`; nothing runs it."""

from pathlib import Path
from typing import assert_type

import torch

import idml
from idml.search.results import Reply


def use_everything(folder: Path) -> None:
    trained = idml.train(data="folder:photos", out=str(folder), method="idml", loss="proxy_anchor", tau=5.0, epochs=3)
    assert_type(trained.selected, dict[str, float])
    assert_type(trained.steps, int)
    idml.train(data="glyphs", out="x", epochs="many")  # type: ignore[arg-type]
    idml.train(out="x")  # type: ignore[call-arg]
    idml.train(data="glyphs", out="x", schedule="cosin")  # type: ignore[arg-type]
    measured = idml.evaluate(folder, "folder:photos", metric="introspective")
    assert_type(measured.recall_at_1, float)
    assert_type(measured.verdict, list[str])
    assert_type(idml.calibrate("gallery", unknown=0.1).words, list[str])
    assert_type(idml.audit(folder, "folder:photos", out=folder / "audit").counts, dict[str, dict[str, int]])
    with idml.Gallery.open("gallery") as gallery:
        assert_type(gallery.search(["a.jpg", Path("b.jpg")], k=3, max_error=0.05), list[Reply])
    embeddings = idml.load_model(folder).embed(folder / "a.jpg")
    assert_type(embeddings, idml.Embeddings)
    assert_type(idml.embed("photos", to="photos.npz").images, int)
    assert_type(idml.index("photos", "gallery").new, int)
    labels = idml.LabelSets(torch.tensor([0]))
    loss = idml.build_loss("contrastive", metric=idml.IntrospectiveMetric(rule="off"))
    loss(embeddings, labels)
    assert_type(idml.evaluate_retrieval(embeddings, ["a"]).map_at_r, float)
    assert_type(idml.evaluate_uncertainty([0.5], [True]).r_auroc, float | None)
