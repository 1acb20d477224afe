import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hookdiff import SampleRequest, UserError, hookimpl
from hookdiff.testing import assert_same, toy_loop, toy_model, weights
from hookdiff_ema import EMA


class Values:
    """Stands in for an optimizer: sets the only parameter to the next of a list of values."""

    def __init__(self, values):
        self.values = list(values)

    @hookimpl
    def optimizer_step(self, loop):
        with torch.no_grad():
            next(loop.model.parameters()).fill_(self.values[loop.progress.step])
        return True


class Scalar(nn.Module):
    def __init__(self, value=0.0, dtype=torch.float32):
        super().__init__()
        self.value = nn.Parameter(torch.tensor([value], dtype=dtype))

    def forward(self, x):
        return x * self.value.to(x.dtype)


def averaged(values, start=0.0, dtype=torch.float32, **options):
    """Return the shadow after weights took on `values` one by one."""
    ema = EMA(**options)
    loop = toy_loop({"values": Values(values), "ema": ema}, model=Scalar(start, dtype), steps=len(values))
    loop.run()
    return ema.shadow["value"].item()


numbers = st.lists(st.floats(-10, 10), min_size=1, max_size=8)
decays = st.floats(0, 0.999)
warmups = st.sampled_from(["ratio", "power", "none"])


def test_known_answer_of_a_ramp():
    assert averaged(range(1, 21), decay=0.9, warmup="none") == pytest.approx(12.0941898913, rel=1e-6)


@given(values=numbers, decay=decays, warmup=warmups)
def test_the_average_lies_between_its_values(values, decay, warmup):
    low, high = min(0, *values), max(0, *values)
    assert low - 1e-5 <= averaged(values, decay=decay, warmup=warmup) <= high + 1e-5


@given(values=numbers, decay=decays, factor=st.floats(-3, 3))
def test_it_is_linear(values, decay, factor):
    scaled = averaged([factor * value for value in values], decay=decay)
    assert scaled == pytest.approx(factor * averaged(values, decay=decay), abs=1e-4)


@given(value=st.floats(-10, 10), decay=decays, count=st.integers(1, 8))
def test_weights_that_stay_are_their_own_average(value, decay, count):
    assert averaged([value] * count, start=value, decay=decay) == pytest.approx(value, rel=1e-6, abs=1e-12)


@given(cut=st.integers(1, 19))
def test_a_restart_equals_the_continuation(cut):
    whole = EMA(decay=0.9)
    toy_loop({"ema": whole}).run()

    from hookdiff.state import flatten, run_state, unflatten

    class Keep:
        @hookimpl
        def on_stop(self, loop):
            tensors, rest = flatten(run_state(loop))
            self.state = unflatten({name: tensor.clone() for name, tensor in tensors.items()}, rest)

    class Restore:
        @hookimpl
        def restore(self):
            return keep.state

    first = toy_loop({"ema": EMA(decay=0.9), "keep": (keep := Keep())}, steps=cut)
    first.run()
    second = EMA(decay=0.9)
    toy_loop({"ema": second, "restore": Restore()}, model=toy_model(seed=9)).run()
    assert_same(second.shadow, whole.shadow)
    assert second.num_updates == whole.num_updates == 20


def test_a_step_that_changes_no_weight_does_not_move_it():
    class Void:
        @hookimpl
        def unscale(self, loop):
            return loop.progress.position % 2 == 0

    seen = []

    class Look:
        @hookimpl
        def before_step(self, loop):
            seen.append((loop.progress.position, ema.num_updates, ema.shadow["0.weight"].clone()))

    ema = EMA(decay=0.5, warmup="none")
    toy_loop({"void": Void(), "ema": ema, "look": Look()}, steps=3).run()
    assert [count for _, count, _ in seen] == [0, 1, 1, 2, 2]
    assert torch.equal(seen[1][2], seen[2][2])


def test_bf16_weights_have_a_float32_average():
    # With a bf16 average and decay 0.9999 nothing would ever move.
    values = [1.0] * 200
    expected = 1 - 0.9999**200
    assert averaged(values, dtype=torch.bfloat16, decay=0.9999, warmup="none") == pytest.approx(expected, rel=1e-3)


def test_samples_use_it_and_leave_no_trace():
    ema, grid = EMA(decay=0.9), SampleRequest(3)
    loop = toy_loop({"ema": ema})
    with loop:
        for _ in loop.steps():
            pass
        before, addresses = weights(loop), [p.data_ptr() for p in loop.model.parameters()]
        averaged, plain = loop.sample(grid), loop.sample(SampleRequest(3, weights="model"))
        named = loop.sample(SampleRequest(3, weights="ema"))
        assert_same(weights(loop), before)
        assert [p.data_ptr() for p in loop.model.parameters()] == addresses
    assert (averaged.weights, plain.weights, named.weights) == ("ema", "model", "ema")
    assert torch.equal(averaged.images, named.images)
    loop.model.load_state_dict(ema.shadow)
    assert torch.equal(loop.sample(SampleRequest(3, weights="model")).images, averaged.images)
    assert not torch.equal(averaged.images, plain.images)


def test_the_weights_come_back_when_sampling_fails():
    class Broken:
        @hookimpl
        def sample(self):
            raise RuntimeError("mine")

    with toy_loop({"ema": EMA(), "broken": Broken()}) as loop:
        next(loop.steps())
        before = weights(loop)
        with pytest.raises(RuntimeError, match="mine"):
            loop.sample(SampleRequest(1))
        assert_same(weights(loop), before)
        assert loop.weights == "model"


def test_it_logs_its_distance():
    told = {}

    class Sink:
        @hookimpl
        def on_log(self, step, values):
            told[step] = values

    toy_loop({"ema": EMA(), "sink": Sink()}).run()
    assert 0 < told[20]["ema/distance"] < 1


def test_the_average_of_another_model_is_refused():
    ema = EMA()
    with toy_loop({"ema": ema}), pytest.raises(UserError, match="'other'"):
        ema.load_state_dict({**ema.state_dict(), "other": torch.zeros(1)})
