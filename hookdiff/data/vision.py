"""Data sets of torchvision that yield pairs of a picture and an integer label."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy
import torch
from torch import Tensor

from hookdiff.data.wrong_sources import may_be_data
from hookdiff.disk.files import own_files
from hookdiff.disk.reading import only_files
from hookdiff.errors import UserError, nearest
from hookdiff.options.fields import Writes

# These classes unpack archives, write a file of their own, or make the folder that they read.
_WRITE_ALWAYS = ("Caltech101", "Caltech256", "Cityscapes", "INaturalist", "ImageNet", "PhotoTour")
_NOT_KEYS = ("transform", "target_transform", "transforms", "loader", "is_valid_file")


def vision(name: str) -> Callable[..., Vision]:
    """Return a function that makes the source of torchvision.datasets.NAME, with the signature of that class.

    Raises UserError if there is no such class.
    """
    from torchvision import datasets

    named = {each: getattr(datasets, each) for each in datasets.__all__}
    kinds = {each: kind for each, kind in named.items() if isinstance(kind, type) and may_be_data(kind)}
    if name not in kinds:
        raise UserError(f"torchvision.datasets has no {name!r} that is read without pickle{nearest(name, kinds)}")
    kind = kinds[name]
    signature = inspect.signature(kind)
    keys = [parameter for key, parameter in signature.parameters.items() if key not in _NOT_KEYS]
    download = signature.parameters.get("download")
    passes_on = any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values())
    if download or passes_on or name in _WRITE_ALWAYS:
        always = name in _WRITE_ALWAYS or (download and download.default)  # some download by default
        written = Annotated[str, Writes("" if always else "download")]
        keys = [key.replace(annotation=written) if key.name == "root" else key for key in keys]

    def make(**arguments: Any) -> Vision:
        if isinstance(root := arguments.get("root"), str) and (arguments.get("download") or name in _WRITE_ALWAYS):
            own_files(Path(root))
        with only_files(no_loops=True):
            return Vision(name, kind(**arguments))

    make.__signature__ = signature.replace(parameters=keys, return_annotation=Vision)  # type: ignore[attr-defined]
    return make


class Vision:
    """A map-style data set of torchvision as a source; `name` is its class.

    Raises ValueError unless each item is a picture with an integer or None.
    """

    one_at_a_time = True  # some sets read an open file, or draw from the default generator, in their __getitem__

    def __init__(self, name: str, data: Any) -> None:
        from PIL import Image

        self.name, self.data = f"torchvision:{name}", data
        item = data[0] if len(data) else None
        if not (isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], Image.Image)):
            kinds = ", ".join(type(each).__name__ for each in item) if isinstance(item, tuple) else type(item).__name__
            raise ValueError(f"{self.name} yields ({kinds}), expected a picture and an integer")
        self.labels = self._labels(item[1])
        names = getattr(data, "classes", None)
        fits = self.labels is not None and isinstance(names, Sequence) and len(names) > int(self.labels.max())
        self.classes = tuple(map(str, names)) if names is not None and fits else None

    def __len__(self) -> int:
        return len(self.data)

    def load(self, index: int) -> Any:
        with only_files():
            return self.data[index][0]

    def describe(self, index: int) -> str:
        return f"{self.name}[{index}]"

    def _labels(self, first: Any) -> Tensor | None:
        if first is None:
            return None
        for name in ("targets", "labels", "_labels"):  # most data sets keep their labels in one of these attributes
            integers = _integers(getattr(self.data, name, ()))
            # Some data sets keep the labels of the file, and yield them shifted to start at 0.
            if integers is not None and len(integers) == len(self.data) and integers[0] == first:
                return integers
        integers = _integers([self.data[index][1] for index in range(len(self.data))])
        if integers is None:
            raise ValueError(f"{self.name} yields labels of {type(first).__name__}, expected integers")
        return integers


def _integers(labels: Any) -> Tensor | None:
    """Return labels as int64; None unless all are integers."""
    try:
        array = numpy.asarray(labels)
    except (TypeError, ValueError):  # for lists of different lengths, say
        return None
    return torch.from_numpy(array.astype(numpy.int64)) if array.ndim == 1 and array.dtype.kind in "iu" else None
