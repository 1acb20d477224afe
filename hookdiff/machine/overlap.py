"""Tensors in which several entries share a place in memory, such as those made by `expand` and `unfold`.

Torch reads them as any other tensor. It refuses to write to them, or silently writes a shared place several times.
"""

import torch
from torch import Tensor


def is_overlapping(tensor: Tensor) -> bool:
    """Return whether entries of `tensor` share a place in memory; it can miss only tensors of `as_strided`."""
    if tensor.layout != torch.strided or not tensor.numel():
        return False
    is_expanded = any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return is_expanded or tensor.numel() > _span(tensor)


def writable(tensor: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return a target and a source: after `target.copy_(source)`, `tensor` holds `values`, which have its shape.

    The target of an overlapping tensor is its memory, so that other tensors of this memory show the values too. If
    `values` have several numbers for one place, `tensor` gets memory of its own.
    """
    if not is_overlapping(tensor):
        return tensor, values
    memory = tensor.as_strided((_span(tensor),), (1,))
    places = torch.arange(len(memory), device=tensor.device).as_strided(tensor.shape, tensor.stride())
    filled, wanted = memory.clone(), values.to(memory)
    filled[places] = wanted
    if torch.equal(filled[places], wanted):
        return memory, filled
    tensor.data = torch.empty_like(tensor, memory_format=torch.contiguous_format)
    return tensor, values


def _span(tensor: Tensor) -> int:
    """Return the number of elements in memory from the first to the last of `tensor`."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
