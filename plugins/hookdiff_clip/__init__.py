"""Gradient clipping by the global norm, fixed or adaptive."""

from hookdiff_clip.plugin import Clip

__all__ = ["Clip"]
