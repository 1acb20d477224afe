"""Keeps exponential and power-function moving averages of the weights."""

from hookdiff_ema.plugin import EMA
from hookdiff_ema.profiles import NoWarmup, Power, Ratio, Warmup

__all__ = ["EMA", "NoWarmup", "Power", "Ratio", "Warmup"]
