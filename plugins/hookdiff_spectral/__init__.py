"""Spectral normalisation: layers whose weight is divided by its largest singular value."""

from hookdiff_spectral.plugin import Spectral

__all__ = ["Spectral"]
