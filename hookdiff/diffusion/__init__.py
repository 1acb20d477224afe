"""Diffusion without a trainer: processes, predictions, weightings, the objective and the samplers, as parts."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
