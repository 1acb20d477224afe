"""Ranks: which process this is of those that train together, and what they agree on and add up.

This is the only module of the core that knows torch.distributed. Alone, a process is rank 0 of 1, and nothing here
costs anything.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import pickle
import platform
import re
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any, NoReturn, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, distributed

from hookdiff.errors import OnAnotherRank, RankLost, UserError

Value = TypeVar("Value")

TIMEOUT = timedelta(minutes=10)  # for which a rank waits in a step for the others
_MOMENT = 3.0  # seconds after which a rank that has not failed too is taken to hang
_PATIENCE = timedelta(hours=4)  # the same between steps, where one rank may compute while the others wait
# By the default group, the group in which ranks wait that long. Kept longer, its threads would abort Python at its end.
_patient: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
_GONE = re.compile("closed|reset|refused|broken pipe|abort", re.IGNORECASE)  # in what gloo and NCCL say of a lost rank
_REFUSED = "hookdiff/refused"  # in the store: the exit code of a rank that has ended with an error of the user
_joins = count()  # how often this process has joined the others
_said: Counter[str] = Counter()  # how often this process has said each text


class _StandIn(threading.local):
    """What this thread has in place of torch.distributed: number, number of ranks, and what gathers values."""

    world: tuple[int, int, Callable[[str, Any], list[Any]]] | None = None


_stand_in = _StandIn()


@contextmanager
def standing_in(rank: int, num: int, gather: Callable[[str, Any], list[Any]]) -> Iterator[None]:
    """Let this thread be a rank during the `with`, for tests in one process.

    `gather(kind, value)` returns the values of all ranks, which must all ask for the same kind.
    """
    _stand_in.world = rank, num, gather
    try:
        yield
    finally:
        _stand_in.world = None


def rank() -> int:
    """Return the number of this process: 0 unless torch.distributed is set up."""
    if _stand_in.world:
        return _stand_in.world[0]
    return distributed.get_rank() if _is_set_up() else 0


def num_ranks() -> int:
    """Return the number of processes that train together: 1 unless torch.distributed is set up."""
    if _stand_in.world:
        return _stand_in.world[1]
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


def launch() -> str:
    """Return the name of the job for which torchrun has started this process, the same in all its attempts; or ""."""
    name = os.environ.get("TORCHELASTIC_RUN_ID", "")
    return f"{name} of {platform.node()} {os.getppid()}" if name == "none" else name  # the user has given no name


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
    import torch._dynamo

    backend = "gloo"
    if device == "cuda" or (device == "auto" and torch.cuda.is_available()):
        if local_rank() >= (found := torch.cuda.device_count()):
            time.sleep(_MOMENT * (local_rank() - found))  # the first one without a GPU shows it
            raise UserError(
                f"process {local_rank()} of this machine has no GPU of its own, there are {found}: "
                + (f"torchrun --nproc-per-node {found}" if found else "set run.device = 'cpu'")
            )
        torch.cuda.set_device(local_rank())
        backend = "cpu:gloo,cuda:nccl"
    elif device.startswith("cuda:"):
        with shown_once():
            raise UserError(f"run.device: {device!r} is one GPU for all ranks; write 'cuda', and each gets its own")
    torch_distributed: Any = distributed  # its stubs lack some names
    store, own, num = next(torch_distributed.rendezvous("env://", timeout=TIMEOUT))
    # Of its own in each attempt: else a rank may find the address of a process that was killed, and wait for it.
    store = torch_distributed.PrefixStore(f"hookdiff/{num_restarts()}/{next(_joins)}", store)
    distributed.init_process_group(backend, store=store, rank=own, world_size=num, timeout=TIMEOUT)
    try:
        yield
    except UserError as error:
        with suppress(RuntimeError):  # the store has ended with the first rank
            store.set(_REFUSED, str(error.exit_code))
        if is_news(f"error: {error}"):
            raise
        raise OnAnotherRank(str(error), error.exit_code) from error
    except RuntimeError as error:
        if not is_of_ranks(error):
            raise
        with suppress(RuntimeError):
            if store.check([_REFUSED]):
                code = int(store.get(_REFUSED))
                raise OnAnotherRank("another rank has ended with an error of the user", code) from error
        raise RankLost(_lost(error)) from error
    finally:
        _patient.clear()
        _said.clear()
        distributed.destroy_process_group()


def leave(code: int) -> NoReturn:
    """End this process with the exit `code`, after what is to be done at exit but before Python cleans up.

    torch can keep a group of gloo for ever (its caches of DTensors have it). A thread of this group that lets go of its
    last tensor while Python cleans up would abort the process.
    """
    atexit._run_exitfuncs()
    with suppress(OSError, ValueError):  # a stream that is full or closed
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


@contextmanager
def shown_once() -> Iterator[None]:
    """Let the first process of each machine show an error of the user that all of them meet before `joined`.

    torchrun ends all others as soon as one has ended. So the others wait until the first has shown it, and show it
    themselves if it does not.
    """
    try:
        yield
    except UserError:
        if local_rank():
            time.sleep(_MOMENT)
        raise


def is_news(text: str) -> bool:
    """Return whether this is the first rank to say `text`; a text that is said again is news once more."""
    if num_ranks() == 1 or _stand_in.world:
        return True
    _said[text] += 1
    key = hashlib.sha256(f"{_said[text]} {text}".encode()).hexdigest()
    first: int = distributed.distributed_c10d._get_default_store().add(f"hookdiff/said/{key}", 1)
    return first == 1


def is_of_ranks(error: BaseException) -> bool:
    """Return whether `error` says that a rank cannot be reached, rather than that something is wrong here."""
    if not _is_set_up():
        return False
    return isinstance(error, distributed.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


def _lost(error: RuntimeError) -> str:
    """Return a message about the collective operation that failed with `error`, and the ranks that did not come."""
    frames = traceback.extract_tb(error.__traceback__)
    callers = [one for one in frames if "torch" not in Path(one.filename).parts and one.filename != __file__]
    own = callers[-1] if callers else frames[-1]
    asked = next((one.name for one in frames[frames.index(own) + 1 :] if not one.name.startswith(("_", "wrapper"))), "")
    place = f"{asked or own.name}, called in {Path(own.filename).name}, line {own.lineno} ({own.name})"
    waited = f"rank {rank()} waited in {place}"
    if "imed out" not in str(error):
        return f"{waited}, and another rank has ended" if _GONE.search(str(error)) else f"{waited}: {error}"
    limit = _PATIENCE if any(one.name in ("gathered", "first_rank_says") for one in frames) else TIMEOUT
    store, until = distributed.distributed_c10d._get_default_store(), time.monotonic() + _MOMENT
    store.set(f"hookdiff/lost/{rank()}", place)
    missing = list(range(num_ranks()))
    while missing and time.monotonic() < until:
        missing = [other for other in missing if not store.check([f"hookdiff/lost/{other}"])]
        time.sleep(0.05)
    gone = f"rank {', '.join(map(str, missing))} did not come" if missing else "no rank is missing, the network is"
    return f"{waited} for {limit}, and {gone}"


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
    if _stand_in.world:
        said: list[Value] = _stand_in.world[2]("the value of the first rank", value)
        return said[0]
    agreed = [value]
    # It finds the device that the backend talks over.
    distributed.broadcast_object_list(agreed, src=0, group=_between_steps())
    return agreed[0]


def gathered(value: Value) -> list[Value]:
    """Return the `value` of each rank, in their order, on all of them; all ranks must call this."""
    if num_ranks() == 1:
        return [value]
    if _stand_in.world:
        return _stand_in.world[2]("the values of all ranks", value)
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
        message = f"on another rank: {error}"
        if isinstance(error, UserError | OSError):
            gathered(OnAnotherRank(message, getattr(error, "exit_code", 1)))
        else:
            gathered((ValueError if isinstance(error, ValueError) else RuntimeError)(message))
        raise
    problems: list[Exception | None] = gathered(None)
    for problem in filter(None, problems):
        raise problem
    return gathered(found)


def first_rank_does(call: Callable[[], Value]) -> Value:
    """Return what `call` returns on the first rank, which alone calls it; an error there is raised on all ranks."""
    found: list[Any] = gathered_or_raised(lambda: call() if rank() == 0 else None)
    value: Value = found[0]
    return value


def agree(flag: bool) -> bool:
    """Return whether `flag` is true on any rank; all ranks must call this."""
    return any(gathered(flag))


class Aside:
    """What threads that run beside the training agree on, in a group of their own.

    A collective operation of such a thread must not meet those of the training. All ranks must make and close it, and
    one thread of each may use it.
    """

    def __init__(self) -> None:
        self._group: Any = None if num_ranks() == 1 else distributed.new_group(backend="gloo", timeout=_PATIENCE)

    def close(self) -> None:
        """Leave the group."""
        if self._group is not None and _is_set_up():
            distributed.destroy_process_group(self._group)
        self._group = None

    def gathered_or_raised(self, call: Callable[[], Value]) -> list[Value]:
        """Return what `call` returns on each rank, in their order, on all of them.

        If it fails, all ranks raise the error of the lowest rank that has one, so that they all decide alike. Raises
        ConnectionError, an OSError, if a rank has ended.
        """
        if self._group is None:
            return [call()]
        value, own = None, None
        try:
            value = call()
        except Exception as error:  # raised below, as soon as the other ranks know
            own = error
        found: list[Any] = [None] * num_ranks()
        try:
            distributed.all_gather_object(found, (value, own and _portable(own)), group=self._group)
        except RuntimeError as error:
            raise ConnectionError("another rank has ended") from (own or error)
        if problem := next(filter(None, (problem for _, problem in found)), None):
            raise problem from own
        return [value for value, _ in found]


def _portable(error: Exception) -> Exception:
    """Return `error`, or one with its text if another process could not read it."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def summed(values: Tensor) -> Tensor:
    """Return the sum of `values` over the ranks, on the same device; all ranks must call this."""
    if num_ranks() == 1:
        return values
    total = values.detach().clone()
    if _stand_in.world:
        return torch.stack(_stand_in.world[2](f"a sum of {tuple(total.shape)} {total.dtype}", total)).sum(0)
    distributed.all_reduce(total)
    return total


def reduced(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the mean of each of `values` over the ranks, and of each pair (sum, count) the sums, as `loop.log` takes.

    The values are numbers or scalar tensors, with the same names on all ranks, which must all call this. Alone, they
    stay as they are.
    """
    if num_ranks() == 1:
        return dict(values)
    numbers = [number for value in values.values() for number in (value if isinstance(value, tuple) else (value,))]
    device = next((number.device for number in numbers if isinstance(number, Tensor)), torch.device("cpu"))
    found = [torch.as_tensor(number, dtype=torch.float64, device=device) for number in numbers]
    sums = iter(summed(torch.stack(found)).unbind()) if found else iter(())
    return {
        name: (next(sums), next(sums)) if isinstance(value, tuple) else next(sums) / num_ranks()
        for name, value in values.items()
    }


def stacked(values: Tensor) -> Tensor:
    """Return the `values` (n) of each rank: ranks n, on the same device; all ranks must call this."""
    rows = values.new_zeros(num_ranks(), len(values))
    rows[rank()] = values
    return summed(rows)
