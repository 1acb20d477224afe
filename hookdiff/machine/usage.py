"""The CPUs, threads and memory that this process may use."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # options of mallopt, from glibc's malloc.h
_QUOTA = Path("/sys/fs/cgroup/cpu.max")  # of this container, on Linux


@cache  # keeps the number at the start of the process
def usual_threads() -> int:
    """Return the number of threads that torch uses, within the CPUs of this process."""
    return min(torch.get_num_threads(), num_cpus())


def num_cpus() -> int:
    """Return the number of CPUs that this process may use, within its affinity and the quota of its container."""
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = _QUOTA.read_text().split()  # microseconds, or "max"
        return max(1, min(available, int(quota) // int(period)))
    except (OSError, ValueError):
        return available


@contextmanager
def thread_beside() -> Iterator[Callable[[], None]]:
    """Yield a function that a new thread beside the training must call first. The end of the `with` waits for the call.

    Operations of torch then use one thread there. With two, GNU's OpenMP would count more threads than CPUs, and the
    threads of the training would sleep between operations while the new thread lives, even if it is idle. A step of a
    network with 30M parameters took 1.4 times as long after the first checkpoint, small convolutions 2.4 times.
    """
    threads, is_called = torch.get_num_threads(), threading.Event()

    def begin() -> None:
        torch.set_num_threads(1)
        torch.get_num_threads()  # at its first call in a thread, it takes the number that any thread has set last
        is_called.set()

    yield begin
    is_called.wait()
    torch.set_num_threads(threads)  # the number with which other new threads begin


@cache
def keep_memory() -> None:
    """Let the C library keep memory that is freed; by default, each step maps its large tensors anew.

    This works only with glibc, and only if no variable such as `MALLOC_TRIM_THRESHOLD_` is set. The effect is in
    benchmarks/README.md.
    """
    is_tuned = any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ)
    mallopt = None if is_tuned or os.name != "posix" else getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
