"""The disk cache of decoded pixels. It carries checksums of its own files, which are verified whenever it is opened."""

import hashlib
import json
import logging
import math
import os
import shutil
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cattrs
import numpy
import torch
from attrs import define, evolve
from torch import Tensor

from hookdiff.data.source import Images
from hookdiff.disk.files import cannot_write, make_folder, new_folder, write_file
from hookdiff.disk.reading import open_file, read_file
from hookdiff.errors import UserError
from hookdiff.images.opened import reason
from hookdiff.images.survey import Kind, Survey, survey
from hookdiff.images.transforms import Transforms
from hookdiff.options.structure import structured
from hookdiff.terminal.words import byte_size

logger = logging.getLogger("hookdiff")

_FORMAT = 4  # a cache of another format is not used
_ABOUT, _PIXELS = "about.json", "pixels"
_CHUNK = 1 << 22  # bytes of pixels with one checksum
_PER_SAMPLE = 10_000  # bytes of about.json, at most: a name and a reason

Fill = Callable[[Any, Survey], None]  # writes pixels, and adds to the survey samples that cannot be decoded


@define(frozen=True)
class _About:
    """The content of about.json. The checksums find damage; who can write a cache can also forge it."""

    shape: tuple[int, ...]
    kinds: list[Kind]
    unreadable: list[tuple[int, str]]
    undecodable: list[tuple[int, str]]
    checksums: list[int]  # CRC-32 of each chunk of the pixels; a SHA-256 would take ten times longer
    digest: str = ""  # SHA-256 of all else in this file

    def digested(self) -> str:
        return hashlib.sha256(json.dumps(cattrs.unstructure(evolve(self, digest=""))).encode()).hexdigest()


def place_of(source: Images, transforms: Transforms, folder: Path) -> Path:
    """Return the cache of the first stage of `source`, in `folder`. Raises UserError without a fingerprint."""
    if not hasattr(source, "fingerprint"):
        name = type(source).__name__
        raise UserError(f"store = 'disk' needs a fingerprint() of {name}, to see when its data has changed")
    first_stage = (transforms.side, transforms.upscale, transforms.channels, transforms.background)
    parts = (_FORMAT, type(source).__qualname__, source.fingerprint(), *first_stage)
    return folder / hashlib.sha256(repr(parts).encode("utf-8", "surrogateescape")).hexdigest()[:32]


def load_or_make(path: Path, source: Images, transforms: Transforms, skip: bool, fill: Fill) -> tuple[Survey, Tensor]:
    """Return the survey and the pixels (n c h w, uint8, memory-mapped) in the cache `path`.

    A cache that is missing is made; one that is damaged is reported and made again. Raises UserError as `survey` does,
    and if the cache cannot be written.
    """
    try:
        make_folder(path.parent)
        with locked(path, shared=True):  # so that several processes verify it at a time
            kept = _load(path, len(source), transforms)
        if kept is None:
            with locked(path, shared=False):
                kept = _load(path, len(source), transforms, report=True)
                if kept is None:
                    logger.info("data: decoding %s images into %s", f"{len(source):,}", path)
                    _write(path, len(source), survey(source, transforms, skip), fill)
                    kept = _load(path, len(source), transforms)
    except OSError as error:
        raise cannot_write(Path(error.filename or path.parent), error) from None
    assert kept is not None
    return kept


@contextmanager
def locked(path: Path, shared: bool) -> Iterator[None]:
    """Hold the lock of a cache, with other processes that hold it `shared`, or alone.

    Raises:
        OSError: if the file of the lock cannot be opened.
    """
    with open_file(path.with_suffix(".lock"), "ab") as lock:
        if os.name != "nt":  # Windows has no such lock
            import fcntl

            fcntl.flock(lock, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)  # until the file is closed
        yield


def _load(path: Path, num: int, transforms: Transforms, report: bool = False) -> tuple[Survey, Tensor] | None:
    """Return the content of a cache of `num` samples; None if it is missing or damaged, which is logged on request."""
    if not os.path.lexists(path):
        return None
    try:
        return _verified(path, num, transforms)
    except (OSError, ValueError, RecursionError) as error:
        if report:
            logger.warning("data: the cache %s is damaged and made again: %s", path, reason(error))
        return None


def _verified(path: Path, num: int, transforms: Transforms) -> tuple[Survey, Tensor]:
    if (size := os.path.getsize(path / _ABOUT)) > (1 + num) * _PER_SAMPLE:
        raise ValueError(f"{_ABOUT} has {size} bytes")
    about = structured(_About, json.loads(read_file(path / _ABOUT)))
    if about.digest != about.digested():
        raise ValueError(f"{_ABOUT} has another digest")
    found = Survey(about.shape, about.kinds, dict(about.unreadable), dict(about.undecodable))
    fits = len(about.shape) == 3 and min(about.shape) > 0 and transforms.fits(about.shape)
    if not fits or not all(0 <= index < num for index in (*found.unreadable, *found.undecodable)):
        raise ValueError(f"{_ABOUT} is of other data")
    with open_file(path / _PIXELS) as file:
        if os.fstat(file.fileno()).st_size != num * math.prod(about.shape):
            raise ValueError(f"{_PIXELS} has another size")
        if _checksums(path / _PIXELS) != about.checksums:
            raise ValueError(f"{_PIXELS} has other checksums")
        rows = numpy.memmap(file, numpy.uint8, "c", shape=(num, *about.shape))
    return found, torch.from_numpy(rows)


def _write(path: Path, num: int, found: Survey, fill: Fill) -> None:
    shape = (num, *found.shape)
    size, free = math.prod(shape), shutil.disk_usage(path.parent).free
    if free < size:  # a mapped file that outgrows its disk kills the process without a message
        raise UserError(f"{path.parent}: needs {byte_size(size)}, {byte_size(free)} are free")
    with new_folder(path) as folder:
        rows = numpy.memmap(folder / _PIXELS, numpy.uint8, "w+", shape=shape)
        fill(rows, found)
        rows.flush()
        unreadable, undecodable = list(found.unreadable.items()), list(found.undecodable.items())
        about = _About(found.shape, found.kinds, unreadable, undecodable, _checksums(folder / _PIXELS))
        about = evolve(about, digest=about.digested())
        write_file(folder / _ABOUT, json.dumps(cattrs.unstructure(about)).encode())


def _checksums(path: Path) -> list[int]:
    """Return the CRC-32 of each chunk of a file, which is read and not mapped."""

    def checksum(start: int) -> int:
        with open_file(path) as file:
            file.seek(start)
            return zlib.crc32(file.read(_CHUNK))

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(checksum, range(0, os.path.getsize(path), _CHUNK)))
