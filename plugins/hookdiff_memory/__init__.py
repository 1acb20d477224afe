"""Logs the memory in use."""

from hookdiff_memory.plugin import Memory

__all__ = ["Memory"]
