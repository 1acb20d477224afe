"""Ends a run when a logged value no longer improves."""

from hookdiff_stop_early.plugin import StopEarly

__all__ = ["StopEarly"]
