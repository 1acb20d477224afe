"""Files that are opened for reading. A pipe, a socket or a device that has the name of a file is never opened."""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Any, cast

import safetensors

from hookdiff.errors import shown


def check_kind(path: Path | str) -> None:
    """Raise OSError if there is a pipe, a socket or a device at `path`."""
    with suppress(FileNotFoundError):
        kind = os.stat(path).st_mode
        if not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)):  # to open a pipe waits for ever, and a device may act on it
            raise OSError(errno.EINVAL, "Not a file, but a pipe, a socket or a device", str(path))


def open_file(path: Path, mode: str = "rb") -> FileIO:
    """Open a file, unbuffered, in a binary mode that may create it; raises OSError for a pipe, a socket or a device."""
    check_kind(path)
    return cast(FileIO, path.open(mode, buffering=0))


@contextmanager
def open_tensors(path: Path) -> Iterator[Any]:
    """Open a safetensors file as `safetensors.safe_open` does; raises OSError and SafetensorError."""
    with open_file(path) as file:
        name = str(path)
        if shown(name) != name and os.name != "nt":  # the library takes no path that is not UTF-8
            name = f"/dev/fd/{file.fileno()}"
        with safetensors.safe_open(name, framework="pt") as tensors:
            yield tensors


def read_file(path: Path) -> bytes:
    """Return the content of a file; raises OSError, also for a pipe, a socket or a device."""
    with open_file(path) as file:
        return file.readall()
