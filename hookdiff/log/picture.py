"""A picture, such as a grid of samples, and its PNG file, with the sampling settings as metadata."""

from __future__ import annotations

import json
from collections.abc import Mapping
from io import BytesIO
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
    """A picture, and its metadata `info`: JSON values such as the sampler and seed. A notebook shows the picture."""

    pixels: NDArray[numpy.uint8] = field(repr=lambda pixels: "x".join(map(str, pixels.shape)))  # h w, grey, or h w 3
    info: Mapping[str, Any] = field(factory=dict)

    def with_info(self, **info: Any) -> Picture:
        """Return the picture with more info."""
        return evolve(self, info={**self.info, **info})

    def as_pillow(self) -> Image:
        """Return the picture as an image of Pillow."""
        from PIL import Image

        return Image.fromarray(self.pixels)

    def save(self, path: str | Path) -> None:
        """Write a PNG file, which appears whole or not at all. Its text chunk "hookdiff" is `info` as JSON.

        NaN and infinities, which JSON lacks, become null.
        """
        from hookdiff.disk.files import new_file  # a run that keeps no pictures does not load it

        with new_file(Path(path)) as partial:
            self._write(partial)

    def _write(self, file: Path | BytesIO) -> None:
        from PIL.PngImagePlugin import PngInfo

        chunks = PngInfo()
        chunks.add_itxt(CHUNK, json.dumps(as_json(self.info, text=str), allow_nan=False))
        self.as_pillow().save(file, "PNG", pnginfo=chunks)

    def _repr_png_(self) -> bytes:
        """Return the PNG file; a notebook calls this."""
        file = BytesIO()
        self._write(file)
        return file.getvalue()


def read_info(image: Image) -> dict[str, Any]:
    """Return the `info` of a PNG file that Pillow has opened; {} if `Picture.save` has not written the file."""
    try:
        info = json.loads(image.info.get(CHUNK, ""))
    except (ValueError, TypeError, RecursionError):
        return {}
    return info if isinstance(info, dict) else {}
