"""From a TOML file to a Loop: reads and checks the config, builds its parts and reports their problems."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
