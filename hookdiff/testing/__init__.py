"""Helpers for tests of plugins: small loops, checks of plugins and of trackers, ranks as threads, examples."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
