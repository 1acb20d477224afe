"""Tests of the noise schedule."""

import pytest
import torch

from hookdiff.diffusion import VP, Diffusion, Linear
from hookdiff_example_schedule import ExampleSchedule


@pytest.mark.parametrize("timesteps", [1, 2, 1000])
def test_the_betas_lie_between_0_and_1_and_rise(timesteps: int) -> None:
    betas = ExampleSchedule().betas(timesteps)
    assert (betas.shape, betas.dtype) == ((timesteps,), torch.float64)
    assert ((betas > 0) & (betas < 1)).all()
    assert (betas.diff() > 0).all()


def test_the_power_1_is_the_linear_schedule() -> None:
    torch.testing.assert_close(ExampleSchedule(power=1.0).betas(1000), Linear().betas(1000))


def test_a_process_takes_it_and_ends_in_noise() -> None:
    process = VP(schedule=ExampleSchedule())
    assert Diffusion(process).process is process
    assert process.at_timesteps([999])[0].alpha < 0.05
