"""The speed of a run and the time that is left."""

from __future__ import annotations

import heapq
import time
from collections import deque

from attrs import define, field

_WINDOW, _FEWEST = 30.0, 5  # seconds of training, and spans, that the speed follows from
_SPAN = 1.0  # seconds; shorter steps are counted together
_LONGER, _LEAST = 3.0, 1.0  # a step that takes three times as long, and a second more, has a pause in it
_IN_A_ROW = 3  # such steps mean that the machine is slower now
_MOST = 64  # pauses that are remembered


@define
class _Span:
    seconds: float
    batches: int
    steps: int

    def grow(self, other: _Span, sign: int = 1) -> None:
        self.seconds += sign * other.seconds
        self.batches += sign * other.batches
        self.steps += sign * other.steps


@define(eq=False)
class Pace:
    """The speed of this process, from the times at which its steps begin; steps before a resume do not count.

    The speed is the mean of the last 30 seconds of training, so it follows a machine that becomes faster or slower. The
    first step, which warms up, does not count, nor do pauses, such as evaluations and saves. After two pauses more
    are expected, at their mean distance and of their mean length. The longest counts as the second longest, since it
    may have been the only one of its kind.
    """

    _newest: tuple[float, int, int] | None = field(init=False, default=None)  # time, batches and steps of a begin
    _first: _Span | None = field(init=False, default=None)
    _spans: deque[_Span] = field(init=False, factory=deque)
    _total: _Span = field(init=False, factory=lambda: _Span(0.0, 0, 0))  # of the spans
    _pauses: deque[tuple[int, float]] = field(init=False, factory=lambda: deque(maxlen=_MOST))  # step and seconds
    _in_a_row: list[_Span] = field(init=False, factory=list)

    def mark(self, batches: int, steps: int) -> None:
        """Note that a step begins, after `batches` and `steps` of the run."""
        before, now = self._newest, time.monotonic()
        self._newest = now, batches, steps
        if before is None or batches <= before[1]:  # a rollback
            return
        span = _Span(now - before[0], batches - before[1], steps - before[2])
        if self._first is None:
            self._first = span
            return
        usual = self._total.seconds / self._total.batches * span.batches if self._spans else span.seconds
        if span.seconds <= usual + max(_LEAST, (_LONGER - 1) * usual):
            self._in_a_row.clear()
            self._add(span)
            return
        self._in_a_row.append(span)
        self._pauses.append((steps, span.seconds - usual))
        if len(self._in_a_row) == _IN_A_ROW:
            for _ in range(_IN_A_ROW):
                self._pauses.pop()
            slower, self._in_a_row = self._in_a_row, []
            self._spans.clear()
            self._total = _Span(0.0, 0, 0)
            for span in slower:
                self._add(span)

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
            distance = (last - first) / len(later)
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
