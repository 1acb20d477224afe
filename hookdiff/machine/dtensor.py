"""Sharded tensors (DTensors): each rank holds a part; norms, sums and names are combined over the ranks.

A tensor that is not sharded is its own part, and costs nothing here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from hookdiff.errors import UserError
from hookdiff.machine.ranks import gathered, rank, summed


def is_sharded(tensor: Tensor) -> bool:
    """Return whether each rank holds only a part of `tensor` (a DTensor)."""
    return hasattr(tensor, "to_local")


def is_unsupported(error: Exception) -> bool:
    """Return whether torch has raised `error` because it has no rule for an operation on sharded tensors."""
    words = ("placement", "sharding strategy", "Sharding propagation")
    return isinstance(error, RuntimeError) and any(text in str(error) for text in words)


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of `tensor`, which shares its memory; a tensor that is not sharded is its own part."""
    return local_parts([tensor])[0] if is_sharded(tensor) else tensor


def local_parts(tensors: Iterable[Any]) -> list[Tensor]:
    """Return this rank's part of each of `tensors`, as `local` does."""
    with torch.no_grad():  # entered once for all tensors, since it costs more than the calls
        return [tensor.to_local() if is_sharded(tensor) else tensor for tensor in tensors]


@torch.no_grad()
def whole(tensor: Tensor) -> Tensor:
    """Return `tensor` with the parts of all ranks; for a sharded tensor all ranks must call this."""
    placed: Any = tensor
    full: Tensor = placed.detach().full_tensor() if is_sharded(tensor) else tensor
    return full


def _axes(tensor: Tensor) -> list[tuple[Any, int, int]]:
    """Return for each axis of the mesh: the placement of a sharded `tensor`, the number of parts, this rank's part."""
    placed: Any = tensor
    mesh = placed.device_mesh
    return list(zip(placed.placements, mesh.shape, mesh.get_coordinate(), strict=True))


def counts(tensor: Tensor) -> bool:
    """Return whether this rank's part of `tensor` counts in a sum over all ranks: each entry counts on one rank."""
    if not is_sharded(tensor):
        return rank() == 0
    return all(at == 0 or placement.is_shard() for placement, _, at in _axes(tensor))


def place(tensor: Tensor) -> tuple[slice, ...]:
    """Return where this rank's part of `tensor` is in the whole: a slice for each dimension.

    Raises:
        UserError: for a part that is no block of the tensor.
    """
    ranges = [range(size) for size in tensor.shape]
    for placement, num, at in _axes(tensor) if is_sharded(tensor) else []:
        kind = type(placement).__name__
        if kind not in ("Replicate", "Shard"):  # not `is_shard`, which is true of a strided shard, too
            raise UserError(f"a tensor of shape {tuple(tensor.shape)} is placed as {placement}; use Shard or Replicate")
        if kind == "Shard":  # as torch.chunk does, but with empty parts where there are too few rows
            rows = ranges[placement.dim]
            most = -(-len(rows) // num)
            ranges[placement.dim] = rows[at * most : (at + 1) * most]
    return tuple(slice(rows.start, rows.stop) for rows in ranges)


def layout(tensor: Tensor) -> object:
    """Return the mesh and placements of `tensor`, to compare and to hash; None if it is not sharded."""
    placed: Any = tensor
    return (placed.device_mesh, tuple(placed.placements)) if is_sharded(tensor) else None


@torch.no_grad()
def fill_(tensor: Tensor, values: Tensor) -> None:
    """Copy `values` into this rank's part of `tensor`. `values` are whole, or sharded in the same way."""
    if is_sharded(tensor):
        tensor, values = local(tensor), local(values) if is_sharded(values) else values[place(tensor)]
    elif tensor.layout == torch.strided and not tensor.is_contiguous():
        from hookdiff.machine.overlap import writable

        tensor, values = writable(tensor, values)
    tensor.copy_(values)


def norms(tensors: Sequence[Tensor], dtype: torch.dtype, held: Sequence[Tensor] | None = None) -> Tensor:
    """Return the L2 norm of each of `tensors`, computed in `dtype`: (tensors,).

    A sharded tensor has the norm of the whole, and all ranks must call this. `held` replaces this rank's parts of
    the tensors, such as by their differences to earlier weights.
    """
    # The set of types first, since a look at each of hundreds of gradients takes as long as a small kernel.
    if set(map(type, tensors)) != {Tensor} and any(map(is_sharded, tensors)):
        return summed(squares(tensors, dtype, held)).sqrt().to(dtype)
    parts = list(tensors if held is None else held)
    return torch.stack(torch._foreach_norm(parts, 2, dtype)) if parts else torch.zeros(0, dtype=dtype)


def squares(tensors: Sequence[Tensor], dtype: torch.dtype, held: Sequence[Tensor] | None = None) -> Tensor:
    """Return this rank's share of the squared L2 norm of each of `tensors`: float64, (tensors,).

    The sum of the shares of all ranks is the squared norm. Norms are computed in `dtype`; `held` is as in `norms`.
    """
    if not tensors:
        return torch.zeros(0, dtype=torch.float64)
    parts = local_parts(tensors) if held is None else list(held)
    squared = torch.stack(torch._foreach_norm(parts, 2, dtype)).double().square()
    counted = _counted(tensors)
    return squared if all(counted) else squared * torch.tensor(counted).to(squared)


def _counted(tensors: Sequence[Tensor]) -> list[bool]:
    """Return `counts(tensor)` for each of `tensors`, asked once for each layout."""
    known = {where: counts(tensor) for where, tensor in {layout(tensor): tensor for tensor in tensors}.items()}
    return [known[layout(tensor)] for tensor in tensors]


def total(tensors: Sequence[Tensor], numbers: Tensor) -> Tensor:
    """Return the sum of `numbers` (tensors,), which this rank has computed from its parts of `tensors`: scalar.

    For sharded tensors it is the sum over all ranks, which must all call this.
    """
    if not any(map(is_sharded, tensors)):
        return numbers.sum()
    return summed((numbers * torch.tensor(_counted(tensors)).to(numbers)).sum())


def names_of_all_ranks(names: list[str], tensors: Iterable[Tensor]) -> list[str]:
    """Return the `names` of all ranks, each once, if one of `tensors` is sharded; all ranks must call this then.

    Otherwise all ranks have looked at the same tensors, and each returns its own `names`.
    """
    if not any(map(is_sharded, tensors)):
        return names
    return list(dict.fromkeys(name for part in gathered(names) for name in part))
