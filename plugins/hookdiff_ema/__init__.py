"""An exponential moving average of the weights, and samples made with it."""

from hookdiff_ema.plugin import EMA, warmup_decay

__all__ = ["EMA", "warmup_decay"]
