"""The promise of the author's kit that a plugin works on several ranks, and that it finds what does not."""

import logging
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import Tensor

from hookdiff import Batch, Feed, InMemory, Loop
from hookdiff.authors.trial_passes import rehearsing
from hookdiff.data import digits
from hookdiff.loop.hookspecs import declaration_of
from hookdiff.machine.ranks import first_rank_says, gathered, num_ranks, rank, summed
from hookdiff.testing import OutOfStep, ToyObjective, all_differences, on_ranks, toy_loop
from hookdiff.testing.rank_checks import Averaging, assert_trains_on_ranks
from hookdiff.testing.record import Record
from tests.conftest import acting, refused, wide
from tests.first_party import COSTLY, KINDS, LOOP, OPTIONS, net

# These talk to other processes; tests/test_training_on_ranks.py and tests/plugins/test_checkpoint_ranks.py start some.
REAL = {"ddp", "fsdp", "checkpoint"}
LOW: dict[str, Any] = {"amp": {"precision": "bf16"}, "ema": {"snapshot_every": 0}}
EXCEPT: dict[str, tuple[str, ...]] = {
    "debug": ("debug/*",),  # measured on images of the first rank
    "gradients": ("gradients/noise_scale",),  # estimated from the samples of one rank
}


@pytest.mark.parametrize("name", [*sorted(KINDS.keys() - REAL - COSTLY), *wide(*sorted(COSTLY))])
def test_each_plugin_trains_on_two_ranks_as_on_one(name: str) -> None:
    for module in declaration_of(KINDS[name]).needs:
        pytest.importorskip(module, reason=f"{name} needs the extra package {module}")
    # In fp16 a part of a batch overflows at another scale than the whole.
    options = {"precision": "bf16"} if name == "amp" else OPTIONS.get(name, {})
    how = {"tolerance": 1e-2 if name == "amp" else 1e-4, "except_for": EXCEPT.get(name, ())}
    # The last batch of an epoch, which is logged, is one sample on the first rank and a filler on the other.
    odd = {"data": Feed(InMemory(digits().images[:55]), held_out=4, drop_last=False)}
    assert_trains_on_ranks(lambda: KINDS[name](**options), model=net(dropout=0), **how, **{**LOOP, **odd})


class HasFloor(ToyObjective):
    """Has some floor of its error, which depends on the variance of the data."""

    def normalize(self, inputs: Tensor) -> Tensor:
        return inputs

    def floor(self, times: Tensor, variance: Tensor) -> Tensor:
        return variance * (times + 1) / 20

    def target_variance(self, times: Tensor, variance: Tensor) -> Tensor:
        return variance * (times + 1) / 10


def ask_for_the_state(loop: Loop) -> None:
    """Do in each step what the plugin `checkpoint` does after the first step of each process."""
    loop.state_dict()


@pytest.mark.parametrize("num", [1, *wide(2)])
def test_to_ask_for_the_state_changes_nothing(num: int) -> None:
    names = ["amp", "clip", "debug", "ema", "gradients", "loss", "lr", "memory", "nan", "spectral", "stop_early"]
    odd = Feed(InMemory(digits().images[:51]), drop_last=False)

    def trained(asks: bool) -> Record:
        def train(rank: int) -> Record:
            plugins = {name: KINDS[name](**{**OPTIONS.get(name, {}), **LOW.get(name, {})}) for name in names}
            record = Record(f"rank {rank}")
            asking = {"asks": acting(after_backward=ask_for_the_state, between_steps=ask_for_the_state)}
            others = {"averaging": Averaging(), **(asking if asks else {}), "record": record}
            options = {**LOOP, "data": odd, "objective": HasFloor(), "run_dir": run_dir}
            toy_loop({**plugins, **others}, model=net(dropout=0), **options).run()
            return record

        with TemporaryDirectory() as folder:
            run_dir = Path(folder)
            return on_ranks(num, train)[0]

    quiet, asked = trained(False), trained(True)
    assert {"loss/unexplained", "gradients/noise_scale"} <= {key.name for key in quiet.values}
    assert not list(all_differences(quiet.values, asked.values))


def logs_the_mean(counts: bool = True, reduces: bool = True) -> Callable[[], object]:
    """Return a function that makes plugins, which log the mean error of all ranks, or of one if they reduce nothing."""

    def log(loop: Loop) -> None:
        errors = loop.output.per_sample
        assert errors is not None
        means = {"mine/mean": (errors.sum(), len(errors)) if counts else errors.mean()}
        loop.log(loop.reduce(means) if reduces else means)

    return lambda: acting(after_optimizer_step=log)


def logs_the_norm_of_a_trial(loop: Loop, batch: Batch) -> None:
    """In a trial no gradients are exchanged, so the norm is that of this rank's samples."""
    with rehearsing(loop) as passes:
        passes(batch)
        norm = loop.gradients.total_norm
    loop.log({"mine/norm": norm})


def asks_on_one_rank(loop: Loop) -> None:
    if loop.is_main and loop.progress.step == 3:
        summed(torch.ones(2))


def fails_on_one_rank(loop: Loop) -> None:
    if loop.rank == 1 and loop.progress.step == 3:
        raise RuntimeError("the disk of rank 1 is gone")


@torch.no_grad()
def moves_one_rank(loop: Loop) -> None:
    if loop.rank == 1 and loop.progress.step == 2:
        next(loop.model.parameters()).mul_(1.001)


@pytest.mark.parametrize(
    ("work", "error", "facts"),
    [
        (asks_on_one_rank, OutOfStep, ("rank 0", "asks_on_one_rank", "rank 1", "a sum of")),  # where each waits
        (fails_on_one_rank, RuntimeError, ("the disk of rank 1 is gone",)),
        (moves_one_rank, AssertionError, ("step 2", "rank 0", "rank 1", "0.weight")),
    ],
)
def test_it_finds_what_one_rank_does_alone(work: Any, error: type[Exception], facts: tuple[str, ...]) -> None:
    with refused(error, *facts):
        assert_trains_on_ranks(lambda: acting(after_optimizer_step=work))


def test_it_finds_a_value_of_one_rank_alone() -> None:
    assert_trains_on_ranks(logs_the_mean())
    assert logging.getLogger("hookdiff").propagate  # the tests that follow see its messages
    with refused(AssertionError, "step 1", "mine/mean", "one process", "rank 0"):
        assert_trains_on_ranks(logs_the_mean(reduces=False))
    assert_trains_on_ranks(logs_the_mean(reduces=False), except_for=["mine/*"])
    with refused(AssertionError, "step 6", "mine/mean", "one process", "rank 0"):
        assert_trains_on_ranks(logs_the_mean(counts=False))  # a rank without a sample has no mean
    with refused(AssertionError, "step 1", "mine/norm", "one process", "rank 0"):
        assert_trains_on_ranks(lambda: acting(before_step=logs_the_norm_of_a_trial))


def test_threads_take_turns_with_generators_of_their_own() -> None:
    def work(number: int) -> tuple[list[float], Any, int]:
        assert (rank(), num_ranks()) == (number, 3)
        drawn = [float(torch.rand(()))]
        everyone = gathered(number)
        drawn.append(float(torch.rand(())))
        return drawn, everyone, int(summed(torch.tensor(number)))

    torch.manual_seed(3)
    expected = [float(torch.rand(())), float(torch.rand(()))]
    torch.manual_seed(3)
    assert on_ranks(3, work) == [(expected, [0, 1, 2], 3)] * 3
    assert (rank(), num_ranks(), float(torch.rand(()))) == (0, 1, expected[0])


def test_a_rank_that_ends_early_is_named() -> None:
    with refused(OutOfStep, "rank 0", "rank 1 has ended"):
        on_ranks(2, lambda number: number or gathered(number))


def test_ranks_that_ask_for_different_things_are_found() -> None:
    with refused(OutOfStep, "the value of the first rank", "the values of all ranks"):
        on_ranks(2, lambda number: gathered(number) if number else first_rank_says(number))
    with refused(OutOfStep, "a sum of (2,) torch.float32", "a sum of (2,) torch.float64"):
        on_ranks(2, lambda number: summed(torch.ones(2, dtype=torch.float64 if number else torch.float32)))
