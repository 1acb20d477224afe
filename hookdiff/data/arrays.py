"""Reads arrays from .npy and .npz files.

Nothing is unpickled. Nothing is memory-mapped either: a mapped file that shrinks would kill the process.
"""

import io
import math
import os
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import IO, Any
from weakref import finalize

import numpy
import torch
from numpy.lib import format as npy

from hookdiff.disk.paths import why_missing
from hookdiff.disk.reading import open_file, reason
from hookdiff.errors import nearest, shown
from hookdiff.machine.fitting import memory_in_use
from hookdiff.terminal.words import byte_size

_LARGEST = 1 << 30  # bytes of one image


def names_in(path: Path) -> list[str]:
    """Return the names of the arrays in an .npz; an .npy has one array, with an empty name."""
    with _opened(path) as file:
        if path.suffix.lower() == ".npy":
            return [""]
        with zipfile.ZipFile(file) as archive:
            return list(dict.fromkeys(n.removesuffix(".npy") for n in archive.namelist() if n.endswith(".npy")))


def open_array(path: Path, name: str, whole: bool = False) -> Any:
    """Return an array of an .npy or .npz: as `Rows` for an .npy in C order, unless `whole`; otherwise in memory.

    Raises:
        ValueError: for a name that the file does not have, and for a file that cannot be read.
    """
    if name not in (names := names_in(path)):
        listed = ", ".join(map(shown, names)).strip() or "one array without a name"
        raise ValueError(f"{path}: has no array {name!r}{nearest(name, names)}; it has {listed}")
    with _opened(path, name) as file:
        if path.suffix.lower() == ".npz":
            with zipfile.ZipFile(file) as archive, archive.open(f"{name}.npy") as member:
                array = _whole(member, archive.getinfo(f"{name}.npy").file_size)
                member.read(1)  # reads to the end of the member, which checks its checksum
                return array
        size = os.fstat(file.fileno()).st_size
        shape, fortran_order, dtype = _header(file, size)
        if not whole and not fortran_order:
            return Rows(path, file, shape, dtype)
        file.seek(0)
        return _whole(file, size)


def array_in(content: bytes) -> Any:
    """Return the array in the bytes of an .npy. Broken bytes and Python objects raise the errors of numpy."""
    return npy.read_array(io.BytesIO(content), allow_pickle=False)


@contextmanager
def _opened(path: Path, name: str = "") -> Iterator[FileIO]:
    """Open `path`, and turn any error in the `with` into a ValueError with the file and the name of the array."""
    if path.suffix.lower() not in (".npy", ".npz"):
        raise ValueError(f"{path}: expected an .npy or an .npz")
    try:
        with open_file(path) as file:
            yield file
    except FileNotFoundError:
        raise ValueError(f"{path}: {why_missing(path)}") from None
    except Exception as error:  # zipfile, zlib, numpy and the parser of headers raise many kinds on broken bytes
        place = f"the array {name!r} " if name else ""
        raise ValueError(f"{path}: {place}cannot be read: {reason(error)}") from error


def _header(file: FileIO, size: int) -> tuple[tuple[int, ...], bool, Any]:
    """Read the shape, whether it has the order of Fortran, and the dtype of an array in a file of `size` bytes."""
    readers = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
    if (version := npy.read_magic(file)) not in readers:  # later versions are only for arrays of structures
        raise ValueError(f"version {version} of the format is not for numbers")
    shape, fortran_order, dtype = readers[version](file)
    if dtype.hasobject:
        raise ValueError("it holds Python objects, which are not unpickled")
    if min(shape, default=0) < 0 or file.tell() + math.prod(shape) * dtype.itemsize > size:
        raise ValueError(f"{size} bytes are too few for {dtype} of shape {shape}")
    return shape, fortran_order, dtype


def _whole(file: IO[bytes], size: int) -> Any:
    """Read an array of `size` bytes."""
    _, memory = memory_in_use(torch.device("cpu"))
    if memory is not None and size > memory:
        raise ValueError(f"its {byte_size(size)} do not fit in memory")
    return npy.read_array(file, allow_pickle=False)


class Rows:
    """The images in an .npy. Each image is read when it is needed. Threads and forked processes may share them."""

    def __init__(self, path: Path, file: FileIO, shape: tuple[int, ...], dtype: Any) -> None:
        self.path, self.shape, self.dtype, self._start = path, shape, dtype, file.tell()
        if (size := math.prod(self.shape[1:]) * self.dtype.itemsize) > _LARGEST:
            raise ValueError(f"one image has {size} bytes, expected at most {_LARGEST}")
        self._file = os.dup(file.fileno())  # stays open on this file if a new file gets its name
        finalize(self, os.close, self._file)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: int) -> Any:
        """Return an image. Raises ValueError if the file has become shorter."""
        row = numpy.empty(self.shape[1:], self.dtype)
        start = self._start + index * row.nbytes
        if self._read(start, row.reshape(-1).view(numpy.uint8)) != row.nbytes:
            raise ValueError(f"the file has become shorter than {start + row.nbytes} bytes")
        return row

    def _read(self, start: int, room: Any) -> int:
        if hasattr(os, "preadv"):
            return os.preadv(self._file, [room], start)
        with open_file(self.path) as file:  # Windows
            file.seek(start)
            return file.readinto(room)
