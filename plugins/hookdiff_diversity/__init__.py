"""Measures whether generated images are diverse, or repeat a few modes, each other, or training images."""

from hookdiff_diversity.plugin import Diversity

__all__ = ["Diversity"]
