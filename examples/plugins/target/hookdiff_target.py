"""The plugin `target`: the time to a target, as benchmarks measure it (Coleman et al. 2017, DAWNBench)."""

from collections.abc import Mapping
from typing import Any

from attrs import define, field
from attrs.validators import ge, in_

from hookdiff import Loop, hookimpl
from hookdiff.options import about


@define(eq=False)
class Target:
    """Ends the run when a logged number has reached a target, several times in a row.

    A run that was ended so stays ended when it is resumed, unless the target is harder then. NaN reaches no target.
    """

    metric: str = field(metadata=about('name of the logged number, such as "val/loss"; required'))
    value: float = field(metadata=about("the target; required"))
    mode: str = field(
        default="min", validator=in_(("min", "max")), metadata=about('reached from above, "min", or from below, "max"')
    )
    times: int = field(default=1, validator=ge(1), metadata=about("measurements in a row that have to reach it"))
    newest: list[float] = field(factory=list, init=False)  # at most `times` measurements

    @property
    def reached(self) -> bool:
        hits = [number <= self.value if self.mode == "min" else number >= self.value for number in self.newest]
        return len(hits) >= self.times and all(hits[-self.times :])

    @hookimpl
    def on_ready(self, loop: Loop) -> None:
        if self.reached:
            self.end(loop)

    @hookimpl
    def on_log(self, loop: Loop, values: Mapping[str, float]) -> None:
        if self.metric in values:
            self.newest = [*self.newest, values[self.metric]][-self.times :]
            if self.reached:
                self.end(loop)

    def end(self, loop: Loop) -> None:
        loop.stop("plugin", f"{self.metric} has reached {self.value:g}: {self.newest[-1]:.4g}")

    def state_dict(self) -> dict[str, Any]:
        return {"newest": list(self.newest)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.newest = list(state["newest"])
