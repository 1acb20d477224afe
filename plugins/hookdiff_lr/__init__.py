"""Sets the learning rate, by schedules that are pure functions of the step."""

from hookdiff_lr.plugin import LR
from hookdiff_lr.schedules import (
    ConstantLR,
    CooldownLR,
    CosineLR,
    CosineRestartsLR,
    InverseSqrtLR,
    LinearLR,
    LRSchedule,
    StepLR,
)

__all__ = [
    "LR",
    "ConstantLR",
    "CooldownLR",
    "CosineLR",
    "CosineRestartsLR",
    "InverseSqrtLR",
    "LRSchedule",
    "LinearLR",
    "StepLR",
]
