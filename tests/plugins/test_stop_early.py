"""The plugin `stop_early`: when a run ends, its message, resumed runs, ranks, and the command line."""

import json
import math
from collections.abc import Sequence
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from attrs import define, field
from hypothesis import given, strategies as st

from hookdiff import Evaluation, Every, Loop, parse_every
from hookdiff.loop.saved import state_of
from hookdiff.testing.toy import toy_loop
from hookdiff_ema import EMA
from hookdiff_stop_early import StopEarly
from tests.conftest import Command, Logged, Restores, check_facts, output, records, saved, toy_run, two_ranks, warnings

NAN, INF = math.nan, math.inf


@define(eq=False)
class Curve(Evaluation):
    """Logs `val/loss`: the next value of a curve at each step, then the last one for ever."""

    values: Sequence[float]
    every: Every = field(default=Every(1), converter=parse_every)

    def evaluate(self, loop: Loop) -> dict[str, float]:
        return {"loss": self.values[min(loop.progress.step, len(self.values)) - 1]}


def train(values: Sequence[float], **options: Any) -> Loop:
    """Return the loop after a run of at most 20 steps, whose `val/loss` has these values."""
    return toy_run({"stop_early": StopEarly(**options), "curve": Curve(values)})


@pytest.mark.parametrize(
    ("values", "options", "step", "best"),
    [
        ([3, 2, 1, 2, 2, 2], {"patience": 3}, 6, ("1", "3")),
        ([3, 2, 1, 2, 2, 0.5, 2, 2, 2], {"patience": 3}, 9, ("0.5", "6")),  # an improvement starts the count over
        ([3, 3], {"patience": 2}, 3, ("3", "1")),  # an equal value is no improvement
        ([3, 2.5, 2, 1.5, 1], {"patience": 2, "min_delta": 0.5}, 7, ("1", "5")),  # from 3 to 2.5 is not enough
        ([1, 2, 3, 2, 2], {"patience": 2, "mode": "max"}, 5, ("3", "3")),
        ([-1, -2, -1], {"patience": 2}, 4, ("-2", "2")),
        ([1, 2, 2, 2], {"patience": 2, "after": 3}, 5, ("2", "3")),
        ([NAN, NAN, NAN], {"patience": 3}, 3, ()),
        ([NAN, 2, NAN, NAN], {"patience": 2}, 4, ("2", "2")),  # and the first NAN is forgotten
        ([INF, NAN, INF], {"patience": 3}, 3, ()),
        ([1, NAN, 2, -INF, NAN], {"patience": 3, "mode": "max"}, 6, ("2", "3")),
    ],
)
def test_it_ends_the_run_and_names_the_best_value(values: Sequence[float], options: Any, step: int, best: Any) -> None:
    loop = train(values, **options)
    assert (loop.end.reason, loop.progress.step) == ("plugin", step)
    check_facts(loop.end.message, "val/loss", options["patience"], *best)


@pytest.mark.parametrize("curve", [[3, 2, 1], [1, 2, 3]])
def test_a_run_that_improves_or_is_short_is_done(curve: list[float]) -> None:
    loop = train([20 - step for step in range(20)] if curve[0] == 3 else curve, patience=20)
    assert (loop.end.reason, loop.progress.step, loop.end.message) == ("done", 20, "")


def reference(values: Sequence[float], patience: int, min_delta: float) -> int | None:
    """Return the number of values after which to stop."""
    for end in range(1, len(values) + 1):
        best, at = INF, 0
        for place, value in enumerate(values[:end], 1):
            if value < best - min_delta:
                best, at = value, place
        if end - at >= patience:
            return end
    return None


@given(
    values=st.lists(st.sampled_from([0.0, 1.0, 1.5, 2.0, 3.0, NAN, INF]), min_size=1, max_size=12),
    patience=st.integers(1, 5),
    min_delta=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_it_ends_where_a_slow_reference_does(values: list[float], patience: int, min_delta: float) -> None:
    stop_early = StopEarly(patience=patience, min_delta=min_delta)
    loop = toy_run({"curve": Curve(values), "stop_early": stop_early}, steps=len(values))
    expected = reference(values, patience, min_delta)
    assert loop.progress.step == (expected or len(values))
    assert bool(loop.end.message) == (expected is not None)


def test_the_order_of_the_plugins_does_not_matter() -> None:
    found = set()
    for order in permutations(["stop_early", "curve", "ema"]):
        plugins = {"stop_early": StopEarly(patience=3), "curve": Curve([3, 2, 1, 2], every=2), "ema": EMA()}
        loop = toy_run({name: plugins[name] for name in order})
        found.add((loop.end.reason, loop.progress.step, loop.end.message))
    assert len(found) == 1
    assert found.pop()[:2] == ("plugin", 8)


def test_a_measurement_at_the_end_of_an_epoch_ends_the_run_there() -> None:
    logged = Logged()
    plugins = {"stop_early": StopEarly(patience=1), "curve": Curve([1], every="1 epochs"), "logged": logged}
    loop = toy_loop(plugins, steps=40)
    assert loop.run() == "plugin"
    assert (loop.progress.step, loop.progress.epoch, loop.progress.samples) == (10, 2, 0)
    assert logged.of("val/loss") == {5: 1.0, 10: 1.0}


@pytest.mark.parametrize("cut", [2, 4, 5])
def test_a_resumed_run_ends_as_the_uninterrupted_one(cut: int) -> None:
    def run(restores: Restores) -> Loop:
        return toy_run({"restores": restores, "stop_early": StopEarly(patience=3), "curve": Curve([3, 2, NAN, 2])})

    restores = Restores(at=cut)
    whole, again = run(restores), run(Restores(restores.state))
    assert (whole.end.reason, whole.progress.step) == ("plugin", 5)
    assert (again.end.reason, again.progress.step, again.end.message) == ("plugin", 5, whole.end.message)
    assert state_of(again.plugins["stop_early"]) == state_of(whole.plugins["stop_early"])


def test_a_run_that_was_ended_trains_no_more_unless_patience_is_raised() -> None:
    stopped = train([3, 2, 2, 2], patience=2)
    assert stopped.progress.step == 4

    def resume(**options: Any) -> tuple[Any, int, str]:
        plugins = {"restores": Restores(saved(stopped)), "stop_early": StopEarly(**options), "curve": Curve([3, 2])}
        loop = toy_run(plugins)
        return loop.end.reason, loop.progress.step, loop.end.message

    assert resume(patience=2) == ("plugin", 4, stopped.end.message)
    assert resume(patience=5)[:2] == ("plugin", 7)
    assert resume(patience=2, mode="max")[:2] == ("plugin", 7)  # another question: the count begins at the first value


def test_a_plugin_is_new_in_each_run() -> None:
    plugin = StopEarly(patience=2)
    loops = [toy_run({"stop_early": plugin, "curve": Curve([3, 2, 2])}) for _ in range(2)]
    assert [loop.progress.step for loop in loops] == [4, 4]


def test_a_value_that_is_never_logged_gives_a_warning_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    toy_loop({"stop_early": StopEarly(metric="val/los"), "curve": Curve([1], every=0)}).run()
    (warning,) = warnings(caplog)
    check_facts(warning, "stop_early", "'val/los'", "'val/loss'", "grad_norm")


@pytest.mark.parametrize("stopped", [False, True])
def test_a_value_that_is_logged_or_may_be_gives_no_warning(stopped: bool, caplog: pytest.LogCaptureFixture) -> None:
    # Logged at the end alone, by on_stop; or not at all, in a run that will be continued.
    with toy_loop({"stop_early": StopEarly(), "curve": Curve([1], every=0)}) as loop:
        for _ in loop.steps():
            if stopped:
                loop.stop("signal")
    assert warnings(caplog) == []
    toy_loop({"restores": Restores(saved(loop)), "stop_early": StopEarly(), "curve": Curve([1], every=0)}).run()
    assert warnings(caplog) == []


def test_a_loop_that_is_only_entered_gives_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    with toy_loop({"stop_early": StopEarly()}):
        pass
    assert warnings(caplog) == []


RANK = """
from hookdiff import hookimpl
from hookdiff.testing.toy import toy_loop
from hookdiff_stop_early import StopEarly

class Logs:
    "Logs a value that differs between the ranks, and one that the first rank alone logs."
    @hookimpl
    def after_optimizer_step(self, loop):
        loop.log({"mine": -loop.progress.step if rank else min(loop.progress.step, 3)})
        if loop.is_main:
            loop.log({"main": loop.progress.step})

result = []
for metric in ("mine", "main"):
    loop = toy_loop({"stop_early": StopEarly(metric=metric, patience=4), "logs": Logs()})
    loop.run()
    result.append((loop.end.reason, loop.progress.step))
"""


def test_all_ranks_end_where_the_first_one_decides(tmp_path: Path) -> None:
    one, other = two_ranks(RANK, tmp_path)
    assert one == other == [("plugin", 5), ("plugin", 5)]


def test_a_run_of_a_config_ends_and_records_why(tmp_path: Path, write_config: Any, hookdiff: Command) -> None:
    config = write_config(
        run={"steps": 500, "batch_size": 64, "plugins": ["stop_early", "loss", "checkpoint"]},
        data={"source": "digits", "held_out": 64},
        optimizer={"lr": 1e-9},  # nothing improves by a tenth
        plugins={"loss": {"every": 4}, "stop_early": {"patience": 3, "min_delta": 0.1}},
    )
    out = output(hookdiff("run", config, "--out", tmp_path / "run"))
    outcome = json.loads((tmp_path / "run" / "outcome.json").read_text())
    assert (outcome["reason"], outcome["step"]) == ("plugin", 16)
    lines = {line["step"]: line for line in records(tmp_path / "run") if "val/loss" in line}
    assert list(lines) == [4, 8, 12, 16]
    check_facts(outcome["message"], "val/loss", 3, f"{lines[4]['val/loss']:.4g}", 4)
    assert outcome["message"] in out
    output(hookdiff("resume", tmp_path / "run"))
    assert json.loads((tmp_path / "run" / "outcome.json").read_text()) == outcome
    output(hookdiff("resume", tmp_path / "run", "--set", "plugins.stop_early.patience=5"))
    assert json.loads((tmp_path / "run" / "outcome.json").read_text())["step"] == 24
