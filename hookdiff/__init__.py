"""A small, hook-based trainer for diffusion models: the names that most scripts and plugins need.

They are imported on first use, so that `hookdiff --help` does not wait for torch. `__init__.pyi` lists them.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
