"""The plugin `sam`: sharpness-aware minimisation (Foret et al. 2021, arXiv 2010.01412, algorithm 1)."""

import torch
from attrs import define, field
from attrs.validators import gt

from hookdiff import Batch, Loop, LossOutput, hookimpl
from hookdiff.models import Buffers, holding
from hookdiff.options import about


@define(eq=False)
class SAM:
    """Updates the weights with the gradient at the nearby weights of highest loss, which leads to flatter minima.

    A step makes two passes, so it takes twice the time. The logged loss is that of the weights before the step.
    """

    rho: float = field(
        default=0.05, validator=gt(0), metadata=about("L2 distance, over all weights, to those of highest loss nearby")
    )
    buffers: Buffers = field(init=False)

    @hookimpl
    def on_start(self, loop: Loop) -> None:
        self.buffers = Buffers(loop.model)

    @hookimpl
    def accumulate(self, loop: Loop, batch: Batch) -> LossOutput:
        output = loop.run_pass(batch)
        # A common factor of all gradients, such as the loss scale of fp16, does not change their direction.
        step = self.rho / (torch.linalg.vector_norm(loop.gradients.norms) + 1e-12)
        gradients = loop.gradients.named()
        worst = {
            name: p.detach() + step * gradients[name] for name, p in loop.model.named_parameters() if name in gradients
        }
        loop.gradients.zero()
        self.buffers.keep()  # batch norm must see each batch only once, with the original weights
        with holding(loop.model, worst):
            loop.run_pass(batch)  # with the same dropout as in the first pass
        self.buffers.put_back()
        return output
