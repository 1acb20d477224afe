import pytest
import torch
from hypothesis import given, strategies as st

from hookdiff.diffusion.losses import L1, MSE, Huber, Loss
from tests.diffusion.conftest import column


@given(st.floats(-5, 5), st.floats(-5, 5), st.floats(0.1, 3))
def test_formulas(output: float, target: float, delta: float) -> None:
    size = abs(output - target)
    expected = {MSE(): size**2, L1(): size, Huber(delta): size**2 / 2 if size < delta else delta * (size - delta / 2)}
    for loss, error in expected.items():
        computed = loss(column(output), column(target))
        assert float(computed) == pytest.approx(error, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("name", Loss.known)
def test_the_error_is_computed_for_each_pixel(name: str) -> None:
    output, target = torch.randn(2, 3, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    error = Loss.of(name)(output, target)
    assert (error.shape, error.dtype) == (output.shape, torch.float32)
    assert torch.equal(error[1], Loss.of(name)(output[1], target[1]))
    assert (error > 0).all()
