"""Measure what Aim, TensorBoard and W&B add to the time of a step.

    python benchmarks/sinks.py [50 10 1] [--plain] [--rounds N] [--threads 1]

The arguments are values of log_every. One loop trains a U-Net on digits, in steps of about 10 ms, with the plugins
`gradients` and `loss`, which log many values (not with `--plain`), and writes metrics.jsonl. It has all three sinks
(W&B offline), but what it logs goes to none of them, to one, or to all, in turns of 50 steps and in an order shuffled
for each round. Two loops, one of them without sinks, would differ by one to three percent by the places of their
tensors in memory alone. After a turn the sinks may finish what is queued, which is not timed. The table has the median
time of a step without sinks, and the median over the rounds of the share that the sinks add to it, with its 95 %
confidence interval (order statistics).
"""

import argparse
import logging
import os
import random
import statistics
import tempfile
import time
import warnings
from collections.abc import Collection, Mapping
from math import ceil, floor, sqrt
from pathlib import Path

import torch

from hookdiff import Loop, LoopConfig, Sink, builtin_plugins, hookimpl
from hookdiff.data import digits
from hookdiff.diffusion import VP, Diffusion
from hookdiff_aim import Aim
from hookdiff_gradients import GradientMonitor
from hookdiff_loss import LossMonitor
from hookdiff_networks import UNet
from hookdiff_tensorboard import TensorBoard
from hookdiff_wandb import WandB

TURN, PAUSE = 50, 0.2  # steps; seconds
SINKS = "aim", "tensorboard", "wandb"


class Switch:
    """The sinks of a loop, each of which can be switched on and off."""

    def __init__(self) -> None:
        self.sinks: dict[str, Sink] = {"aim": Aim(), "tensorboard": TensorBoard(), "wandb": WandB(mode="offline")}
        self.on: Collection[str] = SINKS
        self.values = 0  # of the newest log

    @hookimpl
    def on_ready(self, loop: Loop) -> None:
        for sink in self.sinks.values():
            sink.on_ready(loop)

    @hookimpl
    def on_log(self, loop: Loop, step: int, values: Mapping[str, float]) -> None:
        self.values = len(values)
        for name in self.on:
            self.sinks[name].on_log(loop, step, values)


def compare(folder: Path, log_every: int, rounds: int, is_plain: bool) -> tuple[int, dict[str, list[float]]]:
    """Return the number of values of a log, and for each row of the table the seconds of a step in each round."""
    torch.manual_seed(0)
    model = UNet(channels=32, num_res_blocks=1)
    switch = Switch()
    monitors = {} if is_plain else {"gradients": GradientMonitor(), "loss": LossMonitor()}
    loop = Loop(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True),
        Diffusion(VP(schedule="cosine")),
        digits(),
        LoopConfig(steps=10**9, batch_size=8, log_every=log_every),
        {**builtin_plugins(signals=False), **monitors, "sinks": switch},
        run_dir=folder,
    )
    modes: dict[str, Collection[str]] = {"none": (), **{name: (name,) for name in SINKS}, "all three": SINKS}
    seconds: dict[str, list[float]] = {name: [] for name in modes}
    order = random.Random(0)
    with loop:
        steps = iter(loop.steps())
        for _ in range(TURN // 2):  # so that the log of a turn is in its middle
            next(steps)
        for number in range(-2, rounds):  # the first two to get warm
            for name in order.sample(list(modes), len(modes)):
                switch.on = modes[name]
                began = time.perf_counter()
                for _ in range(TURN):
                    next(steps)
                took = (time.perf_counter() - began) / TURN
                time.sleep(PAUSE)
                if number >= 0:
                    seconds[name].append(took)
    return switch.values, seconds


def interval(values: list[float]) -> tuple[float, float]:
    """Return the 95 % confidence interval of the median."""
    ordered, count = sorted(values), len(values)
    reach = 1.96 * sqrt(count) / 2
    return ordered[max(0, floor(count / 2 - reach))], ordered[min(count - 1, ceil(count / 2 + reach))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("log_every", nargs="*", type=int, default=[50, 10, 1])
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--rounds", type=int, default=80)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    logging.disable(logging.INFO)  # a sink that fails must be seen
    warnings.simplefilter("ignore")
    print(f"torch {torch.__version__}, {options.threads} threads, load {os.getloadavg()[0]:.1f} before")
    print("| log_every | values | without | sinks | added | 95 % |\n|---|---|---|---|---|---|")
    for log_every in options.log_every:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            values, seconds = compare(Path(folder, "run"), log_every, options.rounds, options.plain)
        bare = seconds.pop("none")
        for name, times in seconds.items():
            added = [with_sinks / without - 1 for with_sinks, without in zip(times, bare, strict=True)]
            low, high = interval(added)
            share = f"{statistics.median(added):+.1%} | {low:+.1%} to {high:+.1%}"
            print(f"| {log_every} | {values} | {1000 * statistics.median(bare):.2f} ms | {name} | {share} |")


if __name__ == "__main__":
    main()
