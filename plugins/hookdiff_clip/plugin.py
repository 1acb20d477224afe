"""The plugin `clip`."""

from typing import Any

from attrs import define, evolve, field

from hookdiff import Loop, hookimpl
from hookdiff.loop import DevicePart, Gradients
from hookdiff.options import about, chosen
from hookdiff_clip.rules import Norm, Rule, RuleState


@define(frozen=True)
class ClipState:
    """The saved state of `Clip`."""

    rule: str
    states: dict[str, RuleState]  # by the prefix of the logged values


@define(eq=False)
class Clip:
    """Clips the gradients once per step, at their true scale."""

    rule: Rule = field(default=Norm(), converter=chosen[Rule], metadata=about("rule by which gradients are clipped"))
    adopted: tuple[str, ...] = field(
        default=(), metadata=about("plugins with trained modules, which are clipped, too, one by one")
    )
    _clipped: dict[str, tuple[Rule, Gradients]] = field(init=False)  # copies of the rule, by prefix of logged names

    @hookimpl
    def on_start(self, loop: Loop) -> None:
        models = {"clip": (loop.model, loop.gradients)}
        for name, index, trained in loop.adopted.named(self.adopted):
            models[f"clip/{name}/{index}"] = trained.module, Gradients(trained.module, [trained.optimizer])
        self._clipped = {prefix: (evolve(self.rule), gradients) for prefix, (_, gradients) in models.items()}
        for prefix, (model, gradients) in models.items():
            self._clipped[prefix][0].prepare(model, gradients)

    @hookimpl(trylast=True)
    def after_backward(self, loop: Loop) -> None:
        for prefix, (rule, gradients) in self._clipped.items():
            if gradients is not loop.gradients:
                gradients.clear()  # its stored norms are of an earlier step
            values = rule.clip_(gradients, loop.log.due)
            loop.log.average({f"{prefix}/{name}": value for name, value in values.items()})

    @hookimpl
    def on_device(self, loop: Loop) -> list[DevicePart] | None:
        """Return the clipping as work to record in a CUDA graph; None for a rule that cannot be recorded."""
        parts = [rule.on_device(gradients) for rule, gradients in self._clipped.values()]
        return [part for part in parts if part] if all(parts) else None

    def state_dict(self) -> dict[str, Any]:
        return {"rule": self.rule.use, "states": {name: rule.state_dict() for name, (rule, _) in self._clipped.items()}}

    def load_state_dict(self, state: ClipState) -> None:
        """Restore the state of the same rule; the state of another rule is ignored."""
        if state.rule == self.rule.use:
            for name, (rule, _) in self._clipped.items():
                if name in state.states:
                    rule.load_state_dict(state.states[name])
