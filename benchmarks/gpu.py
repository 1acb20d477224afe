"""Measure all that needs a GPU, with one command, and write the table of this machine into benchmarks/README.md.

    python benchmarks/gpu.py [PART ...] [--rounds 7] [--keep]

tests: the tests that are marked `cuda`.
train: images a second of U-Nets with 34M and 128M weights at 64 x 64, in bf16, from images in memory.
checkpoint: how much longer ten steps take if a checkpoint is saved among them.
memory: the estimate of `hookdiff memory` beside the measured peak, and what torch's allocator holds for it.
sampling: benchmarks/sampling.py on the GPU, if diffusers is installed.

In `train`, each contestant has a process, in which it compiles and warms up beside the others. Then they take turns,
one at a time, in an order shuffled for each round; a turn is about a second of steps. As many as the memory of the GPU
holds are there at a time (`--together`). "hookdiff" is a config with the usual plugins, alone and with `cuda_graphs`
and `compile`, and with AdamW as the others have it; with "Muon" it has the optimizer that a config gets unless it names
one. "diffusers" is the loop of its train_unconditional example around the same network, as it is installed and with its
mixed precision; its images are tensors already, which it would decode. "bare graph" is forward, backward and a fused
AdamW in bf16, captured as one CUDA graph, without noise, clipping, average or a look at the loss: none is faster.
"""

import argparse
import math
import platform
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from attrs import define
from torch import Tensor, nn

from hookdiff.experiment import build_loop, load_config
from hookdiff_memory.estimate import estimate_memory
from hookdiff_networks import UNet

ROOT = Path(__file__).parents[1]
README = ROOT / "benchmarks" / "README.md"
PARTS = ("tests", "train", "checkpoint", "memory", "sampling")
WARM_UP = 25  # steps: compilers and the recording of graphs need more than ten
EVERY = 40  # steps from a checkpoint to the next
SIDE = 64


@define(frozen=True)
class Network:
    """A U-Net and the size of its batches."""

    channels: int
    channel_mults: tuple[int, ...]
    num_res_blocks: int
    batch_size: int

    def make(self) -> nn.Module:
        torch.manual_seed(0)
        return UNet(
            in_channels=3,
            image_size=SIDE,
            channels=self.channels,
            channel_mults=self.channel_mults,
            num_res_blocks=self.num_res_blocks,
        )


NETWORKS = {
    "34M": Network(160, (1, 2, 2), 2, 64),
    "128M": Network(224, (1, 2, 2, 2), 3, 32),
    "small": Network(32, (1, 2), 1, 4),  # to try the script
}

CONFIG = """
[run]
steps = 1000000
batch_size = {batch_size}
device = "{device}"
log_every = 100

[data]
source = "array"
path = "{folder}/images.npy"

[model]
use = "unet"
channels = {channels}
channel_mults = {channel_mults}
num_res_blocks = {num_res_blocks}

[plugins.checkpoint]
every = "1000 h"
"""


def config_of(network: Network, device: str, folder: Path, plugins: tuple[str, ...], *settings: str) -> Any:
    """Return the config of a run as a user would write it, on random images."""
    images = numpy.random.default_rng(0).integers(0, 256, (2048, SIDE, SIDE, 3), numpy.uint8)
    numpy.save(folder / "images.npy", images)
    text = CONFIG.format(
        folder=folder,
        device=device,
        batch_size=network.batch_size,
        channels=network.channels,
        channel_mults=list(network.channel_mults),
        num_res_blocks=network.num_res_blocks,
    )
    (folder / "gpu.toml").write_text(text)
    return load_config(folder / "gpu.toml", ["no:progress", "no:samples", *plugins], settings)


def hookdiff(network: Network, device: str, *plugins: str, optimizer: str = "adamw") -> Iterator[None]:
    with tempfile.TemporaryDirectory() as folder:
        config = config_of(network, device, Path(folder), plugins, f"optimizer.use={optimizer}")
        loop = build_loop(config, Path(folder) / "run")
        with loop:
            for _ in loop.steps():
                yield


def diffusers(network: Network, device: str, mixed_precision: bool) -> Iterator[None]:
    images = torch.rand(2048, 3, SIDE, SIDE) * 2 - 1
    loader = torch.utils.data.DataLoader(images, network.batch_size, shuffle=True)
    net = network.make().to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, betas=(0.95, 0.999), weight_decay=1e-6)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 500))
    alphas_cumprod = (1 - torch.linspace(1e-4, 0.02, 1000, device=device)).cumprod(0)
    while True:
        for clean in loader:
            x0 = clean.to(device)
            noise = torch.randn(x0.shape, device=device)
            t = torch.randint(0, 1000, (len(x0),), device=device)
            level = alphas_cumprod[t].view(-1, 1, 1, 1)
            noisy = level.sqrt() * x0 + (1 - level).sqrt() * noise
            with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=mixed_precision):
                out = net(noisy, t)
            loss = F.mse_loss(out.float(), noise)
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            loss.detach().item()  # for its progress bar
            yield


def bare_graph(network: Network, device: str, compiles: bool, channels_last: bool = False) -> Iterator[None]:
    form = torch.channels_last if channels_last else torch.contiguous_format
    net = network.make().to(device, memory_format=form)  # type: ignore[call-overload]
    call: Callable[..., Tensor] = torch.compile(net) if compiles else net
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True, capturable=device != "cpu")
    x, t = torch.randn(network.batch_size, 3, SIDE, SIDE, device=device), torch.zeros(network.batch_size, device=device)

    def step() -> None:
        with torch.autocast(torch.device(device).type, torch.bfloat16):
            loss = F.mse_loss(call(x, t).float(), x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    replay: Callable[[], object] = step
    if device != "cpu":
        beside = torch.cuda.Stream()
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            for _ in range(5):
                step()
        torch.cuda.current_stream().wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        replay = graph.replay
    while True:
        replay()
        yield


CONTESTANTS: dict[str, Callable[[Network, str], Iterator[None]]] = {
    "bare graph": lambda network, device: bare_graph(network, device, False),
    "bare graph, compiled": lambda network, device: bare_graph(network, device, True),
    "bare graph, channels_last": lambda network, device: bare_graph(network, device, False, True),
    "bare graph, compiled, channels_last": lambda network, device: bare_graph(network, device, True, True),
    "hookdiff": hookdiff,
    "hookdiff, cuda_graphs": lambda network, device: hookdiff(network, device, "cuda_graphs"),
    "hookdiff, compile": lambda network, device: hookdiff(network, device, "compile"),
    "hookdiff, compile and cuda_graphs": lambda network, device: hookdiff(network, device, "compile", "cuda_graphs"),
    "hookdiff, Muon": lambda network, device: hookdiff(network, device, optimizer="muon"),
    "hookdiff, Muon, cuda_graphs": lambda network, device: hookdiff(network, device, "cuda_graphs", optimizer="muon"),
    "hookdiff, Muon, compile and cuda_graphs": lambda network, device: hookdiff(
        network, device, "compile", "cuda_graphs", optimizer="muon"
    ),
    "diffusers, as installed": lambda network, device: diffusers(network, device, mixed_precision=False),
    "diffusers, bf16": lambda network, device: diffusers(network, device, mixed_precision=True),
}


def synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def seconds_of(steps: Iterator[object], num: int, device: str) -> float:
    """Return the seconds that `num` steps take, to the end of their work on the device."""
    synchronize(device)
    begun = time.perf_counter()
    for _ in range(num):
        next(steps)
    synchronize(device)
    return time.perf_counter() - begun


def speed(given: argparse.Namespace, network: str, contestant: str) -> None:
    """Warm up, and say so; then print the images a second of a turn for each line of the input."""
    steps = CONTESTANTS[contestant](NETWORKS[network], given.device)
    seconds_of(steps, WARM_UP if given.device != "cpu" else 2, given.device)
    num = max(5, round(1.0 / (seconds_of(steps, 5, given.device) / 5))) if given.device != "cpu" else 1
    print("result ready", flush=True)
    for _ in sys.stdin:
        print(f"result {NETWORKS[network].batch_size * num / seconds_of(steps, num, given.device)}", flush=True)


class Child:
    """A part of this script in a process of its own, which prints results line by line."""

    def __init__(self, given: argparse.Namespace, *arguments: str) -> None:
        self.name = ", ".join(arguments[1:])
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - read when the process has failed
        command = [sys.executable, __file__, "--device", given.device, "--child", *arguments]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self.errors}
        self.process: Any = subprocess.Popen(command, text=True, **pipes)  # type: ignore[call-overload]

    def answer(self) -> str | None:
        """Wait for the next result, and show it; None at the end, after the last line of an error."""
        for line in self.process.stdout:
            if line.startswith("result "):
                found: str = line.removeprefix("result ").strip()
                print(f"{self.name}: {found}", file=sys.stderr, flush=True)
                return found
        if self.process.wait():
            self.errors.seek(0)
            last = (self.errors.read().strip() or "nothing").splitlines()[-1]
            print(f"{self.name} failed: {last}", file=sys.stderr, flush=True)
        return None

    def turn(self) -> str | None:
        """Ask for one more result, and wait for it."""
        self.process.stdin.write("turn\n")
        self.process.stdin.flush()
        return self.answer()

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


def results(given: argparse.Namespace, *arguments: str) -> Iterator[str]:
    """Yield the results of a child until its end."""
    yield from iter(Child(given, *arguments).answer, None)


def race(given: argparse.Namespace, network: str, names: Sequence[str]) -> dict[str, list[float]]:
    """Return the images a second of each turn of the contestants `names`; none for one that failed."""
    racers = {name: Child(given, "speed", network, name) for name in names}
    speeds = {name: list[float]() for name in names}
    ready = [name for name, racer in racers.items() if racer.answer()]
    order = random.Random(0)
    for _ in range(given.rounds):
        for name in order.sample(ready, len(ready)):
            if found := racers[name].turn():
                speeds[name].append(float(found))
            else:
                ready.remove(name)
    for racer in racers.values():
        racer.close()
    return speeds


def train(given: argparse.Namespace) -> Iterator[str]:
    for network in given.networks:
        speeds = dict[str, list[float]]()
        for first in range(0, len(given.contestants), given.together):
            speeds |= race(given, network, given.contestants[first : first + given.together])
        title = f"{network}, batch {NETWORKS[network].batch_size}"
        yield f"\n| {title} | img/s | to the bare graph | to diffusers, bf16 |"
        yield "|---|---|---|---|"
        for name, found in speeds.items():
            bare = "bare graph, compiled" if "compile" in name else "bare graph"
            cells = (ratio(found, speeds.get(other, [])) for other in (bare, "diffusers, bf16"))
            yield f"| {name} | {middle(found)} | {' | '.join(cells)} |"


def middle(found: list[float]) -> str:
    if not found:
        return "failed"
    return f"{statistics.median(found):.0f} ({min(found):.0f} to {max(found):.0f})"


def ratio(found: list[float], others: list[float]) -> str:
    return f"{statistics.median(found) / statistics.median(others):.2f}" if found and others else ""


def checkpoint(given: argparse.Namespace) -> Iterator[str]:
    yield "\n| network | ten steps | longer with the first checkpoint | with later ones |\n|---|---|---|---|"
    for network in given.networks:
        yield from results(given, "saves", network)


def saves(given: argparse.Namespace, network: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        config = config_of(NETWORKS[network], given.device, Path(folder), (), f"plugins.checkpoint.every={EVERY}")
        with build_loop(config, Path(folder) / "run") as loop:
            steps, usual, longer = loop.steps(), [], []
            seconds_of(steps, EVERY - 15, given.device)
            for _ in range(4):
                usual.append(seconds_of(steps, 10, given.device))
                longer.append(seconds_of(steps, 10, given.device) - usual[-1])  # the save is in the middle
                seconds_of(steps, EVERY - 20, given.device)  # the files are written meanwhile
        cells = (statistics.median(usual), longer[0], statistics.median(longer[1:]))
        print(f"result | {network} | {' | '.join(f'{1000 * one:.0f} ms' for one in cells)} |")


def memory(given: argparse.Namespace) -> Iterator[str]:
    yield "\n| network | plugins | estimated | measured | ratio | reserved |\n|---|---|---|---|---|---|"
    for network in given.networks:
        for plugins in ("", "cuda_graphs"):
            yield from results(given, "peak", network, plugins)


def peak(given: argparse.Namespace, network: str, plugins: str) -> None:
    chosen = tuple(filter(None, [plugins]))
    with tempfile.TemporaryDirectory() as folder:
        config = config_of(NETWORKS[network], given.device, Path(folder), chosen)
        estimated = estimate_memory(config).peak
        loop = build_loop(config, Path(folder) / "run")
        with loop:
            steps = iter(loop.steps())
            for _ in range(WARM_UP):
                next(steps)
            on_gpu = given.device != "cpu"
            measured = torch.cuda.max_memory_allocated() if on_gpu else math.nan
            reserved = torch.cuda.max_memory_reserved() if on_gpu else math.nan
    sizes = [f"{size / 2**30:.2f} GiB" for size in (estimated, measured, reserved)]
    cells = f"{sizes[0]} | {sizes[1]} | {estimated / measured:.2f} | {sizes[2]}"
    print(f"result | {network} | usual{', ' if plugins else ''}{plugins} | {cells} |")


def tests(given: argparse.Namespace) -> Iterator[str]:
    files = [path for path in (ROOT / "tests").rglob("test_*.py") if "pytest.mark.cuda" in path.read_text("utf-8")]
    command = [sys.executable, "-m", "pytest", "-q", "-m", "cuda", "-p", "no:cacheprovider", *map(str, sorted(files))]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    print(ran.stdout[-20_000:], file=sys.stderr, flush=True)
    yield f"\nTests marked `cuda`: {ran.stdout.strip().splitlines()[-1].strip('= ')}."


def sampling(given: argparse.Namespace) -> Iterator[str]:
    script = ROOT / "benchmarks" / "sampling.py"
    command = [sys.executable, str(script), "--device", given.device, "--images", "64", "--rounds", "3"]
    ran = subprocess.run(command, capture_output=True, text=True)
    found = ran.stdout if ran.returncode == 0 else f"not measured: {ran.stderr.strip().splitlines()[-1]}\n"
    yield f"\n```\n{found}```"


def write(name: str, part: str, lines: Sequence[str]) -> None:
    """Put a part of the table of the machine `name` into benchmarks/README.md, in place of its earlier one."""
    begin, end = f"<!-- gpu.py {part}: {name} -->", "<!-- end of gpu.py -->"
    table = "\n".join([begin, *lines, "", end])
    text = README.read_text("utf-8")
    pattern = re.escape(begin) + ".*?" + re.escape(end)
    if re.search(pattern, text, re.S):
        text = re.sub(pattern, lambda _: table, text, flags=re.S)
    else:
        text = f"{text.rstrip()}\n\n{table}\n"
    README.write_text(text, "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help=f"{', '.join(PARTS)}; unless given, all")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--contestants", nargs="+", choices=tuple(CONTESTANTS), default=list(CONTESTANTS))
    parser.add_argument("--together", type=int, help="contestants in memory at a time; unless given, one for 11 GiB")
    parser.add_argument("--networks", nargs="+", choices=tuple(NETWORKS), default=["34M", "128M"])
    parser.add_argument("--device", default="cuda", help="cpu only tries the script")
    parser.add_argument("--keep", action="store_true", help="print the table, and leave README.md as it is")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_intermixed_args()
    if given.device != "cpu" and not torch.cuda.is_available():
        raise SystemExit("gpu.py: there is no CUDA device here, so nothing was measured")
    if given.together is None:
        total = torch.cuda.get_device_properties(0).total_memory if given.device != "cpu" else 0
        given.together = max(1, total // (11 << 30))
    if given.child:
        what, *arguments = given.parts
        {"speed": speed, "saves": saves, "peak": peak}[what](given, *arguments)
        return
    name = torch.cuda.get_device_name() if given.device != "cpu" else platform.processor() or "CPU"
    parts: dict[str, Callable[[argparse.Namespace], Iterator[str]]] = {
        "tests": tests,
        "train": train,
        "checkpoint": checkpoint,
        "memory": memory,
        "sampling": sampling,
    }
    title = f"{name}, torch {torch.__version__}, Python {platform.python_version()}, {time.strftime('%Y-%m-%d')}"
    for part in given.parts or PARTS:  # each is written at once, so that a run which is cut short loses only the last
        lines = [f"{title}:", *parts[part](given)]
        print("\n".join(lines), flush=True)
        if not given.keep:
            write(name, part, lines)


if __name__ == "__main__":
    main()
