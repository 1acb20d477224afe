"""The speed of a run and the time that is left."""

from __future__ import annotations

import heapq
import time
from collections import deque

from attrs import define, field

_WINDOW, _FEWEST = 30.0, 5  # the speed is a mean over this many seconds of training, and over at least this many spans
_SPAN = 1.0  # seconds; shorter steps are counted together
_LONGER, _LEAST = 3.0, 1.0  # a step that takes three times as long as usual, and a second more, contains a pause
_IN_A_ROW = 3  # this many long steps in a row mean that the machine has become slower, short steps that it is faster
_MOST = 64  # pauses that are remembered


@define
class _Span:
    seconds: float
    batches: int
    steps: int
    waited: float = 0.0  # seconds of these that were spent waiting for data

    @property
    def worked(self) -> float:
        return self.seconds - self.waited

    def grow(self, other: _Span, sign: int = 1) -> None:
        self.seconds += sign * other.seconds
        self.batches += sign * other.batches
        self.steps += sign * other.steps
        self.waited += sign * other.waited


@define(eq=False)
class Pace:
    """The speed of this process, from the times at which its steps begin; steps before a resume do not count.

    The speed is the mean of the last 30 seconds of training, so it follows a machine that becomes faster or slower. The
    first step, which warms up, does not count, and neither do pauses, such as evaluations and saves. Waiting for the
    data counts, however irregular it is. After two pauses, further pauses are expected. They have the mean length, and
    follow each other at the mean distance, or at the time since the last pause if that is longer. The longest pause
    counts only as long as the second longest, since it may not come again.
    """

    # Time, batches, steps and seconds of waiting at the beginning of the newest step.
    _newest: tuple[float, int, int, float] | None = field(init=False, default=None)
    _first: _Span | None = field(init=False, default=None)
    _spans: deque[_Span] = field(init=False, factory=deque)
    _total: _Span = field(init=False, factory=lambda: _Span(0.0, 0, 0))  # sum of `_spans`
    _pauses: deque[tuple[int, float]] = field(init=False, factory=lambda: deque(maxlen=_MOST))  # step and seconds
    _in_a_row: list[_Span] = field(init=False, factory=list)  # the last steps if all were much slower, or all faster
    _are_slower: bool = field(init=False, default=False)

    def mark(self, batches: int, steps: int, waited: float = 0.0) -> None:
        """Note that a step begins, after `batches` and `steps` of the run; it has `waited` seconds for data so far."""
        before, now = self._newest, time.monotonic()
        self._newest = now, batches, steps, waited
        if before is None or batches <= before[1]:  # a rollback
            return
        span = _Span(now - before[0], batches - before[1], steps - before[2], waited - before[3])
        if self._first is None:
            self._first = span
            return
        usual = self._total.worked / self._total.batches * span.batches if self._spans else span.worked
        is_slower, is_faster = _is_much_longer(span.worked, usual), _is_much_longer(usual, span.worked)
        if is_slower:
            self._pauses.append((steps, span.worked - usual))
        self._add(_Span(usual + span.waited, span.batches, span.steps, span.waited) if is_slower else span)
        if not (is_slower or is_faster) or is_slower != self._are_slower:
            self._in_a_row.clear()
        if is_slower or is_faster:
            self._in_a_row.append(span)
            self._are_slower = is_slower
        if len(self._in_a_row) == _IN_A_ROW:
            self._follow()

    def _follow(self) -> None:
        """Forget the speed before the last steps, and the pauses that were counted for these steps."""
        for _ in range(_IN_A_ROW if self._are_slower else 0):
            self._pauses.pop()
        self._spans.clear()
        self._total = _Span(0.0, 0, 0)
        for span in self._in_a_row:
            self._add(span)
        self._in_a_row = []

    def images_per_second(self, batch_size: int) -> float | None:
        """Return the speed; None before the second step."""
        known = self._known()
        return known.batches * batch_size / known.seconds if known and known.seconds > 0 else None

    def left(self, total: int) -> float | None:
        """Return the seconds until step `total`, pauses included; None before the second step."""
        known = self._known()
        if self._newest is None or known is None or not known.steps:
            return None
        each, steps = known.seconds / known.steps, total - self._newest[2]
        pause, pauses = 0.0, 0
        if len(self._pauses) > 1:
            (first, _), *later = self._pauses
            last = later[-1][0]
            second = heapq.nlargest(2, (seconds for _, seconds in self._pauses))[1]
            pause = sum(min(seconds, second) for _, seconds in later) / len(later)
            distance = max((last - first) / len(later), self._newest[2] - last)
            pauses = round((total - last) / distance) if distance > 0 else 0
        under_way = time.monotonic() - self._newest[0]
        return max(0.0, steps * each + pauses * pause - min(under_way, each + pause))

    def _known(self) -> _Span | None:
        return self._total if self._spans else self._first

    def _add(self, span: _Span) -> None:
        self._total.grow(span)
        if self._spans and self._spans[-1].seconds + span.seconds <= _SPAN:
            self._spans[-1].grow(span)
        else:
            self._spans.append(span)
        while len(self._spans) > _FEWEST and self._total.seconds - self._spans[0].seconds > _WINDOW:
            self._total.grow(self._spans.popleft(), -1)


def _is_much_longer(seconds: float, usual: float) -> bool:
    return seconds > usual + max(_LEAST, (_LONGER - 1) * usual)
