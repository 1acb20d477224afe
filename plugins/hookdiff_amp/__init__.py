"""Mixed precision: autocast, and a gradient scaler where float16 needs one."""

from hookdiff_amp.plugin import AMP

__all__ = ["AMP"]
