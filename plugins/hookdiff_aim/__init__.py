"""Tracks runs in Aim."""

from hookdiff_aim.plugin import Aim

__all__ = ["Aim"]
