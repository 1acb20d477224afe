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
    """Ends the run when a logged number has reached a target several times in a row.

    When such a run is resumed, it ends again at once, unless the target is now harder. NaN never reaches a target.
    """

    metric: str = field(metadata=about('name of the logged number, such as "val/loss"'))
    value: float = field(metadata=about("the target"))
    mode: Literal["min", "max"] = field(
        default="min", metadata=about('"min": reached at or below the target; "max": reached at or above it')
    )
    times: int = field(default=1, validator=ge(1), metadata=about("measurements in a row that must reach the target"))
    newest: list[float] = saved(factory=list)  # at most `times` measurements
    measured: str = saved("", key="metric")  # the metric of these measurements

    @property
    def reached(self) -> bool:
        hits = [number <= self.value if self.mode == "min" else number >= self.value for number in self.newest]
        return len(hits) >= self.times and all(hits[-self.times :])

    @hookimpl
    def on_ready(self, loop: Loop) -> None:
        if self.measured != self.metric:  # the saved measurements are of another metric
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
