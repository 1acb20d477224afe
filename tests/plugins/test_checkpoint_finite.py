"""Weights that an update makes infinite are in no checkpoint, and a rollback goes back to scheduled ones only."""

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hookdiff import Loop, UserError, builtin_plugins, hookimpl
from hookdiff.testing import assert_same, toy_loop, toy_model, weights
from hookdiff_checkpoint import Checkpoint
from hookdiff_ema import EMA
from hookdiff_nan import NaN
from tests.conftest import RollBackAt, StopAt, acting, check_facts, refused, wide
from tests.plugins.test_checkpoint_faults import steps


@pytest.mark.parametrize("policy", ["stop", "skip", "rollback"])
@pytest.mark.parametrize("at", [4, 6, 7])  # at a save in the middle, at the last step, and just before another save
def test_weights_that_an_update_spoils_are_in_no_checkpoint(at: int, policy: Any, tmp_path: Path) -> None:
    def set_rate(loop: Loop) -> None:
        for group in loop.optimizers[0].param_groups:
            group["lr"] = 3e38 if loop.progress.step + 1 == at else 0.01

    plugins = {**builtin_plugins(signals=False), "rate": acting(before_step=set_rate), "nan": NaN(policy)}
    plugins |= {"checkpoint": Checkpoint(every=2), "ema": EMA(decay=0.9)}
    end = 6 if at == 6 else 12
    sgd = partial(torch.optim.SGD, lr=0.01, weight_decay=10.0)
    loop = toy_loop(plugins, optimizers=lambda model: sgd(model.parameters()), run_dir=tmp_path / "run", steps=end)
    assert loop.run() == "on_nan"
    assert max(steps(tmp_path / "run")) == (at - 1) // 2 * 2
    outcome = json.loads((tmp_path / "run" / "outcome.json").read_text())
    assert outcome["reason"] == "on_nan"
    if at != 7:  # which is found by the loss of step 8
        check_facts(outcome["message"], "weight_decay 10", "3e+38")


def test_infinities_of_a_mask_of_extra_state_and_of_a_plugin_are_saved(tmp_path: Path) -> None:
    class Model(nn.Sequential):
        most = torch.tensor(0.0)

        def get_extra_state(self) -> Tensor:
            return self.most

        def set_extra_state(self, state: Tensor) -> None:
            self.most = torch.tensor(math.inf)

    class Holds:
        def state_dict(self) -> dict[str, Any]:
            return {"most": torch.tensor(math.inf)}

        def load_state_dict(self, state: Any) -> None:
            assert state["most"] == math.inf

    def build(end: int, resume: bool) -> Loop:
        model = Model(*toy_model())
        model.register_buffer("mask", torch.full((3,), -math.inf))
        plugins = {"checkpoint": Checkpoint(), "holds": Holds()}
        return toy_loop(plugins, model=model, run_dir=tmp_path, steps=end, resume=resume)

    assert build(2, resume=False).run() == "done"
    assert build(4, resume=True).run() == "done"


@pytest.mark.parametrize(("eps", "dtype"), [(0.0, torch.float32), (1e-8, torch.float16)])
def test_an_eps_that_is_zero_is_refused(eps: float, dtype: torch.dtype) -> None:
    model = toy_model().to(dtype)
    with refused(UserError, "optimizer.eps", f"{eps:g}"):
        toy_loop(model=model, optimizers=lambda net: torch.optim.AdamW(net.parameters(), eps=eps)).run()


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


@pytest.mark.parametrize("stop_at", [None, 4])  # another process goes on there, and its first step is the bad one
def test_a_statistic_that_a_pass_makes_infinite_is_in_no_checkpoint(stop_at: int | None, tmp_path: Path) -> None:
    def build(end: int) -> Loop:
        # The loss stays finite, since batch norm divides by infinity.
        swell = acting(before_step=lambda loop, batch: batch.inputs.mul_(3e25 if loop.progress.position == 4 else 1))
        plugins = {**builtin_plugins(signals=False), "swell": swell}
        plugins |= {"checkpoint": Checkpoint(every=4), "ema": EMA()}
        return toy_loop(plugins, model=Normed(), run_dir=tmp_path, resume=end != stop_at, steps=end)

    if stop_at:
        assert build(stop_at).run() == "done"
    assert build(12).run() == "on_nan"
    assert steps(tmp_path) == [4]
    message = json.loads((tmp_path / "outcome.json").read_text())["message"]
    check_facts(message, "model/layers.1.running_var", "update was finite", "step-00000004")


INF, ZERO = torch.tensor([math.inf]), torch.zeros(1)


@pytest.mark.parametrize("of_plugin", [False, True])
@pytest.mark.parametrize(
    ("values", "newest"),
    [
        ({1: ZERO, 5: INF}, 4),
        ({1: ZERO, 5: INF.half()}, 4),
        ({1: ZERO.to(torch.float8_e5m2), 5: INF.to(torch.float8_e5m2)}, 4),
        ({1: ZERO.to(torch.float8_e4m3fn), 5: ZERO.to(torch.float8_e4m3fn)}, 8),
        ({1: ZERO, 7: INF * 0}, 6),
        ({1: INF, 3: ZERO, 5: INF}, 4),  # finite at a save
        ({1: INF}, 8),  # a mask that is filled in the first step
        ({5: INF}, 8),  # a new one
        ({1: ZERO, 5: INF.expand(2)}, 8),  # of another shape
    ],
)
def test_a_finite_buffer_must_stay_so(values: dict[int, Tensor], newest: int, of_plugin: bool, tmp_path: Path) -> None:
    class Sets:
        """Sets a buffer at some steps, of the model or of a module of its own."""

        @hookimpl
        def prepare_model(self, loop: Loop) -> None:
            self.module = nn.Linear(1, 1)
            loop.adopt(self, self.module, torch.optim.SGD(self.module.parameters()))

        @hookimpl
        def after_optimizer_step(self, loop: Loop) -> None:
            if loop.progress.step in values:
                module = self.module if of_plugin else loop.model
                module.register_buffer("held", values[loop.progress.step].clone())

    plugins = {"sets": Sets(), "checkpoint": Checkpoint(every=2)}
    loop = toy_loop(plugins, run_dir=tmp_path, steps=8)
    assert loop.run() == ("done" if newest == 8 else "on_nan")
    assert max(steps(tmp_path)) == newest
    if newest < 8:
        check_facts(loop.end.message, "plugins/sets/adopted/0/module/held" if of_plugin else "model/held")


def going_back(run: Path, position: int, stop: int = 0, resume: bool = False, **options: Any) -> Loop:
    """Return a run with a bad batch at a position, which asks for a rollback; it is stopped after step `stop`."""
    plugins = {"bad": RollBackAt(position), "stop": StopAt(stop), "checkpoint": Checkpoint(**options)}
    return toy_loop(plugins, run_dir=run, resume=resume, steps=12)


@pytest.mark.parametrize(
    ("keep_last", "stop_at"), [(1, 5), (3, 5), (1, 7), *wide((1, 3), (1, 4), (1, 6), (3, 3), (3, 4), (3, 6), (3, 7))]
)
def test_a_run_that_was_stopped_before_a_rollback_equals_an_unbroken_one(
    stop_at: int, keep_last: int, tmp_path: Path
) -> None:
    build = partial(going_back, position=7, every=4, keep_last=keep_last)
    unbroken = build(tmp_path / "unbroken")
    assert unbroken.run() == "done"
    assert build(tmp_path / "stopped", stop=stop_at).run() == "plugin"
    resumed = build(tmp_path / "stopped", resume=True)
    assert resumed.run() == "done"
    assert_same(weights(resumed), weights(unbroken))
    assert resumed.progress.state_dict() == unbroken.progress.state_dict()


@pytest.mark.parametrize("stop_at", [1, 2, *wide(3)])
def test_without_a_scheduled_checkpoint_both_stop(stop_at: int, tmp_path: Path) -> None:
    build = partial(going_back, position=3, every=100)
    assert build(tmp_path / "unbroken").run() == "on_nan"
    assert build(tmp_path / "stopped", stop=stop_at).run() == "plugin"
    assert build(tmp_path / "stopped", resume=True).run() == "on_nan"


def test_a_branch_goes_back_to_no_checkpoint_later_than_its_start(tmp_path: Path) -> None:
    source, branch = tmp_path / "source", tmp_path / "branch"
    toy_loop({"checkpoint": Checkpoint(every=2)}, run_dir=source, steps=8).run()
    start = source / "checkpoints" / "step-00000004"
    plugins = {"bad": RollBackAt(5), "checkpoint": Checkpoint(every=100)}
    with toy_loop(plugins, run_dir=branch, resume=start, steps=7) as loop:
        outcomes = [(step.outcome, step.step) for step in loop.steps()]
    assert outcomes == [("updated", 5), ("skipped", 4), ("updated", 5), ("updated", 6), ("updated", 7)]
