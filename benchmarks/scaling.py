"""Compare hookdiff on several ranks with plain scripts of DistributedDataParallel and of fully_shard (FSDP2).

    torchrun --nproc-per-node 2 benchmarks/scaling.py [unet dit memory] [--rounds N] [--builds N] [--threads 1]

All train the same network on the same data, with fused AdamW and a line of the mean loss every 50 steps. With extras
they also clip by norm and average the weights. They take turns: in each round every one of them makes a block of steps,
in a shuffled order, so that other load on the machine affects all alike. All are built anew several times, because two
networks differ by one to three percent by the places of their tensors in memory alone. "alone" is the plain script
without any exchange: each rank trains on its own, which takes as long as a step would if the network cost nothing.

The table has the throughput of all ranks, and its ratio to that of the plain script in the same round: the median, the
half of the rounds around it, and the 95 % confidence interval of the median. `memory` trains a larger network for four
steps, each contestant in processes of its own. Its table has the memory that a rank takes beyond Python and torch, at
the peak; on a GPU it is the most that is allocated. The ranks talk over gloo, or over NCCL where each has a GPU.
"""

import argparse
import logging
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, closing
from math import ceil, floor, sqrt
from pathlib import Path
from typing import Any

import torch
from attrs import define
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from hookdiff import Loop, LoopConfig, builtin_plugins
from hookdiff.data import InMemory
from hookdiff.diffusion import VP, Diffusion
from hookdiff.machine import first_rank_says, gathered, local, num_ranks, rank
from hookdiff_clip import Clip
from hookdiff_ddp import DDP
from hookdiff_ema import EMA
from hookdiff_fsdp import FSDP
from hookdiff_fsdp.blocks import blocks_of
from hookdiff_networks import DiT, UNet

RATE, DECAY, LOG_EVERY, MAX_NORM = 1e-3, 0.999, 50, 1.0
WARM, MEASURED = 3, 4  # steps before the first round of a build, and in a process that measures memory
STEPS = 1_000_000  # of a run; none gets there
MEMORY = "memory"


@define(frozen=True)
class Workload:
    model: Callable[[], nn.Module]
    batch_size: int  # of each rank
    size: int = 16  # of the images, with three channels
    block: int = 2  # steps of a turn


def dit(size: int, width: int, depth: int) -> DiT:
    return DiT(in_channels=3, image_size=size, hidden_size=width, depth=depth, num_heads=width // 64)


def unet(size: int, channels: int, num_res_blocks: int) -> UNet:
    return UNet(in_channels=3, image_size=size, channels=channels, num_res_blocks=num_res_blocks)


# Steps of 50 to 200 ms on a CPU: in much shorter ones the exchange is nearly all.
WORKLOADS = {
    "cpu": {
        "unet": Workload(lambda: unet(16, 48, 1), 12),
        "dit": Workload(lambda: dit(16, 192, 6), 8),
        MEMORY: Workload(lambda: dit(16, 512, 12), 1),
    },
    "cuda": {
        "unet": Workload(lambda: unet(32, 192, 3), 64, size=32, block=10),
        "dit": Workload(lambda: dit(32, 1024, 24), 32, size=32, block=10),
        MEMORY: Workload(lambda: dit(32, 1024, 24), 4, size=32),
    },
}


@define(frozen=True)
class Stand:
    """What all contestants have in common."""

    work: Workload
    device: torch.device
    images: Tensor
    folder: Path

    def network(self) -> nn.Module:
        torch.manual_seed(0)
        return self.work.model().to(self.device)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


Steps = Generator[None, None, None]  # yields after each step
Contestant = Callable[[Stand, bool], Steps]  # trains, with extras or without


def batches(stand: Stand) -> Iterator[Tensor]:
    """Yield this rank's share of each batch for ever, from memory: indexed, not collated."""
    order, size = torch.Generator().manual_seed(0), stand.work.batch_size
    while True:
        for rows in torch.randperm(len(stand.images), generator=order).split(size * num_ranks())[:-1]:
            own = rows[rank() * size : (rank() + 1) * size]
            yield stand.images[own.to(stand.images.device)].to(stand.device).float().div_(127.5).sub_(1)


def plain(stand: Stand, extras: bool, wrap: Callable[[nn.Module], nn.Module]) -> Steps:
    model = stand.network()
    net = wrap(model)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=RATE, fused=True)
    weights = [local(parameter).detach() for parameter in parameters]
    average = [weight.clone() for weight in weights] if extras else []
    schedule = VP(schedule="cosine").tables
    alphas = schedule.alphas_cumprod.sqrt().float().to(stand.device)
    sigmas = (1 - schedule.alphas_cumprod).sqrt().float().to(stand.device)
    torch.manual_seed(rank())
    losses: list[Tensor] = []
    with (stand.folder / f"plain-{rank()}.txt").open("w") as file:
        for x in batches(stand):
            optimizer.zero_grad(set_to_none=True)
            noise, t = torch.randn_like(x), torch.randint(0, 1000, (len(x),), device=stand.device)
            noisy = alphas[t].view(-1, 1, 1, 1) * x + sigmas[t].view(-1, 1, 1, 1) * noise
            loss = functional.mse_loss(net(noisy, t), noise)
            loss.backward()
            if extras:
                nn.utils.clip_grad_norm_(parameters, MAX_NORM, foreach=True)
            optimizer.step()
            if extras:
                torch._foreach_lerp_(average, weights, 1 - DECAY)
            losses.append(loss.detach())
            if len(losses) == LOG_EVERY:
                mean = torch.stack(losses).mean()
                distributed.all_reduce(mean)
                print(float(mean) / num_ranks(), file=file)
                losses = []
            yield


def replicated(model: nn.Module) -> nn.Module:
    devices = [next(model.parameters()).device] if next(model.parameters()).is_cuda else None
    return DistributedDataParallel(model, device_ids=devices, gradient_as_bucket_view=True)


def sharded(model: nn.Module) -> nn.Module:
    for block in blocks_of(model, ()).values():  # the same as the plugin
        fully_shard(block)
    net: nn.Module = fully_shard(model)  # type: ignore[assignment]
    return net


def hookdiff(stand: Stand, extras: bool, plugins: Callable[[], dict[str, object]]) -> Steps:
    more = {"clip": Clip("norm"), "ema": EMA(decay=DECAY)} if extras else {}
    loop = Loop(
        stand.network(),
        lambda model: torch.optim.AdamW(model.parameters(), lr=RATE, fused=True),
        Diffusion(VP(schedule="cosine")),
        InMemory(stand.images),
        LoopConfig(steps=STEPS, batch_size=stand.work.batch_size * num_ranks(), log_every=LOG_EVERY),
        {**builtin_plugins(signals=False), **plugins(), **more},
        run_dir=stand.folder / "run",
    )
    with loop:
        for _ in loop.steps():
            yield


CONTESTANTS: dict[str, Contestant] = {
    "alone": lambda stand, extras: plain(stand, extras, lambda model: model),
    "DDP by hand": lambda stand, extras: plain(stand, extras, replicated),
    "hookdiff, ddp": lambda stand, extras: hookdiff(stand, extras, lambda: {"ddp": DDP()}),
    "FSDP2 by hand": lambda stand, extras: plain(stand, extras, sharded),
    "hookdiff, fsdp": lambda stand, extras: hookdiff(stand, extras, lambda: {"fsdp": FSDP()}),
}
BASES = {"hookdiff, ddp": "DDP by hand", "hookdiff, fsdp": "FSDP2 by hand"}


def stand_of(work: Workload, device: torch.device, folder: str) -> Stand:
    made = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (2048, 3, work.size, work.size), dtype=torch.uint8, generator=made)
    return Stand(work, device, images, Path(folder))


def timed(run: Steps, stand: Stand, steps: int) -> float:
    """Return the seconds of a step, from when all ranks begin until all have ended."""
    stand.synchronize()
    distributed.barrier()
    began = time.perf_counter()
    for _ in range(steps):
        next(run)
    stand.synchronize()
    distributed.barrier()
    return (time.perf_counter() - began) / steps


def compare(work: Workload, device: torch.device, extras: bool, builds: int, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of a step of each contestant, round by round."""
    seconds: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
    order = random.Random(0)  # the same on all ranks
    for _ in range(builds):
        with ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
            runs: dict[str, Any] = {}
            for name in order.sample(list(CONTESTANTS), len(CONTESTANTS)):
                own = Path(first_rank_says(folder), name)
                own.mkdir(exist_ok=True)
                runs[name] = stack.enter_context(closing(CONTESTANTS[name](stand_of(work, device, str(own)), extras)))
            stand = stand_of(work, device, folder)
            for run in runs.values():
                timed(run, stand, WARM)
            for _ in range(rounds):
                for name in order.sample(list(runs), len(runs)):
                    seconds[name].append(timed(runs[name], stand, work.block))
    return seconds


def resident(key: str) -> float:
    """Return the memory of this process, "VmRSS" now or "VmHWM" at its peak, in MiB."""
    # Not `getrusage`: a process begins there with the peak of the one that has started it.
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{key}:"))
    return int(line.split()[1]) / 1024


def measure(name: str, work: Workload, device: torch.device, extras: bool) -> float:
    """Return the memory that this process has taken at the peak of some steps, in MiB."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        stand = stand_of(work, device, folder)
        before = resident("VmRSS")
        with closing(CONTESTANTS[name](stand, extras)) as run:
            timed(run, stand, MEASURED)
            if device.type == "cuda":
                return torch.cuda.max_memory_allocated(device) / 2**20
            return resident("VmHWM") - before


def memory(name: str, extras: bool, options: argparse.Namespace) -> float:
    """Return the most memory that a rank takes, in MiB: each one starts a process for it."""
    words = ["--measure", name, *["--bare"] * (not extras), "--threads", str(options.threads)]
    command = [sys.executable, __file__, *words, "--device", options.device]
    # With a threshold of its own, malloc gives large tensors back at once, so that the peak is that of living ones.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(2**17)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return max(gathered(float(done.stdout.split()[-1])))


def interval(values: list[float]) -> tuple[float, float]:
    """Return the 95 % confidence interval of the median."""
    ordered, count = sorted(values), len(values)
    reach = 1.96 * sqrt(count) / 2
    return ordered[max(0, floor(count / 2 - reach))], ordered[min(count - 1, ceil(count / 2 + reach))]


def rows(title: str, work: Workload, seconds: dict[str, list[float]]) -> list[str]:
    """Return the rows of a workload in the table."""
    found = []
    for name, times in seconds.items():
        middle = statistics.median(times)
        row = f"| {title} | {name} | {1000 * middle:.1f} ms | {work.batch_size * num_ranks() / middle:.1f} |"
        if base := BASES.get(name):
            ratios = [other / own for own, other in zip(times, seconds[base], strict=True)]
            low, median, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
            first, last = interval(ratios)
            row += f" {median:.3f} | {low:.3f} to {high:.3f} | {first:.3f} to {last:.3f} |"
        else:
            row += " | | |"
        found.append(row)
    return found


def join(device: torch.device, name: str) -> None:
    """Join the processes of the same `name` on all ranks."""
    parts: Any = distributed  # its stubs lack some names
    store, own, num = next(parts.rendezvous("env://"))
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    distributed.init_process_group(backend, store=parts.PrefixStore(f"scaling {name}", store), rank=own, world_size=num)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", help=f"of {', '.join(WORKLOADS['cpu'])}; all unless given")
    parser.add_argument("--rounds", type=int, default=20, help="turns of each contestant, in each build")
    parser.add_argument("--builds", type=int, default=4, help="how often all contestants are built")
    parser.add_argument("--threads", type=int, default=1, help="of each process")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--bare", action="store_true", help="only without extras")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := set(options.workloads) - set(WORKLOADS["cpu"]):
        parser.error(f"no workload named {unknown.pop()!r}; known: {', '.join(WORKLOADS['cpu'])}")
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        parser.error("start it by torchrun: torchrun --nproc-per-node 2 benchmarks/scaling.py")
    torch.set_num_threads(options.threads)
    logging.disable(logging.WARNING)
    is_cuda = options.device == "cuda" or (options.device == "auto" and torch.cuda.is_available())
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if is_cuda else torch.device("cpu")
    if is_cuda:
        torch.cuda.set_device(device)
    workloads = WORKLOADS[device.type]
    join(device, f"{options.measure} {options.bare}")
    if options.measure:
        print(measure(options.measure, workloads[MEMORY], device, not options.bare))
    else:
        report(workloads, device, options)
    distributed.destroy_process_group()


def report(workloads: dict[str, Workload], device: torch.device, options: argparse.Namespace) -> None:
    """Measure and print the tables, on the first rank."""
    lines: list[str] = []
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "CPU"
    lines += [f"torch {torch.__version__}, {num_ranks()} ranks of {options.threads} threads on {kind}"]
    lines += [
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} before, {options.builds} x {options.rounds} rounds"
    ]
    is_first = True
    for name in options.workloads or workloads:
        work = workloads[name]
        size = sum(weight.numel() for weight in work.model().parameters()) / 1e6
        for extras in [False] if options.bare else [False, True]:
            title = f"{name}, {size:.1f}M{', clip and ema' * extras}"
            if name == MEMORY:
                taken = {one: memory(one, extras, options) for one in CONTESTANTS}
                lines += ["", "| | | memory of a rank |", "|---|---|---|"] * (not extras)
                lines += [f"| {title} | {one} | {mib:.0f} MiB |" for one, mib in taken.items()]
            else:
                seconds = compare(work, device, extras, options.builds, options.rounds)
                if is_first:
                    lines += ["", "| | | a step | img/s | ratio | half within | 95 % of the median |"]
                    lines += ["|---|---|---|---|---|---|---|"]
                    is_first = False
                lines += rows(title, work, seconds)
            if rank() == 0:
                print("\n".join(lines), flush=True)
            lines = []


if __name__ == "__main__":
    main()
