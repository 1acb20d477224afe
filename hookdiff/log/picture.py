"""A finished picture, such as a grid of samples, and its PNG file, which says how the picture was made."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
from attrs import define, evolve, field
from numpy.typing import NDArray

from hookdiff.log.event import as_json

if TYPE_CHECKING:
    from PIL.Image import Image

CHUNK = "hookdiff"  # keyword of the text chunk, https://www.w3.org/TR/png-3/#11textinfo; it holds JSON


@define(frozen=True, eq=False)
class Picture:
    """A picture, and `info` about it in values of JSON, such as the sampler and the seed."""

    pixels: NDArray[numpy.uint8]  # h w, grey, or h w 3
    info: Mapping[str, Any] = field(factory=dict)

    def with_info(self, **info: Any) -> Picture:
        """Return the picture with more info."""
        return evolve(self, info={**self.info, **info})

    def as_pillow(self) -> Image:
        """Return the picture as one of Pillow."""
        from PIL import Image

        return Image.fromarray(self.pixels)

    def save(self, path: Path) -> None:
        """Write a PNG file, which appears whole or not at all. Its text chunk "hookdiff" is `info` as JSON.

        NaN and infinities, which JSON lacks, become null.
        """
        from PIL.PngImagePlugin import PngInfo

        from hookdiff.disk.files import new_file  # a run that keeps no pictures does not load it

        chunks = PngInfo()
        chunks.add_itxt(CHUNK, json.dumps(as_json(self.info, text=str), allow_nan=False))
        with new_file(path) as partial:
            self.as_pillow().save(partial, "PNG", pnginfo=chunks)


def read_info(image: Image) -> dict[str, Any]:
    """Return the info of a PNG file that `Picture.save` has written, and that Pillow has opened; else {}."""
    try:
        info = json.loads(image.info.get(CHUNK, ""))
    except (ValueError, TypeError, RecursionError):
        return {}
    return info if isinstance(info, dict) else {}
