"""Which of its training classes a run does not learn from."""

from idml.data.sources import ImageSet


def hold_out(images: ImageSet, share: float) -> tuple[ImageSet, ImageSet | None]:
    """The classes to learn from and, every 1/share-th class, those kept for validation; None if there are too few."""
    count = len(images.classes)
    kept = round(count * share)
    if kept < 2 or count - kept < 2:
        return images, None
    chosen = {round((i + 0.5) * count / kept - 0.5) for i in range(kept)}
    return images.of_classes([c for c in range(count) if c not in chosen]), images.of_classes(sorted(chosen))
