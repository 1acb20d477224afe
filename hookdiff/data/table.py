"""Tables: folders with columns and metadata (facts), written whole or not at all, and checked when they are read."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import cattrs
import numpy
import torch
from attrs import define, evolve, field
from torch import Tensor

from hookdiff.disk.files import cannot_write, discard, make_folder, new_folder, write_file
from hookdiff.disk.lock import check_place
from hookdiff.disk.reading import open_file, read_file, reason
from hookdiff.errors import UserError
from hookdiff.options.structure import structured
from hookdiff.terminal.words import byte_size

logger = logging.getLogger("hookdiff")

FORMAT = 7  # a table of another format is not used
_ABOUT = "about.json"
_CHUNK = 1 << 22  # bytes of a column with one checksum
_PER_ROW = 10_000  # bytes of about.json, at most: a name and a reason
DTYPES = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64")  # of a column

_Rows = Mapping[str, Any]  # the columns by name: arrays of numpy, which lie in files
Checked = TypeVar("Checked")


@define(frozen=True)
class Column:
    """The dtype and the shape of a column of a table. The shape begins with the number of rows."""

    dtype: str
    shape: tuple[int, ...]
    checksums: list[int] = field(factory=list)  # CRC-32 of each chunk; a SHA-256 would take ten times longer

    @classmethod
    def of(cls, rows: Tensor, num: int) -> Column:
        """Return a column of `num` rows with the dtype and row shape of `rows`."""
        return cls(str(rows.dtype).removeprefix("torch."), (num, *rows.shape[1:]))

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * numpy.dtype(self.dtype).itemsize


@define(frozen=True)
class _About:
    """The content of about.json. The checksums detect damage, but no forgery."""

    columns: dict[str, Column]
    facts: Any  # of the maker of the table
    digest: str = ""  # SHA-256 of the other values in this file

    def digested(self) -> str:
        return hashlib.sha256(json.dumps(cattrs.unstructure(evolve(self, digest=""))).encode()).hexdigest()


def load_or_make(path: Path, what: str, load: Callable[[Path], Checked], make: Callable[[Path], None]) -> Checked:
    """Return the result of `load` for the table `path`, which `make` writes if it is missing or damaged.

    If several processes need the table at once, one makes it. `what` names the table in messages.

    Raises:
        UserError: if the table cannot be written.
    """
    try:
        make_folder(path.parent)
        with locked(path, shared=True):  # so that several processes verify it at a time
            table = load_if_sound(path, what, load)
        if table is None:
            with locked(path, shared=False):
                table = load_if_sound(path, what, load, report=True)
                if table is None:
                    make(path)
                    table = load_if_sound(path, what, load)
    except OSError as error:
        raise cannot_write(Path(error.filename or path.parent), error) from None
    assert table is not None
    return table


def load_if_sound(path: Path, what: str, load: Callable[[Path], Checked], report: bool = False) -> Checked | None:
    """Return the result of `load` for a table; None if it is missing or damaged. `report` logs the damage."""
    if not os.path.lexists(path):
        return None
    try:
        return load(path)
    except (OSError, ValueError, RecursionError) as error:
        if report:
            logger.warning("data: the %s %s is damaged and made again: %s", what, path, reason(error))
        return None


@contextmanager
def locked(path: Path, shared: bool) -> Iterator[None]:
    """Hold the lock of a table: alone, or `shared` with other processes.

    Raises:
        OSError: if the file of the lock cannot be opened.
    """
    place = path.with_suffix(".lock")
    check_place(place)
    with open_file(place, "ab") as lock:  # nothing is written to it
        if os.name != "nt":  # Windows has no such lock
            import fcntl

            fcntl.flock(lock, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)  # until the file is closed
        yield


def is_in_use(path: Path) -> bool:
    """Return whether a process holds the lock of a table; True on Windows, which has no such locks."""
    if os.name == "nt":
        return True
    import fcntl

    if not path.with_suffix(".lock").exists():
        return False
    with open_file(path.with_suffix(".lock"), "ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def read_table(path: Path, num: int) -> tuple[Any, dict[str, Tensor]]:
    """Return the metadata and the columns (memory-mapped) of a table with `num` rows.

    Raises:
        ValueError: if the table is damaged, or has another number of rows.
    """
    if (size := os.path.getsize(path / _ABOUT)) > (1 + num) * _PER_ROW:
        raise ValueError(f"{_ABOUT} has {size} bytes")
    about = structured(_About, json.loads(read_file(path / _ABOUT)))
    if about.digest != about.digested():
        raise ValueError(f"{_ABOUT} has another digest")
    columns = {}
    for name, column in about.columns.items():
        if column.dtype not in DTYPES or min(column.shape, default=0) < 1 or column.shape[0] != num:
            raise ValueError(f"{_ABOUT} is of other data")
        with open_file(path / column_file(name)) as file:
            if os.fstat(file.fileno()).st_size != column.num_bytes:
                raise ValueError(f"{name} has another size")
            if _checksums(path / column_file(name)) != column.checksums:
                raise ValueError(f"{name} has other checksums")
            columns[name] = torch.from_numpy(numpy.memmap(file, column.dtype, "c", shape=column.shape))
    return about.facts, columns


def save_table(path: Path, columns: Mapping[str, Column], fill: Callable[[_Rows], Any]) -> None:
    """Write a table; `fill` writes the rows of all `columns`, which are zeros at first, and returns the metadata.

    Raises:
        UserError: if the disk has no room for the table.
        OSError: if the table cannot be written.
    """
    check_room(path, columns)
    with new_folder(path) as folder:
        rows = {
            name: numpy.memmap(folder / column_file(name), column.dtype, "w+", shape=column.shape)
            for name, column in columns.items()
        }
        facts = fill(rows)
        for array in rows.values():
            array.flush()
        finish_table(folder, columns, facts)


def finish_table(folder: Path, columns: Mapping[str, Column], facts: Any) -> None:
    """Write about.json, with metadata and checksums, beside the finished files of the columns."""
    sums = {name: _checksums(folder / column_file(name)) for name in columns}
    written = {name: evolve(column, checksums=sums[name]) for name, column in columns.items()}
    about = _About(written, facts)
    discard(folder / _ABOUT)
    write_file(folder / _ABOUT, json.dumps(cattrs.unstructure(evolve(about, digest=about.digested()))).encode())


def check_room(path: Path, columns: Mapping[str, Column], there: int = 0) -> None:
    """Raise UserError if the disk of `path` has no room for `columns`, less the bytes that are `there` already."""
    size, free = sum(column.num_bytes for column in columns.values()) - there, shutil.disk_usage(path.parent).free
    if free < size:  # a mapped file that outgrows its disk kills the process without a message
        raise UserError(f"{path.parent}: needs {byte_size(size)}, {byte_size(free)} are free; set data.cache_dir")


def column_file(name: str) -> str:
    """Return the name of the file of a column."""
    return name if name.isidentifier() else hashlib.sha256(name.encode()).hexdigest()[:16]


def _checksums(path: Path) -> list[int]:
    """Return the CRC-32 of each chunk of a file, which is read and not mapped."""

    def checksum(start: int) -> int:
        with open_file(path) as file:
            file.seek(start)
            return zlib.crc32(file.read(_CHUNK))

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(checksum, range(0, os.path.getsize(path), _CHUNK)))
