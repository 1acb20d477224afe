import gc
import math
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from time import sleep
from typing import Any

import pytest
import torch
from attrs import define, field

from hookdiff import Loop, Reason, Sink, TrackedRun, UserError, builtin_plugins, hookimpl
from hookdiff.authors.mirroring import Call
from hookdiff.log import Distribution, Event, Picture
from hookdiff.testing import assert_same, toy_loop, weights
from tests.conftest import PATIENCE, Restores, RollsBack, StopAt, acting, check_one, ran, refused, wait_until, warnings


def make_loop(plugins: Mapping[str, object], steps: int = 4) -> Loop:
    return toy_loop(plugins, steps=steps, log_every=1)


@define(eq=False)
class Recorder(Sink):
    """Records its calls; the call with the name `failing` calls `fail`."""

    failing: str = ""
    fail: Callable[[], object] = lambda: 1 / 0
    run: TrackedRun | None = field(init=False, default=None)
    calls: list[tuple[Any, ...]] = field(init=False, factory=list)
    threads: set[int] = field(init=False, factory=set)
    times: list[float] = field(init=False, factory=list)

    def open(self, run: TrackedRun) -> list[Call] | None:
        self.run = run
        self.note("open", run.step)
        return None

    def scalars(self, step: int, time: float, values: Mapping[str, float]) -> None:
        self.note("scalars", step, dict(values), time=time)

    def images(self, step: int, time: float, images: Mapping[str, Picture]) -> None:
        self.note("images", step, {name: picture.pixels.shape for name, picture in images.items()}, time=time)

    def texts(self, step: int, time: float, texts: Mapping[str, str]) -> None:
        self.note("texts", step, dict(texts), time=time)

    def distributions(self, step: int, time: float, distributions: Mapping[str, Distribution]) -> None:
        self.note("distributions", step, {name: sum(it.counts) for name, it in distributions.items()}, time=time)

    def event(self, step: int, time: float, event: Event) -> None:
        self.note("event", step, event.kind, time=time)

    def close(self) -> None:
        self.note("close")

    def note(self, *call: Any, time: float | None = None) -> None:
        self.calls.append(call)
        self.times += [] if time is None else [time]
        self.threads.add(threading.get_ident())
        if call[0] == self.failing:
            self.fail()

    @property
    def names(self) -> list[str]:
        return [call[0] for call in self.calls]


class Everything:
    """Logs something of each kind after the second step, and values and pictures as the run stops."""

    @hookimpl
    def after_optimizer_step(self, loop: Loop) -> None:
        if loop.progress.step == 2:
            loop.log.images({"seen": torch.zeros(3, 1, 4, 6)})
            loop.log.texts({"prompt": "a cat"})
            loop.log.distributions({"weights": torch.zeros(7)})
            loop.log.event(Event("restart", "the server was restarted"))

    @hookimpl
    def on_stop(self, loop: Loop, reason: Reason) -> None:
        loop.log({"end/score": 1.5})
        loop.log.images({"last": torch.zeros(1, 3, 4, 4)})


WRITES = ("scalars", "images", "texts", "distributions", "event")


class Patient:
    """A clock for the training and its sinks: it stands still until `hangs` is set, and then a wait takes no time.

    A pause of a sink between two attempts takes none either.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.hangs, self.pauses = 0.0, threading.Event(), list[float]()
        real, clock = threading.Condition.wait, time.monotonic
        others = {*threading.enumerate()} - {threading.main_thread()}  # such as tqdm's, which waits every ten seconds

        def wait(condition: threading.Condition, timeout: float | None = None) -> bool:
            if timeout is None or timeout >= PATIENCE or threading.current_thread() in others:
                return real(condition, timeout)
            if threading.current_thread() is not threading.main_thread():
                self.pauses.append(timeout)
                return False
            end = clock() + PATIENCE
            while not self.hangs.is_set() and clock() < end:
                if real(condition, 0.01):
                    return True
            self.now += timeout
            return False

        monkeypatch.setattr("threading.Condition.wait", wait)
        for name in ("hookdiff.authors.sinks.monotonic", "queue.time"):
            monkeypatch.setattr(name, lambda: self.now)

    def hang(self, until: threading.Event) -> None:
        self.hangs.set()
        assert until.wait(PATIENCE)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> Patient:
    return Patient(monkeypatch)


def test_a_sink_gets_everything_that_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    sink, before = Recorder(), time.time()
    make_loop({"sink": sink, "everything": Everything()}).run()
    assert sink.names == ["open", "scalars", *WRITES[1:], "scalars", "scalars", "scalars", "images", "scalars", "close"]
    assert (sink.calls[0], set(sink.calls[1][2])) == (("open", 0), {"loss", "grad_norm"})
    kind, step, shapes = sink.calls[2]
    assert (kind, step, list(shapes), len(shapes["seen"])) == ("images", 2, ["seen"], 2)  # grey
    assert sink.calls[3:6] == [
        ("texts", 2, {"prompt": "a cat"}),
        ("distributions", 2, {"weights": 7}),
        ("event", 2, "restart"),
    ]
    assert sink.calls[-3][2]["last"][2] == 3
    assert sink.calls[-2:] == [("scalars", 4, {"end/score": 1.5}), ("close",)]
    assert sink.times == sorted(sink.times)
    assert before <= sink.times[0] <= sink.times[-1] <= time.time()
    assert not warnings(caplog)


def test_a_sink_is_called_on_one_thread_of_its_own() -> None:
    sink = Recorder()
    make_loop({"sink": sink}).run()
    assert len(sink.threads) == 1
    assert threading.get_ident() not in sink.threads
    wait_until(lambda: not any(thread.name == "Recorder" for thread in threading.enumerate()))


@cache
def without_sink(steps: int = 4) -> Mapping[str, Any]:
    """Return the weights of a run that has no sink."""
    return weights(ran(make_loop({"everything": Everything()}, steps)))


@pytest.mark.parametrize("failing", ["open", *WRITES, "close"])
def test_golden_warning_of_a_sink_that_is_switched_off(failing: str, caplog: pytest.LogCaptureFixture) -> None:
    sink, other = Recorder(failing=failing), Recorder()
    loop = make_loop({"sink": sink, "other": other, "everything": Everything()})
    assert loop.run() == "done"
    assert warnings(caplog) == [
        f"Recorder is switched off, the run goes on: {failing}: ZeroDivisionError: division by zero"
    ]
    assert sink.names.count(failing) == 1
    assert sink.names[sink.names.index(failing) + 1 :] in ([], ["close"])  # after a failure a sink is only closed
    assert len(other.calls) == 12
    assert_same(weights(loop), without_sink())


# In 80 steps more calls than may wait are queued.
@pytest.mark.parametrize(
    ("failing", "steps"),
    [("open", 4), ("scalars", 80), ("close", 4), *(pytest.param(name, 4, marks=pytest.mark.wide) for name in WRITES)],
)
def test_a_run_goes_on_without_a_sink_that_hangs_and_its_loop_is_free(
    failing: str, steps: int, patient: Patient, caplog: pytest.LogCaptureFixture
) -> None:
    released = threading.Event()
    sink = Recorder(failing=failing, fail=lambda: patient.hang(released), timeout=0.5)
    loop = make_loop({"sink": sink, "everything": Everything()}, steps)
    assert loop.run() == "done"
    assert patient.now == 0.5  # it waited for the sink once
    check_one(warnings(caplog), "Recorder", failing, "TimeoutError", "0.5 s")
    assert_same(weights(loop), without_sink(steps))
    freed = weakref.ref(loop)
    del loop
    gc.collect()
    assert freed() is None
    released.set()
    wait_until(lambda: not any(thread.name == "Recorder" for thread in threading.enumerate()))
    assert sink.names[-1] == failing  # after the deadline nothing is called


def test_a_sink_that_fails_twice_warns_once(patient: Patient, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Recorder):
        def scalars(self, step: int, time: float, values: Mapping[str, float]) -> None:
            raise OSError("disk full")

        def close(self) -> None:
            raise OSError("still full")

    make_loop({"sink": Broken()}).run()
    check_one(warnings(caplog), "Broken", "scalars", "OSError: disk full")


@pytest.mark.parametrize("failing", ["open", "scalars", "event", "close"])
def test_a_transient_error_is_repeated_after_growing_pauses(
    failing: str, patient: Patient, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        if len(patient.pauses) < 3:
            raise ConnectionError("restarts")

    sink, whole = Recorder(failing=failing, fail=fail), Recorder()
    make_loop({"sink": sink, "whole": whole, "everything": Everything()}).run()
    assert not warnings(caplog)
    at = sink.names.index(failing)
    assert sink.names[at : at + 4] == [failing] * 4
    assert sink.calls[:at] + sink.calls[at + 3 :] == whole.calls
    assert (len(sink.threads), patient.pauses) == (1, [0.1, 0.5, 2.5])


@pytest.mark.parametrize("error", [ConnectionError("gone"), TimeoutError("server")], ids=repr)
def test_an_error_that_lasts_is_not_repeated_for_ever_and_is_no_hang(
    error: Exception, patient: Patient, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise error

    sink = Recorder(failing="scalars", fail=fail)
    assert make_loop({"sink": sink}).run() == "done"
    assert sink.names == ["open", *["scalars"] * 4, "close"]
    check_one(warnings(caplog), "Recorder", "scalars", f"{type(error).__name__}: {error}")


def test_a_sink_decides_which_errors_are_transient(patient: Patient) -> None:
    class Own(Recorder):
        def is_transient(self, error: Exception) -> bool:
            return isinstance(error, ZeroDivisionError)

    sink = Own(failing="open")
    make_loop({"sink": sink}).run()
    assert sink.names == [*["open"] * 4, "close"]


def test_training_does_not_wait_for_a_sink(caplog: pytest.LogCaptureFixture) -> None:
    seen, goes_on = [], threading.Event()

    class Sees(Recorder):
        def images(self, step: int, time: float, images: Mapping[str, Picture]) -> None:
            seen.append(images["mine"].pixels.max())

    def release(loop: Loop) -> None:
        if loop.progress.step == 2:
            images = torch.full((1, 1, 2, 2), -1.0)
            loop.log.images({"mine": images})
            images.fill_(1.0)
        if loop.progress.step == 3:
            goes_on.set()

    sink = Sees(failing="scalars", fail=lambda: goes_on.wait(PATIENCE), timeout=PATIENCE)
    make_loop({"sink": sink, "releases": acting(after_optimizer_step=release)}).run()
    assert [call[1] for call in sink.calls if call[0] == "scalars"] == [1, 2, 3, 4]
    assert seen == [0]
    assert not warnings(caplog)


def test_a_sink_that_is_slow_gets_everything() -> None:
    sink = Recorder(failing="scalars", fail=lambda: sleep(0.002))
    make_loop({"sink": sink}, steps=80).run()
    assert [call[1] for call in sink.calls[1:-1]] == list(range(1, 81))


def test_the_loop_is_checked_by_the_training_and_copied_for_the_sink(tmp_path: Path) -> None:
    seen: list[Any] = []

    class Sees(Recorder):
        def check(self, loop: Loop) -> None:
            seen.append((loop.device.type, threading.get_ident()))

    sink, hparams = Sees(), {"run": {"steps": 4}}
    loop = ran(toy_loop({"sink": sink}, steps=4, hparams=hparams, run_dir=tmp_path / "run"))
    assert seen == [("cpu", threading.get_ident())]
    assert sink.run == TrackedRun(tmp_path / "run", hparams, is_branch=False, step=0)
    assert sink.run.hparams["run"] is not loop.hparams["run"]


def test_the_hparams_have_the_options_of_a_loop_in_a_script() -> None:
    sink = Recorder()
    toy_loop({"sink": sink}, steps=4, hparams={"model": {"width": 8}}).run()
    assert sink.run
    assert sink.run.hparams["model"] == {"width": 8}
    assert (sink.run.hparams["run"]["steps"], sink.run.hparams["run"]["batch_size"]) == (4, 8)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_in_a_sink_ends_the_run(error: type[BaseException], caplog: pytest.LogCaptureFixture) -> None:
    def interrupt() -> None:
        raise error

    sink = Recorder(failing="scalars", fail=interrupt)
    loop = make_loop({"sink": sink})
    with pytest.raises(error):
        loop.run()
    assert sink.names == ["open", "scalars", "close"]
    assert not warnings(caplog)


def test_an_error_in_check_ends_the_run() -> None:
    class Lacking(Recorder):
        def check(self, loop: Loop) -> None:
            raise UserError("no account")

    sink = Lacking()
    with refused(UserError, "no account"):
        make_loop({"sink": sink}).run()
    assert sink.calls == []


def test_other_ranks_write_nothing(second_rank: None) -> None:
    sink = Recorder()
    make_loop({"sink": sink, "everything": Everything()}).run()
    assert sink.calls == []


def test_a_sink_opens_after_its_state_is_loaded() -> None:
    class Stateful(Recorder):
        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: Mapping[str, Any]) -> None:
            self.calls.append(("load",))

    sink, first = Stateful(), ran(make_loop({}, steps=1))
    make_loop({"sink": sink, "state": Restores({**first.state_dict(), "plugins": {"sink": {}}})}).run()
    assert sink.names[:2] == ["load", "open"]


def test_a_sink_is_open_when_the_first_step_begins() -> None:
    sink = Recorder()
    with make_loop({"sink": sink}) as loop:
        assert sink.names == []  # a loop that only samples opens none
        for _ in loop.steps():
            assert sink.names[0] == "open"
    stopped = Recorder()
    make_loop({"sink": stopped, "stops": acting(on_ready=lambda loop: loop.stop())}).run()
    assert stopped.names == ["open", "close"]


def test_a_second_run_of_the_loop_opens_the_sink_again_but_not_what_is_logged_after_its_close() -> None:
    def clean(loop: Loop) -> None:
        loop.resources.callback(lambda: loop.log.event(Event("mine", "cleaned up")))

    sink = Recorder()
    ran(ran(make_loop({"sink": sink, "cleans": acting(on_start=clean), "stop": StopAt(1)}, steps=2)))
    assert sink.names == ["open", "scalars", "close"] * 2


def test_texts_arrive_without_lone_surrogates() -> None:
    def log(loop: Loop) -> None:
        loop.log.texts({"prompt \udc80": "a \udc80"})
        loop.log.event(Event("kind \udc80", "b \udc80"))
        loop.log({"loss \udc80": 1.0})

    sink = Recorder()
    make_loop({"sink": sink, "odd": acting(after_optimizer_step=log)}, steps=1).run()
    assert ("texts", 1, {"prompt \\udc80": "a \\udc80"}) in sink.calls
    assert ("event", 1, "kind \\udc80") in sink.calls
    repr(sink.calls).encode()


@define(eq=False)
class Filled(Recorder):
    """A sink with three earlier steps, each of which waits for `release`."""

    release: Callable[[], object] = lambda: None

    def open(self, run: TrackedRun) -> list[Call]:
        Recorder.open(self, run)
        return [Call("scalars", partial(self.earlier, step)) for step in (-3, -2, -1)]

    def earlier(self, step: int) -> None:
        self.release()
        self.note("scalars", step, {})


def test_training_does_not_wait_while_a_sink_is_filled(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trained = threading.Event()

    def end(loop: Loop) -> None:
        if loop.progress.step == 2:
            loop.log.images({"seen": torch.full((1, 1, 4, 6), 1.0)})
        if loop.progress.step == 80:
            trained.set()

    sink = Filled(release=lambda: trained.wait(PATIENCE), timeout=PATIENCE)
    plugins = {**builtin_plugins(signals=False), "sink": sink, "ends": acting(after_optimizer_step=end)}
    toy_loop(plugins, steps=80, log_every=1, run_dir=tmp_path / "run").run()
    steps = [call[1] for call in sink.calls if call[0] == "scalars"]
    assert steps == [-3, -2, -1, *range(1, 81)]
    assert [list(call[2]) for call in sink.calls if call[0] == "images"] == [["seen"]]
    assert sink.names[-1] == "close"
    assert not warnings(caplog)


class Slow:
    """Makes each call of a fill take a while by the clock of the sinks; the one of step `blocked` waits for a log."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: float, blocked: int) -> None:
        self.late, self.seconds, self.blocked = 0.0, seconds, blocked
        self.calls, self.begun, self.logged = 0, threading.Event(), threading.Event()
        monkeypatch.setattr("hookdiff.authors.sinks.monotonic", lambda: time.monotonic() + self.late)

    def __call__(self) -> None:
        self.late += self.seconds
        self.calls += 1
        if self.calls == self.blocked:
            self.begun.set()
            assert self.logged.wait(PATIENCE)

    @hookimpl
    def before_step(self, loop: Loop) -> None:
        if loop.progress.step == 1:
            assert self.begun.wait(PATIENCE)
        if loop.progress.step == 2:
            self.logged.set()


def test_each_call_of_a_fill_has_the_whole_deadline(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    slow = Slow(monkeypatch, seconds=0.4 * PATIENCE, blocked=3)
    sink = Filled(release=slow, timeout=PATIENCE)
    make_loop({"sink": sink, "slow": slow}).run()
    assert [call[1] for call in sink.calls if call[0] == "scalars"] == [-3, -2, -1, 1, 2, 3, 4]
    assert not warnings(caplog)


def test_training_leaves_a_sink_whose_fill_is_late(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    slow = Slow(monkeypatch, seconds=2 * PATIENCE, blocked=1)
    assert make_loop({"sink": Filled(release=slow, timeout=PATIENCE), "slow": slow}).run() == "done"
    check_one(warnings(caplog), "Filled", "scalars", f"{PATIENCE} s", "hookdiff mirror")
    assert slow.calls == 1


def test_a_rollback_opens_the_sink_again() -> None:
    sink = Recorder()
    plugins = {**builtin_plugins(signals=False), "sink": sink, "back": RollsBack(at=1, position=3)}
    make_loop(plugins, steps=4).run()
    (again,) = (place for place, call in enumerate(sink.calls) if call == ("open", 1))
    assert (sink.calls[again - 1], sink.calls[again + 1]) == (("close",), ("event", 1, "rollback"))
    assert [call[1] for call in sink.calls[again:] if call[0] == "scalars"] == [2, 3, 4]


def test_a_rollback_breaks_off_a_fill(caplog: pytest.LogCaptureFixture) -> None:
    class Long(Filled):
        def open(self, run: TrackedRun) -> list[Call]:
            return Filled.open(self, run) * (0 if run.step else 10_000)

    class Rolls(RollsBack):
        @hookimpl
        def on_nan(self) -> str:
            lost.set()
            return "rollback"

    lost = threading.Event()
    sink = Long(release=lambda: lost.wait(PATIENCE) and sleep(0.02), timeout=PATIENCE)
    make_loop({**builtin_plugins(signals=False), "sink": sink, "back": Rolls(at=1, position=3)}, steps=4).run()
    assert sink.names.count("open") == 2
    assert sink.names.count("scalars") < 20_000  # 200 seconds
    assert sink.calls[-1] == ("close",)
    assert not any("Long" in warning for warning in warnings(caplog))


@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl"])
def test_a_tracker_can_be_filled_from_the_files_of_a_resumed_run(name: str, tmp_path: Path) -> None:
    new, resumed = (TrackedRun(tmp_path, {}, is_branch=False, step=step) for step in (0, 3))
    assert not resumed.has_earlier_steps
    (tmp_path / name).touch()
    assert resumed.has_earlier_steps
    assert not new.has_earlier_steps
    assert not TrackedRun(None, {}, is_branch=False, step=3).has_earlier_steps


def test_nan_and_infinity_arrive_unchanged() -> None:
    sink = Recorder()
    log = acting(after_optimizer_step=lambda loop: loop.log({"nan": math.nan, "inf": math.inf}))
    make_loop({"sink": sink, "odd": log}, steps=1).run()
    values = sink.calls[1][2]
    assert math.isnan(values["nan"])
    assert values["inf"] == math.inf
