import gc
import logging
import mmap
import sys
import weakref
from pathlib import Path

import pytest
import torch

from hookdiff import PASS, hookimpl
from hookdiff.machine.fitting import free_memory, memory_in_use
from hookdiff.terminal import byte_size
from hookdiff.testing import toy_loop
from hookdiff_memory import Memory
from hookdiff_memory.plugin import MIB
from tests.conftest import Logged, acting, added_transfers

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


class Seen(Logged):
    """Keeps what is logged, and holds 64 MiB more from `step` on."""

    def __init__(self, step):
        super().__init__()
        self.step, self.held = step, []

    @hookimpl(tryfirst=True)
    def after_optimizer_step(self, loop):
        if loop.progress.step == self.step:
            # Not a tensor: an allocator may give it memory that an earlier test has used, and the process keeps.
            self.held.append(mmap.mmap(-1, 64 * MIB))
            for place in range(0, 64 * MIB, mmap.PAGESIZE):
                self.held[-1][place] = 1


def resident():
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


@LINUX
def test_it_logs_what_the_process_takes_in_mib():
    sink = Seen(step=7)
    toy_loop({"memory": Memory(), "sink": sink}).run()
    allocated, peaks = sink.of("memory/allocated"), list(sink.of("memory/peak").values())
    assert list(allocated) == [5, 10, 15, 20]
    assert allocated[10] - allocated[5] == pytest.approx(64, abs=2)
    assert allocated[20] == pytest.approx(resident(), rel=0.05)
    assert peaks == sorted(peaks)
    assert peaks[-1] >= allocated[10]


def test_nobody_waits_for_the_device():
    assert added_transfers({"memory": Memory(empty_cache_every=1)}, steps=6, log_every=1) == 0


def test_short_memory_is_reported_once(caplog):
    toy_loop({"memory": Memory(warn_above=1e-6), "logged": (logged := Logged())}).run()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    what, why, remedy = record.getMessage().splitlines()
    assert what.startswith("step 5: ")
    assert f" {byte_size(logged.of('memory/peak')[5] * 2**20)} of " in what
    assert "cpu" in why
    assert "run.micro_batch" in remedy


def test_enough_memory_is_not_worth_a_word(caplog):
    toy_loop({"memory": Memory()}).run()
    assert caplog.records == []


@pytest.mark.parametrize(
    ("every", "void", "steps", "micro_batch"),
    [
        (3, (), [3, 6, 9, 12], 3),
        (3, (0, 3, 4, 9), [3, 6, 9, 12], None),  # position 4 is void after update 3: the third is not counted twice
        ("1 epoch", (), [6, 11], None),  # of five steps, so it shows at the next one
        (0, (), [], 3),
    ],
)
def test_what_hangs_in_cycles_is_freed_when_it_is_due(every, void, steps, micro_batch):
    left, freed = [], []

    def litter():
        cycle = [torch.ones(2)]
        cycle.append(cycle)
        left.append(weakref.ref(cycle[0]))

    skips = acting(before_step=litter, unscale=lambda loop: False if loop.progress.position in void else PASS)
    gc.collect()
    gc.disable()  # nobody else frees a cycle
    try:
        plugins = {"memory": Memory(empty_cache_every=every), "skips": skips}
        with toy_loop(plugins, steps=14, micro_batch=micro_batch) as loop:
            for step in loop.steps():
                freed += [step.step] * any(tensor() is None for tensor in left)
                left[:] = [tensor for tensor in left if tensor() is not None]
    finally:
        gc.enable()
    assert freed == steps


@pytest.mark.cuda
def test_a_gpu_tells_what_its_allocator_counts():
    device = torch.device("cuda", 0)
    free_memory(device)
    before, total = memory_in_use(device)
    held = torch.ones(16 * MIB, device=device)
    values, _ = memory_in_use(device)
    assert values["allocated"] - before["allocated"] == held.nbytes
    assert values["peak"] >= values["allocated"]
    assert values["reserved"] >= values["allocated"]
    assert total is not None
    del held
    free_memory(device)
    assert memory_in_use(device)[0]["reserved"] < values["reserved"]
