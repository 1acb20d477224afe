"""Spectral normalisation: weights divided by their largest singular value."""

from hookdiff_spectral.plugin import Spectral

__all__ = ["Spectral"]
