"""Plugins with a part in the passes of a step, as a stranger would write them."""

import torch
from attrs import define, field
from torch import Tensor, nn

from hookdiff import Batch, Loop, LossOutput, hookimpl
from hookdiff.models.weights import holding


@define(eq=False)
class SAM:
    """Sharpness-aware minimisation: takes the gradient at weights that a first pass has moved uphill."""

    rho: float = 0.05
    after: int = 0  # updates of one pass

    @hookimpl
    def accumulate(self, loop: Loop, batch: Batch) -> LossOutput:
        output = loop.run_pass(batch)
        if loop.progress.step < self.after:
            return output
        scale = self.rho / torch.linalg.vector_norm(loop.gradients.norms)
        own = dict(loop.model.named_parameters())
        moved = {name: own[name].detach() + scale * grad for name, grad in loop.gradients.named().items()}
        loop.gradients.zero()
        with holding(loop.model, moved):
            loop.run_pass(batch)
        return output


@define(eq=False)
class Uncertainty:
    """Learns a weight for each of ten ranges of the noise level (Karras et al. 2024, arXiv 2312.02696, eq. 14).

    It keeps no state of its own.
    """

    every: int = 1
    lr: float = 0.01
    net: nn.Embedding = field(init=False)

    @net.default
    def _zeros(self) -> nn.Embedding:
        return nn.Embedding.from_pretrained(torch.zeros(10, 1), freeze=False)

    @hookimpl
    def prepare_model(self, loop: Loop) -> None:
        loop.adopt(self, self.net, torch.optim.Adam(self.net.parameters(), self.lr), every=self.every)

    @hookimpl
    def reduce_loss(self, output: LossOutput) -> Tensor:
        assert output.per_sample is not None
        assert output.timesteps is not None
        log_variance = self.net(output.timesteps.long() % 10).squeeze(1)
        return (output.per_sample / log_variance.exp() + log_variance).mean()
