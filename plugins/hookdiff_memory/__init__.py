"""Logs the memory in use, and estimates the memory of a config: `hookdiff memory`."""

from hookdiff_memory.plugin import Memory

__all__ = ["Memory"]
