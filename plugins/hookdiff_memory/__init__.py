"""The memory in use, logged."""

from hookdiff_memory.plugin import Memory

__all__ = ["Memory"]
