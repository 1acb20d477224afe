"""The requirements for a class or function that a config names. The object is checked, but not called."""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Sequence
from typing import Any

from attrs import define
from torch import nn
from torch.optim import Optimizer

from hookdiff.data.wrong_sources import may_be_data
from hookdiff.errors import PluginError
from hookdiff.options.structure import result_of

_BUILD_BY_CLASSES = ("torch", "diffusers")  # some of their functions turn Python source into a module


@define(frozen=True)
class PartRequirement:
    """The requirement for a place: a class, or a function that is annotated to return such an object."""

    takes: str  # the class in words
    annotation: str  # that a function needs
    fits: Callable[[type], bool]
    takes_several: bool = False  # a function may return a list or a tuple

    def check(self, path: str, target: object) -> None:
        """Raise PluginError unless `target`, imported from `path`, fits."""
        if isinstance(target, type):
            if not self.fits(target):
                raise PluginError(f"{path} is no {self.takes}; name one")
            return
        if isinstance(target, types.ModuleType) or not callable(target):
            raise PluginError(f"{path} is a {type(target).__name__}, expected a class or a function")
        library = str(getattr(target, "__module__", "")).partition(".")[0]
        if library in _BUILD_BY_CLASSES:
            raise PluginError(f"{path} is a function of {library}, expected a {self.takes}")
        if not self._is_promised(result_of(target)):
            raise PluginError(
                f"{path} is not annotated to return a {self.takes}: if it is a function that does, write "
                f"`-> {self.annotation}` behind its arguments"
            )

    def _is_promised(self, result: Any) -> bool:
        kind, inner = typing.get_origin(result) or result, typing.get_args(result)
        if kind in (typing.Union, types.UnionType):
            return all(map(self._is_promised, inner))
        if self.takes_several and kind in (list, tuple, Sequence):
            return all(self._is_promised(each) for each in inner if each is not Ellipsis)
        return isinstance(kind, type) and self.fits(kind)


MODEL = PartRequirement("subclass of torch.nn.Module", "torch.nn.Module", lambda kind: issubclass(kind, nn.Module))
OPTIMIZER = PartRequirement(
    "subclass of torch.optim.Optimizer",
    "torch.optim.Optimizer",
    lambda kind: issubclass(kind, Optimizer),
    takes_several=True,
)
SOURCE = PartRequirement("data set with a length and [i]", "hookdiff.InMemory", may_be_data)
