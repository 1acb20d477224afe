"""Measure how long a save blocks training, how long it takes to reach the disk, and how long a cold load takes.

    python benchmarks/checkpoint.py [--megabytes 500] [--rounds 7] [--memory-format channels_last] [--folder DIR]

All save the same state of one run: a U-Net, AdamW's moments and an average of the weights, in float32. They take turns
in an order shuffled for each round. A turn has a few steps of training, a save without training (for the time until
all is on the disk), and a save during training (for the slowdown of the steps). Then the files are dropped from the
system's cache and read again into existing tensors. Reading ends when the values are in them, so that a file which is
only mapped is read too. All that is read is compared, once.

hookdiff: the plugin `checkpoint`; its save blocks for its hook between two steps. Its load verifies SHA-256.
torch.save: to a temporary name, synced, renamed; the loop waits for all of it. Read with weights_only, and once more
with mmap.
accelerate: save_state and load_state, which sync nothing and verify nothing.
DCP: torch.distributed.checkpoint.async_save in one process, with a stager of its own for each save, as it is by
default, and with one that is kept and used again.
"""

import argparse
import logging
import os
import random
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from attrs import define, field
from torch import Tensor, nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load as load_dcp
from torch.distributed.checkpoint.state_dict_saver import async_save

from hookdiff import Loop, LoopConfig, hookimpl, parse_every
from hookdiff.disk import flatten, unflatten
from hookdiff_checkpoint import Checkpoint, read_checkpoint
from hookdiff_ema import EMA
from hookdiff_networks import UNet

WARM_STEPS = 3  # before each save


def unet(channels: int) -> nn.Module:
    return UNet(
        in_channels=3, image_size=16, channels=channels, channel_mults=(1, 2, 2, 2), num_res_blocks=4, head_dim=channels
    )


def unet_of(megabytes: float) -> nn.Module:
    """Return the U-Net of which four copies in float32 are nearest to `megabytes`."""

    def size(channels: int) -> float:
        with torch.device("meta"):
            return sum(weight.numel() for weight in unet(channels).parameters()) * 4 * 4 / 1e6

    return unet(min(range(8, 201, 8), key=lambda channels: abs(size(channels) - megabytes)))


class Completed:
    """Counts the checkpoints of hookdiff that are complete."""

    def __init__(self) -> None:
        self.paths: list[Path] = []

    @hookimpl
    def on_checkpoint(self, path: Path) -> None:
        self.paths.append(path)


class Training:
    """The run that is saved in all ways."""

    def __init__(self, model: nn.Module, folder: Path) -> None:
        self.folder, self.completed, self.count = folder, Completed(), 0
        plugins = {
            "ema": EMA(decay=0.999),
            "checkpoint": Checkpoint(every=parse_every("1 epochs"), keep_last=1),
            "completed": self.completed,
        }

        def objective(net: nn.Module, batch: Any) -> Tensor:
            loss: Tensor = net(batch.inputs, torch.zeros(1)).square().mean()
            return loss

        self.loop = Loop(
            model,
            lambda prepared: torch.optim.AdamW(prepared.parameters(), lr=1e-6, fused=True),
            objective,
            torch.randn(4, 3, 16, 16),
            LoopConfig(steps=10**9, batch_size=1, log_every=10**9),
            plugins,
            run_dir=folder / "run",
        )

    def step(self) -> float:
        """Train a step, and return its seconds."""
        batch = next(iter(self.loop.feed.batches(0)))
        began = time.perf_counter()
        self.loop.run_step(batch)
        return time.perf_counter() - began

    @property
    def state(self) -> dict[str, Any]:
        return self.loop.state_dict()

    def place(self, name: str) -> Path:
        """Return a new path, once the earlier ones of this name are gone."""
        for earlier in self.folder.glob(f"{name}-*"):
            shutil.rmtree(earlier) if earlier.is_dir() else earlier.unlink()
        self.count += 1
        return self.folder / f"{name}-{self.count}"


class Way:
    """A way to save and load."""

    def __init__(self, training: Training) -> None:
        self.training = training
        self.path = Path()  # of the newest

    def prepare(self) -> None:
        """Do the work that is not timed."""

    def save(self) -> None:
        """Save, or begin a save."""
        raise NotImplementedError

    def is_done(self) -> bool:
        """Whether the save that was begun is on the disk."""
        return True

    def load(self, targets: dict[str, Tensor]) -> None:
        """Fill the tensors of a state, by flat name."""
        raise NotImplementedError


class Hookdiff(Way):
    def prepare(self) -> None:
        loop = self.training.loop
        loop.progress.end_epoch()
        loop.hook.on_epoch_end(loop=loop)  # a save is due
        self.known = len(self.training.completed.paths)

    def save(self) -> None:
        self.training.loop.hook.between_steps(loop=self.training.loop)

    def is_done(self) -> bool:
        self.save()  # no other is due, so it only looks
        if len(self.training.completed.paths) == self.known:
            return False
        self.path = self.training.completed.paths[-1]
        return True

    def load(self, targets: dict[str, Tensor]) -> None:
        fill(targets, read_checkpoint(self.path))


class TorchSave(Way):
    def prepare(self) -> None:
        self.path = self.training.place(type(self).__name__)

    def save(self) -> None:
        partial = self.path.with_suffix(".partial")
        with partial.open("wb") as file:
            torch.save(self.training.state, file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(self.path)
        descriptor = os.open(self.path.parent, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)

    def load(self, targets: dict[str, Tensor]) -> None:
        fill(targets, torch.load(self.path, weights_only=True))


class TorchMapped(TorchSave):
    def load(self, targets: dict[str, Tensor]) -> None:
        fill(targets, torch.load(self.path, weights_only=True, mmap=True))


class Accelerate(Way):
    def __init__(self, training: Training) -> None:
        super().__init__(training)
        from accelerate import Accelerator  # type: ignore[import-untyped]

        self.accelerator = Accelerator(cpu=True)
        loop = training.loop
        self.accelerator.prepare(loop.model, loop.optimizers[0])
        self.accelerator.register_for_checkpointing(loop.plugins["ema"])

    def prepare(self) -> None:
        self.path = self.training.place("accelerate")

    def save(self) -> None:
        self.accelerator.save_state(str(self.path))

    def load(self, targets: dict[str, Tensor]) -> None:
        self.accelerator.load_state(str(self.path))  # into the run itself


class DCP(Way):
    future: Future[Any]

    def stager(self) -> DefaultStager | None:
        return None

    def prepare(self) -> None:
        self.path = self.training.place(type(self).__name__)

    def save(self) -> None:
        begun: Any = async_save(self.training.state, checkpoint_id=self.path, async_stager=self.stager(), no_dist=True)
        self.future = begun

    def is_done(self) -> bool:
        if not self.future.done():
            return False
        self.future.result()
        return True

    def load(self, targets: dict[str, Tensor]) -> None:
        tree = flatten(self.training.state)[1]
        load_dcp(unflatten(targets, tree), checkpoint_id=self.path, no_dist=True)


class DCPKept(DCP):
    """With one stager for all saves."""

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        pinned = torch.cuda.is_available()
        self.kept = DefaultStager(StagingOptions(pinned, False, False, pinned))

    def stager(self) -> DefaultStager:
        return self.kept


WAYS: dict[str, Callable[[Training], Way]] = {
    "torch.save": TorchSave,
    "torch.save, read with mmap": TorchMapped,
    "hookdiff": Hookdiff,
    "accelerate": Accelerate,
    "DCP async_save": DCP,
    "DCP async_save, stager kept": DCPKept,
}


def fill(targets: dict[str, Tensor], state: Mapping[str, Any]) -> None:
    tensors = flatten(state)[0]
    for name, target in targets.items():
        target.copy_(tensors[name])


def evict(path: Path) -> None:
    """Drop files from the system's cache."""
    for file in [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]:
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


@define
class Times:
    """Seconds and ratios of one way to save, a number for each round."""

    first: float = 0.0  # seconds for which the first save blocked
    blocked: list[float] = field(factory=list)
    durable: list[float] = field(factory=list)
    slowed: list[float] = field(factory=list)  # steps while it writes, over those before
    load: list[float] = field(factory=list)


def turn(way: Way, training: Training, times: Times, targets: dict[str, Tensor], is_first: bool) -> None:
    for _ in range(1 if is_first else WARM_STEPS):
        training.step()
    way.prepare()
    os.sync()
    began = time.perf_counter()
    way.save()
    blocked = time.perf_counter() - began
    while not way.is_done():
        time.sleep(0.002)
    durable = time.perf_counter() - began
    if is_first:
        times.first = blocked
    else:
        before = statistics.median(training.step() for _ in range(WARM_STEPS))
        way.prepare()
        os.sync()
        again = time.perf_counter()
        way.save()
        times.blocked += [blocked, time.perf_counter() - again]
        times.durable.append(durable)
        steps = []
        while not way.is_done():
            steps.append(training.step())
        if steps:
            times.slowed.append(statistics.mean(steps) / before)
    evict(way.path)
    expected = flatten(training.state)[0] if is_first else {}
    began = time.perf_counter()
    way.load(targets)
    times.load.append(time.perf_counter() - began)
    if is_first and not isinstance(way, Accelerate):
        assert all(torch.equal(targets[name], value) for name, value in expected.items()), "not what was saved"


def measure(megabytes: float, rounds: int, memory_format: torch.memory_format, folder: Path) -> dict[str, Times]:
    torch.manual_seed(0)
    model = unet_of(megabytes).to(memory_format=memory_format)
    training = Training(model, folder)
    with training.loop:
        training.step()  # before it, AdamW has no state
        targets = {name: torch.empty_like(value) for name, value in flatten(training.state)[0].items()}
        size = sum(value.nbytes for value in targets.values())
        print(f"{size / 1e6:.0f} MB in {len(targets)} tensors, {memory_format}, {rounds} rounds", flush=True)
        ways = {name: make(training) for name, make in WAYS.items()}
        times = {name: Times() for name in ways}
        order = random.Random(0)
        for number in range(-1, rounds):
            for name in order.sample(list(ways), len(ways)):
                turn(ways[name], training, times[name], targets, number < 0)
                if number < 0:
                    times[name].load.clear()
    return times


def table(times: dict[str, Times]) -> Iterator[str]:
    yield "| | blocked, ms | of DCP | first, ms | on the disk, s | steps meanwhile | cold load, s | of torch.load |"
    yield "|---|---|---|---|---|---|---|---|"
    dcp, plain = times["DCP async_save"], times["torch.save"]
    for name, one in times.items():
        blocked = quartiles([1e3 * seconds for seconds in one.blocked], "{:.0f}")
        ratio = quartiles([a / b for a, b in zip(one.blocked, dcp.blocked, strict=True)], "{:.2f}")
        load = quartiles([a / b for a, b in zip(one.load, plain.load, strict=True)], "{:.2f}")
        slowed = quartiles(one.slowed, "{:.2f}") if len(one.slowed) > 1 else ""
        yield (
            f"| {name} | {blocked} | {ratio} | {1e3 * one.first:.0f} | {quartiles(one.durable, '{:.2f}')} | {slowed} "
            f"| {quartiles(one.load, '{:.2f}')} | {load} |"
        )


def quartiles(values: list[float], form: str) -> str:
    low, middle, high = (form.format(value) for value in statistics.quantiles(values, n=4))
    return f"{middle} ({low} to {high})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=500)
    parser.add_argument("--rounds", type=int, default=7, help="turns of each, at least 2")
    parser.add_argument("--memory-format", choices=["channels_last", "contiguous_format"], default="channels_last")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="on the disk to measure; a temporary one unless given")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    print(f"torch {torch.__version__}, {options.threads} threads")
    with tempfile.TemporaryDirectory(dir=options.folder, ignore_cleanup_errors=True) as folder:
        times = measure(options.megabytes, options.rounds, getattr(torch, options.memory_format), Path(folder))
    print("\n".join(table(times)))


if __name__ == "__main__":
    main()
