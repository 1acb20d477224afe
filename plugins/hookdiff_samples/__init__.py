"""Grids of samples, always from the same noise."""

from hookdiff_samples.plugin import SampleGrid

__all__ = ["SampleGrid"]
