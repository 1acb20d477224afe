"""Decoded samples on disk, in one folder per source: about.json, and the pixels, which are memory-mapped.

The name of the folder is a hash of the data and of the options of the first stage, so a change makes a new cache.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import cattrs
from attrs import define
from torch import Tensor

from hookdiff.data.source import AnySource
from hookdiff.data.table import FORMAT, Column, load_or_make, read_table, save_table
from hookdiff.images.survey import Kind, Survey
from hookdiff.images.transforms import Transforms
from hookdiff.options.structure import structured

logger = logging.getLogger("hookdiff")

_PIXELS = "pixels"

Fill = Callable[[Any, Survey], None]  # writes pixels, and notes in the survey which samples cannot be decoded


@define(frozen=True)
class _Facts:
    kinds: list[Kind]
    unreadable: list[tuple[int, str]]
    undecodable: list[tuple[int, str]]


def key_of(source: AnySource, transforms: Transforms) -> tuple[Any, ...] | None:
    """Return the values that decide the resized pixels of `source`; None for a source without a fingerprint."""
    if (fingerprint := source.fingerprint()) is None:
        return None
    return FORMAT, source.kind, fingerprint, *transforms.first_stage


def place_of(key: tuple[Any, ...], folder: Path) -> Path:
    """Return the path in `folder` of the table with this `key`."""
    return folder / hashlib.sha256(repr(key).encode("utf-8", "surrogateescape")).hexdigest()[:32]


def load_or_decode(
    path: Path, num: int, total: int, look: Callable[[], Survey], fits: Callable[[Sequence[int]], bool], fill: Fill
) -> tuple[Survey, Tensor]:
    """Return the survey and the pixels (n c h w, uint8, memory-mapped) in the cache `path`.

    A missing cache is made: `look` returns the survey, and `fill` writes `num` of the `total` pictures of the source. A
    damaged cache, or one with a shape that does not fit, is reported and made again.

    Raises:
        UserError: as `look` does, and if the cache cannot be written.
    """

    def make(path: Path) -> None:
        logger.info("data: decoding %s images into %s", f"{num:,}", path)
        seen = look()

        def filled(rows: Any) -> Any:
            fill(rows[_PIXELS], seen)
            return facts_of(seen)

        save_table(path, {_PIXELS: Column("uint8", (num, *seen.shape))}, filled)

    def load(path: Path) -> tuple[Survey, Tensor]:
        facts, columns = read_table(path, num)
        pixels = columns[_PIXELS] if columns.keys() == {_PIXELS} else None
        if pixels is None or pixels.dim() != 4 or not fits(pixels.shape[1:]):
            raise ValueError("the cache is of other data")
        return survey_of(facts, tuple(pixels.shape[1:]), total), pixels

    return load_or_make(path, "cache", load, make)


def facts_of(seen: Survey) -> Any:
    """Return a survey, without its shape, as values for JSON."""
    return cattrs.unstructure(_Facts(seen.kinds, list(seen.unreadable.items()), list(seen.undecodable.items())))


def survey_of(facts: Any, shape: tuple[int, ...], num: int) -> Survey:
    """Return the survey that `facts_of` wrote, of `num` samples of `shape`. Raises ValueError for other values."""
    about = structured(_Facts, facts)
    seen = Survey(shape, about.kinds, dict(about.unreadable), dict(about.undecodable))
    if not all(0 <= index < num for index in (*seen.unreadable, *seen.undecodable)):
        raise ValueError("the cache is of other data")
    return seen
