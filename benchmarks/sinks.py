"""Measure what Aim, TensorBoard and W&B together add to the time of a step.

    python benchmarks/sinks.py [50 10 1] [--rounds N] [--threads 1]

The arguments are values of log_every. Two loops train the same U-Net on the same digits, in steps of about 10 ms; both
have the plugins `gradients` and `loss` and write metrics.jsonl, and one has all three sinks (W&B offline). They take
turns of 50 steps, in an order shuffled for each round; after a turn the sinks may finish what is queued, which is not
timed. The table has the median time of a step, and the median over the rounds of the share that the sinks add, with its
95 % confidence interval (order statistics).
"""

import argparse
import logging
import os
import random
import statistics
import tempfile
import time
import warnings
from collections.abc import Iterator
from math import ceil, floor, sqrt
from pathlib import Path

import torch

from hookdiff import Loop, LoopConfig, builtin_plugins
from hookdiff.data import digits
from hookdiff.diffusion import VP, Diffusion
from hookdiff_aim import Aim
from hookdiff_gradients import GradientMonitor
from hookdiff_loss import LossMonitor
from hookdiff_networks import UNet
from hookdiff_tensorboard import TensorBoard
from hookdiff_wandb import WandB

TURN, PAUSE = 50, 0.2  # steps; seconds


def train(folder: Path, log_every: int, has_sinks: bool) -> Iterator[None]:
    torch.manual_seed(0)
    model = UNet(channels=32, num_res_blocks=1)
    sinks = {"aim": Aim(), "tensorboard": TensorBoard(), "wandb": WandB(mode="offline")} if has_sinks else {}
    loop = Loop(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True),
        Diffusion(VP(schedule="cosine")),
        digits(),
        LoopConfig(steps=10**9, batch_size=8, log_every=log_every),
        {**builtin_plugins(signals=False), "gradients": GradientMonitor(), "loss": LossMonitor(), **sinks},
        run_dir=folder,
    )
    with loop:
        for _ in loop.steps():
            yield


def compare(folder: Path, log_every: int, rounds: int) -> dict[bool, list[float]]:
    loops = {has_sinks: train(folder / str(has_sinks) / "run", log_every, has_sinks) for has_sinks in (False, True)}
    seconds: dict[bool, list[float]] = {has_sinks: [] for has_sinks in loops}
    order = random.Random(0)
    for number in range(-2, rounds):  # the first two to get warm
        for has_sinks in order.sample(list(loops), len(loops)):
            began = time.perf_counter()
            for _ in range(TURN):
                next(loops[has_sinks])
            took = (time.perf_counter() - began) / TURN
            time.sleep(PAUSE)
            if number >= 0:
                seconds[has_sinks].append(took)
    for loop in loops.values():
        loop.close()
    return seconds


def interval(values: list[float]) -> tuple[float, float]:
    """Return the 95 % confidence interval of the median."""
    ordered, count = sorted(values), len(values)
    reach = 1.96 * sqrt(count) / 2
    return ordered[max(0, floor(count / 2 - reach))], ordered[min(count - 1, ceil(count / 2 + reach))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("log_every", nargs="*", type=int, default=[50, 10, 1])
    parser.add_argument("--rounds", type=int, default=80)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    logging.disable(logging.INFO)  # a sink that fails must be seen
    warnings.simplefilter("ignore")
    print(f"torch {torch.__version__}, {options.threads} threads, load {os.getloadavg()[0]:.1f} before")
    print("| log_every | without | with all three | added | 95 % |\n|---|---|---|---|---|")
    for log_every in options.log_every:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            seconds = compare(Path(folder), log_every, options.rounds)
        added = [with_sinks / bare - 1 for bare, with_sinks in zip(*seconds.values(), strict=True)]
        bare, with_sinks = (1000 * statistics.median(times) for times in seconds.values())
        low, high = interval(added)
        share = f"{statistics.median(added):+.1%} | {low:+.1%} to {high:+.1%}"
        print(f"| {log_every} | {bare:.2f} ms | {with_sinks:.2f} ms | {share} |")


if __name__ == "__main__":
    main()
