"""Finds errors in the data, the network or the optimisation of a training."""

from hookdiff_debug.plugin import Debug

__all__ = ["Debug"]
