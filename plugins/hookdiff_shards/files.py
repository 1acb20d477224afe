"""Reads ranges of bytes of many shards, in any thread, forked process, or process that got a pickle."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any
from weakref import finalize

from attrs import define

from hookdiff import StorageError
from hookdiff.disk import open_file
from hookdiff_shards.places import missing
from hookdiff_shards.remote import check_parts, is_url, read_range, state_of

THREADS = 16  # threads that wait for servers
_OPEN = 64  # files that a process keeps open; a system may allow 256 in all


@define(frozen=True)
class Shard:
    """A shard with the size and the mark that it had when the run first looked at it."""

    name: str  # its path or URL
    size: int
    mark: str  # a text that changes when the content changes

    @property
    def place(self) -> str:
        return self.name if is_url(self.name) else os.path.realpath(self.name)


class Files:
    """The files of the shards `names`.

    Raises ValueError for shards that are missing or cannot be read, and StorageError if a server fails.
    """

    def __init__(self, names: Sequence[str], options: Mapping[str, Any]) -> None:
        self.options = dict(options)
        look = partial(_look, options=self.options)
        first = look(names[0])  # the first alone, so that a mistake in all URLs is reported once
        if first is not None and is_url(first.name) and first.size > 1:
            check_parts(first.name, self.options)
        pool = ThreadPoolExecutor(THREADS)
        try:
            looked_at = [first, *pool.map(look, names[1:])]
        finally:
            pool.shutdown(cancel_futures=True)
        if absent := [name for name, shard in zip(names, looked_at, strict=True) if shard is None]:
            raise missing(absent)
        self.shards = [shard for shard in looked_at if shard is not None]

    def read(self, number: int, start: int, size: int) -> bytes:
        """Return `size` bytes of a shard, from `start`; fewer at its end.

        Raises OSError, and StorageError for a local file that has changed or a server that fails.
        """
        shard = self.shards[number]
        size = min(size, shard.size - start)
        if size <= 0:  # some servers refuse an empty range
            return b""
        if is_url(shard.name):
            return read_range(shard.name, self.options, start, size)
        content: bytes = self._opened(shard).read(start, size)
        return content

    @cached_property
    def _opened(self) -> Any:
        return lru_cache(_OPEN)(_Local)  # a file that leaves the cache stays open until no thread reads it

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_opened"}  # each process opens its own


def _look(name: str, options: Mapping[str, Any]) -> Shard | None:
    """Return the shard `name`; None if there is none."""
    try:
        if is_url(name):
            return Shard(name, *state_of(name, options))
        if os.path.isdir(name):  # a folder that has the name of a shard in a range
            raise ValueError(f"{name}: is a folder, expected a .tar")
        with open_file(Path(name)) as file:
            return Shard(name, *_state(file.fileno()))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ValueError(f"{name}: {error.strerror or error}") from None


def _state(descriptor: int) -> tuple[int, str]:
    about = os.fstat(descriptor)
    return about.st_size, str(about.st_mtime_ns)


class _Local:
    """An open file; it is closed when nothing uses it any more."""

    def __init__(self, shard: Shard) -> None:
        self.shard, self.path = shard, Path(shard.name)
        with open_file(self.path) as file:
            self.descriptor = os.dup(file.fileno())
        finalize(self, os.close, self.descriptor)

    def read(self, start: int, size: int) -> bytes:
        if _state(self.descriptor) != (self.shard.size, self.shard.mark):  # other bytes may pass for a picture
            raise StorageError(f"{self.path} has changed since the run began: start again to read it anew")
        if hasattr(os, "pread"):
            return os.pread(self.descriptor, size, start)
        with open_file(self.path) as file:  # Windows has no pread
            file.seek(start)
            return file.read(size) or b""
