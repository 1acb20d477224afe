"""Tests of the optimizer."""

import torch
from torch import nn

from hookdiff.testing import assert_resumes
from hookdiff_example_optimizer import ExampleOptimizer


def test_each_weight_moves_by_the_sign_of_its_mean_gradient() -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = ExampleOptimizer([weight], lr=0.25, momentum=0.5)
    for gradient in ([4.0, -4.0, 0.0], [-1.0, -1.0, 0.0], [-8.0, 8.0, 0.0]):
        weight.grad = torch.tensor(gradient)
        optimizer.step()
    assert weight.tolist() == [0.75, 1.25, 1.0]  # the means are 2, 0.5, -3.75 and -2, -1.5, 3.25


def test_a_run_with_it_resumes() -> None:
    assert_resumes(object, optimizers=lambda model: ExampleOptimizer(model.parameters(), lr=0.01))
