"""Measure `hookdiff report` on a long run: time, size of the file, and time until a browser shows it.

    python benchmarks/report.py [--steps 100000] [--grids 200] [--browser /usr/bin/chromium]

The run directory is made up: a line of metrics.jsonl for each step with the main values of the plugins loss, gradients,
lr, clip and memory, a checkpoint every 100 steps, and grids of 2 x 36 images of 64 pixels, half noise and half smooth.
The report is made by a process of its own. If playwright and the browser are installed, the headless browser loads the
file five times; the times are until the page can be used (the event load), and until the last plot is drawn.
"""

import argparse
import importlib.util
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import numpy
import torch

from hookdiff.authors import sheet
from hookdiff.log import Panel
from hookdiff.run_dir import picture_path

EDGES = ["-inf", *(f"{-8.5 + 1.6 * k:+.1f}" for k in range(11)), "+inf"]
CONFIG = "[run]\nsteps = {steps}\nbatch_size = 64\nlog_every = 1\n"


def make_run(folder: Path, steps: int, grids: int) -> None:
    folder.mkdir()
    (folder / "config.toml").write_text(CONFIG.format(steps=steps))
    draw = random.Random(0)
    with (folder / "metrics.jsonl").open("w") as metrics, (folder / "events.jsonl").open("w") as events:
        for step in range(1, steps + 1):
            loss = 0.3 + math.exp(-step / 5000) + 0.05 * draw.random()
            line = {"step": step, "time": 1.7e9 + step / 10, "loss": loss, "loss/smooth": loss, "lr": 1e-3}
            line |= {"grad_norm": draw.random(), "clip/threshold": 1.0, "memory/peak": 2000.0}
            for k, (low, high) in enumerate(pairwise(EDGES)):
                line[f"loss/snr-{k:02d}:{low}..{high}"] = loss * draw.random()
                line[f"loss/floor-{k:02d}:{low}..{high}"] = 0.5
            metrics.write(json.dumps(line) + "\n")
            if step % 100 == 0:
                event = {"kind": "checkpoint", "severity": "info", "text": f"saved step-{step:08d}"}
                events.write(json.dumps({"step": step, "time": 1.7e9 + step / 10, **event}) + "\n")
    (folder / "outcome.json").write_text(json.dumps({"reason": "done", "message": "", "step": steps, "epoch": 1}))
    across = numpy.linspace(0, 3, 64)
    smooth = torch.tensor(numpy.sin(across[:, None] * 3) * numpy.cos(across), dtype=torch.float32)
    for k in range(grids):
        noise = torch.rand(72, 3, 64, 64, generator=torch.Generator().manual_seed(k)) * 2 - 1
        share = k / max(1, grids - 1)
        images = (share * smooth + (1 - share / 2) * noise).clamp(-1, 1)
        step = (k + 1) * steps // grids
        panels = [Panel(images[:36], title="ema"), Panel(images[36:], title="model")]
        sheet(panels).with_info(name="samples", step=step).save(picture_path(folder, "samples", step))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--grids", type=int, default=200)
    parser.add_argument("--browser", default="/usr/bin/chromium")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        make_run(run, options.steps, options.grids)
        begin = time.monotonic()
        process = subprocess.Popen([sys.executable, "-m", "hookdiff", "report", str(run)])
        _, status, usage = os.wait4(process.pid, 0)
        assert status == 0, status
        path = run / "report.html"
        size = path.stat().st_size / 1e6
        memory = usage.ru_maxrss / 1024  # Linux counts in KiB
        print(f"{options.steps:,} logged steps and {options.grids} grids")
        print(f"report: {time.monotonic() - begin:.1f} s, {memory:.0f} MiB of memory, {size:.1f} MB")
        if importlib.util.find_spec("playwright") is None or not Path(options.browser).exists():
            print("playwright or the browser is missing: not opened")
        else:
            opened(path, options.browser)


def opened(path: Path, browser_path: str) -> None:
    from playwright.sync_api import sync_playwright

    loaded, drawn = [], []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path, args=["--no-sandbox", "--disable-gpu"])
        for _ in range(5):
            page = browser.new_page()
            begin = time.monotonic()
            page.goto(path.as_uri())
            loaded.append(time.monotonic() - begin)
            page.wait_for_selector("html[data-ready=yes]", state="attached")
            drawn.append(time.monotonic() - begin)
            page.close()
        browser.close()
    for name, times in (("loaded", loaded), ("last plot drawn", drawn)):
        print(f"{name}: median {statistics.median(times):.2f} s, {min(times):.2f} to {max(times):.2f} s")


if __name__ == "__main__":
    main()
