"""Draws the pictures that the examples use, so that they run anywhere in seconds: one sub-folder for each class.

A class is a scene of five coloured shapes. Each picture of it is lit differently, shifted and noisy. With a folder of
your own photos you need none of this.
"""

from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw


def draw_pictures(folder: str | Path, *, classes: int, each: int, size: int = 64, first: int = 0) -> Path:
    """Draw ``each`` pictures of every class from ``first`` on; return the folder."""
    for label in range(first, first + classes):
        scene = np.random.default_rng(label)  # the same class gives the same scene
        background, colours = scene.integers(0, 256, 3), scene.integers(0, 256, (5, 3))
        places, radii = scene.uniform(0.15, 0.85, (5, 2)), scene.uniform(0.08, 0.25, 5)
        sides = scene.integers(3, 8, 5)
        target = Path(folder) / f"scene {label:02d}"
        target.mkdir(parents=True, exist_ok=True)
        for number in range(each):
            change = np.random.default_rng([label, number])
            image = Image.new("RGB", (size, size), tuple(int(c) for c in background))
            draw = ImageDraw.Draw(image)
            for colour, place, radius, n in zip(colours, places, radii, sides, strict=True):
                x, y = (place + change.normal(0, 0.02, 2)) * size
                turn = float(change.normal(0, 8))
                draw.regular_polygon((x, y, radius * size), int(n), rotation=turn, fill=tuple(int(c) for c in colour))
            pixels = np.asarray(image) * change.uniform(0.8, 1.2) + change.normal(0, 12, (size, size, 3))
            Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(target / f"{number}.png")
    return Path(folder)
