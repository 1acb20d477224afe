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
WIDTH = 120  # columns of a line; what does not fit is left out
MOST = 8  # values shown at once under a bar


@define(eq=False)
class Progress:
    """Shows on stderr how far the run is: a bar on a terminal, elsewhere a line for every log. It has no settings."""

    _pace: Pace | None = field(init=False, default=None)
    _bar: Bar | None = field(init=False, default=None)
    _values: dict[str, float] = field(init=False, factory=dict)  # the last of each name
    _times: Counter[str] = field(init=False, factory=Counter)  # each name was logged
    _began: int = field(init=False, default=0)  # position of the first batch

    @hookimpl
    def on_start(self, loop: Loop) -> None:
        if not loop.is_main:
            return
        self._pace, self._began = Pace(loop), loop.progress.position
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
        shown = {name: value for name, value in values.items() if name not in loop.log.details}
        if self._pace is None or not shown:
            return
        if "loss" not in shown and loop.progress.position != self._began:
            shown["loss"] = loop.gradients.loss  # between two logs there is no mean yet: that of the step
        self._values |= shown
        self._times.update(shown.keys())
        if self._bar is None:
            known, others = self._parts(shown)
            parts = (label(step, total_steps(loop)), *known, *self._pace.parts())
            print(fitting(parts, others), file=sys.stderr, flush=True)
        self._pace.mark()

    def _make_bar(self, loop: Loop, pace: Pace) -> Bar:
        def draw() -> Group:
            step, total = loop.progress.step, total_steps(loop)
            known, others = self._parts(self._values)
            shown = spaced([*known, *others][:MOST])
            return picture(label(step, total), step, total, spaced(pace.parts()), shown)

        return Bar(draw)

    def _parts(self, values: Mapping[str, float]) -> tuple[list[str], list[str]]:
        """Return what every line has, and the others: what is logged rarely, as an evaluation is, comes first."""
        others = sorted((name for name in values if name not in FIRST), key=self._times.__getitem__)
        known = [name for name in FIRST if name in values]
        return [_value(name, values[name]) for name in known], [_value(name, values[name]) for name in others]


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
            left.append(config.max_time.amount - (now - self._loop.start_time))
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


def fitting(parts: Iterable[str], others: Iterable[str]) -> str:
    """Return `parts` on one line, and as many of the `others`, from the first on, as there is room for."""
    line = spaced(parts)
    for other in others:
        if len(longer := spaced((line, other))) > WIDTH:
            break
        line = longer
    return line


def _value(name: str, value: float) -> str:
    return f"{name} {value:.4g}"


def clock(seconds: float) -> str:
    """Return `seconds` as "0:12" or "3:02:01"."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
