"""Finds the cause of a NaN, and keeps the step so that `hookdiff replay` can run it again."""

from hookdiff_nan.plugin import NaN

__all__ = ["NaN"]
