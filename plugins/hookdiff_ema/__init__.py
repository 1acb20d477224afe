"""Exponential and power-function moving averages of the weights, samples made with them, and others made afterwards."""

from hookdiff_ema.plugin import EMA

__all__ = ["EMA"]
