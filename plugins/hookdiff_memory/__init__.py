"""Logs the memory in use, and estimates the memory of a config: `hookdiff memory`."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
