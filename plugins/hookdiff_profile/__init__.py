"""Shows where the time of a training step goes, and measures what would make it faster: `hookdiff profile`."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
