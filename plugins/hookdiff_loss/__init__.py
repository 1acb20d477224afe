"""Monitors the loss: its trend, its value at each noise level, and the loss of held-out samples."""

from hookdiff_loss.plugin import LossMonitor

__all__ = ["LossMonitor"]
