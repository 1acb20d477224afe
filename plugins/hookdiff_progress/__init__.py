"""A progress bar, or lines where there is no terminal."""

from hookdiff_progress.plugin import Progress

__all__ = ["Progress"]
