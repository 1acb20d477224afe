"""Writes one HTML file about a run, or about several: progress, curves, pictures, events, config and diagnoses.

The plugin is imported on first use, so that the command `hookdiff report` does not wait for torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
