"""The files of a run directory: each file has a module here, which writes and reads it."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
