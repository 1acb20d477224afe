"""Measure `hookdiff report` and `watch` on a very long run, and `hookdiff runs` on very many.

    python benchmarks/long_runs.py [--lines 1000000] [--runs 10000]

All run directories are made up. The long run has a line of metrics.jsonl for each step, with 26 values of the plugins
loss, gradients, lr, clip and memory, and an FID every 10,000 steps. Each of the many runs has 100 lines, 2 FID values
and a config of 200 lines; seed and learning rate differ. Each command is a process of its own.
"""

import argparse
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

EDGES = ["-inf", *(f"{-8.5 + 1.6 * k:+.1f}" for k in range(9)), "+inf"]
TABLE = '[plugins.p{number}]\nevery = "{number} steps"\nrate = 0.5\nnames = [\n    "a",\n    "b",\n]\n'


def make_long(folder: Path, num: int) -> None:
    folder.mkdir()
    (folder / "config.toml").write_text(f"[run]\nsteps = {num}\nbatch_size = 64\nlog_every = 1\n")
    draw = random.Random(0)
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, num + 1):
            loss = 0.3 + math.exp(-step / 5000) + 0.05 * draw.random()
            line = {"step": step, "time": 1.7e9 + step / 10, "loss": loss, "loss/smooth": loss, "lr": 1e-3}
            line |= {"grad_norm": draw.random(), "clip/threshold": 1.0, "memory/peak": 2000.0}
            for k, (low, high) in enumerate(pairwise(EDGES)):
                line[f"loss/snr-{k:02d}:{low}..{high}"] = loss * draw.random()
                line[f"loss/floor-{k:02d}:{low}..{high}"] = 0.5
            if step % 10_000 == 0:
                line |= {"fd/digits": 100 / step, "fd/digits/num": 1000.0}
            file.write(json.dumps(line) + "\n")
    (folder / "outcome.json").write_text(json.dumps({"reason": "done", "message": "", "step": num, "epoch": 1}))


def make_many(folder: Path, num: int) -> None:
    tables = "".join(TABLE.format(number=number) for number in range(24))
    start = {"step": 0, "time": 1.7e9, "kind": "start", "severity": "info", "text": "", "details": {"steps": 1000}}
    draw = random.Random(0)
    for number in range(num):
        run = folder / f"sweep-{number // 100:03d}" / f"run-{number:05d}"
        run.mkdir(parents=True)
        rate = draw.choice([1e-4, 3e-4, 1e-3])
        (run / "config.toml").write_text(f"[run]\nseed = {number}\nsteps = 1000\n[optimizer]\nlr = {rate}\n{tables}")
        with (run / "metrics.jsonl").open("w") as file:
            for step in range(10, 1001, 10):
                line = {
                    "step": step,
                    "time": 1.7e9 + step,
                    "loss": draw.random(),
                    "loss/smooth": draw.random(),
                    "lr": rate,
                }
                line |= {"fd/digits": draw.random(), "fd/digits/num": 1000.0} if step % 500 == 0 else {}
                file.write(json.dumps(line) + "\n")
        (run / "events.jsonl").write_text(json.dumps(start) + "\n")
        (run / "outcome.json").write_text(json.dumps({"reason": "done", "message": "", "step": 1000, "epoch": 1}))


def measure(*words: str) -> None:
    begin = time.monotonic()
    process = subprocess.Popen([sys.executable, "-m", "hookdiff", *words], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    assert status == 0, status
    processor, memory = usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024  # Linux counts in KiB
    seconds = time.monotonic() - begin
    print(f"{words[0]}: {seconds:.1f} s ({processor:.1f} s of the processor), {memory:.0f} MiB of memory")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--lines", type=int, default=1_000_000)
    parser.add_argument("--runs", type=int, default=10_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        long, many = Path(folder, "long"), Path(folder, "many")
        make_long(long, options.lines)
        print(f"{options.lines:,} lines of 26 values, {(long / 'metrics.jsonl').stat().st_size / 1e6:,.0f} MB")
        measure("report", str(long))
        measure("watch", str(long))
        make_many(many, options.runs)
        print(f"{options.runs:,} runs")
        measure("runs", str(many))


if __name__ == "__main__":
    main()
