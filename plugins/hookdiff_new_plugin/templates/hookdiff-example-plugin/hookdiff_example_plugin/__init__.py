"""The plugin `example_plugin`: a running mean of the loss."""

from attrs import define, field

from hookdiff import Loop, hookimpl, plugin, saved
from hookdiff.options import about, between


@plugin(hooks_version=1)
@define(eq=False)  # a plugin equals only itself
class ExamplePlugin:
    """Logs a running mean of the loss."""

    decay: float = field(default=0.9, validator=between(0, 1), metadata=about("share of the old mean in the new one"))
    mean: float | None = saved(None)  # in checkpoints, so that a resumed run goes on with it

    @hookimpl
    def after_optimizer_step(self, loop: Loop) -> None:
        loss = loop.gradients.loss
        self.mean = loss if self.mean is None else self.decay * self.mean + (1 - self.decay) * loss
        loop.log({"example_plugin": self.mean})
