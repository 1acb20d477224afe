"""The plugin `clip`."""

from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import define, evolve, field

from hookdiff import Loop, hookimpl
from hookdiff.choices import chosen
from hookdiff.options import about
from hookdiff_clip.rules import Norm, Rule


@define(eq=False)
class Clip:
    """Clips the gradients once per step, at their true scale."""

    rule: Rule = field(default=Norm(), converter=chosen[Rule], metadata=about("rule by which gradients are clipped"))
    moved_keys: ClassVar[Mapping[str, str]] = {
        "mode": "rule = 'adaptive'",
        "statistic": "rule = 'adaptive', 'percentile' or 'zscore'",
        "max_norm": "rule = { use = 'norm', max_norm = 1.0 }",
        **{key: f"rule = {{ use = 'adaptive', {key} = ... }}" for key in ("min_norm", "factor", "decay", "warmup")},
        "window": "rule = { use = 'percentile', window = 100 }",
        "percentile": "rule = { use = 'percentile', percentile = 90.0 }",
        "deviations": "rule = { use = 'zscore', deviations = 3.0 }",
        "max_value": "rule = { use = 'value', max_value = 1.0 }",
        "agc_factor": "rule = { use = 'agc', factor = 0.01 }",
        "min_weight": "rule = { use = 'agc', min_weight = 1e-3 }",
        "exclude": "rule = { use = 'agc', exclude = ['out.*'] }",
    }
    _running: Rule = field(init=False)  # copy of the rule for this run, with its state

    @hookimpl
    def on_start(self, loop: Loop) -> None:
        self._running = evolve(self.rule)
        self._running.start(loop)

    @hookimpl(trylast=True)
    def after_backward(self, loop: Loop) -> None:
        self._running.clip_(loop)

    def state_dict(self) -> dict[str, Any]:
        """Return the name of the rule and its state."""
        return {"rule": self.rule.use, "state": self._running.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of the same rule; the state of another rule is ignored."""
        if state["rule"] == self.rule.use:
            self._running.load_state_dict(state["state"])
