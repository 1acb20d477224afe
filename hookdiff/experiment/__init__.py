"""From a TOML file to a Loop: reads and checks the config, builds its parts, finds problems that building shows.

The names are imported on first use. `__init__.pyi` lists them.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
