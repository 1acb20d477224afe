"""Muon for the matrices of a model, and AdamW for the rest: `[optimizer] use = "muon"`."""

from hookdiff_muon.optimizer import muon

__all__ = ["muon"]
