"""Pictures for people to look at: grids with names, PNG files that say how they were made, animations.

The names are imported on first use, so that commands that only read pictures do not wait for torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
