"""Options of plugins and parts: their help, ranges and types, parts chosen by name, and "every 2 epochs"."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
