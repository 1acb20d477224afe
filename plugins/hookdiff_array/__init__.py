"""Reads images from one numpy file: `source = "array"`."""

from hookdiff_array.source import Arrays

__all__ = ["Arrays"]
