"""The progress of long work. A bar shows the progress; if there is no bar, the log gets it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from attrs import define, field

from hookdiff.terminal.words import in_words

logger = logging.getLogger("hookdiff.terminal.pace")  # a name of its own, because each command shows these messages

_LONG = 20.0  # seconds of work; shorter work gets no message
_BETWEEN = 30.0  # seconds between two messages
_START = 1.0  # seconds before the first message, because processes may still be starting

Part = TypeVar("Part")


@define(eq=False)
class Work:
    """Work in progress: `done` of `total` units."""

    what: str  # such as "fid: images"
    total: int
    unit: str
    done: int = 0
    began: float = field(init=False, factory=lambda: time.monotonic())  # a lambda, so that tests can replace the clock
    _first: tuple[int, float] | None = field(init=False, default=None)  # units of the first part, and when it was done
    _last: float = field(init=False, default=0.0)  # when the last part was done

    def add(self, units: int) -> None:
        """Count the `units` of a part as done."""
        self.done, self._last = self.done + units, time.monotonic()
        self._first = self._first or (self.done, self._last)

    @property
    def has_pace(self) -> bool:
        """Whether a second part is done; the first part may have compiled code or started processes."""
        return self._first is not None and self.done > self._first[0]

    def left(self) -> float | None:
        """Return the seconds that the rest takes at the speed since the first part; None while nothing is done."""
        if not self.done or self._first is None:
            return None
        done, since = self._first if self.has_pace else (0, self.began)
        return (self._last - since) / (self.done - done) * (self.total - self.done)


Show = Callable[[Sequence[Work]], None]


class _Here(threading.local):
    """The `Work` objects of a thread, outermost first, and the functions that show these; only the last is called."""

    def __init__(self) -> None:
        self.works: list[Work] = []
        self.shows: list[Show] = []


_here = _Here()


@contextmanager
def shown_by(show: Show) -> Iterator[None]:
    """Call `show` with the `Work` objects of this thread, outermost first, after each part, instead of logging."""
    _here.shows.append(show)
    try:
        yield
    finally:
        _here.shows.remove(show)


def is_shown() -> bool:
    """Return whether a function shows the progress of work in this thread."""
    return bool(_here.shows)


def paced(
    parts: Iterable[Part], total: int, what: str, unit: str = "images", size: Callable[[Any], int] = len
) -> Generator[Part, None, None]:
    """Yield `parts` of `size(part)` units each, and show how many of the `total` units are done.

    A function given to `shown_by` shows the progress. Otherwise, if the work takes longer than 20 seconds, the log gets
    a line, and then one every 30 seconds. If works are nested, only the outermost work with a finished part is logged.
    Only the first rank shows and logs the progress. Close the generator if you keep it in a variable: otherwise, after
    an error, the work would still count as unfinished.
    """
    # Imported late: it needs torch, and a terminal view of a run does not.
    from hookdiff.machine.ranks import rank

    if rank():
        yield from parts
        return
    work = Work(what, total, unit)
    begin = last = work.began
    outer = tuple(_here.works)
    _here.works.append(work)
    try:
        _show()
        for part in parts:
            yield part
            work.add(size(part))
            if _here.shows:
                _show()
            elif work.done < total and not any(each.done for each in outer):
                now, left, is_first = time.monotonic(), work.left() or 0.0, last == begin
                pause = _START if is_first and work.has_pace else _BETWEEN
                if left > (_LONG if is_first else 0) and now - last > pause:
                    done = f"{work.done:,} of {total:,} {unit}"
                    names = ", ".join(each.what for each in (*outer, work))
                    logger.info("%s: %s, about %s left", names, done, in_words(left))
                    last = now
    finally:
        _here.works.remove(work)
        _show()


def _show() -> None:
    if _here.shows:
        _here.shows[-1](tuple(_here.works))
