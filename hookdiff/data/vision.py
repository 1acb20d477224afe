"""Any data set of torchvision that yields a picture and a whole number."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hookdiff.errors import UserError, nearest

_NOT_KEYS = ("transform", "target_transform", "transforms", "loader", "is_valid_file")


def vision(name: str) -> Callable[..., Vision]:
    """Return a function that makes the source of torchvision.datasets.NAME; its signature is the class's own.

    Raises UserError when there is no such class.
    """
    from torchvision import datasets

    kind = getattr(datasets, name, None)
    if not (isinstance(kind, type) and hasattr(kind, "__getitem__")):
        known = [each for each in datasets.__all__ if isinstance(getattr(datasets, each), type)]
        raise UserError(f"torchvision.datasets has no {name!r}{nearest(name, known)}")
    signature = inspect.signature(kind)
    keys = [parameter for key, parameter in signature.parameters.items() if key not in _NOT_KEYS]

    def make(**arguments: Any) -> Vision:
        return Vision(name, kind(**arguments))

    made: Any = make
    made.__signature__ = signature.replace(parameters=keys, return_annotation=Vision)
    return make


class Vision:
    """A map-style `data` set of torchvision, called `name`, as a source.

    Raises ValueError when its items are no pairs of a picture and a whole number, or None.
    """

    one_at_a_time = True  # some read an open file or draw from the default generator in their __getitem__

    def __init__(self, name: str, data: Any) -> None:
        from PIL import Image

        self.name, self.data = f"torchvision:{name}", data
        item = data[0] if len(data) else None
        if not (isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], Image.Image)):
            kinds = ", ".join(type(each).__name__ for each in item) if isinstance(item, tuple) else type(item).__name__
            raise ValueError(f"{self.name} yields ({kinds}), expected a picture and a whole number")
        self.labels = self._labels(item[1])
        names = getattr(data, "classes", None)
        fits = self.labels is not None and isinstance(names, Sequence) and len(names) > int(self.labels.max())
        self.classes = tuple(map(str, names)) if names is not None and fits else None

    def __len__(self) -> int:
        return len(self.data)

    def load(self, index: int) -> Any:
        """Return the picture, decoded by torchvision."""
        return self.data[index][0]

    def describe(self, index: int) -> str:
        """Return the name of the set and the position in it."""
        return f"{self.name}[{index}]"

    def _labels(self, first: Any) -> Tensor | None:
        if first is None:
            return None
        if not _is_whole(first):
            raise ValueError(f"{self.name} yields labels of {type(first).__name__}, expected whole numbers")
        for name in ("targets", "labels", "_labels"):  # what most of them call theirs
            found = getattr(self.data, name, None)
            if found is None or len(found) != len(self.data) or not all(_is_whole(label) for label in found):
                continue
            if int(found[0]) == int(first):  # and not as a file has it, before torchvision counts from 0
                return torch.tensor([int(label) for label in found])
        return torch.tensor([int(self.data[index][1]) for index in range(len(self.data))])


def _is_whole(label: Any) -> bool:
    try:
        return bool(int(label) == label)
    except (TypeError, ValueError, RuntimeError):
        return False
