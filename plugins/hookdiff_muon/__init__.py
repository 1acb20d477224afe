"""Muon for matrices and kernels of a model, and AdamW for the rest: `[optimizer] use = "muon"`."""

from hookdiff_muon.build import muon
from hookdiff_muon.optimizer import Muon

__all__ = ["Muon", "muon"]
