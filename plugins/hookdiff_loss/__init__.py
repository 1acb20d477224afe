"""Watches the loss: its trend, its share at each noise level, and on samples that are held out."""

from hookdiff_loss.plugin import Loss

__all__ = ["Loss"]
