"""Keeps Python's garbage collector away from imported modules: hundreds of thousands of objects that stay."""

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

    Otherwise a step takes 0.2 s longer every now and then.
    """
    import_module("torch._dynamo")  # half of all modules, which the first optimizer would import later
    gc.freeze()
    gc.set_threshold(*_USUAL)
