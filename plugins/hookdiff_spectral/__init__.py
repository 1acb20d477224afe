"""Divides weights by their largest singular value: spectral normalisation."""

from hookdiff_spectral.plugin import Spectral

__all__ = ["Spectral"]
