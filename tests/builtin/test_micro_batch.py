"""`micro_batch = "auto"` finds the size that fits in memory; its trial changes nothing."""

import sys

import pytest
import tomli
import torch
from torch import nn

from hookdiff import Feed, LoopConfig, UserError, hookimpl, load_config
from hookdiff.builtin.micro_batch import FitMicroBatch
from hookdiff.disk.tree import flatten
from hookdiff.images import Transforms, feed_of
from hookdiff.machine.fitting import is_out_of_memory
from hookdiff.models.footprint import HeldBytes
from hookdiff.testing import assert_same, toy_loop, weights
from hookdiff_amp import AMP
from hookdiff_ema import EMA
from tests.authors.test_trial_passes import Counts, Net
from tests.conftest import Logged, acting, check_one, finish, refused
from tests.sam import SAM, Uncertainty

WIDE = """
import resource
from pathlib import Path

import torch
from attrs import define
from torch import nn

from hookdiff import hookimpl

@define(eq=False)
class Limit:
    "Limits the memory to a little more than is in use when the run starts."
    mib: int = 120

    @hookimpl(tryfirst=True)
    def on_start(self):
        x = torch.ones(1000, 1000, requires_grad=True)
        (x @ x).sum().backward()  # the library has allocated its own memory by now
        used = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_DATA, (used + self.mib * 2**20, resource.RLIM_INFINITY))

class Wide(nn.Module):
    "Keeps several times 4 MiB of each sample for the backward pass."
    def __init__(self, in_channels: int):
        super().__init__()
        self.first, self.last = nn.Linear(64, 2**10), nn.Linear(2**10, 64)

    def forward(self, x, timesteps):
        h = self.first(x.flatten(1))[:, None] * torch.ones(2**10, 1)
        return self.last(h.sin().cos().mean(1)).reshape(x.shape)
"""


@pytest.fixture
def wide(tmp_path, user_module, write_config, monkeypatch):
    """Return a folder with a config that sets micro_batch to "auto"."""
    user_module("hd_wide", WIDE)
    run = {"steps": 1, "micro_batch": "auto", "plugins": ["ema", "hd_wide:Limit"]}
    write_config("wide.toml", run=run, model={"use": "hd_wide:Wide"})
    # The memory of each tensor returns to the system, so that a size which fits once fits again.
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")
    return tmp_path


@pytest.mark.wide
@pytest.mark.skipif(sys.platform != "linux", reason="limits memory as Linux does")
def test_the_size_that_fits_is_found_and_recorded(wide, start):
    code, _, err = finish(start(wide, "run", "wide.toml", "--out", "run", fresh=True))
    assert code == 0, err[-2000:]
    size = tomli.loads((wide / "run" / "config.toml").read_text())["run"]["micro_batch"]
    assert size in (8, 4, 2)
    check_one([line for line in err.splitlines() if "micro_batch" in line], size, 16)
    assert load_config(wide / "run" / "config.toml", trust=True).run.micro_batch == size


class Full:
    """Raises an out-of-memory error for more than `most` samples at a time."""

    def __init__(self, most, kind=torch.OutOfMemoryError):
        self.most, self.kind, self.tried = most, kind, []

    @hookimpl(wrapper=True)
    def compute_loss(self, batch):
        output = yield
        self.tried.append(len(batch))
        if len(batch) > self.most:
            raise self.kind("DefaultCPUAllocator: can't allocate memory")
        return output


@pytest.mark.parametrize(("batch_size", "most"), [(1, 1), (8, 8), (9, 8), (40, 5), (39, 1), (7, 50)])
def test_the_batch_is_halved_until_it_fits(batch_size, most):
    full = Full(most)
    feed = Feed(torch.zeros(40, 4), limit=8 if batch_size == 39 else None)  # which repeats samples to fill the batch
    plugins = {"full": full, "micro_batch": FitMicroBatch()}
    with toy_loop(plugins, data=feed, batch_size=batch_size, steps=1) as loop:
        size = loop.config.micro_batch
        expected = batch_size
        while expected > most:
            expected = (expected + 1) // 2
        assert size == expected
        # A second micro-batch is tried while the gradients of the first are in memory.
        assert full.tried[-2:] == ([size] * 2 if batch_size >= 2 * size else full.tried[-2:])
        assert all(parameter.grad is None for parameter in loop.model.parameters())


class FullOfValues:
    """Raises an out-of-memory error for more than 800 values at a time."""

    @hookimpl(wrapper=True)
    def compute_loss(self, batch):
        output = yield
        if batch.inputs.numel() > 800:
            raise torch.OutOfMemoryError("DefaultCPUAllocator: can't allocate memory")
        return output


def test_of_several_shapes_the_largest_decides():
    pictures = [torch.zeros(1, *((10, 20) if number == 7 else (10, 10)), dtype=torch.uint8) for number in range(20)]
    data = feed_of(pictures, Transforms(image_size=10, buckets=("10x10", "20x10")))
    plugins = {"full": FullOfValues(), "micro_batch": FitMicroBatch()}
    with toy_loop(plugins, data=data, model=nn.Conv2d(1, 1, 1), batch_size=8, steps=20) as loop:
        assert loop.config.micro_batch == 4  # 8 of the frequent shape would fit
        loop.run()


def test_the_trial_changes_nothing():
    def run(**given):
        logged, amp = Logged(), AMP(precision="fp16", growth_interval=2)
        plugins = {"amp": amp, "ema": EMA(), "counts": Counts(), "logged": logged, **given.pop("plugins")}
        with toy_loop(plugins, model=Net(), steps=6, log_every=2, **given) as loop:
            state = torch.get_rng_state()
            for _ in loop.steps():
                pass
        return loop, logged.calls, state

    tried, logged, state = run(plugins={"full": Full(3), "micro_batch": FitMicroBatch()})
    plain, expected, plain_state = run(plugins={}, micro_batch=tried.config.micro_batch)
    assert tried.config.micro_batch == 2
    assert_same(weights(tried), weights(plain))
    (tensors, tree), (expected_tensors, expected_tree) = (flatten(loop.state_dict()) for loop in (tried, plain))
    assert_same(tensors, expected_tensors)
    assert (tree, logged) == (expected_tree, expected)
    assert torch.equal(state, plain_state)


class FullInTheSecondPass(SAM):
    """Raises an out-of-memory error for more than `most` samples at a time, while the weights are moved."""

    most = 3

    @hookimpl
    def on_start(self, loop):
        self.own, self.raised = weights(loop), 0

    @hookimpl(wrapper=True)
    def compute_loss(self, loop, batch):
        output = yield
        moved = any(not torch.equal(value, self.own[name]) for name, value in loop.model.state_dict().items())
        if moved and len(batch) > self.most:
            self.raised += 1
            raise torch.OutOfMemoryError("CUDA out of memory")
        return output


def test_the_second_pass_counts_and_its_error_leaves_the_weights():
    full = FullInTheSecondPass()
    plugins = {"full": full, "weight": Uncertainty(), "micro_batch": FitMicroBatch()}
    with toy_loop(plugins, batch_size=8, steps=1, hparams={"run": {"micro_batch": "auto"}}) as loop:
        assert (loop.config.micro_batch, full.raised, loop.hparams) == (2, 2, {"run": {"micro_batch": 2}})
        assert_same(weights(loop), full.own)
        assert all(parameter.grad is None for parameter in (*loop.model.parameters(), plugins["weight"].net.weight))


def test_if_nothing_fits_the_config_is_as_before():
    full = FullInTheSecondPass()
    full.most = 0
    hparams = {"run": {"micro_batch": "auto"}}
    loop = toy_loop({"full": full, "micro_batch": FitMicroBatch()}, hparams=hparams)
    with refused(UserError, "run.micro_batch", "not even one sample", "cpu"), loop:
        pass
    assert (loop.config.micro_batch, loop.hparams) == (None, hparams)
    assert_same(weights(loop), full.own)


def test_memory_is_reserved_for_the_optimizers_of_plugins():
    def most(kind):
        def adopt(loop):
            loop.adopt(big, net, kind(net.parameters(), 0.1))

        net, big = nn.Linear(1000, 1000), acting(prepare_model=adopt)
        loop = toy_loop({"big": big, "micro_batch": FitMicroBatch()})
        with HeldBytes(()) as held, loop:
            pass
        return held.most

    assert most(torch.optim.Adam) - most(torch.optim.SGD) >= 2 * 4 * 1000 * 1000


def test_only_an_out_of_memory_error_becomes_a_user_error():
    loop = toy_loop({"full": Full(0, RuntimeError), "micro_batch": FitMicroBatch()})
    with refused(UserError, "run.micro_batch", "cpu"), loop:
        pass

    def fail():
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with refused(RuntimeError, "mat1 and mat2"), toy_loop({"w": acting(compute_loss=fail), "fit": FitMicroBatch()}):
        pass


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("[enforce fail] . DefaultCPUAllocator: not enough memory: you tried to allocate"), True),
        (RuntimeError("MPS backend out of memory (MPS allocated: 17.93 GB)"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (MemoryError(), True),
        (RuntimeError("expected scalar type Float but found Half"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_out_of_memory_errors_are_recognised(error, expected):
    assert is_out_of_memory(error) is expected


def test_auto_in_a_script_is_refused_with_the_plugin_to_add():
    with refused(ValueError, "micro_batch", "'auto'", "FitMicroBatch()"):
        LoopConfig(micro_batch="auto")


def test_the_config_keeps_auto_until_the_run_starts(wide):
    assert load_config(wide / "wide.toml").resolved()["run"]["micro_batch"] == "auto"
