"""What this process may use of the machine, and how busy the machine is."""

from __future__ import annotations

import ctypes
import os
import resource
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch
from attrs import define

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # options of mallopt, from glibc's malloc.h
_CONTAINER = Path("/sys/fs/cgroup")  # limits and counts of this container, on Linux


@cache  # as torch has it at the start of the process
def usual_threads() -> int:
    """Return the number of threads that torch uses, within the CPUs of this process."""
    return min(torch.get_num_threads(), num_cpus())


def num_cpus() -> int:
    """Return the number of CPUs that this process may use: of the machine, its affinity, and its container."""
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = (_CONTAINER / "cpu.max").read_text().split()  # microseconds, or "max"
        return max(1, min(available, int(quota) // int(period)))
    except (OSError, ValueError):
        return available


@contextmanager
def thread_beside() -> Iterator[Callable[[], None]]:
    """Yield a function for a new thread beside the training, which calls it first; at the end, wait for the call.

    Operations of torch then take one thread there. With two, GNU's OpenMP would see more threads than CPUs, and those
    of the training would sleep between operations as long as that thread lives, even if it has nothing to do. A step of
    a network with 30M parameters took 1.4 times as long after the first checkpoint, small convolutions 2.4 times.
    """
    threads, is_called = torch.get_num_threads(), threading.Event()

    def begin() -> None:
        torch.set_num_threads(1)
        torch.get_num_threads()  # at its first question, a thread takes the number that was set last anywhere
        is_called.set()

    yield begin
    is_called.wait()
    torch.set_num_threads(threads)  # the number with which other new threads begin


@cache
def keep_memory() -> None:
    """Let the C library keep memory that is freed: without it each step maps its large tensors anew.

    Only glibc can, and variables such as MALLOC_TRIM_THRESHOLD_ come first; elsewhere nothing is changed. The effect is
    in benchmarks/README.md.
    """
    is_tuned = any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ)
    mallopt = None if is_tuned or os.name != "posix" else getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


@define(frozen=True)
class Usage:
    """Counts of the process and of the machine, all of which only rise."""

    wall: float  # seconds
    own: float  # seconds of CPU time of this process, over all its threads
    busy: float | None  # seconds of CPU time of all processes, on Linux
    faults: int  # pages that were read from the disk
    throttled: float | None  # seconds in which the container's limit held its processes back, on Linux

    @classmethod
    def now(cls) -> Usage:
        own = os.times()
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
        return cls(time.perf_counter(), own.user + own.system, _busy(), faults, _throttled())

    def since(self, earlier: Usage) -> Usage:
        """Return the counts since `earlier`."""

        def less(now: float | None, before: float | None) -> float | None:
            return None if now is None or before is None else now - before

        return Usage(
            self.wall - earlier.wall,
            self.own - earlier.own,
            less(self.busy, earlier.busy),
            self.faults - earlier.faults,
            less(self.throttled, earlier.throttled),
        )

    def cause(self) -> str | None:
        """Return what has slowed the process down in this time, in words, or None if nothing here shows it."""
        others = 0.0 if self.busy is None else max(0.0, self.busy - self.own) / self.wall
        if self.throttled and self.throttled > 0.1 * self.wall:
            return f"the limit of the container held its processes back for {self.throttled:.1f} of {self.wall:.1f} s"
        if self.faults > 50 * self.wall:
            return f"memory is short: {self.faults / self.wall:.0f} pages a second are read from the disk"
        if others > 0.3:
            used = f"other processes use {others:.1f} of the {num_cpus()} CPUs"
            return used + "; beside them run.threads = 1 may be faster" * (torch.get_num_threads() > 1)
        return None


def _busy() -> float | None:
    try:
        # user, nice, system, idle, iowait, irq, softirq, steal: of all CPUs, in ticks
        ticks = [int(count) for count in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    except (OSError, ValueError):
        return None
    return float(sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")


def _throttled() -> float | None:
    try:
        counts = dict(line.split() for line in (_CONTAINER / "cpu.stat").read_text().splitlines())
        return int(counts["throttled_usec"]) / 1e6
    except (OSError, ValueError, KeyError):
        return None
