"""Test the memory of an optimizer's state, counted before the state exists."""

import pytest
import torch
from torch import nn

from hookdiff.models.footprint import optimizer_bytes
from hookdiff.testing.toy import toy_model


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.AdamW, {}),
        (torch.optim.SGD, {}),
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.Adam, {"amsgrad": True}),
        (torch.optim.RMSprop, {}),
    ],
)
def test_the_state_of_an_optimizer_is_counted_before_it_exists(kind, options):
    model = toy_model()
    for parameter in model[0].parameters():
        parameter.requires_grad_(False)
    optimizer = kind(model.parameters(), lr=0.1, **options)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # the scheduler replaces optimizer.step
    before = [p.clone() for p in model.parameters()]
    counted = optimizer_bytes([optimizer, optimizer])
    assert not optimizer.state
    assert all(map(torch.equal, model.parameters(), before))
    for parameter in model[3].parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    values = [value for entry in optimizer.state.values() for value in entry.values()]
    assert counted == 2 * sum(value.nbytes for value in values if isinstance(value, torch.Tensor))


def test_an_optimizer_that_reads_values_is_counted_as_adam():
    class Picky(torch.optim.SGD):
        def step(self, closure=None):
            if float(self.param_groups[0]["params"][0].sum()) > 0:
                super().step()

    model = nn.Linear(3, 5)
    assert optimizer_bytes([Picky(model.parameters(), lr=0.1)]) == 2 * 4 * (15 + 5)
