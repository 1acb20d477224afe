"""The plugin `progress`."""

from __future__ import annotations

import logging
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import define, evolve, field

from hookdiff import Loop, Step, hookimpl
from hookdiff.machine import memory_in_use
from hookdiff.terminal import Display, Work, byte_size, duration, find_display, rate, shown_by, step_label
from hookdiff_progress.pace import Pace
from hookdiff_progress.picture import FIRST, Facts, picture

if TYPE_CHECKING:
    from rich.console import RenderableType

WIDTH = 120  # columns of a line in a pipe; further values are left out
LOSSES = 24  # losses in the sparkline
SOONEST, LATEST = 10.0, 60.0  # seconds between two lines in a pipe: a tenth of the time so far, within these limits

logger = logging.getLogger("hookdiff")


@define
class _Run:
    """What is shown of a run."""

    loop: Loop
    pace: Pace
    values: dict[str, tuple[int, float]] = field(factory=dict)  # step and newest value of each name
    times: Counter[str] = field(factory=Counter)  # how often each name was logged
    losses: deque[float] = field(factory=lambda: deque(maxlen=LOSSES))
    first_loss: tuple[int, float] | None = None  # of the first update in this process, with its step
    saved: int | None = None  # step of the newest checkpoint
    works: Sequence[Work] = ()

    @property
    def total(self) -> int | None:
        return self.loop.config.expected_steps(self.loop.progress, self.loop.feed)

    def draw(self, width: int, has_blocks: bool) -> list[RenderableType]:
        values, newest = self.values, max((step for step, _ in self.values.values()), default=0)
        if self.first_loss and "loss" not in values:
            values, newest = {"loss": self.first_loss, **values}, self.loop.progress.step
        facts = evolve(self.line(values, newest), works=self.works, losses=tuple(self.losses))
        return picture(facts, width, has_blocks)

    def line(self, values: Mapping[str, tuple[int, float]], newest: int) -> Facts:
        """Return the facts with these values; a value that is older than the step `newest` is shown with its step."""
        loop, texts = self.loop, dict[str, str]()
        usual = [name for name in FIRST if name in values]
        rarest_first = sorted((name for name in values if name not in FIRST), key=self.times.__getitem__)
        for name in [*usual, *rarest_first]:
            step, value = values[name]
            is_old = step < newest and (name not in FIRST or values is not self.values)
            is_said = name in usual[:-1] and values[usual[-1]][0] == step  # the last value of this step shows it
            texts[name] = f"{value:.4g} (step {step:,})" if is_old and not is_said else f"{value:.4g}"
        return Facts(loop.progress.step, self.total, list(self._pace()), texts, (), list(self._notes()))

    def _pace(self) -> Iterator[str]:
        """Yield "1,234 img/s" and "ETA 12 s" as far as they are known."""
        config, total, left = self.loop.config, self.total, []
        speed = self.pace.images_per_second(config.batch_size)
        if speed is not None:
            yield rate(speed)
        if total is not None and (time_left := self.pace.left(total)) is not None:
            left.append(time_left)
        if config.max_time.amount:
            left.append(max(0.0, config.max_time.amount - (time.monotonic() - self.loop.end.start_time)))
        if left:
            yield f"ETA {duration(min(left))}"

    def _notes(self) -> Iterator[str]:
        sizes, _ = memory_in_use(self.loop.device)
        if size := sizes.get("peak") or sizes.get("reserved"):
            yield f"memory {byte_size(size)}"
        if self.saved is not None:
            yield f"saved at {self.saved:,}"


@define(eq=False)
class ProgressBar:
    """Shows on stderr how far the run is: a bar on a terminal or in a notebook, elsewhere a line now and then.

    A line comes with the first log, then at most every ten seconds, later every minute, and at the end. If nothing is
    logged for a minute, a line comes all the same. The plugin has no options. When stderr is closed, full or broken,
    it is switched off with a line in the log, and the run goes on.
    """

    _run: _Run | None = field(init=False, default=None)
    _display: Display | None = field(init=False, default=None)
    _unshown: dict[str, tuple[int, float]] = field(init=False, factory=dict)  # values for the next line
    _next: float = field(init=False, default=0.0)  # time after which a log is printed
    _latest: float = field(init=False, default=0.0)  # time of the next line if nothing is logged until then
    _printed: int = field(init=False, default=0)  # step of the last line

    @hookimpl
    def on_ready(self, loop: Loop) -> None:
        if not loop.is_main:
            return
        self._run, self._display, self._unshown = _Run(loop, Pace()), None, {}
        self._next, self._latest, self._printed = 0.0, time.monotonic() + LATEST, loop.progress.step
        loop.resources.callback(self._stop)
        with self._switched_off_if_broken():
            self._display = find_display(self._run.draw)
            if self._display is not None:
                self._display.start()
                loop.resources.enter_context(shown_by(self._show_works))

    @hookimpl
    def before_step(self, loop: Loop) -> None:
        if self._run is not None:
            self._run.pace.mark(loop.progress.position, loop.progress.step, loop.feed.waited)
            self._tick()
            if self._display is None and time.monotonic() >= self._latest:
                self._print(self._run)

    @hookimpl
    def between_steps(self, step: Step | None) -> None:
        if self._run is not None and not self._run.first_loss and step and step.outcome == "updated":
            self._run.first_loss = step.step, step.loss

    @hookimpl
    def on_log(self, loop: Loop, step: int, values: Mapping[str, float]) -> None:
        run, shown = self._run, {name: value for name, value in values.items() if name not in loop.log.details}
        if run is None or not shown:
            return
        newest = {name: (step, value) for name, value in shown.items()}
        run.values |= newest
        run.times.update(shown.keys())
        if "loss" in shown:
            run.losses.append(shown["loss"])
        if self._display is None:
            self._unshown |= newest
            if time.monotonic() >= self._next:
                self._print(run)

    @hookimpl
    def on_checkpoint(self, path: Path, step: int) -> None:
        if self._run is not None:
            self._run.saved = step

    def _tick(self) -> None:
        if self._display is not None:
            with self._switched_off_if_broken():
                self._display.tick()

    def _show_works(self, works: Sequence[Work]) -> None:
        if self._run is not None:
            self._run.works = works
            self._tick()

    def _print(self, run: _Run) -> None:
        values, self._unshown = self._unshown, {}
        step = run.loop.progress.step
        facts = run.line(values, step)
        texts = {name: f"{name} {text}" for name, text in facts.values.items()}
        known = [texts.pop(name) for name in FIRST if name in texts]
        line = "  ".join([step_label(step, facts.total), *known, *facts.pace])
        for other in [*texts.values(), *facts.notes]:
            if len(line) + 2 + len(other) > WIDTH:
                break
            line = f"{line}  {other}"
        with self._switched_off_if_broken():
            print(line, file=sys.stderr, flush=True)
        now = time.monotonic()
        self._printed, self._latest = step, now + LATEST
        if values:  # a line without values must not delay the next log
            self._next = now + min(LATEST, max(SOONEST, (now - run.loop.end.start_time) / 10))

    def _stop(self) -> None:
        run = self._run
        if run is not None and self._display is None and (self._unshown or self._printed < run.loop.progress.step):
            self._print(run)
        if self._display is not None:
            with self._switched_off_if_broken():
                self._display.stop()
        self._run = self._display = None

    @contextmanager
    def _switched_off_if_broken(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:  # ValueError: it is closed
            display, self._display, self._run = self._display, None, None
            with suppress(OSError, ValueError):
                if display is not None:
                    display.stop()
            reason = error.strerror if isinstance(error, OSError) and error.strerror else error
            logger.warning("progress is switched off, the run goes on: stderr cannot be written: %s", reason)
