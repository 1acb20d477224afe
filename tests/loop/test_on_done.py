"""Test the hook `on_done`: when it is called, and that a checkpoint has what a plugin keeps in it."""

import signal
from pathlib import Path
from typing import Any

import pytest
from attrs import define
from torch import Tensor

from hookdiff import Loop, builtin_plugins, hookimpl, saved
from hookdiff.testing import assert_any_order, assert_removable, assert_resumes, assert_trains_on_ranks, toy_loop
from hookdiff.testing.compare import assert_same, weights
from hookdiff_checkpoint import Checkpoint, read_checkpoint
from tests.conftest import acting, contents, ran
from tests.forked import python


@define(eq=False)
class Mean:
    """Offers the mean of the weights after each second update, which is made when the run is done."""

    sums: dict[str, Tensor] = saved(factory=dict)
    count: int = saved(0)
    final: dict[str, Tensor] = saved(factory=dict)

    @hookimpl
    def after_optimizer_step(self, loop: Loop) -> None:
        if loop.progress.step % 2 == 0:
            self.count += 1
            self.sums = {name: self.sums.get(name, 0) + p.detach() for name, p in loop.model.named_parameters()}

    @hookimpl
    def on_done(self) -> None:
        self.final = {name: total / self.count for name, total in self.sums.items()}

    @hookimpl
    def offer_weights(self) -> dict[str, Any]:
        return {"mean": lambda: self.final}


def noting(calls: list[str]) -> object:
    """Return a plugin that notes the hooks of the end of a run."""
    return acting(on_done=lambda: calls.append("on_done"), on_stop=lambda: calls.append("on_stop"))


@pytest.mark.wide
def test_what_is_made_at_the_end_is_that_of_any_run() -> None:
    assert_resumes(Mean)
    assert_any_order(Mean)
    assert_removable(Mean)
    assert_trains_on_ranks(Mean)


@pytest.mark.parametrize("reason", ["done", "plugin", "time", "signal", "on_nan"])
def test_it_is_called_once_when_the_run_is_over_for_good(reason: str) -> None:
    calls: list[str] = []
    stop = acting(after_optimizer_step=lambda loop: loop.stop(reason))
    toy_loop({"notes": noting(calls), **({} if reason == "done" else {"stop": stop})}, steps=3).run()
    assert calls == (["on_done", "on_stop"] if reason in ("done", "plugin") else ["on_stop"])


def test_it_is_not_called_in_a_loop_that_only_samples_nor_after_an_error_or_a_break() -> None:
    calls: list[str] = []
    with toy_loop({"notes": noting(calls)}):
        pass
    with toy_loop({"notes": noting(calls)}) as loop:
        next(loop.steps())
    failing = acting(after_optimizer_step=lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        toy_loop({"notes": noting(calls), "failing": failing}).run()
    assert calls == ["on_stop"] * 3


def train(run: Path, steps: int = 8, every: int = 4, resume: bool = False, **more: object) -> Loop:
    plugins = {**builtin_plugins(), "mean": Mean(), **more, "checkpoint": Checkpoint(every=every, keep_last=9)}
    return ran(toy_loop(plugins, run_dir=run, steps=steps, resume=resume))


def newest(run: Path) -> dict[str, Any]:
    return read_checkpoint(max((run / "checkpoints").iterdir()))


@pytest.mark.parametrize("every", [4, 100])
def test_the_last_checkpoint_holds_what_was_made_at_the_end(tmp_path: Path, every: int) -> None:
    loop = train(tmp_path / "run", every=every)
    with loop.weights("mean"):
        assert_same(newest(tmp_path / "run")["plugins"]["mean"]["final"], weights(loop))
    before = contents(tmp_path / "run")
    train(tmp_path / "run", every=every, resume=True)  # no step is left
    assert contents(tmp_path / "run") == before


KILLED = """
import os, signal, sys
from pathlib import Path
from tests.conftest import acting, wait_until
from tests.loop.test_on_done import train

run = Path(sys.argv[1])

def kill():
    wait_until((run / "checkpoints" / "step-00000008").exists)
    os.kill(os.getpid(), signal.SIGKILL)

train(run, killed=acting(on_stop=kill))
"""


@pytest.mark.wide
def test_a_run_killed_before_its_last_save_saves_it_though_no_step_is_left(tmp_path: Path) -> None:
    assert python(KILLED, tmp_path / "run")[0] == -signal.SIGKILL
    assert newest(tmp_path / "run")["progress"]["step"] == 8
    assert not newest(tmp_path / "run")["plugins"]["mean"]["final"]
    train(tmp_path / "run", resume=True)
    train(tmp_path / "other")
    assert_same(*(newest(tmp_path / run)["plugins"]["mean"]["final"] for run in ("run", "other")))


def test_a_run_that_is_made_longer_equals_a_longer_one(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    train(whole, steps=14)
    train(cut)
    train(cut, steps=14, resume=True)
    for step in (4, 8, 12, 14):
        ours, its = (read_checkpoint(run / "checkpoints" / f"step-{step:08d}") for run in (cut, whole))
        for state in (ours, its) if step < 14 else ():
            del state["plugins"]["mean"]["final"]  # the shorter run has ended before
        for key in ("model", "optimizers", "progress"):
            assert_same({key: ours[key]}, {key: its[key]})
        assert_same(ours["plugins"]["mean"], its["plugins"]["mean"])
