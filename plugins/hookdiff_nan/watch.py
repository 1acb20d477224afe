"""Looks for the first value that is not finite in a forward and a backward, from hooks on every module."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch
from attrs import define, field
from torch import Tensor, nn

from hookdiff_nan.stats import Stats, is_bad, stats, tensors


@define(frozen=True)
class Place:
    """A module, in the words of a report."""

    name: str  # empty: the whole model
    kind: str  # its class

    def __str__(self) -> str:
        return f"{self.name or 'the model'} ({self.kind})"

    def is_inside(self, outer: Place) -> bool:
        """Whether `outer` is another module, of which this one is a part."""
        return self.name != outer.name and (not outer.name or self.name.startswith(f"{outer.name}."))


@define(frozen=True)
class Forward:
    """The first module whose output is not finite."""

    place: Place
    inputs: list[Stats]
    outputs: list[Stats]
    inputs_finite: bool
    last_finite: Place | None  # the module that finished before it
    dtype: torch.dtype  # of the first output that is not finite


@define(frozen=True)
class Backward:
    """The first gradient that is not finite, in the order of the backward pass."""

    takers: list[Place]  # the innermost modules that took the tensor in: the gradient came out of one of them
    maker: Place | None  # the innermost module that put the tensor out
    parameter: str | None  # when it is the gradient of a parameter
    gradient: Stats


@define(eq=False)
class Watch:
    """In its `with`, notes what the modules of `model` do. Each look waits for the device."""

    model: nn.Module
    forward: Forward | None = field(default=None, init=False)
    backward: Backward | None = field(default=None, init=False)
    given: list[Stats] = field(factory=list, init=False)  # what the model was given last
    returned: list[Stats] = field(factory=list, init=False)  # what it made of it
    given_finite: bool = field(default=True, init=False)  # always
    returned_finite: bool = field(default=False, init=False)  # always, where it was called as a whole
    autocast: torch.dtype | None = field(default=None, init=False)  # in which the model computed, if in another
    _last: Place | None = field(default=None, init=False)
    # By node of the graph and output of it: the tensors themselves would keep all activations alive.
    _takers: dict[tuple[Any, int], list[Place]] = field(factory=dict, init=False)
    _makers: dict[tuple[Any, int], Place] = field(factory=dict, init=False)
    _handles: list[Any] = field(factory=list, init=False)

    def __enter__(self) -> Watch:
        for name, module in self.model.named_modules():
            place = Place(name, type(module).__name__)
            self._handles += [
                module.register_forward_pre_hook(self._before(place), with_kwargs=True),
                module.register_forward_hook(self._after(place), with_kwargs=True),
            ]
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                self._handles.append(parameter.register_hook(self._parameter(name)))  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self._takers, self._makers = [], {}, {}

    def _before(self, place: Place) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            if not place.name:
                device = next(module.parameters()).device.type
                on = torch.is_autocast_enabled(device)
                self.autocast = torch.get_autocast_dtype(device) if on else None
                taken = list(tensors((args, kwargs)))
                self.given = [stats(value) for value in taken]
                self.given_finite = self.given_finite and not any(map(is_bad, taken))
            for value in tensors((args, kwargs)):
                if (key := self._listen(value)) is not None:
                    self._takers[key].append(place)

        return hook

    def _after(self, place: Place) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            made = list(tensors(output))
            for value in made:
                if (key := self._listen(value)) is not None:
                    self._makers.setdefault(key, place)  # the innermost ends first
            if not place.name:
                self.returned_finite = not any(map(is_bad, made)) and (self.returned_finite or not self.returned)
                self.returned = [stats(value) for value in made]
            if self.forward is not None:
                return
            bad = [value for value in made if is_bad(value)]
            if bad:
                taken = list(tensors((args, kwargs)))
                finite = not any(map(is_bad, taken))
                inputs, outputs = [stats(value) for value in taken], [stats(value) for value in made]
                self.forward = Forward(place, inputs, outputs, finite, self._last, bad[0].dtype)
            self._last = place

        return hook

    def _listen(self, value: Tensor) -> tuple[Any, int] | None:
        """Have the gradient of `value` looked at, once; return what it is known by."""
        if value.grad_fn is None:
            return None
        key = value.grad_fn, value.output_nr
        if key not in self._takers:
            self._takers[key] = []
            value.register_hook(lambda gradient: self._look(key, gradient))  # type: ignore[no-untyped-call]
        return key

    def _look(self, key: tuple[Any, int], gradient: Tensor) -> None:
        if self.backward is None and is_bad(gradient):
            takers = self._takers.get(key, [])
            # A container takes in what its first module does: the innermost is told.
            inner = [one for one in takers if not any(other.is_inside(one) for other in takers)]
            self.backward = Backward(inner, self._makers.get(key), None, stats(gradient))

    def _parameter(self, name: str) -> Any:
        def hook(gradient: Tensor) -> None:
            if self.backward is None and is_bad(gradient):
                self.backward = Backward([], None, name, stats(gradient))

        return hook
