"""What plugins share: base classes, generated images, their features, charts, sheets of pictures, helpers for tests."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
