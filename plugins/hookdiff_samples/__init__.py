"""Shows grids of images that are always generated from the same noise."""

from hookdiff_samples.plugin import SampleGrid

__all__ = ["SampleGrid"]
