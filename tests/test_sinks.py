from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from attrs import define, field
from torch import Tensor, nn

from hookdiff import Batch, Loop, LoopConfig, Reason, UserError, hookimpl
from hookdiff.disk import as_pictures
from hookdiff.sinks import Sink

DATA = torch.rand(32, 1, 4, 4) * 2 - 1


def loss(net: nn.Module, batch: Batch) -> Tensor:
    result: Tensor = net(batch.inputs).square()
    return result


def make_loop(plugins: Mapping[str, object], steps: int = 4) -> Loop:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 4))
    config = LoopConfig(steps=steps, batch_size=8, log_every=1)
    return Loop(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, DATA, config, plugins)


def weights(loop: Loop) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in loop.model.state_dict().items()}


@define(eq=False)
class Recorder(Sink):
    """Notes its calls; `failing` names the one that calls `fail`."""

    failing: str = ""
    fail: Callable[[], object] = lambda: 1 / 0
    calls: list[tuple[Any, ...]] = field(init=False, factory=list)
    threads: set[int] = field(init=False, factory=set)

    def open(self, loop: Loop) -> None:
        self._note("open", loop.progress.step)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._note("scalars", step, dict(values))

    def images(self, step: int, images: Mapping[str, Tensor]) -> None:
        self._note("images", step, {name: tuple(pictures.shape) for name, pictures in images.items()})

    def close(self) -> None:
        self._note("close")

    def _note(self, *call: Any) -> None:
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


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_takes_everything_that_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    sink = Recorder()
    make_loop({"sink": sink, "pictures": Pictures()}).run()
    assert sink.names == ["open", "scalars", "images", "scalars", "scalars", "scalars", "images", "scalars", "close"]
    assert sink.calls[0] == ("open", 0)
    assert set(sink.calls[1][2]) == {"loss", "grad_norm"}
    assert sink.calls[2] == ("images", 2, {"seen": (6, 1, 4, 4)})
    assert sink.calls[-3:] == [("images", 4, {"last": (2, 3, 4, 4)}), ("scalars", 4, {"end/score": 1.5}), ("close",)]
    assert not warnings_in(caplog)


def test_is_called_on_one_thread_of_its_own() -> None:
    sink = Recorder()
    make_loop({"sink": sink}).run()
    assert len(sink.threads) == 1
    assert threading.get_ident() not in sink.threads
    deadline = time.monotonic() + 2
    while any(thread.name == "Recorder" for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("failing", ["open", "scalars", "images", "close"])
def test_a_failing_sink_is_switched_off_with_one_warning(failing: str, caplog: pytest.LogCaptureFixture) -> None:
    without = make_loop({"pictures": Pictures()})
    without.run()
    sink, other = Recorder(failing=failing), Recorder()
    loop = make_loop({"sink": sink, "other": other, "pictures": Pictures()})
    assert loop.run() == "done"
    assert warnings_in(caplog) == [
        f"Recorder is switched off, the run goes on: {failing}: ZeroDivisionError: division by zero"
    ]
    assert sink.names.count(failing) == 1
    assert sink.names[sink.names.index(failing) + 1 :] in ([], ["close"])  # what it holds is let go
    assert len(other.calls) == 9
    for name, value in weights(without).items():
        assert torch.equal(weights(loop)[name], value)


def test_a_sink_that_fails_twice_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Recorder):
        def scalars(self, step: int, values: Mapping[str, float]) -> None:
            raise OSError("disk full")

        def close(self) -> None:
            raise OSError("still full")

    make_loop({"sink": Broken()}).run()
    assert warnings_in(caplog) == ["Broken is switched off, the run goes on: scalars: OSError: disk full"]


@pytest.mark.parametrize("failing", ["open", "scalars", "close"])
def test_a_sink_that_hangs_is_left_behind(failing: str, caplog: pytest.LogCaptureFixture) -> None:
    released = threading.Event()
    sink = Recorder(failing=failing, fail=released.wait, timeout=0.2)
    began = time.monotonic()
    assert make_loop({"sink": sink}).run() == "done"
    assert time.monotonic() - began < 2
    assert warnings_in(caplog) == [
        f"Recorder is switched off, the run goes on: {failing}: TimeoutError: no answer within 0.2 s"
    ]
    assert sink.names[-1] == failing
    released.set()


def test_the_sinks_own_timeout_error_is_no_hang(caplog: pytest.LogCaptureFixture) -> None:
    def give_up() -> None:
        raise TimeoutError("server")

    sink = Recorder(failing="scalars", fail=give_up)
    make_loop({"sink": sink}).run()
    assert warnings_in(caplog) == ["Recorder is switched off, the run goes on: scalars: TimeoutError: server"]
    assert sink.names == ["open", "scalars", "close"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_interrupts_pass(error: type[BaseException], caplog: pytest.LogCaptureFixture) -> None:
    def interrupt() -> None:
        raise error

    sink = Recorder(failing="scalars", fail=interrupt)
    loop = make_loop({"sink": sink})
    with pytest.raises(error):
        loop.run()
    assert loop.progress.step == 1
    assert sink.names == ["open", "scalars", "close"]
    assert not warnings_in(caplog)


def test_what_check_raises_ends_the_run() -> None:
    class Lacking(Recorder):
        def check(self) -> None:
            raise UserError("no account")

    sink = Lacking()
    with pytest.raises(UserError, match="no account"):
        make_loop({"sink": sink}).run()
    assert sink.calls == []


def test_other_ranks_write_nothing() -> None:
    sink = Recorder()
    loop = make_loop({"sink": sink, "pictures": Pictures()})
    loop.is_main = False
    loop.run()
    assert sink.calls == []


def test_opens_after_its_state_is_loaded() -> None:
    class Stateful(Recorder):
        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: Mapping[str, Any]) -> None:
            self.calls.append(("load",))

    class Saved:
        @hookimpl
        def restore(self, loop: Loop) -> dict[str, Any]:
            return {
                "progress": loop.progress.state_dict(),
                "log": {},
                "model": loop.model.state_dict(),
                "optimizers": {"0": {}},
                "plugins": {"sink": {}},
            }

    sink = Stateful()
    make_loop({"sink": sink, "saved": Saved()}).run()
    assert sink.names[:2] == ["load", "open"]


class StopAt:
    """Ends the run after a step; run again, it goes on."""

    def __init__(self, step: int) -> None:
        self.step = step

    @hookimpl
    def after_optimizer_step(self, loop: Loop) -> None:
        if loop.progress.step == self.step:
            loop.stop()


def test_a_second_run_of_the_loop_opens_again() -> None:
    sink = Recorder()
    loop = make_loop({"sink": sink, "stop": StopAt(1)}, steps=2)
    loop.run()
    loop.run()
    assert sink.names == ["open", "scalars", "close"] * 2


def test_values_arrive_as_they_are() -> None:
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


def test_a_timeout_is_positive() -> None:
    with pytest.raises(ValueError, match="timeout"):
        Recorder(timeout=0)
