"""Files and folders that are written whole or not at all, even if the process is killed or the power fails.

A file is written under another name, synced and renamed.
"""

import errno
import hashlib
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path

from attrs import define

from hookdiff.disk.lock import check_place, is_in_run
from hookdiff.disk.paths import partial_of
from hookdiff.disk.reading import open_file
from hookdiff.errors import StorageError, UserError

_CHUNK = 1 << 22  # bytes that are hashed and written at a time, so that other threads can run between


@define(frozen=True)
class Written:
    """Size and hash of a written file."""

    bytes: int
    sha256: str


def write_file(path: Path, data: bytes) -> Written:
    """Write `data` to a new file and sync it."""
    return write_parts(path, iter([memoryview(data)]))


def write_parts(path: Path, parts: Iterator[memoryview]) -> Written:
    """Write `parts`, one after the other, to a new file and sync it."""
    check_place(path.parent)
    digest, size = hashlib.sha256(), 0
    with path.open("xb", buffering=0) as file:  # never through a link or into a pipe that has the name
        for part in parts:
            for begin in range(0, len(part), _CHUNK):
                chunk = part[begin : begin + _CHUNK]
                digest.update(chunk)
                size += len(chunk)
                while chunk:  # a disk that is almost full may take only a part of the chunk
                    chunk = chunk[file.write(chunk) :]
        os.fsync(file.fileno())
    return Written(size, digest.hexdigest())


def cannot_write(path: Path, error: OSError) -> UserError:
    """Return the error to raise for an OSError at `path`.

    The error is a StorageError if the disk is full or fails, or if the run directory was removed after it was checked.
    """
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        try:
            check_place(path)
        except StorageError as gone:
            return gone
        except OSError:  # a link leads out of the directory, which is still there
            pass
    kind = StorageError if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO) else UserError
    return kind(f"{path}: cannot be written: {error.strerror or error}")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError in the `with` into the error that `cannot_write` returns."""
    try:
        yield
    except OSError as error:
        raise cannot_write(path, error) from None


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path; the file there is renamed to `path` when the `with` ends without an error."""
    make_folder(path.parent)
    partial = partial_of(path)
    discard(partial)
    try:
        yield partial
        check_place(path.parent)
        os.replace(partial, path)
    finally:
        discard(partial)
    sync_folder(path.parent)


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield a new, empty folder; it is renamed to `path` when the `with` ends without an error.

    An earlier folder is replaced. For an instant no folder has the name: the earlier folder is called
    `.NAME.replaced`, and the new folder `.NAME.partial`.
    """
    partial, replaced = partial_of(path), path.with_name(f".{path.name}.replaced")
    make_folder(path.parent)
    discard(partial)
    partial.mkdir()
    try:
        yield partial
        sync_folder(partial)
        check_place(path.parent)
        if os.path.lexists(path):
            discard(replaced)
            os.replace(path, replaced)
        os.replace(partial, path)
    finally:
        discard(partial)
    sync_folder(path.parent)
    discard(replaced)


def open_own(path: Path, mode: str) -> FileIO:
    """Open a file to change it, unbuffered, in a binary mode that may create it.

    A file that has another hard link, as in a copy by `cp -al`, is first replaced by a copy, so that the file under the
    other name does not change.

    Raises:
        OSError: for a link out of a run directory, a pipe, a socket or a device.
    """
    check_place(path)
    with suppress(FileNotFoundError):
        if path.is_file() and os.stat(path).st_nlink > 1:
            copy_file(path, Path(os.path.realpath(path)))
    return open_file(path, mode)


def own_files(folder: Path) -> None:
    """Replace files that have several hard links by copies in a folder of a run, before a library writes there."""
    if is_in_run(folder):
        for place, _, names in os.walk(folder):
            for path in (Path(place, name) for name in names):
                if stat.S_ISREG((status := path.lstat()).st_mode) and status.st_nlink > 1:
                    copy_file(path, path)


def has_other_name(file: FileIO) -> bool:
    """Return whether an open file has got another hard link, so that it must not be changed any more."""
    return os.fstat(file.fileno()).st_nlink > 1


def copy_file(path: Path, copy: Path) -> None:
    """Write the content of the file at `path` to a new file, which takes the name `copy`."""
    with open_file(path) as file, new_file(copy) as partial:
        write_parts(partial, map(memoryview, iter(lambda: file.read(_CHUNK), b"")))
        shutil.copymode(path, partial)


def discard(path: Path) -> None:
    """Remove a file, a link, or a folder with its content; errors are ignored."""
    with suppress(OSError, StorageError):
        check_place(path.parent)
        if path.is_dir() and not path.is_symlink():  # rmtree would open a pipe, and wait for ever
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


def make_folder(path: Path) -> None:
    """Make a folder and its parents, unless they exist, and sync the new names."""
    check_place(path)
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(exist_ok=True)
        sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Sync the names in a folder to the disk."""
    if os.name != "nt":  # Windows has no such call and needs none
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
