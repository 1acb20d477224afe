"""Files, locks and paths of a run directory.

The names are imported on first use, so that commands that only read a run directory do not wait for torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
