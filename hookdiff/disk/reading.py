"""Opens files for reading, but never a pipe, a socket or a device in place of a file."""

import errno
import os
import stat
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from io import FileIO
from pathlib import Path
from typing import Any, cast

from hookdiff.errors import shown


class _Guards(threading.local):
    open: tuple[bool, ...] = ()  # for each `only_files` that is open in a thread, whether it refuses loops


_guarded = _Guards()


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
        OSError: if the file cannot be read, and for a pipe, a socket or a device.
    """
    with open_file(path) as file:
        return file.readall()


@contextmanager
def only_files(no_loops: bool = False) -> Iterator[None]:
    """Check the files that Python code of this thread, such as a library, opens in the `with`.

    With `no_loops`, check the folders that it lists, too: a library would follow a link to a folder that contains the
    link for ever.

    Raises:
        OSError: in that code, before it opens a pipe, a socket or a device other than the null device, or lists a link
            to a folder that the link is in.
    """
    _listen()
    before = _guarded.open
    _guarded.open = (*before, no_loops)
    try:
        yield
    finally:
        _guarded.open = before


@cache
def _listen() -> None:
    sys.addaudithook(_heard)  # it stays for the life of the process


def _heard(event: str, arguments: tuple[Any, ...]) -> None:
    if event not in ("open", "os.scandir", "os.listdir") or not (guards := _guarded.open):
        return
    path = arguments[0]
    if not isinstance(path, str | bytes | os.PathLike):  # an open file, by its number
        return
    path = os.fsdecode(path)
    if event == "open" and path != os.devnull:
        check_kind(path)
    elif event != "open" and any(guards) and os.path.islink(path):
        inside = Path(os.path.realpath(os.path.dirname(path)))
        if inside.is_relative_to(os.path.realpath(path)):
            raise OSError(errno.ELOOP, "A link to a folder that contains it, which would be read for ever", path)


def reason(error: Exception) -> str:
    """Return the message of an error that a file has raised, such as that of a decoder of Pillow, on one line."""
    if type(error).__name__ == "UnidentifiedImageError":
        return "no picture of a known format"
    # Without the path, since callers put it before the message.
    message = str(getattr(error, "strerror", None) or error).partition("\n")[0].removesuffix(".")
    kind = "" if message and isinstance(error, (OSError, ValueError)) else f"{type(error).__name__}: "
    return shown(kind + message)
