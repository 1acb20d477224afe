import math

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

from hookdiff.loop.gradients import Gradients
from hookdiff.testing.toy import toy_loop, toy_model

values = st.lists(st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=4), min_size=1, max_size=4)


def gradients_of(rows: list[list[float]], loss: float = 0.5, dtype: torch.dtype = torch.float32) -> Gradients:
    model = nn.ParameterList([torch.zeros(len(row), dtype=dtype) for row in rows])
    for parameter, row in zip(model, rows, strict=True):
        parameter.grad = torch.tensor(row, dtype=dtype)
    gradients = Gradients(model, [torch.optim.SGD(model.parameters())])
    gradients.begin(torch.tensor(loss))
    return gradients


@given(rows=values, loss=st.floats(-1e3, 1e3, width=32))
def test_norms_equal_those_of_plain_python(rows: list[list[float]], loss: float) -> None:
    gradients = gradients_of(rows, loss)
    norms = [math.hypot(*row) for row in rows]
    assert gradients.norms.tolist() == pytest.approx(norms, rel=1e-5, abs=1e-30)
    assert gradients.total_norm == pytest.approx(math.hypot(*norms), rel=1e-5, abs=1e-30)
    assert gradients.loss == loss
    assert gradients.finite


@given(rows=values, factor=st.floats(0, 100, width=32))
def test_scaling_the_gradients_scales_their_norms(rows: list[list[float]], factor: float) -> None:
    gradients = gradients_of(rows)
    gradients.scale_(factor)
    norms, total = gradients.norms.tolist(), gradients.total_norm
    gradients.clear()
    assert norms == pytest.approx(gradients.norms.tolist(), rel=1e-5, abs=1e-30)
    assert total == pytest.approx(gradients.total_norm, rel=1e-5, abs=1e-30)
    for gradient, row in zip(gradients.tensors(), rows, strict=True):
        assert torch.equal(gradient, torch.tensor(row) * factor)


def test_norms_are_kept_until_they_are_cleared_or_a_step_begins() -> None:
    gradients = gradients_of([[3.0, 4.0]])
    assert gradients.total_norm == 5
    gradients.tensors()[0].mul_(2)
    assert gradients.total_norm == 5
    gradients.clear()
    assert (gradients.total_norm, gradients.loss) == (10, 0.5)
    gradients.tensors()[0].mul_(2)
    gradients.begin(torch.tensor(0.25))
    assert (gradients.total_norm, gradients.loss) == (20, 0.25)


@pytest.mark.parametrize(
    ("rows", "loss", "named"),
    [
        ([[1.0], [math.nan]], 0.5, ["1"]),
        ([[-math.inf, 1.0], [0.0], [math.nan]], 0.5, ["0", "2"]),
        ([[1.0]], math.nan, []),
        ([[1.0]], math.inf, []),
    ],
)
def test_gradients_that_are_not_finite_are_named(rows: list[list[float]], loss: float, named: list[str]) -> None:
    gradients = gradients_of(rows, loss)
    assert not gradients.finite
    assert gradients.nonfinite() == named


def test_finite_gradients_get_a_true_norm_although_their_squares_overflow() -> None:
    gradients = gradients_of([[3e25], [0.0, -4e25]])
    assert (gradients.total_norm, gradients.finite) == (math.inf, False)
    assert gradients.nonfinite() == []
    assert gradients.finite
    assert gradients.total_norm == pytest.approx(5e25, rel=1e-6)
    gradients.scale_(1 / 5e25)
    assert gradients.total_norm == pytest.approx(1, rel=1e-6)
    assert torch.cat(gradients.tensors()).tolist() == pytest.approx([0.6, 0, -0.8], rel=1e-6)


@pytest.mark.parametrize(
    ("dtype", "scale", "of_norms", "rel"),
    [
        (torch.float16, 1e4, torch.float32, 0.01),
        (torch.bfloat16, 1e4, torch.float32, 0.01),
        (torch.float64, 1e100, torch.float64, 1e-12),
    ],
)
def test_squares_do_not_overflow(dtype: torch.dtype, scale: float, of_norms: torch.dtype, rel: float) -> None:
    gradients = gradients_of([[3 * scale, 4 * scale]], dtype=dtype)
    assert gradients.finite
    assert gradients.total_norm == pytest.approx(5 * scale, rel=rel)
    assert gradients.norms.dtype == of_norms


def test_parameters_without_a_gradient_are_left_out() -> None:
    model = toy_model()
    model[0].weight.requires_grad_(False)  # type: ignore[index]
    with toy_loop(model=model, steps=1) as loop:
        next(loop.steps())
    assert list(loop.gradients.named()) == ["0.bias", "3.weight", "3.bias"]
    assert len(loop.gradients.norms) == 3
    loop.gradients.named()["3.bias"].zero_()
    assert loop.gradients.tensors()[2].eq(0).all()  # tensors() gives the same tensors as named(), in the same order


def test_a_weight_that_no_optimizer_holds_is_not_read() -> None:
    model = toy_model()
    last = [parameter for name, parameter in model.named_parameters() if name.startswith("3.")]
    with toy_loop(model=model, optimizers=lambda _: torch.optim.SGD(last, lr=0.1)) as loop:
        for step in loop.steps():
            assert loop.gradients.names == ["3.weight", "3.bias"]
            norms = [float(parameter.grad.norm()) for parameter in last if parameter.grad is not None]
            assert step.grad_norm == pytest.approx(math.hypot(*norms))
