"""Looks after a training: what is wrong with its data, network or optimisation, in words."""

from hookdiff_debug.plugin import Debug

__all__ = ["Debug"]
