"""Tests of the sampler."""

import pytest
import torch
from torch import Generator, Tensor

from hookdiff.diffusion import Diffusion, Sampling
from hookdiff.testing import assert_converges
from hookdiff_example_sampler import ExampleSampler


@pytest.mark.parametrize("process", ["flow", "vp", "edm"])
def test_it_reaches_an_image_that_the_network_always_predicts(process: str) -> None:
    image = torch.linspace(-0.5, 0.5, 16).reshape(1, 4, 4)

    def net(x: Tensor, times: Tensor) -> Tensor:
        return image.expand_as(x)

    sampling = Sampling(sampler=ExampleSampler(middle=0.3), steps=3)
    made = sampling.sample(net, Diffusion(process, prediction="sample"), (1, 4, 4), [Generator(), Generator()], "cpu")
    torch.testing.assert_close(made, image.expand(2, 1, 4, 4))


def test_its_error_falls_as_that_of_a_method_of_second_order() -> None:
    assert_converges(ExampleSampler(), order=2)
