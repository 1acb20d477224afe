"""Reads image data sets of Hugging Face: `source = "huggingface"`."""

from hookdiff_huggingface.source import HuggingFace

__all__ = ["HuggingFace"]
