"""The memory that tensors take, counted on tensors that have a shape and no values."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def as_fakes(model: nn.Module, mode: FakeTensorMode, device: torch.device) -> nn.Module:
    """Put tensors without values in the place of all parameters and buffers of `model`, as if it were on `device`."""
    made: dict[Tensor, Tensor] = {}  # shared ones stay shared
    for module in model.modules():
        tables: tuple[Any, ...] = (module._parameters, module._buffers)
        for tensors in tables:
            for name, tensor in tensors.items():
                if tensor is not None:
                    if tensor not in made:
                        made[tensor] = _fake(tensor, mode, device)
                    tensors[name] = made[tensor]
    return model


def _fake(tensor: Tensor, mode: FakeTensorMode, device: torch.device) -> Tensor:
    with mode:
        empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def optimizer_bytes(optimizers: Iterable[Optimizer]) -> int:
    """Return the bytes of state that `optimizers` will have once they have made an update; they are left as they are.

    Where one cannot be run on fake tensors it is two numbers for each of its weights, as Adam has.
    """
    return sum(map(_optimizer_bytes, optimizers))


def _optimizer_bytes(optimizer: Optimizer) -> int:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    like = object.__new__(type(optimizer))
    vars(like).update(vars(optimizer))
    like.state = defaultdict(dict)
    like.param_groups = [
        {**group, "params": [_fake(p, mode, p.device) for p in group["params"]]} for group in optimizer.param_groups
    ]
    weights = [p for group in like.param_groups for p in group["params"] if p.requires_grad]
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    try:
        with mode:
            type(optimizer).step(like)  # not like.step: a scheduler may have put its own there
    except Exception:  # whatever an optimizer may raise
        return sum(2 * weight.numel() * weight.element_size() for weight in weights)
    return sum(storages(value for entry in like.state.values() for value in entry.values()).values())


def storages(tensors: Iterable[object], device: torch.device | None = None) -> dict[int, int]:
    """Return the bytes of each storage under those of `tensors` that are some, on the kind of `device` if it is given.

    Their keys are addresses.
    """
    found = (tensor for tensor in tensors if isinstance(tensor, Tensor))
    storages = (t.untyped_storage() for t in found if device is None or t.device.type == device.type)
    return {storage._cdata: storage.nbytes() for storage in storages}


class HeldBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows the bytes of all storages that are made under it, from first to last.

    Those that are `known`, by address, are there before, and have to stay; `before` is their sum. `now` and `most` are
    of the others.
    """

    def __init__(self, known: Mapping[int, int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.before = sum(known.values())
        self.now = self.most = 0
        self._alive = set(known)

    @classmethod
    def beside(cls, tensors: Iterable[object]) -> HeldBytes:
        """Follow what is made beside those of `tensors` that are some."""
        return cls(storages(tensors))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._add(tensor.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        address, size = storage._cdata, storage.nbytes()
        if address not in self._alive:
            self._alive.add(address)
            self.now += size
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self._drop, address, size).atexit = False

    def _drop(self, address: int, size: int) -> None:
        self._alive.remove(address)
        self.now -= size
