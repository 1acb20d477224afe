"""Counts of the memory that tensors take."""

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hookdiff.models.optimizer_copy import copy_optimizer


def as_fake(tensor: Tensor, mode: FakeTensorMode, device: torch.device) -> Tensor:
    """Return a tensor or parameter on `device` with the shape of `tensor` and no values."""
    with mode:
        empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def optimizer_bytes(optimizers: Iterable[Optimizer]) -> int:
    """Return the bytes of state that `optimizers` will have after an update, without changing them.

    For an optimizer that cannot run on fake tensors, two numbers for each weight are counted, as in Adam.
    """
    mode, total = FakeTensorMode(allow_non_fake_inputs=True), 0

    def copied(weight: Tensor) -> Tensor:
        fake = as_fake(weight, mode, weight.device)
        fake.grad = torch.zeros_like(fake) if fake.requires_grad else None
        return fake

    for optimizer in optimizers:
        tried = copy_optimizer(optimizer, optimizer.param_groups, copied)
        try:
            with mode:
                tried.step()
            total += sum(storages(value for entry in tried.state.values() for value in entry.values()).values())
        except Exception:  # an optimizer may raise anything
            weights = (weight for group in optimizer.param_groups for weight in group["params"])
            total += sum(2 * weight.nbytes for weight in weights if weight.requires_grad)
    return total


def storages(leaves: Iterable[object], device: torch.device | None = None) -> dict[int, int]:
    """Return the bytes of the storages of tensors in `leaves`, by address; with a `device`, only those of its type."""
    tensors = (leaf for leaf in leaves if isinstance(leaf, Tensor))
    on_device = (tensor for tensor in tensors if device is None or tensor.device.type == device.type)
    return {storage._cdata: storage.nbytes() for storage in (tensor.untyped_storage() for tensor in on_device)}


class HeldBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of storages that are made in the `with`: `now` is the present sum, `most` its peak.

    Storages with an address in `known` existed before: they are not counted, and must not be freed.
    """

    def __init__(self, known: Iterable[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.most = 0
        self._alive = set(known)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in filter(torch.is_tensor, tree_leaves(result)):
            storage = tensor.untyped_storage()
            address, size = storage._cdata, storage.nbytes()
            if address not in self._alive:
                self._alive.add(address)
                self.now += size
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self._drop, address, size).atexit = False
        return result

    def _drop(self, address: int, size: int) -> None:
        self._alive.remove(address)
        self.now -= size
