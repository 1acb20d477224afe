"""The base of all sinks. A sink sends the logged values, pictures and events of a run to a tracker."""

from __future__ import annotations

import logging
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from functools import partial
from pathlib import Path
from queue import Empty, Full, Queue
from time import monotonic, time as now
from typing import TYPE_CHECKING, Any, ClassVar

import numpy
from attrs import define, field, frozen
from attrs.validators import gt

from hookdiff.log.distribution import Distribution
from hookdiff.log.event import Event
from hookdiff.log.picture import Picture, read_info
from hookdiff.loop.hookspecs import hookimpl
from hookdiff.machine.usage import thread_beside
from hookdiff.options.fields import about
from hookdiff.options.structure import as_toml
from hookdiff.run_dir.layout import has_logged
from hookdiff.run_dir.pictures_png import picture_path, read_picture

if TYPE_CHECKING:
    from hookdiff.loop.loop import Loop

logger = logging.getLogger("hookdiff")

_WAITING = 64  # most calls in the queue, because pictures are large


@frozen
class TrackedRun:
    """Facts about a run that are copied from its loop when a sink opens."""

    run_dir: Path | None
    hparams: Mapping[str, Any]  # the whole config, as in config.toml
    is_branch: bool  # whether the run continues a run of another directory
    step: int  # updates so far; above 0 in a resumed run, and after a rollback

    @property
    def has_earlier_steps(self) -> bool:
        """Whether the run directory holds earlier steps of the run, which can be sent to a tracker."""
        return self.step > 0 and self.run_dir is not None and has_logged(self.run_dir)


@define(eq=False)
class Sink:
    """The base of all sinks, such as Aim: a sink sends a run to a tracker, and neither ends it nor delays it for long.

    A subclass is a plugin like any other (`@define(eq=False)`) and implements the methods below that it needs, but no
    hooks. The methods are called on the main rank only. The training calls `check`. A thread of the sink calls the
    other methods in order, with copies of the values and without the loop. The training waits only for `open`, for
    `close`, and while 64 calls are queued. A rollback closes the sink and opens it again. A call that raises a
    transient error is repeated three times, after growing pauses. If a call fails or takes longer than `timeout`, the
    sink is switched off with one warning and the run continues. KeyboardInterrupt and SystemExit end the run.

    All values that a sink gets are also in the run directory: `hookdiff mirror RUN --to NAME` sends them to a tracker
    again. `time` is the time of the log call, in seconds since 1970.
    """

    _pauses: ClassVar[Sequence[float]] = (0.1, 0.5, 2.5)  # seconds before each repetition of a call
    timeout: float = field(
        default=30.0,
        validator=gt(0),
        kw_only=True,
        metadata=about("longest time of a call; after that, the tracker is off and the run continues", "seconds"),
    )
    _worker: _Worker | None = field(init=False, default=None)  # None unless the sink is open
    _is_closed: bool = field(init=False, default=False)  # whether a run has closed the sink, until the next run

    @property
    def where(self) -> str:
        """A text on where the tracker keeps the run, such as "the folder runs/x/tensorboard"; known once it is open."""
        return type(self).__name__

    def place(self, run: TrackedRun) -> object:
        """Return the place to which the tracker would write the run; sinks with equal places overwrite each other.

        By default, all sinks of a class have the same place.
        """
        return type(self)

    def check(self, loop: Loop) -> None:
        """Raise UserError for a mistake of the user, such as a missing package; the run then ends before it starts.

        The states of plugins are not loaded yet. Copy the values from `loop` that the other methods need.
        """

    def clear(self, run: TrackedRun) -> None:
        """Remove this run from the tracker; `hookdiff mirror` calls it before `open`."""

    def open(self, run: TrackedRun) -> Sequence[Call] | None:
        """Open the tracker: before the first step, once the state of a resumed run is loaded, and after a rollback.

        The run continues at `run.step`, so remove later steps from the tracker. If the tracker lacks earlier steps,
        return `hookdiff.authors.earlier(run, self)`: calls that send these steps from the run directory. These calls
        are made before any other call, while the training continues.
        """
        return None

    def filled(self) -> None:
        """Note that the tracker has all earlier steps now; called after the calls that `open` has returned."""

    def scalars(self, step: int, time: float, values: Mapping[str, float]) -> None:
        """Write the `values` logged at `step`; they may be nan or infinite."""

    def images(self, step: int, time: float, images: Mapping[str, Picture]) -> None:
        """Write pictures with uint8 pixels."""

    def texts(self, step: int, time: float, texts: Mapping[str, str]) -> None:
        """Write texts."""

    def distributions(self, step: int, time: float, distributions: Mapping[str, Distribution]) -> None:
        """Write histograms."""

    def event(self, step: int, time: float, event: Event) -> None:
        """Write an event, such as a finding."""

    def close(self) -> None:
        """Flush and close the tracker at the end of every run, even if a call such as `open` has failed.

        The queued calls and `close` share a limit of `timeout` seconds; no call begins after that.
        """

    def is_transient(self, error: Exception) -> bool:
        """Return whether to repeat a call that raised `error`. Default: for an OSError, as of disks and networks."""
        return isinstance(error, OSError)

    @hookimpl
    def on_start(self, loop: Loop) -> None:
        self._is_closed = False
        if loop.is_main:
            self.check(loop)

    @hookimpl(trylast=True)
    def on_ready(self, loop: Loop) -> None:
        self._open(loop)

    @hookimpl
    def on_log(self, loop: Loop, step: int, values: Mapping[str, float]) -> None:
        if values:
            self._send(loop, "scalars", self.scalars, step, dict(values))

    @hookimpl(trylast=True)  # after their files are written
    def on_images(self, loop: Loop, step: int, images: Mapping[str, Picture]) -> None:
        worker = self._open(loop)
        if worker and worker.is_filling and loop.run_dir:  # the queue may be long: it gets paths, not pixels
            for name in images:
                worker.send("images", send_picture, self, step, name, picture_path(loop.run_dir, name, step))
        else:
            self._send(loop, "images", self.images, step, dict(images))

    @hookimpl
    def on_texts(self, loop: Loop, step: int, texts: Mapping[str, str]) -> None:
        self._send(loop, "texts", self.texts, step, dict(texts))

    @hookimpl
    def on_distributions(self, loop: Loop, step: int, distributions: Mapping[str, Distribution]) -> None:
        self._send(loop, "distributions", self.distributions, step, dict(distributions))

    @hookimpl(wrapper=True)
    def on_event(self, loop: Loop, step: int, event: Event) -> Generator[None, Any, Any]:
        if event.kind == "rollback" and self._worker:
            # Open before events.jsonl holds the rollback, because the rollback would otherwise be sent twice.
            self._worker.open(_facts(loop, step, is_branch=False), again=True)
        result = yield
        self._send(loop, "event", self.event, step, event)
        return result

    def _send(self, loop: Loop, name: str, method: Callable[..., object], step: int, what: object) -> None:
        if worker := self._open(loop):
            worker.send(name, method, step, now(), what)

    def _open(self, loop: Loop) -> _Worker | None:
        if loop.is_main and self._worker is None and not self._is_closed:
            self._worker = _Worker(self)
            # Not in on_stop: other plugins may still log there.
            loop.resources.callback(self._close, self._worker)
            self._worker.open(_facts(loop, loop.progress.step, loop.is_branch))
        return self._worker

    def _close(self, worker: _Worker) -> None:
        self._worker, self._is_closed = None, True
        worker.send("close", self.close, wait=True)


def _facts(loop: Loop, step: int, is_branch: bool) -> TrackedRun:
    hparams = deepcopy({"run": as_toml(loop.config), **loop.hparams})
    return TrackedRun(loop.run_dir, hparams, is_branch, step)


@define(eq=False)
class Call:
    """A call of a method of a sink."""

    name: str  # of the method
    make: Callable[[], object]
    is_over: threading.Event = field(init=False, factory=threading.Event)


def send_picture(sink: Sink, step: int, name: str, path: Path) -> None:
    """Send the picture in a file of the run directory to `sink`; a missing or damaged file is skipped."""
    try:
        written = path.stat().st_mtime
    except OSError:
        return
    if picture := read_picture(path):
        sink.images(step, written, {name: Picture(numpy.array(picture), read_info(picture))})


class _Worker:
    """Makes the calls of a sink, from "open" to "close", on a daemon thread, which cannot keep the process from ending.

    All calls share one thread, since locks and SQLite connections belong to the thread that made them.
    """

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._calls: Queue[Call | None] = Queue(_WAITING)
        self._earlier: deque[Call] = deque()  # they send the earlier steps to the tracker
        self.is_filling = False
        self._current: tuple[str, float] | None = None  # name and start time of the current call
        self._is_off = False  # after a call that failed, only "close" is made
        self._is_left = threading.Event()  # set after a call that took too long: no call follows it
        self._interrupt: BaseException | None = None
        self._lock = threading.Lock()
        with thread_beside() as begin:
            threading.Thread(target=self._run, args=(begin,), name=type(sink).__name__, daemon=True).start()

    def open(self, run: TrackedRun, again: bool = False) -> None:
        """Open the sink, and wait until it is open; `again` closes it first."""
        if self.is_filling:  # `open` returns these calls again, with the queued calls
            self._drop()
        self.send("open", self._open, run, again, wait=True)

    def send(self, name: str, method: Callable[..., object], *arguments: Any, wait: bool = False) -> None:
        """Queue a call, and `wait` for its end if asked; raise KeyboardInterrupt or SystemExit of an earlier call."""
        if not self._is_left.is_set() and (name == "close" or not self._is_off):
            call, deadline = Call(name, partial(method, *arguments)), monotonic() + self._sink.timeout
            in_time = not self._is_late() and self._put(call)
            if not in_time or (wait and not call.is_over.wait(deadline - monotonic())):
                self._leave(name)
        interrupt, self._interrupt = self._interrupt, None
        if interrupt:
            raise interrupt

    def _is_late(self) -> bool:
        current = self._current
        return current is not None and monotonic() - current[1] > self._sink.timeout

    def _put(self, call: Call) -> bool:
        try:
            self._calls.put(call, timeout=self._sink.timeout)
        except Full:
            return False
        return True

    def _leave(self, name: str) -> None:
        current = self._current
        self._is_left.set()
        reason = f"no answer within {self._sink.timeout:g} s"
        if self.is_filling:
            reason += ", and it lacks earlier steps of the run; send them with `hookdiff mirror`"
        self._switch_off(current[0] if current else name, TimeoutError(reason))
        self._drop()
        self._calls.put(None)  # wakes the thread, in case it is idle

    def _drop(self) -> None:
        self._earlier.clear()
        with suppress(Empty):
            while True:
                self._calls.get_nowait()

    def _switch_off(self, name: str, error: Exception) -> None:
        with self._lock:
            before, self._is_off = self._is_off, True
        if not before:
            sink, reason = type(self._sink).__name__, f"{type(error).__name__}: {error}"
            logger.warning("%s is switched off, the run goes on: %s: %s", sink, name, reason)
            logger.debug("where %s failed:", sink, exc_info=error)

    def _run(self, begin: Callable[[], None]) -> None:
        """Make the queued calls, on the thread."""
        begin()
        while (call := self._calls.get()) and not self._is_left.is_set():
            if call.name == "close" or not self._is_off:
                self._make(call)
            call.is_over.set()
            if call.name == "close":
                return
            self._fill()

    def _open(self, run: TrackedRun, again: bool) -> None:
        if again:
            self._sink.close()
        self._earlier = deque(self._sink.open(run) or ())
        if self._earlier:
            self._earlier.append(Call("filled", self._sink.filled))
            self.is_filling, self._calls.maxsize = True, sys.maxsize

    def _fill(self) -> None:
        """Make the calls for the earlier steps. The training does not wait: its queue has no limit meanwhile."""
        with suppress(IndexError):  # no calls are left
            while not (self._is_off or self._is_left.is_set()):
                self._make(self._earlier.popleft())
        self.is_filling = False
        self._calls.maxsize = max(_WAITING, self._calls.qsize())

    def _make(self, call: Call) -> None:
        self._current = call.name, monotonic()
        try:
            self._repeat(call.make)
        except Exception as error:
            self._switch_off(call.name, error)
        except BaseException as error:
            self._interrupt, self._is_off = error, True
        self._current = None

    def _repeat(self, make: Callable[[], object]) -> None:
        for pause in self._sink._pauses:
            try:
                make()
                return
            except Exception as error:
                if self._is_off or not self._sink.is_transient(error) or self._is_left.wait(pause):
                    raise
        make()
