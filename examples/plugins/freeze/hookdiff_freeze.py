"""The plugin `freeze`: fine-tuning that trains new layers first."""

from fnmatch import fnmatchcase

from attrs import define, field
from attrs.validators import ge, min_len
from torch import nn

from hookdiff import Loop, UserError, hookimpl, nearest
from hookdiff.options import about


@define(eq=False)
class Freeze:
    """Freezes some of the weights until a step, and then trains them.

    In fine-tuning, new layers first adapt to the pretrained ones (Howard & Ruder 2018, arXiv 1801.06146, section 3.3).
    """

    weights: list[str] = field(validator=min_len(1), metadata=about('patterns of names of weights, such as "down.*"'))
    until: int = field(default=1000, validator=ge(1), metadata=about("updates with frozen weights", "steps"))
    chosen: list[nn.Parameter] = field(factory=list, init=False)

    @hookimpl
    def on_start(self, loop: Loop) -> None:
        trained = {name: p for name, p in loop.model.named_parameters() if p.requires_grad}
        for pattern in self.weights:
            if not any(fnmatchcase(name, pattern) for name in trained):
                raise UserError(f"plugins.freeze.weights: no weight matches {pattern!r}{nearest(pattern, trained)}")
        self.chosen = [p for name, p in trained.items() if any(fnmatchcase(name, pattern) for pattern in self.weights)]
        if len(self.chosen) == len(trained):
            raise UserError("plugins.freeze.weights: all weights match; choose patterns that leave some to train")
        loop.resources.callback(self.thaw)  # after the run, the weights are trainable again

    # Called in each step, so that the weights are frozen again after a resume, or a rollback to an earlier step.
    @hookimpl
    def before_step(self, loop: Loop) -> None:
        self.thaw(loop.progress.step >= self.until)

    def thaw(self, trains: bool = True) -> None:
        for parameter in self.chosen:
            parameter.requires_grad_(trains)
