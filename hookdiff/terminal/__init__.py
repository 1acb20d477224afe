"""Work that takes long and says how far it is, and bars at the bottom of a terminal or in a notebook."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
