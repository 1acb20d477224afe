"""Where the first stage of the samples lives: in memory, in a file that is mapped into it, or nowhere."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy
import torch
from attrs import define, field, validators
from torch import Tensor

from hookdiff.data.decode import Unreadable
from hookdiff.data.source import Images, in_threads, read
from hookdiff.data.survey import Survey
from hookdiff.data.transforms import Transforms
from hookdiff.errors import UserError

GIB = 1 << 30
_FORMAT = 1  # of the files of a cache; a new one is never taken for an old one


def _default_cache() -> str:
    return os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "hookdiff")


@define(frozen=True, kw_only=True)
class Store:
    """Where samples are kept once they are decoded and resized, and what becomes of those that cannot be."""

    store: Literal["auto", "memory", "disk", "none"] = "auto"  # auto: memory up to memory_limit, else none
    memory_limit: float = field(default=4.0, validator=validators.ge(0))  # auto: GiB of decoded pixels
    cache_dir: str | None = None  # disk: where files of decoded pixels are; hookdiff in the user's cache unless given
    unreadable: Literal["stop", "skip"] = "stop"  # what cannot be read: tell and stop, or leave it out

    @property
    def folder(self) -> Path:
        """The folder of the caches."""
        return Path(self.cache_dir or _default_cache()).expanduser()

    def place(self, num_bytes: int) -> str:
        """Return where so many bytes are kept: "memory", "disk" or "none"."""
        if self.store != "auto":
            return self.store
        return "memory" if num_bytes <= self.memory_limit * GIB else "none"


def fill(source: Images, indices: Sequence[int], transforms: Transforms, pixels: Tensor) -> dict[int, str]:
    """Write the first stage of the samples `indices` to their rows of `pixels` (n c h w, uint8).

    Returns what could not be read, and why.
    """
    torn, shape = {}, tuple(pixels.shape[1:])
    rows = pixels.numpy()

    def one(index: int) -> str | None:
        try:
            rows[index] = read(source, index, transforms, shape).numpy()
        except Unreadable as error:
            return str(error)
        return None

    for index, answer in zip(indices, in_threads(source, one, indices), strict=True):
        if answer is not None:
            torn[index] = answer
    return torn


@define
class Cache:
    """The file of decoded pixels of one source under one set of options."""

    path: Path  # a folder with the pixels and what is known of them

    @classmethod
    def of(cls, source: Images, transforms: Transforms, folder: Path) -> Cache:
        """Return the cache of `source`, which need not exist yet. Raises UserError where its data has no name."""
        if not hasattr(source, "fingerprint"):
            raise UserError(
                f"store = 'disk': {type(source).__name__} cannot tell when its data changes (it has no fingerprint)"
            )
        parts = (_FORMAT, type(source).__qualname__, source.fingerprint(), *transforms.first_stage)
        return cls(folder / hashlib.sha256(repr(parts).encode("utf-8", "surrogateescape")).hexdigest()[:32])

    def load(self) -> tuple[Survey, Tensor, dict[int, str]] | None:
        """Return the survey, the pixels (n c h w, mapped into memory) and what could not be read.

        None where there is no cache, or one that is not whole.
        """
        try:
            about = json.loads((self.path / "about.json").read_text("utf-8"))
            shape, size = tuple(about["shape"]), (self.path / "pixels").stat().st_size
        except (OSError, ValueError, KeyError):
            return None
        if size != numpy.prod(shape, dtype=object):
            return None
        pixels = torch.from_file(str(self.path / "pixels"), shared=False, size=size, dtype=torch.uint8)
        return Survey.from_json(about["survey"]), pixels.view(shape), dict(about["torn"])

    def build(self, source: Images, found: Survey, transforms: Transforms, shape: tuple[int, int, int]) -> None:
        """Decode all that was `found` to be readable into the cache, which appears whole or not at all."""
        partial = self.path.with_name(f".{self.path.name}-{uuid.uuid4().hex}.partial")
        size = len(source) * int(numpy.prod(shape))
        try:
            partial.mkdir(parents=True)
            # A mapped file that outgrows its disk ends the process without a word, so the room is looked at first.
            if (free := shutil.disk_usage(partial).free) < size:
                raise UserError(f"{self.path.parent}: needs {size / GIB:.2f} GiB, {free / GIB:.2f} are free")
            rows: Any = numpy.memmap(partial / "pixels", numpy.uint8, "w+", shape=(len(source), *shape))
            readable = [index for index in range(len(source)) if index not in found.unreadable]
            torn = fill(source, readable, transforms, torch.from_numpy(rows))
            rows.flush()
            about = {"shape": [len(source), *shape], "survey": found.to_json(), "torn": list(torn.items())}
            (partial / "about.json").write_text(json.dumps(about), "utf-8")
            shutil.rmtree(self.path, ignore_errors=True)  # one that is not whole
            try:
                os.rename(partial, self.path)
            except OSError:
                if self.load() is None:  # else another process was first, with the same pixels
                    raise
        except OSError as error:
            raise UserError(f"{self.path.parent}: cannot be written: {error.strerror or error}") from None
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Let one process of this machine at a time build the cache, where the system can; else each builds it."""
        try:
            import fcntl
        except ImportError:  # Windows
            yield
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            file = (self.path.parent / f"{self.path.name}.lock").open("w")
        except OSError as error:
            raise UserError(f"{self.path.parent}: cannot be written: {error.strerror or error}") from None
        with file:
            fcntl.flock(file, fcntl.LOCK_EX)  # given back when the file is closed, whatever happens to the process
            yield
