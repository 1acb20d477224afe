"""A step of an optimizer's copy changes nothing of the run."""

import torch
from torch import Tensor, nn

from hookdiff.models.optimizer_copy import copy_optimizer


def test_a_step_of_the_copy_is_one_of_the_optimizer_and_leaves_it_alone() -> None:
    weight, calls = nn.Parameter(torch.tensor([1.0, 2.0])), list[object]()
    optimizer = torch.optim.SGD([weight], lr=0.5, momentum=0.9)
    optimizer.register_step_pre_hook(lambda *_: calls.append("hook"))
    torch.optim.lr_scheduler.ConstantLR(optimizer)  # which wraps the step
    rate = optimizer.param_groups[0]["lr"]

    def copied(weight: Tensor) -> Tensor:
        copy = weight.detach().clone()
        copy.grad = torch.ones_like(copy)
        return copy

    tried = copy_optimizer(optimizer, optimizer.param_groups, copied)
    tried.step()
    (copy,) = tried.param_groups[0]["params"]
    assert torch.equal(copy, torch.tensor([1.0 - rate, 2.0 - rate]))
    assert (tried.state[copy]["momentum_buffer"].tolist(), weight.tolist()) == ([1.0, 1.0], [1.0, 2.0])
    assert (weight.grad, dict(optimizer.state), calls) == (None, {}, [])
