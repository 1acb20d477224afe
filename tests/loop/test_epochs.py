"""What is drawn in an epoch, and what a plugin makes of a batch: `before_epoch`, `Feed.weigh`, `make_batch`."""

from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from hypothesis import given, settings, strategies as st
from torch import Tensor

from hookdiff import Batch, Feed, InMemory, Loop, UserError, hookimpl
from hookdiff.testing import assert_resumes, assert_same, toy_loop, weights
from hookdiff_checkpoint import Checkpoint
from tests.conftest import Batches, RollsBack, acting, outcomes, ran, refused


class Curriculum:
    """Draws more and more of the samples; keeps what was drawn."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int]] = []  # epoch, samples into it
        self.drawn: list[list[int]] = []

    @hookimpl
    def before_epoch(self, loop: Loop) -> None:
        self.calls.append((loop.progress.epoch, loop.progress.samples))
        number = len(loop.feed.training)
        loop.feed.weigh((torch.arange(number) < 10 * (loop.progress.epoch + 1)).double())

    @hookimpl
    def before_step(self, batch: Batch) -> None:
        assert batch.indices is not None
        self.drawn.append(batch.indices.tolist())


def test_weights_decide_what_is_drawn_in_an_epoch() -> None:
    plugin = Curriculum()
    toy_loop({"curriculum": plugin}, epochs=4).run()
    assert plugin.calls == [(0, 0), (1, 0), (2, 0), (3, 0)]
    for epoch in range(4):
        drawn = {index for batch in plugin.drawn[5 * epoch : 5 * epoch + 5] for index in batch}
        assert max(drawn) < 10 * (epoch + 1)
        assert len(drawn) > 5 * (epoch + 1)


def test_the_weights_are_those_of_one_epoch() -> None:
    def weigh(loop: Loop) -> None:
        if loop.progress.epoch == 0:
            loop.feed.weigh(torch.eye(40)[3])

    batches = Batches()
    toy_loop({"first": acting(before_epoch=weigh), "batches": batches}, epochs=2).run()
    drawn = [index for batch in batches.seen for index in batch.indices.tolist()]  # type: ignore[union-attr]
    assert (drawn[:40], sorted(drawn[40:])) == ([3] * 40, list(range(40)))


@pytest.mark.parametrize("cut", [1, 5, 7])
def test_a_run_resumed_within_an_epoch_has_its_weights_without_a_second_call(cut: int, tmp_path: Path) -> None:
    def run(place: Path, steps: int, resume: bool = False) -> tuple[Loop, Curriculum]:
        plugins = {"curriculum": (plugin := Curriculum()), "checkpoint": Checkpoint()}
        return ran(toy_loop(plugins, run_dir=place, resume=resume, steps=steps)), plugin

    whole, whole_plugin = run(tmp_path / "whole", 12)
    run(tmp_path / "cut", cut)
    resumed, plugin = run(tmp_path / "cut", 12, resume=True)
    assert plugin.drawn == whole_plugin.drawn[cut:]
    assert plugin.calls == [call for call in whole_plugin.calls if 5 * call[0] >= cut]
    assert_same(weights(resumed), weights(whole))


def test_weights_for_other_data_are_refused_on_resume(tmp_path: Path) -> None:
    toy_loop({"curriculum": Curriculum(), "checkpoint": Checkpoint()}, run_dir=tmp_path, steps=2).run()
    plugins = {"curriculum": Curriculum(), "checkpoint": Checkpoint()}
    with refused(UserError, "data", 40, 41):
        toy_loop(plugins, run_dir=tmp_path, steps=9, resume=True, data=torch.zeros(41, 4)).run()


def test_a_rollback_keeps_the_weights_of_the_epoch() -> None:
    plugin, plain = Curriculum(), Curriculum()
    toy_loop({"plain": plain}, epochs=2).run()
    loop = toy_loop({"plugin": plugin, "back": RollsBack(at=4, position=6)}, epochs=2)
    assert outcomes(loop)[6] == "skipped"
    assert (plugin.drawn, plugin.calls) == (plain.drawn, plain.calls)


@settings(max_examples=25, deadline=None)
@given(weights=st.lists(st.floats(0, 1e300), min_size=1, max_size=6).filter(any), seed=st.integers(0, 99))
def test_samples_are_drawn_in_proportion_to_their_weights(weights: list[float], seed: int) -> None:
    copies = 4000
    feed = Feed(torch.zeros(len(weights) * copies, 1)).bind(1, seed)
    feed.weigh(torch.tensor(weights, dtype=torch.float64).repeat_interleave(copies))
    drawn = torch.bincount(feed.order(0) // copies, minlength=len(weights)).double()
    expected = torch.tensor(weights, dtype=torch.float64)
    expected = expected / expected.max()
    expected = expected / expected.sum() * len(feed.training)
    # Five standard deviations of a binomial count; a weight of zero is never drawn.
    assert ((drawn - expected).abs() <= 5 * expected.sqrt() + 1).all()
    assert not drawn[expected == 0].any()


def test_samples_held_out_are_never_drawn() -> None:
    feed = Feed(torch.zeros(40, 1), held_out=10).bind(1)
    feed.weigh(torch.ones(40))
    assert not set(feed.order(0).tolist()) & set(feed.held_out_indices.tolist())


@pytest.mark.parametrize(
    "bad", [torch.ones(3), torch.zeros(40), -torch.ones(40), torch.full((40,), torch.nan), torch.ones(40, 1)]
)
def test_bad_weights_are_refused(bad: Tensor) -> None:
    feed = Feed(torch.zeros(40, 1)).bind(1)
    with pytest.raises(ValueError, match="weights"):
        feed.weigh(bad)


def test_weights_beside_balanced_classes_are_refused() -> None:
    feed = Feed(InMemory(torch.zeros(4, 1), torch.tensor([0, 1, 0, 1])), balanced=True).bind(1)
    with refused(UserError, "balanced"):
        feed.weigh(torch.ones(4))


class Mixes:
    """Mix-up, with its own randomness."""

    @hookimpl(wrapper=True)
    def make_batch(self, loop: Loop) -> Any:
        batch = yield
        generator = loop.random.generator("mixup", loop.progress.position, loop.device)
        share = torch.rand((), generator=generator, device=loop.device)
        return evolve(batch, inputs=share * batch.inputs + (1 - share) * batch.inputs.flip(0))


@pytest.mark.parametrize("micro_batch", [None, 3])
def test_a_changed_batch_is_resumed_exactly(micro_batch: int | None) -> None:
    assert_resumes(Mixes, micro_batch=micro_batch)


def test_a_changed_batch_keeps_the_noise() -> None:
    mixed, plain = Batches(), Batches()
    toy_loop({"mixes": Mixes(), "batches": mixed}, steps=8).run()
    toy_loop({"batches": plain}, steps=8).run()
    for mixed_batch, batch in zip(mixed.seen, plain.seen, strict=True):
        assert torch.equal(mixed_batch.draws["noise"], batch.draws["noise"])
        assert not torch.equal(mixed_batch.inputs, batch.inputs)


def test_a_veto_consumes_the_batch_and_calls_no_other_hook() -> None:
    steps: list[int] = []
    vetoes = acting(
        make_batch=lambda loop, batch: batch[:0] if loop.progress.position % 2 else batch,
        before_step=lambda loop: steps.append(loop.progress.position),
    )
    loop = toy_loop({"vetoes": vetoes}, epochs=1)
    assert outcomes(loop) == ["updated", "skipped", "updated", "skipped", "updated"]
    assert (steps, loop.progress.epoch, loop.progress.step) == ([0, 2, 4], 1, 3)


@pytest.mark.parametrize("rows", [2, 4, 16])
@pytest.mark.parametrize("micro_batch", [None, 3])
def test_a_batch_of_another_size_is_one_step_of_the_mean_over_its_samples(rows: int, micro_batch: int | None) -> None:
    def resize(batch: Batch) -> Batch:
        return evolve(batch, inputs=batch.inputs.repeat(2, 1)[:rows], labels=None, indices=None)

    batches, plain = Batches(), toy_loop()
    plugins = {"resizes": acting(make_batch=resize), "batches": batches}
    with toy_loop(plugins, steps=1, micro_batch=micro_batch) as loop:
        (step,) = loop.steps()
        assert (step.outcome, loop.progress.samples) == ("updated", 8)
        plain.objective(plain.model, batches.seen[0]).loss.backward()  # type: ignore[arg-type, union-attr]
        norm = torch.stack([p.grad.square().sum() for p in plain.model.parameters() if p.grad is not None]).sum().sqrt()
        assert step.grad_norm == pytest.approx(norm.item(), rel=1e-5)
