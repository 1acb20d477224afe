"""Samples better by moving away from what the network made earlier in its training."""

from hookdiff_autoguidance.plugin import Autoguidance

__all__ = ["Autoguidance"]
