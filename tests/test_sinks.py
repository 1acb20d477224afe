import math
import threading
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from attrs import define, field
from torch import Tensor

from hookdiff import Loop, Reason, UserError, hookimpl
from hookdiff.disk import as_pictures
from hookdiff.sinks import Sink
from hookdiff.testing import assert_same, toy_loop, weights
from tests.conftest import Restores, StopAt, check_facts, refused, saved, wait_until, warnings


def make_loop(plugins: Mapping[str, object], steps: int = 4) -> Loop:
    return toy_loop(plugins, steps=steps, log_every=1)


@define(eq=False)
class Recorder(Sink):
    """Records its calls; the call with the name `failing` calls `fail`."""

    failing: str = ""
    fail: Callable[[], object] = lambda: 1 / 0
    calls: list[tuple[Any, ...]] = field(init=False, factory=list)
    threads: set[int] = field(init=False, factory=set)

    def open(self, loop: Loop) -> None:
        self.note("open", loop.progress.step)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self.note("scalars", step, dict(values))

    def images(self, step: int, images: Mapping[str, Tensor]) -> None:
        self.note("images", step, {name: tuple(pictures.shape) for name, pictures in images.items()})

    def close(self) -> None:
        self.note("close")

    def note(self, *call: Any) -> None:
        self.calls.append(call)
        self.threads.add(threading.get_ident())
        if call[0] == self.failing:
            self.fail()

    @property
    def names(self) -> list[str]:
        return [call[0] for call in self.calls]


class Pictures:
    """Logs pictures after the second step and values as the run stops."""

    @hookimpl
    def after_optimizer_step(self, loop: Loop) -> None:
        if loop.progress.step == 2:
            loop.log.images({"seen": torch.zeros(3, 2, 4, 4)})

    @hookimpl
    def on_stop(self, loop: Loop, reason: Reason) -> None:
        loop.log({"end/score": 1.5})
        loop.log.images({"last": torch.zeros(2, 3, 4, 4)})


def test_a_sink_gets_everything_that_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    sink = Recorder()
    make_loop({"sink": sink, "pictures": Pictures()}).run()
    assert sink.names == ["open", "scalars", "images", "scalars", "scalars", "scalars", "images", "scalars", "close"]
    assert sink.calls[0] == ("open", 0)
    assert set(sink.calls[1][2]) == {"loss", "grad_norm"}
    assert sink.calls[2] == ("images", 2, {"seen": (6, 1, 4, 4)})
    assert sink.calls[-3:] == [("images", 4, {"last": (2, 3, 4, 4)}), ("scalars", 4, {"end/score": 1.5}), ("close",)]
    assert not warnings(caplog)


def test_a_sink_is_called_on_one_thread_of_its_own() -> None:
    sink = Recorder()
    make_loop({"sink": sink}).run()
    assert len(sink.threads) == 1
    assert threading.get_ident() not in sink.threads
    wait_until(lambda: not any(thread.name == "Recorder" for thread in threading.enumerate()))


@pytest.mark.parametrize("failing", ["open", "scalars", "images", "close"])
def test_golden_warning_of_a_sink_that_is_switched_off(failing: str, caplog: pytest.LogCaptureFixture) -> None:
    without = make_loop({"pictures": Pictures()})
    without.run()
    sink, other = Recorder(failing=failing), Recorder()
    loop = make_loop({"sink": sink, "other": other, "pictures": Pictures()})
    assert loop.run() == "done"
    assert warnings(caplog) == [
        f"Recorder is switched off, the run goes on: {failing}: ZeroDivisionError: division by zero"
    ]
    assert sink.names.count(failing) == 1
    assert sink.names[sink.names.index(failing) + 1 :] in ([], ["close"])  # after a failure a sink is only closed
    assert len(other.calls) == 9
    assert_same(weights(loop), weights(without))


def test_a_sink_that_fails_twice_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Recorder):
        def scalars(self, step: int, values: Mapping[str, float]) -> None:
            raise OSError("disk full")

        def close(self) -> None:
            raise OSError("still full")

    make_loop({"sink": Broken()}).run()
    (warning,) = warnings(caplog)
    check_facts(warning, "Broken", "scalars", "OSError: disk full")


@pytest.mark.parametrize("failing", ["open", "scalars", "close"])
def test_a_run_goes_on_without_a_sink_that_hangs(failing: str, caplog: pytest.LogCaptureFixture) -> None:
    released = threading.Event()
    sink = Recorder(failing=failing, fail=released.wait, timeout=0.5)
    assert make_loop({"sink": sink}).run() == "done"
    (warning,) = warnings(caplog)
    check_facts(warning, "Recorder", failing, "TimeoutError", "0.5 s")
    assert sink.names[-1] == failing
    released.set()


def test_a_timeout_error_of_the_sink_is_no_hang(caplog: pytest.LogCaptureFixture) -> None:
    def give_up() -> None:
        raise TimeoutError("server")

    sink = Recorder(failing="scalars", fail=give_up)
    make_loop({"sink": sink}).run()
    (warning,) = warnings(caplog)
    check_facts(warning, "Recorder", "scalars", "TimeoutError: server")
    assert sink.names == ["open", "scalars", "close"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_in_a_sink_ends_the_run(error: type[BaseException], caplog: pytest.LogCaptureFixture) -> None:
    def interrupt() -> None:
        raise error

    sink = Recorder(failing="scalars", fail=interrupt)
    loop = make_loop({"sink": sink})
    with pytest.raises(error):
        loop.run()
    assert loop.progress.step == 1
    assert sink.names == ["open", "scalars", "close"]
    assert not warnings(caplog)


def test_an_error_in_check_ends_the_run() -> None:
    class Lacking(Recorder):
        def check(self) -> None:
            raise UserError("no account")

    sink = Lacking()
    with refused(UserError, "no account"):
        make_loop({"sink": sink}).run()
    assert sink.calls == []


def test_other_ranks_write_nothing(second_rank: None) -> None:
    sink = Recorder()
    make_loop({"sink": sink, "pictures": Pictures()}).run()
    assert sink.calls == []


def test_a_sink_opens_after_its_state_is_loaded() -> None:
    class Stateful(Recorder):
        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: Mapping[str, Any]) -> None:
            self.calls.append(("load",))

    first = make_loop({}, steps=1)
    first.run()
    sink = Stateful()
    make_loop({"sink": sink, "state": Restores({**saved(first), "plugins": {"sink": {}}})}).run()
    assert sink.names[:2] == ["load", "open"]


def test_a_second_run_of_the_loop_opens_the_sink_again() -> None:
    sink = Recorder()
    loop = make_loop({"sink": sink, "stop": StopAt(1)}, steps=2)
    loop.run()
    loop.run()
    assert sink.names == ["open", "scalars", "close"] * 2


def test_nan_and_infinity_arrive_unchanged() -> None:
    class Odd:
        @hookimpl
        def after_optimizer_step(self, loop: Loop) -> None:
            loop.log({"nan": math.nan, "inf": math.inf})

    sink = Recorder()
    make_loop({"sink": sink, "odd": Odd()}, steps=1).run()
    values = sink.calls[1][2]
    assert math.isnan(values["nan"])
    assert values["inf"] == math.inf


@pytest.mark.parametrize(("channels", "shape"), [(1, (2, 1, 4, 5)), (3, (2, 3, 4, 5)), (4, (8, 1, 4, 5))])
def test_pictures_have_one_or_three_channels(channels: int, shape: tuple[int, ...]) -> None:
    images = torch.arange(2 * channels * 20).reshape(2, channels, 4, 5)
    pictures = as_pictures(images)
    assert pictures.shape == shape
    assert torch.equal(pictures.flatten(), images.flatten())


def test_a_timeout_must_be_positive() -> None:
    with refused(ValueError, "timeout"):
        Recorder(timeout=0)
