"""Bases and tools of plugins: periodic work, generated images, trackers, trial passes, charts, sheets of pictures."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
