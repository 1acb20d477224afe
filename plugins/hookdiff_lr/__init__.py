"""Learning rate schedules: pure functions of the step."""

from hookdiff_lr.plugin import LR

__all__ = ["LR"]
