"""Statistics of gradients and updates, and what is wrong with them in words."""

from hookdiff_gradients.diagnosis import Finding, Limits, Numbers, diagnose, diagnose_nan
from hookdiff_gradients.plugin import GradientMonitor

__all__ = ["Finding", "GradientMonitor", "Limits", "Numbers", "diagnose", "diagnose_nan"]
