"""The plugin `progress`."""

from __future__ import annotations

import logging
import os
import statistics
import sys
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

from attrs import define, field

from hookdiff import Loop, hookimpl
from hookdiff_progress.bar import Bar, picture

if TYPE_CHECKING:
    from rich.console import Group

FIRST = ("loss", "lr", "grad_norm")
WIDTH = 120  # columns of a line; further values are left out
MOST = 8  # values below a bar

log = logging.getLogger("hookdiff")


@define(eq=False)
class ProgressBar:
    """Shows on stderr how far the run is: a bar on a terminal, elsewhere a line for every log. It has no options.

    When stderr is closed, full or broken, it is switched off with a line in the log, and the run goes on.
    """

    _pace: Pace | None = field(init=False, default=None)
    _bar: Bar | None = field(init=False, default=None)
    _values: dict[str, float] = field(init=False, factory=dict)  # newest value of each name
    _times: Counter[str] = field(init=False, factory=Counter)  # how often each name was logged
    _began: int = field(init=False, default=0)  # position of the first batch
    _newest: int | None = field(init=False, default=None)  # step of the newest line

    @hookimpl
    def on_ready(self, loop: Loop) -> None:
        if not loop.is_main:
            return
        self._pace, self._bar, self._began, self._newest = Pace(loop), None, loop.progress.position, None
        with self._switched_off_if_broken():
            if sys.stderr is None:
                raise ValueError("it is closed")
            # Not rich's own test: with FORCE_COLOR it takes a pipe for a terminal.
            if sys.stderr.isatty() and os.environ.get("TERM") not in ("dumb", "unknown"):
                self._bar = Bar(partial(self._draw, loop, self._pace))
                loop.resources.callback(self._stop)
                self._bar.start()

    @hookimpl
    def before_step(self) -> None:
        if self._bar is not None:
            with self._switched_off_if_broken():
                self._bar.tick()

    def _stop(self) -> None:
        if self._bar is not None:
            with self._switched_off_if_broken():
                self._bar.stop()

    @contextmanager
    def _switched_off_if_broken(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:  # ValueError: it is closed
            bar, self._bar, self._pace = self._bar, None, None
            with suppress(OSError, ValueError):
                if bar is not None:
                    bar.stop()
            reason = error.strerror if isinstance(error, OSError) and error.strerror else error
            log.warning("progress is switched off, the run goes on: stderr cannot be written: %s", reason)

    @hookimpl
    def on_log(self, loop: Loop, step: int, values: Mapping[str, float]) -> None:
        shown = {name: value for name, value in values.items() if name not in loop.log.details}
        if self._pace is None or not shown:
            return
        if "loss" not in shown and step != self._newest and loop.progress.position != self._began:
            shown["loss"] = loop.gradients.loss  # of this step: the mean is only known at regular logs
        self._values, self._newest = self._values | shown, step
        self._times.update(shown.keys())
        if self._bar is None:
            known, others = self._parts(shown)
            line = "  ".join([label(step, total_steps(loop)), *known, *self._pace.parts()])
            for other in others:
                if len(line) + 2 + len(other) > WIDTH:
                    break
                line = f"{line}  {other}"
            with self._switched_off_if_broken():
                print(line, file=sys.stderr, flush=True)
        if self._pace is not None:
            self._pace.mark()

    def _draw(self, loop: Loop, pace: Pace) -> Group:
        step, total = loop.progress.step, total_steps(loop)
        known, others = self._parts(self._values)
        shown = "  ".join([*known, *others][:MOST])
        return picture(label(step, total), step, total, "  ".join(pace.parts()), shown)

    def _parts(self, values: Mapping[str, float]) -> tuple[list[str], list[str]]:
        """Return the values that every line has, and the others, beginning with those that are logged most rarely."""
        others = sorted((name for name in values if name not in FIRST), key=self._times.__getitem__)
        known = [name for name in FIRST if name in values]
        texts = {name: f"{name} {value:.4g}" for name, value in values.items()}
        return [texts[name] for name in known], [texts[name] for name in others]


class Pace:
    """The speed of this process; steps before a resume do not count."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._start = self._now()
        self._marks = deque([self._start], maxlen=10)
        self._longest = 0.0, 0  # seconds and steps of the longest interval between two logs

    def mark(self) -> None:
        """Note the time and the progress of the run."""
        self._longest = self._longest_until(now := self._now())
        self._marks.append(now)

    def parts(self) -> Iterable[str]:
        """Yield "1234 img/s" and "ETA 0:12" as far as they are known.

        The pace is the median over the last ten logs. The time left follows from the mean of this process, because
        evaluations make a run longer; but without the longest interval, so that a single pause does not count as
        training.
        """
        last = self._now()
        (began, _, steps), (now, _, steps_now) = self._start, last
        config, total, left = self._loop.config, total_steps(self._loop), []
        took, made = now - began, steps_now - steps
        pause, steps_in_pause = self._longest_until(last)
        if steps_in_pause < made:
            took, made = took - pause, made - steps_in_pause
        spans = [(end - start, b - a) for (start, a, _), (end, b, _) in pairwise([*self._marks, last])]
        # Some clocks stand still for 15 ms.
        if paces := [batches / seconds for seconds, batches in spans if batches > 0 and seconds > 0]:
            yield f"{statistics.median(paces) * config.batch_size:.0f} img/s"
        if total is not None and made > 0:
            left.append((total - steps_now) * took / made)
        if config.max_time.amount:
            left.append(config.max_time.amount - (now - self._loop.end.start_time))
        if left:
            yield f"ETA {clock(max(0.0, min(left)))}"

    def _longest_until(self, now: tuple[float, int, int]) -> tuple[float, int]:
        began, _, steps = self._marks[-1]
        return max(self._longest, (now[0] - began, now[2] - steps))

    def _now(self) -> tuple[float, int, int]:
        return time.monotonic(), self._loop.progress.position, self._loop.progress.step


def total_steps(loop: Loop) -> int | None:
    """Return the step at which the run is done if all further batches change the weights, or None without a limit."""
    config, progress, totals = loop.config, loop.progress, []
    if config.steps is not None:
        totals.append(config.steps)
    if config.epochs is not None:
        made = -(-progress.samples // config.batch_size)  # batches of the current epoch
        totals.append(progress.step + (config.epochs - progress.epoch) * loop.feed.num_batches - made)
    return min(totals, default=None)


def label(step: int, total: int | None) -> str:
    """Return "step 500/2000"."""
    return f"step {step}" if total is None else f"step {step}/{total}"


def clock(seconds: float) -> str:
    """Return `seconds` as "0:12" or "3:02:01"."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
