"""Learning rate schedules: pure functions of the step."""

from hookdiff_lr.plugin import LR, lr_factor

__all__ = ["LR", "lr_factor"]
