from .plugin import LR as LR
from .schedules import (
    ConstantLR as ConstantLR,
    CooldownLR as CooldownLR,
    CosineLR as CosineLR,
    CosineRestartsLR as CosineRestartsLR,
    InverseSqrtLR as InverseSqrtLR,
    LinearLR as LinearLR,
    LRSchedule as LRSchedule,
    StepLR as StepLR,
)
