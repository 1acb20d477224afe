"""Clips gradients: by a norm, by a threshold that follows the run, by value, or by output unit."""

from hookdiff_clip.plugin import Clip
from hookdiff_clip.rules import AGC, Adaptive, Norm, Percentile, Rule, Value, ZScore

__all__ = ["AGC", "Adaptive", "Clip", "Norm", "Percentile", "Rule", "Value", "ZScore"]
