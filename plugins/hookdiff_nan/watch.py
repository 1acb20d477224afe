"""Finds the first value of the passes of a step that is not finite, with hooks on every module."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from attrs import define, field
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


def is_bad(value: Tensor) -> bool:
    """Whether `value` holds a NaN or an infinity."""
    return not bool(value.detach().isfinite().all())


def tensors(node: Any) -> list[Tensor]:
    """Return the tensors among the arguments or outputs of a module, which may be nested."""
    return [leaf for leaf in tree_leaves(node) if isinstance(leaf, Tensor)]


def describe(values: Tensor) -> str:
    """Return type, shape, number of NaN and infinities, and range of the finite `values`, as text."""
    values = values.detach()
    real = torch.view_as_real(values) if values.is_complex() else values
    counts = ((int(real.isnan().sum()), "NaN"), (int(real.isinf().sum()), "inf"))
    bad = " and ".join(f"{count} {kind}" for count, kind in counts if count)
    text = bad or "empty"
    finite = real[real.isfinite()].cpu().double()
    if len(finite):
        low, high = finite.min().item(), finite.max().item()
        text = f"{low:.4g} to {high:.4g}, mean {finite.mean().item():.4g}, largest {max(abs(low), abs(high)):.4g}"
        text = f"{bad}, the rest {text}" if bad else text
    sides = " x ".join(map(str, values.shape)) or "scalar"
    return f"{name_of(values.dtype)} {sides}: {text}"


def name_of(dtype: torch.dtype) -> str:
    """Return the name of `dtype`, such as "float32"."""
    return str(dtype).removeprefix("torch.")


@define(frozen=True)
class NamedModule:
    """The name and the class of a module, for reports."""

    name: str  # empty: the whole model
    kind: str  # its class

    def __str__(self) -> str:
        return f"{self.name or 'the model'} ({self.kind})"

    def is_inside(self, outer: NamedModule) -> bool:
        """Whether this module is a part of `outer`, but not `outer` itself."""
        return self.name != outer.name and (not outer.name or self.name.startswith(f"{outer.name}."))


@define(frozen=True)
class Forward:
    """The first module with an output that is not finite."""

    place: NamedModule
    inputs: list[str]  # each input as text, from `describe`
    outputs: list[str]
    inputs_finite: bool
    has_nan: bool  # an output holds a NaN, not only infinities
    last_finite: NamedModule | None  # the module that finished before it
    dtype: torch.dtype  # dtype of the first output that is not finite


@define(frozen=True)
class Backward:
    """The first gradient that is not finite, in the order of the backward pass."""

    takers: list[NamedModule]  # the innermost modules with the tensor as an input: the gradient came from one of them
    maker: NamedModule | None  # the innermost module with the tensor as an output
    parameter: str | None  # its name, if it is the gradient of a parameter
    gradient: str  # text of `describe`


@define(eq=False)
class Watch:
    """Records the first bad output and the first bad gradient in a `with` block. Each check waits for the device.

    `begin` forgets a micro-batch with only finite values. After the first other micro-batch, nothing more is recorded.
    """

    model: nn.Module
    others: Sequence[tuple[str, Tensor]] = ()  # parameters of other modules, with their names
    bad_loss: bool = field(default=False, init=False)  # the loss of the last micro-batch is not finite
    forward: Forward | None = field(default=None, init=False)
    backward: Backward | None = field(default=None, init=False)
    given: list[str] = field(factory=list, init=False)  # the last arguments of the model
    returned: list[str] = field(factory=list, init=False)  # the last outputs of the model
    given_finite: bool = field(default=True, init=False)  # all arguments of the model were finite
    returned_finite: bool = field(default=False, init=False)  # the model was called, and all its outputs were finite
    autocast: torch.dtype | None = field(default=None, init=False)  # autocast's dtype in the model's forward, if any
    _last: NamedModule | None = field(default=None, init=False)
    # Keys are a graph node and its output number: keys that hold tensors would keep all activations alive.
    _takers: dict[tuple[Any, int], list[NamedModule]] = field(factory=dict, init=False)
    _makers: dict[tuple[Any, int], NamedModule] = field(factory=dict, init=False)
    _handles: list[Any] = field(factory=list, init=False)
    _listeners: list[Any] = field(factory=list, init=False)  # handles of hooks on values of the micro-batch

    def begin(self) -> None:
        """Begin a micro-batch, and forget the micro-batch before. Does nothing outside of the `with`."""
        if self._handles:
            self._forget()

    def finish(self, loss: Tensor) -> None:
        """End a micro-batch, or all passes, with this `loss`; if a value was not finite, record nothing more."""
        if self._handles:
            self.bad_loss = is_bad(loss)
            if self.bad_loss or self.backward:
                self._close()

    def _forget(self) -> None:
        self._let_go()
        self.forward, self.backward = None, None
        self.autocast, self._last = None, None
        self.given, self.returned = [], []
        self.bad_loss, self.given_finite, self.returned_finite = False, True, False

    def __enter__(self) -> Watch:
        self._forget()
        for name, module in self.model.named_modules():
            place = NamedModule(name, type(module).__name__)
            self._handles += [
                module.register_forward_pre_hook(partial(self._before, place), with_kwargs=True),
                module.register_forward_hook(partial(self._after, place), with_kwargs=True),
            ]
        for name, parameter in (*self.model.named_parameters(), *self.others):
            if parameter.requires_grad:
                hook = partial(self._look, name, None)
                self._handles.append(parameter.register_hook(hook))  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def _close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._let_go()

    def _let_go(self) -> None:
        # A hook and the graph node of its value hold each other, and with them the whole graph. The graph's ends at
        # the parameters remember the CUDA stream of these passes, so no step could be captured on another stream.
        for listener in self._listeners:
            listener.remove()
        self._listeners, self._takers, self._makers = [], {}, {}

    def _before(self, place: NamedModule, module: nn.Module, args: Any, kwargs: Any) -> None:
        given = tensors((args, kwargs))
        if not place.name:
            device = next(module.parameters()).device.type
            self.autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
            self.given = [describe(value) for value in given]
            self.given_finite = self.given_finite and not any(map(is_bad, given))
        for value in given:
            if (key := self._listen(value)) is not None:
                self._takers[key].append(place)

    def _after(self, place: NamedModule, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        made = tensors(output)
        for value in made:
            if (key := self._listen(value)) is not None:
                self._makers.setdefault(key, place)  # the innermost module returns first
        bad = [value for value in made if is_bad(value)]
        if not place.name:
            self.returned_finite = not bad and (self.returned_finite or not self.returned)
            self.returned = [describe(value) for value in made]
        if self.forward is not None:
            return
        if bad:
            given = tensors((args, kwargs))
            inputs, outputs = [describe(value) for value in given], [describe(value) for value in made]
            has_nan = any(bool(value.isnan().any()) for value in bad)
            is_finite = not any(map(is_bad, given))
            self.forward = Forward(place, inputs, outputs, is_finite, has_nan, self._last, bad[0].dtype)
        self._last = place

    def _listen(self, value: Tensor) -> tuple[Any, int] | None:
        """Check the gradient of `value` once it is computed; return the key of `value`."""
        if value.grad_fn is None:
            return None
        key = value.grad_fn, value.output_nr
        if key not in self._takers:
            self._takers[key] = []
            self._listeners.append(value.register_hook(partial(self._look, None, key)))  # type: ignore[no-untyped-call]
        return key

    def _look(self, parameter: str | None, key: tuple[Any, int] | None, gradient: Tensor) -> None:
        if self.backward is None and is_bad(gradient):
            takers, maker = (self._takers.get(key, []), self._makers.get(key)) if key else ([], None)
            # A container has the same input as its first module, so only the innermost is reported.
            inner = [taker for taker in takers if not any(other.is_inside(taker) for other in takers)]
            self.backward = Backward(inner, maker, parameter, describe(gradient))
