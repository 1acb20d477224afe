"""Checks of a sink: its tracker has the values of the run directory, and no failure of the sink changes a run."""

from __future__ import annotations

import math
import shutil
import sqlite3
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any, Final, cast

import torch
from attrs import define, field

from hookdiff import builtin_plugins
from hookdiff.authors.mirroring import mirror
from hookdiff.authors.sinks import Call, Sink, TrackedRun
from hookdiff.disk.tree import State
from hookdiff.log.event import Event
from hookdiff.loop.dispatch import PASS
from hookdiff.loop.hookspecs import hookimpl
from hookdiff.loop.loop import Loop
from hookdiff.run_dir.history import History
from hookdiff.testing.compare import ValueKey, all_differences, fail
from hookdiff.testing.record import Record, quiet, round_trip
from hookdiff.testing.toy import toy_loop

_SINK = "sink"  # the name of the tested sink in its runs
_CHECKPOINT, _KILL, _END = 2, 5, 6  # steps: of the saved state, of the kill, and of the end
_ROUNDING = 1e-6  # trackers keep numbers in float32
_LIMITS = (0.1, 1.0)  # seconds to wait for a hanging call; the longer limit is for a busy machine
_CALLS = ("open", "filled", "scalars", "images", "texts", "distributions", "event", "close")
_EARLIER = "begin a new record in open, and return earlier(run, self)"
_REMEDIES = {
    "a run": "scalars has to write each of the values, NaN included, and close has to flush them",
    "a kill and a resume": f"the tracker keeps the values up to run.step, and none of later steps: {_EARLIER}",
    "a rollback": f"a rollback closes the sink and opens it again, without values after run.step: {_EARLIER}",
    "a branch": f"the new tracker begins with the earlier values of the continued run: {_EARLIER}",
    "hookdiff mirror": "clear has to remove the run from the tracker, and open has to prepare it for scalars",
}
_FAULTS: Final[Mapping[str, Exception | None]] = {
    "raises OSError": OSError("no space left"),
    "raises ValueError": ValueError("not accepted"),
    "is locked": sqlite3.OperationalError("database is locked"),
    "hangs": None,
}


def assert_tracks(make: Callable[[Path], Sink], read: Callable[[Path], Mapping[tuple[int, str], float]]) -> None:
    """Raise AssertionError, with the sink, the call and the remedy, unless the tracker has the values of each run.

    The tracker must hold the values of metrics.jsonl after a run, after a kill and a resume, after a rollback, in a
    run that continues another in a new directory (a branch), and after `hookdiff mirror`. To imitate a kill, the files
    of the run directory and of the tracker are copied during a run. The run is resumed from these copies and an older
    state, with the tracker at a new path. Numbers may be rounded to float32. Values that JSON lacks are NaN.

    If a call of the sink fails, is locked or hangs, a resumed run is the same to the last bit as without the sink, and
    logs one warning: the sink is switched off.

    Args:
        make: returns a new sink that writes to the tracker at a path, an existing folder. A branch has a different path
            than its run. The test sets its `timeout` if a call hangs.
        read: returns the numbers that the tracker at a path has now, by step and name. If the tracker begins a new run
            in each process, return the numbers of the newest run.
    """
    with TemporaryDirectory() as folder, quiet() as warnings:
        tests = _Tests(Path(folder), make, read, warnings)
        tests.check_run()
        tests.check_rollback()
        killed = tests.kill()
        tests.check_resumes(killed)
        tests.check_faults(killed)


@define(eq=False)
class _Everything:
    """Logs values of each kind, some of them only in a few steps; `has_odd`: also "test/odd"."""

    has_odd: bool = True

    @hookimpl
    def after_optimizer_step(self, loop: Loop) -> None:
        step = loop.progress.step
        loop.log({"test/nan": math.nan if step % 2 else step / 3, "test/inf": math.inf})
        if step % 2 == 0:
            loop.log({"test/even": float(step)})
            loop.log.images({"test/picture": torch.full((1, 1, 2, 2), step / 10)})
            loop.log.texts({"test/text": f"step {step}"})
            loop.log.distributions({"test/histogram": torch.tensor([0.0, 1.0])})
            loop.log.event(Event("finding", f"found at {step}"))
        if self.has_odd and step > _CHECKPOINT and loop.progress.position == step:  # not after a rollback
            loop.log({"test/odd": 1.0})

    @hookimpl
    def on_stop(self, loop: Loop) -> None:
        loop.log({"test/last": 2.0})


@define(eq=False)
class _Restores:
    """A checkpoint in memory: keeps the state of a step, restores `state`, and rolls back after a NaN."""

    state: State | None = None
    nan_at: int | None = None

    @hookimpl
    def restore(self) -> State:
        return PASS if self.state is None else self.state

    @hookimpl(trylast=True)
    def between_steps(self, loop: Loop) -> None:
        if self.state is None and loop.progress.step == _CHECKPOINT:
            self.state = round_trip(loop.state_dict())

    @hookimpl(wrapper=True)
    def compute_loss(self, loop: Loop) -> Any:
        output = yield
        if loop.progress.position == self.nan_at:
            output.loss.data.fill_(math.nan)
        return output

    @hookimpl
    def on_nan(self) -> str:
        return "rollback"


@define(eq=False)
class _Copies:
    """Copies folders in the state that a kill of the process would leave, after the calls of the sink so far."""

    sink: Sink
    copies: Mapping[Path, Path]

    @hookimpl(tryfirst=True)
    def before_step(self, loop: Loop) -> None:
        if loop.progress.step == _KILL:
            if self.sink._worker:
                self.sink._worker.send("scalars", lambda: None, wait=True)
            for source, target in self.copies.items():
                shutil.copytree(source, target)


@define
class _Killed:
    """A run that was killed in the middle, with copies of its folders at that time."""

    run_dir: Path
    path: Path  # of the tracker
    state: State  # of an older step
    copies: Mapping[Path, Path]

    def put_back(self) -> None:
        shutil.rmtree(self.run_dir)
        shutil.copytree(self.copies[self.run_dir], self.run_dir)

    def copy_tracker(self, folder: Path) -> Path:
        """Return `folder` with a copy of the tracker: a client may keep the files of the old place open."""
        shutil.copytree(self.copies[self.path], folder, dirs_exist_ok=True)
        return folder


@define
class _Tests:
    """The tests of one sink."""

    folder: Path
    make: Callable[[Path], Sink]
    read: Callable[[Path], Mapping[tuple[int, str], float]]
    warnings: list[str]
    name: str = field(default="", init=False)  # of the sink's class

    def new_folder(self) -> Path:
        return Path(mkdtemp(dir=self.folder))

    def new_sink(self, path: Path) -> Sink:
        sink = self.make(path)
        if not isinstance(sink, Sink):
            raise TypeError(f"make returned a {type(sink).__name__}; expected a subclass of hookdiff.Sink")
        self.name = type(sink).__name__
        return sink

    def train(self, plugins: Mapping[str, object], run_dir: Path, steps: int = _END, **options: Any) -> None:
        everything = {**builtin_plugins(signals=False), **plugins}
        hparams = {"run": {"steps": steps}}
        toy_loop(everything, run_dir=run_dir, steps=steps, log_every=1, hparams=hparams, **options).run()

    def check_run(self) -> None:
        run_dir, path = self.new_folder(), self.new_folder()
        self.train({_SINK: self.new_sink(path), "everything": _Everything()}, run_dir)
        self.compare("a run", run_dir, path)

    def check_rollback(self) -> None:
        run_dir, path = self.new_folder(), self.new_folder()
        plugins = {_SINK: self.new_sink(path), "everything": _Everything(), "back": _Restores(nan_at=_KILL)}
        self.train(plugins, run_dir)
        self.compare("a rollback", run_dir, path)

    def kill(self) -> _Killed:
        run_dir, path = self.new_folder(), self.new_folder()
        sink, memory = self.new_sink(path), _Restores()
        copies = {place: self.folder / f"copy of {place.name}" for place in (run_dir, path)}
        plugins = {_SINK: sink, "everything": _Everything(), "earlier": memory, "copies": _Copies(sink, copies)}
        self.train(plugins, run_dir)
        assert memory.state is not None
        self.warnings.clear()
        return _Killed(run_dir, path, memory.state, copies)

    def check_resumes(self, killed: _Killed) -> None:
        """Check a resumed run, a branch of this run, and `hookdiff mirror`."""
        killed.put_back()
        tracker = killed.copy_tracker(self.new_folder())
        self.resume(killed, killed.run_dir, {_SINK: self.new_sink(tracker)}, resume=True)
        self.compare("a kill and a resume", killed.run_dir, tracker)

        run_dir, path = self.new_folder(), self.new_folder()
        self.resume(killed, run_dir, {_SINK: self.new_sink(path)}, resume=killed.run_dir)
        self.compare("a branch", run_dir, path)
        self.compare("a branch", killed.run_dir, tracker)  # has not changed

        # The tracker of a longer run, with values that the run directory lacks.
        tracker = killed.copy_tracker(self.new_folder())
        mirror(History(killed.run_dir), self.new_sink(tracker))
        self.compare("hookdiff mirror", killed.run_dir, tracker)

    def resume(self, killed: _Killed, run_dir: Path, plugins: Mapping[str, object], **options: Any) -> None:
        others = {"everything": _Everything(has_odd=False), "earlier": _Restores(killed.state)}
        self.train({**plugins, **others}, run_dir, steps=_KILL - 1, **options)

    def compare(self, event: str, run_dir: Path, path: Path) -> None:
        switched_off, self.warnings[:] = [warning for warning in self.warnings if self.name in warning], []
        fail(f"{self.name}, in {event}: a call failed", switched_off)
        logged = {(line.step, name): value for line in History(run_dir).metrics for name, value in line.values.items()}
        there = {key: value if math.isfinite(value) else math.nan for key, value in self.read(path).items()}
        differences = all_differences(_keyed(logged), _keyed(there), _ROUNDING)
        problem = f"{self.name}: after {event} the tracker differs from metrics.jsonl; {_REMEDIES[event]}"
        fail(problem, (each.describe("metrics.jsonl", "the tracker") for each in differences))

    def check_faults(self, killed: _Killed) -> None:
        """Check resumed runs with a new tracker, because these make all calls of a sink."""
        alone = self.train_with(killed, None)
        defined = [
            call for call in _CALLS if getattr(type(self.make(self.new_folder())), call) is not getattr(Sink, call)
        ]
        for call in defined:
            for what, error in _FAULTS.items():
                if error is not None:
                    self.check_fault(killed, alone, call, what, error)
                    continue
                try:
                    self.check_fault(killed, alone, call, what, _LIMITS[0])
                except AssertionError:
                    self.check_fault(killed, alone, call, what, _LIMITS[1])

    def check_fault(self, killed: _Killed, alone: Record, call: str, what: str, fault: Exception | float) -> None:
        sink, problem = self.new_sink(self.new_folder()), f"{self.name}, when {call} {what}"
        self.warnings.clear()
        with _failing(sink, call, fault) as is_called:
            try:
                record = self.train_with(killed, sink)
            except Exception as raised:
                remedy = "the methods of Sink are called on its own thread: implement these methods, and no hooks"
                raise AssertionError(f"{problem}: {raised!r} ends the run; {remedy}") from raised
        if not is_called:
            return  # such as `filled`, if `open` returns no calls
        differences = all_differences(alone.steps, record.steps)
        fail(
            f"{problem}: the run differs from one without the sink; read the loop only in check, and change nothing",
            (each.describe("the run without it", "the run with it") for each in differences),
        )
        if len(self.warnings) != 1 or not all(name in self.warnings[0] for name in (self.name, call)):
            remedy = "do not catch the error, because Sink logs that it is switched off; log no warning of your own"
            raise AssertionError(
                "\n  ".join([f"{problem}: expected one warning that names both; {remedy}:", *self.warnings])
            )

    def train_with(self, killed: _Killed, sink: Sink | None) -> Record:
        run_dir, record = self.new_folder() / "run", Record("the run")
        shutil.copytree(killed.copies[killed.run_dir], run_dir)
        plugins = {"record": record} if sink is None else {_SINK: sink, "record": record}
        self.resume(killed, run_dir, plugins, resume=True, fresh=[_SINK] * (sink is not None))
        return record


def _keyed(numbers: Mapping[tuple[int, str], float]) -> dict[ValueKey, float]:
    return {ValueKey("logged number", name, step): value for (step, name), value in numbers.items()}


@contextmanager
def _failing(sink: Sink, call: str, fault: Exception | float) -> Iterator[list[str]]:
    """Let a call of `sink` raise `fault`, or hang during the `with`; yield a list of the calls so far.

    A number is the timeout of a hanging call. The other calls after `open` then do nothing, so that none is late.
    """
    kind, trainer, is_called = type(sink), threading.get_ident(), list[str]()
    released, is_over = threading.Event(), threading.Event()

    def fail_or_hang(self: Sink, *arguments: object) -> None:
        is_called.append(call)
        if isinstance(fault, Exception):
            raise fault
        if threading.get_ident() == trainer:
            raise RuntimeError("the call runs on the thread of the training, which therefore waits for ever")
        released.wait()
        with suppress(Exception):
            kind.close(self)  # on the thread that has opened it
        is_over.set()

    def open_in_time(self: Sink, run: TrackedRun) -> Sequence[Call] | None:
        calls = kind.open(self, run)
        self.timeout = cast("float", fault)
        return calls

    body: dict[str, Any] = {"__slots__": (), "_pauses": (0.001,)}
    if not isinstance(fault, Exception):
        body |= {**dict.fromkeys(_CALLS, lambda *_: None), "open": open_in_time}
        sink.timeout = fault if call == "open" else sink.timeout
    sink.__class__ = type(kind.__name__, (kind,), {**body, call: fail_or_hang})
    try:
        yield is_called
    finally:
        released.set()
        if is_called and not isinstance(fault, Exception):
            is_over.wait()
