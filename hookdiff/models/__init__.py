"""Networks of any library: the loss and the samples that are asked of one, its weights, its optimizers' state."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
