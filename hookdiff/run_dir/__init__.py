"""The formats of a run directory's files: who writes them, beside who reads them."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
