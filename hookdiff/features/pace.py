"""Tells people how long a count of images takes, and how far it is."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Sized
from typing import TypeVar

from hookdiff.ranks import rank

logger = logging.getLogger("hookdiff")

_LONG = 20.0  # seconds that are worth a message
_BETWEEN = 30.0  # seconds between two messages

Part = TypeVar("Part", bound=Sized)


def paced(parts: Iterable[Part], total: int, what: str) -> Iterator[Part]:
    """Yield `parts`, which have a length, of `total` images in all; if that takes long, log how long and how far."""
    begin = last = time.monotonic()
    done = 0
    for part in parts:
        yield part
        done += len(part)
        now = time.monotonic()
        left = (now - begin) / done * (total - done) if done else 0.0
        is_first = last == begin
        if rank() == 0 and done < total and left > (_LONG if is_first else 0) and (is_first or now - last > _BETWEEN):
            logger.info("%s: %s of %s images, about %s left", what, f"{done:,}", f"{total:,}", in_words(left))
            last = now


def in_words(seconds: float) -> str:
    """Return a time for people: "45 s", "3 min", "2.5 h"."""
    if seconds < 100:
        return f"{max(1, round(seconds))} s"
    return f"{round(seconds / 60)} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
