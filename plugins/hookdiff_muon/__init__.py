"""Trains matrices and kernels of a model by Muon, and the rest by AdamW: `[optimizer] use = "muon"`."""

from hookdiff_muon.build import muon
from hookdiff_muon.optimizer import Muon

__all__ = ["Muon", "muon"]
