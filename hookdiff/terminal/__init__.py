"""Progress of long work, bars in a terminal or a notebook, and the spelling of times, speeds and sizes."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
