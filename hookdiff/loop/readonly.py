"""Attributes that everybody may read, and only their object may set."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class ReadOnly:
    """The base of a class with attributes that are set in `__init__`, and after that only by its own methods.

    Declare them `Final`, so that a type checker refuses an assignment too. The methods use `_set` and `_lending`.
    """

    def __setattr__(self, name: str, value: object) -> None:
        if name in vars(self) or vars(self).get("_is_made"):
            raise AttributeError(f"{type(self).__name__}.{name} is read-only; change it by a method")
        super().__setattr__(name, value)

    def _set(self, **attributes: Any) -> None:
        vars(self).update(attributes)

    @contextmanager
    def _lending(self, **attributes: Any) -> Iterator[None]:
        before = {name: vars(self)[name] for name in attributes}
        self._set(**attributes)
        try:
            yield
        finally:
            self._set(**before)
