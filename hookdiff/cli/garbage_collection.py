"""Keeps Python's garbage collector from checking the hundreds of thousands of objects of imported modules."""

import gc
from functools import cache
from importlib import import_module

_USUAL = gc.get_threshold()
_RARE = 5_000  # new objects between two collections; every hundredth collection covers all objects


@cache
def collect_rarely() -> None:
    """Collect garbage rarely from now on, since it took a quarter of the time of the import of torch."""
    gc.set_threshold(_RARE, *_USUAL[1:])


@cache
def freeze_modules() -> None:
    """Collect garbage as usual from now on, but never again among the objects that exist now.

    Otherwise some steps take 0.2 s longer.
    """
    import_module("torch._dynamo")  # imports half of all modules; the first optimizer needs them
    gc.freeze()
    gc.set_threshold(*_USUAL)
