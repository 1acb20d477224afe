"""Ranks: which process this is of those that train together, what they agree on, and their parts of a tensor.

This is the only module of the core that knows torch.distributed. Alone, a process is rank 0 of 1, and nothing here
costs anything.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed

from hookdiff.errors import UserError

Value = TypeVar("Value")

TIMEOUT = timedelta(minutes=10)  # for which a rank waits in a step for the others
_PATIENCE = timedelta(hours=4)  # the same between steps, where one rank may compute while the others wait
_patient: dict[Any, Any] = {}  # by the default group: the group in which ranks wait that long


class OnAnotherRank(UserError):
    """An error of the user that another rank has met, and shows."""


def rank() -> int:
    """Return the number of this process: 0 unless torch.distributed is set up."""
    return distributed.get_rank() if _is_set_up() else 0


def num_ranks() -> int:
    """Return the number of processes that train together: 1 unless torch.distributed is set up."""
    return distributed.get_world_size() if _is_set_up() else 1


def _is_set_up() -> bool:
    return distributed.is_available() and distributed.is_initialized()


def num_launched() -> int:
    """Return the number of processes that torchrun has started for this run: 1 without it."""
    started = all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"))
    return int(os.environ["WORLD_SIZE"]) if started else 1


def local_rank() -> int:
    """Return the number of this process among those that torchrun has started on this machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def num_restarts() -> int:
    """Return how often torchrun has started this run again."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


@contextmanager
def joined(device: str = "auto") -> Iterator[None]:
    """Join the processes that torchrun has started until the end of the `with`; alone, do nothing.

    `device` is that of the config. With "auto" or "cuda", each process gets the GPU of its number on this machine, as
    the current one. Raises UserError if there are fewer GPUs than processes, or if `device` is one GPU for all.
    """
    if num_launched() == 1 or _is_set_up():
        yield
        return
    # Imported after the group is made, it would keep the group and its threads until Python ends.
    import torch._dynamo  # noqa: F401

    backend = "gloo"
    if device == "cuda" or (device == "auto" and torch.cuda.is_available()):
        if local_rank() >= (found := torch.cuda.device_count()):
            raise UserError(
                f"process {local_rank()} of this machine has no GPU of its own, there are {found}: "
                f"torchrun --nproc-per-node {max(1, found)}"
            )
        torch.cuda.set_device(local_rank())
        backend = "cpu:gloo,cuda:nccl"
    elif device.startswith("cuda:"):
        raise UserError(f"run.device: {device!r} is one GPU for all ranks; write 'cuda', and each rank gets its own")
    distributed.init_process_group(backend, timeout=TIMEOUT)
    try:
        yield
    finally:
        _patient.clear()
        distributed.destroy_process_group()


def _between_steps() -> Any:
    """Return the group for what happens between steps; all ranks must call this at its first use."""
    default = distributed.group.WORLD
    if default not in _patient:
        _patient.clear()
        _patient[default] = distributed.new_group(timeout=_PATIENCE)
    return _patient[default]


def first_rank_says(value: Value) -> Value:
    """Return the `value` of the first rank; all ranks must call this, and wait for one another.

    Decisions that depend on the clock need it: if two processes disagree whether an evaluation is due, both wait for
    ever, one in a collective of the evaluation, the other in a collective of the next step.
    """
    if num_ranks() == 1:
        return value
    agreed = [value]
    # It finds the device that the backend talks over.
    distributed.broadcast_object_list(agreed, src=0, group=_between_steps())
    return agreed[0]


def gathered(value: Value) -> list[Value]:
    """Return the `value` of each rank, in their order, on all of them; all ranks must call this."""
    if num_ranks() == 1:
        return [value]
    found: list[Value] = [value] * num_ranks()
    distributed.all_gather_object(found, value, group=_between_steps())
    return found


def gathered_or_raised(call: Callable[[], Value]) -> list[Value]:
    """Return what `call` returns on each rank, as `gathered` does; an error on one rank is raised on all of them.

    Else the others would wait for ever. They raise it with the same message, as an OnAnotherRank, ValueError or
    RuntimeError.
    """
    if num_ranks() == 1:
        return [call()]
    try:
        found = call()
    except Exception as error:  # raised again, as soon as the other ranks know
        kinds: dict[type[Exception], type[Exception]] = {UserError: OnAnotherRank, ValueError: ValueError}
        own = next((kind for base, kind in kinds.items() if isinstance(error, base)), RuntimeError)
        gathered((own, str(error)))
        raise
    problems: list[tuple[type[Exception], str] | None] = gathered(None)
    for problem in filter(None, problems):
        kind, message = problem
        raise kind(f"on another rank: {message}")
    return gathered(found)


def first_rank_does(call: Callable[[], Value]) -> Value:
    """Return what `call` returns on the first rank, which alone calls it; an error there is raised on all ranks."""
    found: list[Any] = gathered_or_raised(lambda: call() if rank() == 0 else None)
    value: Value = found[0]
    return value


def agree(flag: bool) -> bool:
    """Return whether `flag` is true on any rank; all ranks must call this."""
    return any(gathered(flag))


def summed(values: Tensor) -> Tensor:
    """Return the sum of `values` over the ranks, on the same device; all ranks must call this."""
    if num_ranks() == 1:
        return values
    total = values.detach().clone()
    distributed.all_reduce(total)
    return total


def is_sharded(tensor: Tensor) -> bool:
    """Return whether each rank holds a part of `tensor` only (a DTensor)."""
    return hasattr(tensor, "to_local")


@torch.no_grad()
def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of `tensor`, which shares its memory; a tensor that is not sharded is its own part."""
    placed: Any = tensor
    part: Tensor = placed.detach().to_local() if is_sharded(tensor) else tensor
    return part


@torch.no_grad()
def whole(tensor: Tensor) -> Tensor:
    """Return `tensor` with the parts of all ranks; all ranks must call this for a sharded one."""
    placed: Any = tensor
    full: Tensor = placed.detach().full_tensor() if is_sharded(tensor) else tensor
    return full


def counts(tensor: Tensor) -> bool:
    """Return whether this rank's part of `tensor` counts in a sum over all ranks, where each entry counts once."""
    if not is_sharded(tensor):
        return rank() == 0
    placed: Any = tensor
    coordinates = placed.device_mesh.get_coordinate() or ()
    return all(at == 0 or placement.is_shard() for at, placement in zip(coordinates, placed.placements, strict=True))


def place(tensor: Tensor) -> tuple[slice, ...]:
    """Return where this rank's part of `tensor` is in the whole: a slice for each dimension."""
    if not is_sharded(tensor):
        return tuple(slice(0, size) for size in tensor.shape)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    placed: Any = tensor
    sizes, starts = compute_local_shape_and_global_offset(placed.shape, placed.device_mesh, placed.placements)
    return tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))


@torch.no_grad()
def fill_(tensor: Tensor, values: Tensor) -> None:
    """Copy `values`, which are those of the whole `tensor` or sharded as it is, into this rank's part of it."""
    local(tensor).copy_(local(values) if is_sharded(values) else values[place(tensor)])


def squares(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Return the squared L2 norm of each of `tensors`, of the parts that count on this rank: float64, (tensors,).

    The norms are computed in `dtype`. The sum over the ranks is the squared norm of the whole.
    """
    norms = torch.stack(torch._foreach_norm([local(tensor) for tensor in tensors], 2, dtype)).double()
    counted = [counts(tensor) for tensor in tensors]
    if all(counted):
        return norms.square()
    return norms.square() * torch.tensor(counted, dtype=norms.dtype).to(norms.device)
