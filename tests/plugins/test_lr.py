import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hookdiff import UserError, hookimpl
from hookdiff.testing import toy_loop
from hookdiff_lr import LR, lr_factor

shapes = st.fixed_dictionaries(
    {
        "schedule": st.sampled_from(["constant", "linear", "cosine"]),
        "warmup": st.integers(0, 200),
        "start_factor": st.floats(0, 1),
        "min_ratio": st.floats(0, 1),
    }
)


@pytest.mark.parametrize(("step", "factor"), [(0, 0), (50, 0.5), (100, 1), (550, 0.5), (1000, 0)])
def test_known_answers(step, factor):
    assert lr_factor(step, 1000, "cosine", warmup=100) == pytest.approx(factor, abs=1e-12)


@given(shape=shapes, step=st.integers(0, 2000))
def test_it_stays_within_its_bounds(shape, step):
    low = min(shape["start_factor"] if shape["warmup"] else 1, shape["min_ratio"])
    assert low - 1e-12 <= lr_factor(step, 1000, **shape) <= 1 + 1e-12


@given(shape=shapes)
def test_it_has_no_jumps(shape):
    factors = [lr_factor(step, 1000, **shape) for step in range(1200)]
    steepest = max(1 / max(1, shape["warmup"]), 2 / (1000 - shape["warmup"])) + 1e-12
    assert max(abs(a - b) for a, b in itertools.pairwise(factors)) <= steepest


@given(shape=shapes, past=st.integers(0, 1000))
def test_it_ends_where_it_should(shape, past):
    end = 1.0 if shape["schedule"] == "constant" else shape["min_ratio"]
    assert lr_factor(1000 + past, 1000, **shape) == pytest.approx(end, abs=1e-12)


class Look:
    def __init__(self):
        self.rates = []

    @hookimpl
    def after_optimizer_step(self, loop):
        self.rates.append([group["lr"] for optimizer in loop.optimizers for group in optimizer.param_groups])


@pytest.mark.parametrize("micro_batch", [None, 3])
def test_the_rate_of_a_step_depends_on_the_step_alone(micro_batch):
    look = Look()
    toy_loop({"lr": LR(warmup=4), "look": look}, micro_batch=micro_batch).run()
    assert look.rates == [[0.01 * lr_factor(step, 20, "cosine", 4)] for step in range(20)]


def test_every_group_keeps_its_own_rate():
    def optimizers(model):
        groups = [{"params": model[0].parameters(), "lr": 0.5}, {"params": model[3].parameters(), "lr": 0.1}]
        return torch.optim.SGD(groups)

    look = Look()
    toy_loop({"lr": LR("linear"), "look": look}, optimizers=optimizers, steps=4).run()
    assert look.rates[2] == [pytest.approx(0.25), pytest.approx(0.05)]


def test_a_skipped_step_does_not_move_it():
    class Hold:
        @hookimpl
        def optimizer_step(self, loop):
            return False if loop.progress.position in (3, 4) else None

    plain, held = Look(), Look()
    toy_loop({"lr": LR(), "look": plain}).run()
    toy_loop({"lr": LR(), "look": held, "hold": Hold()}).run()
    assert plain.rates == held.rates


def test_epochs_are_counted_in_steps():
    look = Look()
    toy_loop({"lr": LR("linear"), "look": look}, epochs=2).run()
    assert look.rates[-1] == [pytest.approx(0.001)]


def test_a_warm_up_as_long_as_the_run_is_refused():
    with pytest.raises(UserError, match=r"plugins\.lr\.warmup: 20 steps"):
        toy_loop({"lr": LR(warmup=20)}).run()
