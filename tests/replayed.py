"""A stand-in for CUDA graphs on a CPU: it notes the operations of torch, and repeats them at the same addresses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

READS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default, torch.ops.aten.equal.default}


class _Noting(TorchDispatchMode):
    """Notes each operation; at the end, puts back what they have changed of the tensors that were there before."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[tuple[Any, Any, Any, Any]] = []
        self._made: set[int] = set()  # storages
        self._before: dict[int, tuple[Tensor, Tensor]] = {}  # by storage: a changed tensor, and its values before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in READS:
            raise RuntimeError("operation not permitted when stream is capturing")
        for tensor in _written(func, args, kwargs):
            place = tensor.untyped_storage().data_ptr()
            if place not in self._made and place not in self._before:
                whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
                self._before[place] = whole, whole.clone()
        results = func(*args, **kwargs)
        given = {one.untyped_storage().data_ptr() for one in _tensors((args, kwargs))}
        self._made |= {one.untyped_storage().data_ptr() for one in _tensors(results)} - given
        # A step kept as it is would see the lists that it is called with change.
        self.noted.append((func, *tree_map(lambda one: one, (args, kwargs)), results))
        return results

    def put_back(self) -> None:
        for whole, values in self._before.values():
            whole.copy_(values)


def _tensors(tree: Any) -> list[Tensor]:
    return [one for one in tree_leaves(tree) if isinstance(one, Tensor)]


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    written = []
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written += _tensors(args[number] if number < len(args) else kwargs.get(argument.name))
    return written


class CpuRecorder:
    """Notes what `Recorder` records; a read by the host is an error, as there."""

    def __init__(self) -> None:
        self.num_replays = [0, 0]  # of the passes, of the update
        self._count = 0

    @contextmanager
    def aside(self) -> Iterator[None]:
        yield

    def renew(self) -> None:
        pass

    def record(self, work: Callable[[], object]) -> Callable[[], object]:
        noting = _Noting()
        with noting:
            work()
        noting.put_back()
        number, self._count = self._count % 2, self._count + 1

        def replay() -> None:
            self.num_replays[number] += 1
            with torch.no_grad():
                for func, args, kwargs, results in noting.noted:
                    again = func(*args, **kwargs)
                    for old, new in zip(tree_flatten(results)[0], tree_flatten(again)[0], strict=True):
                        if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                            old.copy_(new)

        return replay
