"""What caused a NaN, kept so that `hookdiff replay` can run that very step again."""

from hookdiff_nan.plugin import NaN

__all__ = ["NaN"]
