"""Encoders of pictures and texts, the tables of latents and conditions, and the readers of these tables."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
