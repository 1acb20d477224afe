"""The machine, and the processes that train together: ranks, sharded tensors, memory, seeds."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
