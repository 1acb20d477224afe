"""Keeps Python from looking for garbage among imported modules, which are hundreds of thousands of objects and stay."""

import gc
from functools import cache
from importlib import import_module

_USUAL = gc.get_threshold()
_RARE = 5_000  # new objects between two searches; every hundredth is one among all objects


@cache
def collect_rarely() -> None:
    """Look for garbage rarely from now on: the search took a quarter of the time in which torch is imported."""
    gc.set_threshold(_RARE, *_USUAL[1:])


@cache
def freeze_modules() -> None:
    """Look for garbage as usual from now on, but never again among what there is now.

    Otherwise a step takes 0.2 s longer every now and then.
    """
    import_module("torch._dynamo")  # as the first optimizer would: half of all modules
    gc.freeze()
    gc.set_threshold(*_USUAL)
