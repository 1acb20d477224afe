"""Features of images: their spaces, the Fréchet distance, nearest neighbours, and the features of a data set."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
