"""Measure `hookdiff report` and `watch` on long runs, and `hookdiff runs` on very many.

    python benchmarks/long_runs.py [--lines 1000000] [--steps 100000] [--runs 10000] [--browser /usr/bin/chromium]

All run directories are made up. A long run has a line of metrics.jsonl for each step, with 26 values of the plugins
loss, gradients, lr, clip and memory, and an FID every 10,000 steps. One has --lines, another --steps with pictures: a
checkpoint every 100 steps, and 200 grids of 2 x 36 images of 64 pixels, half noise and half smooth. Each of the many
runs has 100 lines, 2 FID values and a config of 200 lines; seed and learning rate differ.

Each command is a process of its own. If playwright and the browser are installed, the headless browser loads the report
with pictures five times; the times are until the page can be used (the event load), and until the last plot is drawn.
"""

import argparse
import importlib.util
import json
import math
import multiprocessing
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

EDGES = ["-inf", *(f"{-8.5 + 1.6 * k:+.1f}" for k in range(9)), "+inf"]
TABLE = '[plugins.p{number}]\nevery = "{number} steps"\nrate = 0.5\nnames = [\n    "a",\n    "b",\n]\n'
GRIDS = 200


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
    end(folder, num)


def end(folder: Path, step: int) -> None:
    (folder / "outcome.json").write_text(json.dumps({"reason": "done", "message": "", "step": step, "epoch": 1}))


def add_pictures(folder: Path, num: int) -> None:
    """Add checkpoints and grids to a long run of `num` steps.

    A process of its own does this: the memory that a process had at most is at least that of the one which started it.
    """
    import numpy
    import torch

    from hookdiff.authors import sheet
    from hookdiff.log import Panel
    from hookdiff.run_dir import picture_path

    with (folder / "events.jsonl").open("w") as events:
        for step in range(100, num + 1, 100):
            event = {"kind": "checkpoint", "severity": "info", "text": f"saved step-{step:08d}"}
            events.write(json.dumps({"step": step, "time": 1.7e9 + step / 10, **event}) + "\n")
    across = numpy.linspace(0, 3, 64)
    smooth = torch.tensor(numpy.sin(across[:, None] * 3) * numpy.cos(across), dtype=torch.float32)
    for k in range(GRIDS):
        noise = torch.rand(72, 3, 64, 64, generator=torch.Generator().manual_seed(k)) * 2 - 1
        share = k / (GRIDS - 1)
        images = (share * smooth + (1 - share / 2) * noise).clamp(-1, 1)
        step = (k + 1) * num // GRIDS
        panels = [Panel(images[:36], title="ema"), Panel(images[36:], title="model")]
        sheet(panels).with_info(name="samples", step=step).save(picture_path(folder, "samples", step))


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
                line = {"step": step, "time": 1.7e9 + step, "lr": rate}
                line |= {"loss": draw.random(), "loss/smooth": draw.random()}
                line |= {"fd/digits": draw.random(), "fd/digits/num": 1000.0} if step % 500 == 0 else {}
                file.write(json.dumps(line) + "\n")
        (run / "events.jsonl").write_text(json.dumps(start) + "\n")
        end(run, 1000)


def measure(*words: str) -> None:
    begin = time.monotonic()
    process = subprocess.Popen([sys.executable, "-m", "hookdiff", *words], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    assert status == 0, status
    processor, memory = usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024  # Linux counts in KiB
    seconds = time.monotonic() - begin
    print(f"{words[0]}: {seconds:.1f} s ({processor:.1f} s of the processor), {memory:.0f} MiB of memory")


def open_report(path: Path, browser_path: str) -> None:
    if importlib.util.find_spec("playwright") is None or not Path(browser_path).exists():
        print("playwright or the browser is missing: not opened")
        return
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--lines", type=int, default=1_000_000)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--browser", default="/usr/bin/chromium")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        long, pictured, many = Path(folder, "long"), Path(folder, "pictured"), Path(folder, "many")
        make_long(long, options.lines)
        print(f"{options.lines:,} lines of 26 values, {(long / 'metrics.jsonl').stat().st_size / 1e6:,.0f} MB")
        measure("report", str(long))
        measure("watch", str(long))
        make_long(pictured, options.steps)
        drawing = multiprocessing.get_context("spawn").Process(target=add_pictures, args=(pictured, options.steps))
        drawing.start()
        drawing.join()
        assert drawing.exitcode == 0, drawing.exitcode
        print(f"{options.steps:,} lines and {GRIDS} grids")
        measure("report", str(pictured))
        print(f"a file of {(pictured / 'report.html').stat().st_size / 1e6:.1f} MB")
        open_report(pictured / "report.html", options.browser)
        make_many(many, options.runs)
        print(f"{options.runs:,} runs")
        measure("runs", str(many))


if __name__ == "__main__":
    main()
