"""Image files for the tests of the data."""

from collections.abc import Sequence
from pathlib import Path

import numpy
from PIL import Image

CLASSES = ("ant", "bee", "cat")


def noise(seed: int, width: int, height: int, mode: str = "RGB") -> Image.Image:
    """Return a picture of random pixels that the seed determines."""
    channels = len(Image.new(mode, (1, 1)).getbands())
    values = numpy.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=numpy.uint8)
    return Image.merge(mode, [Image.fromarray(numpy.ascontiguousarray(values[..., k])) for k in range(channels)])


def write_folder(
    root: Path, num: int = 24, size: tuple[int, int] = (12, 9), classes: Sequence[str] = CLASSES, mode: str = "RGB"
) -> list[Path]:
    """Write `num` pictures, one class after the other, and return their paths in the order of the source."""
    paths = []
    for k in range(num):
        path = root / classes[k % len(classes)] / f"{k:03}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        noise(k, *size, mode).save(path)
        paths.append(path)
    return sorted(paths)
