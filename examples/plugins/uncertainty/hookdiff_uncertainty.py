"""The plugin `uncertainty`: a learned loss weight for each noise level, as in EDM2 (Karras et al. 2024)."""

import math

import torch
from attrs import define, field
from attrs.validators import ge, gt
from torch import Tensor, nn

from hookdiff import Loop, LossOutput, UserError, hookimpl
from hookdiff.authors import seeded
from hookdiff.machine import derive_seed
from hookdiff.options import about


class LogVariance(nn.Module):
    """The learned function u: a linear map of Fourier features of ln(sigma / alpha) / 4, which is zero at the start."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.register_buffer("frequencies", 2 * math.pi * torch.randn(features))
        self.register_buffer("phases", 2 * math.pi * torch.rand(features))
        self.linear = nn.Linear(features, 1, bias=False)
        nn.init.zeros_(self.linear.weight)

    def forward(self, log_snr: Tensor) -> Tensor:
        level = log_snr.float().clamp(-40, 40) / -8  # the log-SNR of pure noise is not finite
        waves = torch.outer(level, self.get_buffer("frequencies")) + self.get_buffer("phases")
        result: Tensor = self.linear(math.sqrt(2) * waves.cos())
        return result[:, 0]


@define(eq=False)
class Uncertainty:
    """Divides the loss at each noise level by a learned estimate of that loss, so that all levels count alike.

    The network and u(noise level) are trained together to minimise loss / exp(u) + u (arXiv 2312.02696, eq. 21).
    """

    lr: float = field(default=0.01, validator=gt(0), metadata=about("learning rate of u (Adam)"))
    features: int = field(default=128, validator=ge(1), metadata=about("number of Fourier features"))
    log_variance: LogVariance = field(init=False)

    @hookimpl
    def prepare_model(self, loop: Loop) -> None:
        seed = derive_seed(loop.config.seed, "uncertainty", 0)
        with seeded(seed, loop.device):
            self.log_variance = LogVariance(self.features)
        loop.adopt(self, self.log_variance, torch.optim.Adam(self.log_variance.parameters(), lr=self.lr))

    @hookimpl
    def reduce_loss(self, output: LossOutput) -> Tensor:
        if output.per_sample is None or output.log_snr is None:
            raise UserError("uncertainty: the objective returns no log-SNR for each sample; use Diffusion")
        loss = output.per_sample if output.weights is None else output.per_sample * output.weights
        u: Tensor = self.log_variance(output.log_snr)
        return (loss / u.exp() + u).mean()
