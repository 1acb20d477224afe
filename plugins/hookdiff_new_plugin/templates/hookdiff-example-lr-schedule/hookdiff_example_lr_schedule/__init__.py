"""The learning rate schedule `example_lr_schedule`: a rate that halves at regular steps."""

from attrs import define, field
from attrs.validators import ge

from hookdiff.options import about
from hookdiff_lr import LRSchedule


@define(frozen=True)
class ExampleLrSchedule(LRSchedule):
    """A fall by half at regular steps, smooth and without an end."""

    half_life: int = field(default=10_000, validator=ge(1), metadata=about("after which the rate is half", "steps"))

    def factor(self, step: int, warmup: int, total: int) -> float:
        return float(0.5 ** ((step - warmup) / self.half_life))
