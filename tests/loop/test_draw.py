"""Test the hook `draw`: times that follow the losses so far, drawn for the whole step, saved, and drawn again."""

from collections.abc import Generator
from typing import Any

import pytest
import torch
from attrs import define
from torch import Tensor

from hookdiff import Batch, Loop, hookimpl, saved
from hookdiff.builtin.micro_batch import FitMicroBatch
from hookdiff.machine import summed
from hookdiff.testing import assert_any_order, assert_removable, assert_resumes, assert_trains_on_ranks, toy_loop
from hookdiff.testing.toy import ToyObjective
from tests.conftest import acting, ran


@define(eq=False)
class ByLoss:
    """Draws each of the ten times as often as its losses so far are large."""

    losses: Tensor = saved(factory=lambda: torch.ones(10))

    @hookimpl(wrapper=True)
    def draw(self, loop: Loop, batch: Batch) -> Generator[None, Batch, Batch]:
        drawn = yield
        generator = loop.random.generator("by loss", loop.progress.position, loop.device)
        times = torch.multinomial(self.losses, batch.total, True, generator=generator)
        return drawn.with_draws({"timesteps": drawn.own(times)})

    @hookimpl
    def after_optimizer_step(self, loop: Loop) -> None:
        assert loop.output.per_sample is not None
        own = torch.zeros(10).index_add(0, loop.output.timesteps, loop.output.per_sample)
        self.losses = 0.9 * self.losses + 0.1 * summed(own)


def test_times_that_depend_on_the_losses_are_those_of_any_run() -> None:
    assert_resumes(ByLoss)
    assert_any_order(ByLoss)


@pytest.mark.wide
def test_times_that_depend_on_the_losses_are_those_of_all_ranks() -> None:
    assert_removable(ByLoss, changes="training")
    assert_trains_on_ranks(ByLoss)


def test_the_times_are_those_that_the_plugin_drew() -> None:
    times: list[Any] = []
    note = acting(before_step=lambda loop, batch: times.extend(batch.draws["timesteps"].tolist()))
    only = ByLoss()
    only.losses = torch.eye(10)[3]
    toy_loop({"by_loss": only, "note": note}, steps=1, batch_size=32).run()
    assert times == [3] * 32
    assert only.losses[3] > 0.9
    assert only.losses.count_nonzero() == 1


def test_a_plugin_may_draw_in_place_of_the_objective() -> None:
    class NoDraw(ToyObjective):
        def draw(self, batch: Batch, generator: torch.Generator) -> Batch:
            raise AssertionError

    draws = {"noise": torch.zeros(8, 4), "timesteps": torch.zeros(8, dtype=torch.int64)}
    loop = ran(toy_loop({"mine": acting(draw=lambda batch: batch.with_draws(draws))}, objective=NoDraw(), steps=2))
    assert loop.progress.step == 2


def test_the_trials_of_a_micro_batch_draw_as_a_step_does() -> None:
    by_loss = ByLoss()
    seen: list[Tensor] = []
    passes = acting(accumulate=lambda loop, batch: seen.append(batch.draws["timesteps"]) or loop.run_pass(batch))
    by_loss.losses = torch.eye(10)[3]
    with toy_loop({"by_loss": by_loss, "passes": passes, "fit": FitMicroBatch()}):
        assert seen
        assert all(times.eq(3).all() for times in seen)
