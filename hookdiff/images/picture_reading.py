"""Reads one picture: from a file, or from a source."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, BinaryIO, TypeVar

from hookdiff.data.source import AnySource
from hookdiff.disk.reading import check_kind, reason
from hookdiff.errors import StorageError
from hookdiff.images.decoding import Unreadable
from hookdiff.images.formats import known

Result = TypeVar("Result")


def open_picture(file: str | BinaryIO) -> Any:
    """Return the lazy Pillow image in a file: only the header is read.

    Raises:
        OSError: for a pipe, a socket or a device, and for formats that `formats.py` does not list: for PostScript,
            Pillow would run Ghostscript, whatever the name of the file. Pillow may raise other errors.
    """
    from PIL import Image

    if isinstance(file, str):
        check_kind(file)
    return Image.open(file, formats=[kind.names[0] for kind in known()])


def with_image(source: AnySource, index: int, function: Callable[[Any], Result]) -> Result:
    """Return `function(picture)` for the picture at `index`, and close its file.

    Raises Unreadable for any error but a StorageError, which concerns all pictures.
    """
    try:
        image = source.load(index)
        with image if hasattr(image, "fp") else nullcontext():
            return function(image)
    except StorageError:
        raise
    except Exception as error:  # a decoder may raise any error on broken bytes
        raise Unreadable(f"{source.name_of(index)}: {reason(error)}") from error
