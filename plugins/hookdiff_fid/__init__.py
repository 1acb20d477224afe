"""Measures the Fréchet distance of generated images to the data (FID, for features of Inception), and more."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
