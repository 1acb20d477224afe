"""Where the first stage of the samples is kept: in memory, in a memory-mapped file, or nowhere."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import cattrs
import numpy
import torch
from attrs import define, field
from attrs.validators import ge, in_
from cattrs.errors import BaseValidationError
from torch import Tensor

from hookdiff.data.source import Images, with_images
from hookdiff.data.survey import Survey
from hookdiff.data.transforms import Transforms
from hookdiff.disk import make_folder, new_folder, write_file
from hookdiff.errors import UserError
from hookdiff.options import about

GIB = 1 << 30
_FORMAT = 2  # of a cache: one of another format is not read


@define(frozen=True, kw_only=True)
class Store:
    """Where samples are kept once they are decoded and resized, and what happens to samples that cannot be read."""

    store: Literal["auto", "memory", "disk", "none"] = field(
        default="auto",
        validator=in_(("auto", "memory", "disk", "none")),
        metadata=about(
            'where decoded and resized samples are kept: "memory"; "disk", in a file; "none", decoded again in each '
            'epoch; "auto", in memory up to `memory_limit`, else "none"'
        ),
    )
    memory_limit: float = field(
        default=4.0, validator=ge(0), metadata=about('of "auto": limit of decoded pixels', "GiB")
    )
    cache_dir: str | None = field(
        default=None, metadata=about('of "disk": folder of the files; without it `hookdiff` in the user\'s cache')
    )
    unreadable: Literal["stop", "skip"] = field(
        default="stop",
        validator=in_(("stop", "skip")),
        metadata=about('what to do if samples cannot be read: "stop", or "skip" them with a warning'),
    )

    @property
    def folder(self) -> Path:
        """The folder of the caches."""
        user = os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "hookdiff")
        return Path(self.cache_dir or user).expanduser()

    def place(self, num_bytes: int) -> str:
        """Return where this number of bytes is kept: "memory", "disk" or "none"."""
        if self.store != "auto":
            return self.store
        return "memory" if num_bytes <= self.memory_limit * GIB else "none"


def fill(source: Images, found: Survey, transforms: Transforms, pixels: Tensor) -> None:
    """Write the first stage of all samples with a readable header to their rows of `pixels` (n c h w, uint8).

    Samples that cannot be decoded are added to `found.undecodable`.
    """
    rows = pixels.numpy()

    def decode(index: int, image: Any) -> None:
        rows[index] = transforms.fit(image, found.shape).numpy()

    readable = [index for index in range(len(source)) if index not in found.unreadable]
    for index, error in with_images(source, readable, decode):
        if error is not None:
            found.undecodable[index] = str(error)


def cache_of(source: Images, transforms: Transforms, folder: Path) -> Path:
    """Return the folder of the cache of `source`, which need not exist. Raises UserError without a fingerprint."""
    if not hasattr(source, "fingerprint"):
        name = type(source).__name__
        raise UserError(f"store = 'disk' needs a fingerprint() of {name}, to see when its data has changed")
    first_stage = (transforms.side, transforms.upscale, transforms.channels, transforms.background)
    parts = (_FORMAT, type(source).__qualname__, source.fingerprint(), *first_stage)
    return folder / hashlib.sha256(repr(parts).encode("utf-8", "surrogateescape")).hexdigest()[:32]


def load_cache(path: Path) -> tuple[Survey, Tensor] | None:
    """Return the survey and the pixels (n c h w, uint8, memory-mapped) in a cache; None unless both are complete."""
    try:
        found = cattrs.structure(json.loads((path / "survey.json").read_text("utf-8")), Survey)
        return found, torch.from_numpy(numpy.load(path / "pixels.npy", mmap_mode="c"))
    except (OSError, EOFError, ValueError, BaseValidationError):
        return None


def write_cache(path: Path, source: Images, found: Survey, transforms: Transforms) -> None:
    """Decode `source` into a cache, which appears complete or not at all."""
    shape = (len(source), *found.shape)
    size, free = torch.Size(shape).numel(), shutil.disk_usage(path.parent).free
    if free < size:  # a mapped file that outgrows its disk kills the process without a message
        raise UserError(f"{path.parent}: needs {size / GIB:.2f} GiB, {free / GIB:.2f} are free")
    with new_folder(path) as folder:
        rows = numpy.lib.format.open_memmap(folder / "pixels.npy", "w+", numpy.uint8, shape)
        fill(source, found, transforms, torch.from_numpy(rows))
        rows.flush()
        write_file(folder / "survey.json", json.dumps(cattrs.unstructure(found)).encode())


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Let one process of this machine at a time use `path`; on Windows, which has no such lock, all at once."""
    make_folder(path.parent)
    with path.with_suffix(".lock").open("w") as file:
        if os.name != "nt":
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)  # until the file is closed, also by the end of the process
        yield
