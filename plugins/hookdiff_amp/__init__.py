"""Trains in mixed precision: autocast, with a gradient scaler for float16."""

from hookdiff_amp.plugin import AMP

__all__ = ["AMP"]
