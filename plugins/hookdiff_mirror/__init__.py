"""Rebuilds what a tracker shows of a run, from the run directory."""

from hookdiff_mirror.rebuild import find_sink, rebuild

__all__ = ["find_sink", "rebuild"]
