"""Sets the learning rate, by schedules that are pure functions of the step."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
