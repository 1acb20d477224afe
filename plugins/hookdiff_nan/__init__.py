"""Finds the cause of a NaN, and keeps the step so that `hookdiff replay` can run it again."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
