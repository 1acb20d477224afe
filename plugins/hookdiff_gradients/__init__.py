"""Measures gradients and updates, and diagnoses them."""

from hookdiff_gradients.diagnosis import Limits, Numbers, diagnose_gradients, diagnose_nan
from hookdiff_gradients.plugin import GradientMonitor

__all__ = ["GradientMonitor", "Limits", "Numbers", "diagnose_gradients", "diagnose_nan"]
