"""Compare the forms of a training step on a CPU: precision, memory format, attention, and memory that is kept.

    python benchmarks/step.py [attention] [networks] [--threads N] [--rounds N]

`attention` times a layer of attention by matrix products and by torch's kernel, forward alone (sampling) and with the
backward pass (training), for tokens, channels of a head and precision; memory is kept. `networks` times steps of whole
networks with AdamW in images a second. Each way of handling memory has a process of its own, as glibc cannot go back;
the processes take turns round by round, and the forms within a process too. The rules of `run.channels_last = "auto"`,
`run.attention = "by_layer"` and amp's "auto" follow from these tables.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hookdiff.machine import keep_memory
from hookdiff.models import adapt, attention, use_attention
from hookdiff_networks import DiT, UNet

PRECISIONS = {"float32": torch.float32, "bf16": torch.bfloat16}


def of_diffusers(side: int = 32) -> nn.Module:
    from diffusers import UNet2DModel

    model = UNet2DModel(
        sample_size=side,
        in_channels=1,
        out_channels=1,
        layers_per_block=1,
        block_out_channels=(32, 64, 64),
        down_block_types=("DownBlock2D", "DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D", "UpBlock2D"),
        norm_num_groups=8,
    )
    return model


# By name: the network, the shape of a batch.
NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "unet 8 px (basic.toml)": (lambda: UNet(channels=32, num_res_blocks=1), (64, 1, 8, 8)),
    "unet 28 px (fashion-unet.toml)": (
        lambda: UNet(image_size=28, channels=32, channel_mults=(1, 2, 2), num_res_blocks=1),
        (64, 1, 28, 28),
    ),
    "unet 64 px": (
        lambda: UNet(in_channels=3, image_size=64, channels=64, channel_mults=(1, 2, 4), num_res_blocks=1),
        (8, 3, 64, 64),
    ),
    "dit 28 px": (lambda: DiT(image_size=28), (64, 1, 28, 28)),
    "UNet2DModel 32 px": (lambda: adapt(of_diffusers()), (64, 1, 32, 32)),
}
FORMS = list(product(PRECISIONS, ("contiguous", "channels_last"), ("kernel", "by_layer")))


def timed(call: Callable[[], object], repeats: int) -> float:
    """Return the median seconds of a call, after one that does not count."""
    call()
    seconds = []
    for _ in range(repeats):
        begun = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds)


def compare_attention(rounds: int) -> None:
    keep_memory()
    print("time of products / time of the kernel        training               sampling")
    for precision, head_dim, tokens in product(PRECISIONS, (8, 32, 64), (16, 64, 256, 1024)):
        heads, batch = max(1, 64 // head_dim), 64 if tokens <= 256 else 16
        shape = (batch, heads, tokens, head_dim)
        row = []
        for trains in (True, False):
            parts = [torch.randn(shape, dtype=PRECISIONS[precision], requires_grad=trains) for _ in range(3)]

            def call(form: str, parts: list[Tensor] = parts, trains: bool = trains) -> None:
                with torch.set_grad_enabled(trains):
                    out = attention(*parts, form)  # type: ignore[arg-type]
                    if trains:
                        torch.autograd.grad(out.sum(), parts)

            ratios = [timed(lambda: call("product"), 3) / timed(lambda: call("kernel"), 3) for _ in range(rounds)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            row.append(f"{middle:.2f} ({low:.2f} to {high:.2f})")
        print(f"{precision:<8} {head_dim:>3} channels {tokens:>5} tokens      {row[0]:<22} {row[1]}", flush=True)


def measure_networks(keeps: bool) -> None:
    """Print images a second of each network and form, a line for each round that the parent asks for."""
    if keeps:
        keep_memory()
    steps = {name: [_step(*NETWORKS[name], form) for form in FORMS] for name in NETWORKS}
    for line in sys.stdin:
        name = line.strip()
        print(*(NETWORKS[name][1][0] / timed(step, 3) for step in steps[name]), flush=True)


def _step(make: Callable[[], nn.Module], shape: tuple[int, ...], form: tuple[str, str, str]) -> Callable[[], None]:
    precision, memory_format, attends = form
    torch.manual_seed(0)
    model = make().train()
    use_attention(model, attends)  # type: ignore[arg-type]
    if memory_format == "channels_last":
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    x, t = torch.randn(shape), torch.randint(0, 1000, shape[:1])

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            out = model(x, t)
        F.mse_loss(out.float(), x).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def compare_networks(rounds: int, threads: int) -> None:
    children = {}
    for keeps in (False, True):
        command = [sys.executable, __file__, "--child", str(int(keeps)), "--threads", str(threads)]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
        children[keeps] = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
    for name in NETWORKS:
        speeds: dict[bool, list[list[float]]] = {False: [], True: []}
        for _ in range(rounds):
            for keeps, child in children.items():
                assert child.stdin
                assert child.stdout
                print(name, file=child.stdin, flush=True)
                speeds[keeps].append([float(speed) for speed in child.stdout.readline().split()])
        print(f"\n{name}: ratio to float32, contiguous, kernel, memory returned")
        base = [speed[0] for speed in speeds[False]]
        print(f"{'':<36}{'returned':<24}kept ({statistics.median(base):.0f} img/s is 1)")
        for at, form in enumerate(FORMS):
            cells = []
            for keeps in (False, True):
                ratios = [speed[at] / of for speed, of in zip(speeds[keeps], base, strict=True)]
                low, middle, high = statistics.quantiles(ratios, n=4)
                cells.append(f"{middle:.2f} ({low:.2f} to {high:.2f})")
            print(f"{' '.join(form):<36}{cells[0]:<24}{cells[1]}", flush=True)
    for child in children.values():
        child.communicate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", default=["attention", "networks"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    if given.child:
        measure_networks(given.child == "1")
        return
    if "attention" in given.what:
        compare_attention(given.rounds)
    if "networks" in given.what:
        compare_networks(given.rounds, given.threads)


if __name__ == "__main__":
    main()
