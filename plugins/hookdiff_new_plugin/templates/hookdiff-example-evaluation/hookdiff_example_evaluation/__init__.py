"""The plugin `example_evaluation`: the loss of held-out samples."""

import torch
from attrs import define, field
from attrs.validators import ge
from torch import Tensor

from hookdiff import Evaluation, Loop, UserError, hookimpl, plugin
from hookdiff.options import about


@plugin(hooks_version=1)
@define(eq=False)  # a plugin equals only itself
class ExampleEvaluation(Evaluation):
    """Measures the loss of held-out samples, with the same noise each time."""

    draws: int = field(default=2, validator=ge(1), metadata=about("draws of noise and time for each sample"))

    @hookimpl
    def on_ready(self, loop: Loop) -> None:
        if not len(loop.feed.held_out_indices):
            raise UserError("plugins.example_evaluation: there are no held-out samples: set data.held_out")

    def evaluate(self, loop: Loop) -> dict[str, tuple[Tensor, int]]:
        total, count = torch.zeros((), device=loop.device), 0
        for position, batch in enumerate(loop.feed.unaugmented(loop.feed.held_out_indices)):
            for draw in range(self.draws):
                generator = loop.random.generator("evaluate", position * self.draws + draw, loop.device)
                drawn = loop.objective.draw(batch, generator)
                total += loop.hook.compute_loss(loop=loop, batch=drawn).loss * len(batch)
                count += len(batch)
        return {"example_evaluation": (total, count)}  # a mean over all ranks
