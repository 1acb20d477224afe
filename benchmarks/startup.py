"""Compare the time that each command takes with that of `import torch` alone.

    python benchmarks/startup.py [--rounds 11]

The commands take turns, each in a process of its own and in an order shuffled for each round, so that other load on the
machine affects all alike. The table has the median time, and the median over the rounds of its ratio to `import torch`
in the same round, with its interquartile range. The config is a small U-Net on digits; the run has made two steps.
"first step" ends when a run of that config, or a script in plain torch that trains two convolutions on the same digits,
has updated the weights for the first time.
"""

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CONFIG = """
[run]
steps = 2
batch_size = 16
device = "cpu"
plugins = ["ema", "lr", "checkpoint"]
[data]
source = "digits"
[model]
use = "unet"
channels = 8
num_res_blocks = 1
head_dim = 8
[optimizer]
lr = 1e-3
[sampling]
steps = 2
"""
# A run in `first/` and the script below end their processes after the first update.
FIRST = """
import os
from hookdiff import hookimpl

class First:
    @hookimpl
    def after_optimizer_step(self):
        os._exit(0)
"""
PLAIN = """
import os, torch
from sklearn.datasets import load_digits
images = torch.from_numpy(load_digits().images).float()[:16, None]
net = torch.nn.Sequential(torch.nn.Conv2d(1, 64, 3, padding=1), torch.nn.SiLU(), torch.nn.Conv2d(64, 1, 3, padding=1))
optimizer = torch.optim.AdamW(net.parameters())
(net(images) - images).square().mean().backward()
optimizer.step()
os._exit(0)
"""
TORCH = "import torch"
HOOKDIFF = [sys.executable, "-m", "hookdiff"]
COMMANDS = {
    TORCH: [sys.executable, "-c", TORCH],
    "--help": [*HOOKDIFF, "--help"],
    "plugins": [*HOOKDIFF, "plugins"],
    "plugins ema": [*HOOKDIFF, "plugins", "ema"],
    "check": [*HOOKDIFF, "check", "small.toml"],
    "sample": [*HOOKDIFF, "sample", "run", "--num", "1", "--out", "x.png", "--overwrite"],
    "resume, already done": [*HOOKDIFF, "resume", "run"],
    "run, first step": [*HOOKDIFF, "run", "small.toml", "--out", "first", "--overwrite", "--plugins", "first:First"],
    "plain torch, first step": [sys.executable, "-c", PLAIN],
}


def seconds(command: list[str], folder: str) -> float:
    """Run the command in `folder`, and return how long it took."""
    begin = time.perf_counter()
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return time.perf_counter() - begin


def quartiles(values: list[float]) -> tuple[float, float, float]:
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=11)
    options = parser.parse_args()
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "small.toml").write_text(CONFIG)
        Path(folder, "first.py").write_text(FIRST)
        seconds([*HOOKDIFF, "run", "small.toml", "--out", "run"], folder)
        for turn in range(options.rounds + 1):
            for name in random.sample(list(COMMANDS), len(COMMANDS)):
                took = seconds(COMMANDS[name], folder)
                if turn:  # the first round fills the system's cache of files
                    times[name].append(took)
    print(f"{options.rounds} rounds, load of the machine {os.getloadavg()[0]:.1f}")
    print(f"{'':<24} {'seconds':>8} {'ratio':>6}   interquartile range")
    for name, own in times.items():
        low, middle, high = quartiles([one / base for one, base in zip(own, times[TORCH], strict=True)])
        print(f"{name:<24} {statistics.median(own):>8.2f} {middle:>6.2f}   {low:.2f} to {high:.2f}")


if __name__ == "__main__":
    main()
