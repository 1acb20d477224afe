"""Joins the processes that torchrun has started as the ranks of one run, and reports lost ranks."""

from __future__ import annotations

import atexit
import hashlib
import os
import platform
import re
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any, NoReturn

from torch import distributed

from hookdiff.errors import OnAnotherRank, UserError
from hookdiff.machine import ranks
from hookdiff.machine.ranks import forget_groups, is_set_up, num_ranks, rank

TIMEOUT = timedelta(minutes=10)  # how long a rank waits for the others in a step
_MOMENT = 3.0  # seconds after which a rank that has not failed is assumed to hang
_GONE = re.compile("closed|reset|refused|broken pipe|abort", re.IGNORECASE)  # gloo's and NCCL's words for a lost rank
_REFUSED = "hookdiff/refused"  # in the store: the exit code of a rank that has ended with an error of the user
_joins = count()  # how often this process has joined the others
_reported: Counter[str] = Counter()  # how often this process has reported each text


class RankLost(UserError):
    """Another process of the same run has ended, or hangs, though the input was right."""

    exit_code = 1


def num_launched() -> int:
    """Return the number of processes that torchrun has started for this run; 1 if it has started none."""
    started = all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"))
    return int(os.environ["WORLD_SIZE"]) if started else 1


def local_rank() -> int:
    """Return the number of this process among those that torchrun has started on this machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def num_restarts() -> int:
    """Return how often torchrun has started this run again."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def job_name() -> str:
    """Return the name of torchrun's job, the same in all its attempts; "" if torchrun has not started this process."""
    name = os.environ.get("TORCHELASTIC_RUN_ID", "")
    return f"{name} of {platform.node()} {os.getppid()}" if name == "none" else name  # the user has given no name


@contextmanager
def joined(device: str = "auto") -> Iterator[None]:
    """Join the processes that torchrun has started until the end of the `with`; a single process does nothing.

    `device` is `run.device` of the config. With "auto" or "cuda", each process gets the GPU of its number on this
    machine. Raises UserError if there are fewer GPUs than processes, or if `device` is one GPU for all.
    """
    if num_launched() == 1 or is_set_up():
        yield
        return
    # First, since an import after the group is made would keep the group and its threads until Python ends.
    import torch._dynamo

    backend = "gloo"
    if device == "cuda" or (device == "auto" and torch.cuda.is_available()):
        if local_rank() >= (num_gpus := torch.cuda.device_count()):
            time.sleep(_MOMENT * (local_rank() - num_gpus))  # the first process without a GPU shows the error
            raise UserError(
                f"process {local_rank()} of this machine has no GPU of its own, there are {num_gpus}; "
                + (f"start torchrun --nproc-per-node {num_gpus}" if num_gpus else "set run.device = 'cpu'")
            )
        torch.cuda.set_device(local_rank())
        backend = "cpu:gloo,cuda:nccl"
    elif device.startswith("cuda:"):
        with shown_once():
            raise UserError(f"run.device: {device!r} is one GPU for all ranks; write 'cuda', and each gets its own")
    torch_distributed: Any = distributed  # its stubs lack some names
    store, number, num = next(torch_distributed.rendezvous("env://", timeout=TIMEOUT))
    # A prefix for each attempt: else a rank may find the address of a process that was killed, and wait for it.
    store = torch_distributed.PrefixStore(f"hookdiff/{num_restarts()}/{next(_joins)}", store)
    distributed.init_process_group(backend, store=store, rank=number, world_size=num, timeout=TIMEOUT)
    try:
        yield
    except UserError as error:
        with suppress(RuntimeError):  # the store has ended with the first rank
            store.set(_REFUSED, str(error.exit_code))
        if is_first_report(f"error: {error}"):
            raise
        raise OnAnotherRank(str(error), error.exit_code) from error
    except RuntimeError as error:
        if not is_of_ranks(error):
            raise
        with suppress(RuntimeError):
            if store.check([_REFUSED]):
                code = int(store.get(_REFUSED))
                raise OnAnotherRank("another rank has ended; its message says what to change", code) from error
        raise RankLost(_lost(error)) from error
    finally:
        forget_groups()
        _reported.clear()
        distributed.destroy_process_group()


def is_of_ranks(error: BaseException) -> bool:
    """Return whether `error` says that a rank cannot be reached, rather than that something is wrong here."""
    if not is_set_up():
        return False
    return isinstance(error, distributed.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


def leave(code: int) -> NoReturn:
    """End this process with the exit `code`, after the functions of `atexit` but before Python cleans up.

    torch can keep a group of gloo for ever, since its caches of DTensors hold it. A thread of this group that frees its
    last tensor while Python cleans up would abort the process.
    """
    atexit._run_exitfuncs()
    with suppress(OSError, ValueError):  # a stream that is full or closed
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


@contextmanager
def shown_once() -> Iterator[None]:
    """Let the first process of each machine show a UserError that all of its processes raise before `joined`.

    torchrun ends all processes as soon as one has ended. So the others wait until the first has shown the error, and
    show it themselves if the first does not.
    """
    try:
        yield
    except UserError:
        if local_rank():
            time.sleep(_MOMENT)
        raise


def is_first_report(text: str) -> bool:
    """Return whether this rank is the first to report `text`; each repetition counts as a new text."""
    if not is_set_up():
        return True
    _reported[text] += 1
    key = hashlib.sha256(f"{_reported[text]} {text}".encode()).hexdigest()
    first: int = distributed.distributed_c10d._get_default_store().add(f"hookdiff/said/{key}", 1)
    return first == 1


def _lost(error: RuntimeError) -> str:
    """Return a message about the collective operation that failed with `error`, and the ranks that did not come."""
    frames = traceback.extract_tb(error.__traceback__)
    here = (__file__, ranks.__file__)
    callers = [frame for frame in frames if "torch" not in Path(frame.filename).parts and frame.filename not in here]
    caller = callers[-1] if callers else frames[-1]
    place = f"{caller.name}, line {caller.lineno} of {Path(caller.filename).name}"
    waited = f"rank {rank()} waited in {place}"
    if "imed out" not in str(error):
        return f"{waited}, and another rank has ended" if _GONE.search(str(error)) else f"{waited}: {error}"
    store, until = distributed.distributed_c10d._get_default_store(), time.monotonic() + _MOMENT
    store.set(f"hookdiff/lost/{rank()}", place)
    missing = list(range(num_ranks()))
    while missing and time.monotonic() < until:
        missing = [other for other in missing if not store.check([f"hookdiff/lost/{other}"])]
        time.sleep(0.05)
    gone = (
        f"rank {', '.join(map(str, missing))} did not come" if missing else "no rank is missing, the network has failed"
    )
    return f"{waited}, and {gone}: {error}"
