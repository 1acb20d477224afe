"""Sharded tensors in a checkpoint: each is cut into pieces, which lie in the files of the ranks that wrote them."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from operator import index
from typing import Any, ClassVar

import torch
from attrs import define
from torch import Tensor
from torch.utils._pytree import tree_map

from hookdiff.machine import counts, local, place

_LARGEST = 2**59  # values of a tensor: more cannot be addressed in bytes
_MOST_DIMENSIONS = 64

Start = tuple[int, ...]  # where a piece begins in the whole, in each dimension


@define(frozen=True)
class PieceLocation:
    """Where this rank's piece of a tensor lies in the whole tensor."""

    shape: tuple[int, ...]  # of the whole tensor
    dtype: torch.dtype
    start: Start
    is_mine: bool  # this rank writes its piece, which is not empty, and no earlier rank has it
    is_whole: bool  # the main rank writes the tensor in one piece

    @classmethod
    def of(cls, tensor: Tensor, is_whole: bool) -> PieceLocation:
        """Return the place of `tensor`, which may be sharded. Raises UserError if this rank's piece is not a block."""
        start = tuple(part.start for part in place(tensor))
        is_mine = counts(tensor) and local(tensor).numel() > 0
        return cls(tuple(tensor.shape), tensor.dtype, start, is_mine, is_whole)

    def manifest(self, starts: Mapping[str, Start]) -> dict[str, Any]:
        """Return the entry of the tensor in the manifest; `starts` has the start of its piece in each file."""
        return {"shape": self.shape, "dtype": str(self.dtype).removeprefix("torch."), "pieces": dict(starts)}


class Pieces(Tensor):
    """A whole tensor on the CPU that is put together from its pieces when an operation needs its values.

    The values are not kept, so at most one such tensor takes memory. A slice reads only the pieces that it overlaps.
    A slice within a single piece shares the memory of the piece, which is mapped from a file.
    """

    _pieces: Mapping[Start, Tensor]

    # Operations go to `__torch_dispatch__` alone, which returns plain tensors.
    __torch_function__: ClassVar[Any] = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, shape: tuple[int, ...], dtype: torch.dtype, pieces: Mapping[Start, Tensor]) -> Pieces:
        """Return the tensor of `shape` with `pieces`, by their starts; the pieces must fill the tensor."""
        make: Any = Tensor._make_wrapper_subclass
        tensor: Pieces = make(cls, shape, dtype=dtype, device="cpu")
        tensor._pieces = pieces
        return tensor

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.slice.Tensor and isinstance(args[0], Pieces):
            whole, dim, *bounds = args
            begin, end, step = slice(*bounds).indices(whole.shape[dim])
            if step == 1:
                return whole._narrowed(dim, begin, max(begin, end))
        read = lambda value: value.read() if isinstance(value, Pieces) else value  # noqa: E731
        return func(*tree_map(read, args), **tree_map(read, kwargs or {}))

    def __deepcopy__(self, memo: object) -> Tensor:
        return self.read().clone()

    def read(self) -> Tensor:
        """Return the tensor with its values."""
        if len(self._pieces) == 1:
            return next(iter(self._pieces.values()))
        tensor = torch.empty(self.shape, dtype=self.dtype)
        for start, piece in self._pieces.items():
            tensor[tuple(slice(at, at + size) for at, size in zip(start, piece.shape, strict=True))] = piece
        return tensor

    def _narrowed(self, dim: int, begin: int, end: int) -> Pieces:
        """Return the part of this tensor from `begin` to `end` in dimension `dim`."""
        inside = {}
        for start, piece in self._pieces.items():
            low, high = max(begin, start[dim]), min(end, start[dim] + piece.shape[dim])
            if low < high:
                moved = (*start[:dim], low - begin, *start[dim + 1 :])
                inside[moved] = piece.narrow(dim, low - start[dim], high - low)
        return Pieces((*self.shape[:dim], end - begin, *self.shape[dim + 1 :]), self.dtype, inside)


def pieced(name: str, saved: Mapping[str, Any], files: Mapping[str | None, Mapping[str, Tensor]]) -> Tensor:
    """Return the tensor `name` that a manifest describes as `saved`, with its pieces in `files`; nothing is copied.

    The manifest is not trusted. Raises ValueError, or another error of wrong types and names, unless the pieces are a
    grid that fills the tensor.
    """
    shape, dtype = tuple(index(size) for size in saved["shape"]), vars(torch)[saved["dtype"]]
    if min(shape, default=0) < 0 or len(shape) > _MOST_DIMENSIONS or prod(max(1, size) for size in shape) > _LARGEST:
        raise ValueError(f"{name} has an impossible shape")
    pieces = {}
    for file, at in saved["pieces"].items():
        start, piece = tuple(map(index, at)), files[file][name]
        if piece.dtype != dtype or piece.dim() != len(shape) or len(start) != len(shape) or start in pieces:
            raise ValueError(f"the piece of {name} in {file} is {piece.dtype} {tuple(piece.shape)} at {start}")
        pieces[start] = piece
    if not _fill(shape, pieces):
        raise ValueError(f"the pieces of {name} do not fill its shape {shape}, or overlap")
    return next(iter(pieces.values())) if len(pieces) == 1 else Pieces(shape, dtype, pieces)


def _fill(shape: tuple[int, ...], pieces: Mapping[Start, Tensor]) -> bool:
    """Return whether `pieces` are a grid that fills `shape`; ranks cut a tensor in no other way.

    The time is linear in the number of pieces. For blocks at any places it would be quadratic.
    """
    if not prod(shape):
        return not pieces
    cuts = [sorted({start[dim] for start in pieces}) for dim in range(len(shape))]
    if any(cut[:1] != [0] for cut in cuts) or prod(map(len, cuts)) != len(pieces):
        return False
    ends = [dict(zip(cut, [*cut[1:], size], strict=True)) for cut, size in zip(cuts, shape, strict=True)]
    return all(
        tuple(end[at] - at for end, at in zip(ends, start, strict=True)) == tuple(piece.shape)
        for start, piece in pieces.items()
    )
