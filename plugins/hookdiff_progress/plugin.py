"""The plugin `progress`."""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING

from attrs import define, field

from hookdiff import Loop, hookimpl
from hookdiff_progress.bar import Bar, picture

if TYPE_CHECKING:
    from rich.console import Group

FIRST = ("loss", "lr", "grad_norm")
MOST = 8  # values shown at once: a plugin may log one a layer


@define(eq=False)
class Progress:
    """Shows on stderr how far the run is: a bar on a terminal, elsewhere a line for every log. It has no settings."""

    _pace: Pace | None = field(init=False, default=None)
    _bar: Bar | None = field(init=False, default=None)
    _values: dict[str, float] = field(init=False, factory=dict)  # the last of each name
    _times: Counter[str] = field(init=False, factory=Counter)  # each name was logged

    @hookimpl
    def on_start(self, loop: Loop) -> None:
        if not loop.is_main:
            return
        self._pace = Pace(loop)
        # Not rich's own test: where FORCE_COLOR is set, it takes a pipe for a terminal.
        if sys.stderr.isatty() and os.environ.get("TERM") not in ("dumb", "unknown"):
            self._bar = self._make_bar(loop, self._pace)
            loop.resources.callback(self._bar.stop)
            self._bar.start()

    @hookimpl
    def before_step(self) -> None:
        if self._bar is not None:
            self._bar.tick()

    @hookimpl
    def on_log(self, loop: Loop, step: int, values: Mapping[str, float]) -> None:
        if self._pace is None:
            return
        self._values |= values
        self._times.update(values.keys())
        if self._bar is None:
            parts = (label(step, total_steps(loop)), *self._shown(values), *self._pace.parts())
            print(spaced(parts), file=sys.stderr, flush=True)
        self._pace.mark()

    def _make_bar(self, loop: Loop, pace: Pace) -> Bar:
        def draw() -> Group:
            step, total = loop.progress.step, total_steps(loop)
            return picture(label(step, total), step, total, spaced(pace.parts()), spaced(self._shown(self._values)))

        return Bar(draw)

    def _shown(self, values: Mapping[str, float]) -> list[str]:
        # What is logged rarely, as an evaluation is, comes before what every log has.
        others = sorted((name for name in values if name not in FIRST), key=self._times.__getitem__)
        names = [*(name for name in FIRST if name in values), *others][:MOST]
        return [f"{name} {values[name]:.4g}" for name in names]


class Pace:
    """How fast this process is, over its last ten logs: what an earlier one did before a resume does not count."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._marks = deque([self._now()], maxlen=10)

    def mark(self) -> None:
        """Note where the run is; the oldest of ten marks goes."""
        self._marks.append(self._now())

    def parts(self) -> Iterable[str]:
        """Return "1234 img/s" and "ETA 0:12" as far as they are known.

        Evaluations make a run longer but not the training slower: the pace is the median over the logs, the time left
        goes by their mean.
        """
        last = self._now()
        (began, _, steps), (now, _, steps_now) = self._marks[0], last
        config, total = self._loop.config, total_steps(self._loop)
        seconds, left = now - began, []
        spans = [(end - start, b - a) for (start, a, _), (end, b, _) in pairwise([*self._marks, last])]
        if paces := [done / took for took, done in spans if done > 0 and took > 0]:  # some clocks stand still for 15 ms
            yield f"{statistics.median(paces) * config.batch_size:.0f} img/s"
        if total is not None and steps_now > steps:
            left.append((total - steps_now) * seconds / (steps_now - steps))
        if config.max_time.amount:
            left.append(config.max_time.amount - (now - self._loop.began))
        if left:
            yield f"ETA {clock(max(0.0, min(left)))}"

    def _now(self) -> tuple[float, int, int]:
        return time.monotonic(), self._loop.progress.position, self._loop.progress.step


def total_steps(loop: Loop) -> int | None:
    """Return the step at which the run will be done, if the batches to come all change the weights; None: no limit."""
    config, progress, totals = loop.config, loop.progress, []
    if config.steps is not None:
        totals.append(config.steps)
    if config.epochs is not None:
        made = -(-progress.samples // config.batch_size)  # batches of the epoch under way
        totals.append(progress.step + (config.epochs - progress.epoch) * loop.feed.num_batches - made)
    return min(totals, default=None)


def label(step: int, total: int | None) -> str:
    """Return "step 500/2000"."""
    return f"step {step}" if total is None else f"step {step}/{total}"


def spaced(parts: Iterable[str]) -> str:
    """Return `parts` on one line."""
    return "  ".join(parts)


def clock(seconds: float) -> str:
    """Return `seconds` as "0:12" or "3:02:01"."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
