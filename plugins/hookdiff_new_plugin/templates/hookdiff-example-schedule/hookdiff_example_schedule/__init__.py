"""The noise schedule `example_schedule`: betas that grow by a power of the time."""

import torch
from attrs import define, field
from attrs.validators import gt
from torch import Tensor

from hookdiff.diffusion import Schedule
from hookdiff.options import about

_FIRST, _LAST = 1e-4, 0.02


@define(frozen=True)
class ExampleSchedule(Schedule):
    """Betas from 0.0001 to 0.02 that grow by a power of the time; 1 is the linear schedule."""

    power: float = field(default=1.5, validator=gt(0), metadata=about("power of the time"))

    def betas(self, timesteps: int) -> Tensor:
        time = torch.linspace(0, 1, timesteps, dtype=torch.float64, device="cpu")
        return _FIRST + (_LAST - _FIRST) * time**self.power
