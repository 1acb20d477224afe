"""The plugin `target`: the time to a target, as benchmarks measure it (Coleman et al. 2017, DAWNBench)."""

from collections.abc import Mapping
from typing import Literal

from attrs import define, field
from attrs.validators import ge

from hookdiff import Loop, hookimpl, saved
from hookdiff.machine import first_rank_says
from hookdiff.options import about


@define(eq=False)
class Target:
    """Ends the run when a logged number has reached a target, several times in a row.

    A run that was ended so stays ended when it is resumed, unless the target is harder then. NaN reaches no target.
    """

    metric: str = field(metadata=about('name of the logged number, such as "val/loss"'))
    value: float = field(metadata=about("the target"))
    mode: Literal["min", "max"] = field(
        default="min", metadata=about('"min": a number up to the target reaches it; "max": a number from the target up')
    )
    times: int = field(default=1, validator=ge(1), metadata=about("measurements in a row that have to reach it"))
    newest: list[float] = saved(factory=list)  # at most `times` measurements
    measured: str = saved("", key="metric")  # the metric of these measurements

    @property
    def reached(self) -> bool:
        hits = [number <= self.value if self.mode == "min" else number >= self.value for number in self.newest]
        return len(hits) >= self.times and all(hits[-self.times :])

    @hookimpl
    def on_ready(self, loop: Loop) -> None:
        if self.measured != self.metric:  # the saved measurements are of another number
            self.newest, self.measured = [], self.metric
        self.end_if_reached(loop)

    @hookimpl
    def on_log(self, values: Mapping[str, float]) -> None:
        if self.metric in values:
            self.newest = [*self.newest, values[self.metric]][-self.times :]

    @hookimpl
    def between_steps(self, loop: Loop) -> None:
        self.end_if_reached(loop)

    def end_if_reached(self, loop: Loop) -> None:
        if first_rank_says(self.reached):  # ranks may log different values, or none
            loop.stop("plugin", f"{self.metric} has reached {self.value:g}")
