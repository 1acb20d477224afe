"""Shows a progress bar on a terminal, and prints lines of text elsewhere."""

from hookdiff_progress.plugin import ProgressBar

__all__ = ["ProgressBar"]
