"""Files that are opened for reading. A pipe, a socket or a device that has the name of a file is never opened."""

import errno
import os
import stat
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import cast


def check_kind(path: Path | str) -> None:
    """Raise OSError if there is a pipe, a socket or a device at `path`."""
    with suppress(FileNotFoundError):
        kind = os.stat(path).st_mode
        if not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)):  # to open a pipe waits for ever, and a device may act on it
            raise OSError(errno.EINVAL, "Not a file, but a pipe, a socket or a device", str(path))


def open_file(path: Path, mode: str = "rb") -> FileIO:
    """Open a file, unbuffered, in a binary mode that may create it.

    Raises:
        OSError: for a pipe, a socket or a device.
    """
    check_kind(path)
    return cast(FileIO, path.open(mode, buffering=0))


def read_file(path: Path) -> bytes:
    """Return the content of a file.

    Raises:
        OSError: also for a pipe, a socket or a device.
    """
    with open_file(path) as file:
        return file.readall()
