"""Finds errors in the data, the network or the optimisation of a training."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
