"""Animated pictures: WebP and GIF."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image

ANIMATION_FORMATS = ("webp", "gif")
_LONGEST = 16_383  # pixels of the longest side in WebP


def save_animation(frames: Sequence[Image], path: Path, *, frame: int = 120, last: int = 1500) -> None:
    """Write `frames` of one size as an endless animation to a WebP or GIF file; the suffix gives the format.

    Frames with a side of more than 16,383 pixels are made smaller.

    Args:
        frames: pictures of one size.
        path: the file.
        frame: time for which each frame is shown, in milliseconds.
        last: time for which the last frame is shown, in milliseconds.

    Raises:
        OSError, RuntimeError or ValueError: if the file cannot be written.
    """
    from hookdiff.disk.files import new_file

    width, height = frames[0].size
    if (longest := max(width, height)) > _LONGEST:
        size = max(1, width * _LONGEST // longest), max(1, height * _LONGEST // longest)
        frames = [frame.resize(size) for frame in frames]
    first, *others = frames
    times = [frame] * len(others) + [last]
    options = {"quality": 80, "method": 2} if path.suffix == ".webp" else {"disposal": 1}
    with new_file(path) as partial:
        kind = path.suffix[1:].upper()
        first.save(partial, kind, save_all=True, append_images=others, duration=times, loop=0, **options)
