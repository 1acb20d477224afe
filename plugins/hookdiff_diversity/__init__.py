"""Measures whether generated images are diverse, or repeat a few modes, one another, or the training set."""

from hookdiff_diversity.plugin import Diversity

__all__ = ["Diversity"]
