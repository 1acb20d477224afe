"""Learning rate schedules: pure functions of the step."""

from hookdiff_lr.plugin import LR
from hookdiff_lr.schedules import Constant, Cooldown, Cosine, CosineRestarts, InverseSqrt, Linear, Schedule, Step

__all__ = ["LR", "Constant", "Cooldown", "Cosine", "CosineRestarts", "InverseSqrt", "Linear", "Schedule", "Step"]
