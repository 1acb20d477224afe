"""Compare square crops with buckets, and origins of the positions of `dit`, on drawings of three shapes.

    python benchmarks/shapes.py crops [--minutes 10] [--seeds 0 1 2]       # CPU time of one thread
    python benchmarks/shapes.py positions [--steps 340] [--seeds 0 1 2]
    python benchmarks/shapes.py table

A drawing has a dark frame along its edges, two grey bands, and a dark disc in its middle. It is drawn in 32 x 32, 40 x
24 or 24 x 40 pixels, and trained on at about 16 x 16: cut to squares (`image_size = 16`), or in buckets of 16x16, 20x12
and 12x20. An image passes if each of its edges is dark over 90 % of its length, and the disc is round and in the
middle. Square crops are shown no edges of oblong drawings, so their network cannot know the frame of an oblong image.

Each training is a process with one thread; `crops` gives each the same CPU time, so that the machine may have other
work. What is finished is kept in --work.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw
from torch import Tensor

SIZES = ["16x16", "20x12", "12x20"]  # width x height
UNTRAINED = ["20x16", "24x12"]
NUM, IMAGES = 3000, 48
FRAME, RADII = 2.5, (1.9, 2.7)  # pixels of a sample


def draw(width: int, height: int, numbers: random.Random, fine: int = 16) -> Image.Image:
    """Return a drawing of twice this size, with smooth edges."""
    wide, high, frame = width * fine, height * fine, FRAME * fine
    picture = Image.new("L", (wide, high), 235)
    pen = ImageDraw.Draw(picture)
    for _ in range(2):
        top = numbers.uniform(0.15, 0.75) * high
        pen.rectangle((0, top, wide, top + 2 * fine), 150)
    pen.rectangle((0, 0, wide, high), outline=20, width=round(frame))
    radius = numbers.uniform(*RADII) * fine
    pen.ellipse((wide / 2 - radius, high / 2 - radius, wide / 2 + radius, high / 2 + radius), 20)
    return picture.resize((2 * width, 2 * height), Image.Resampling.BOX)


def passes(images: Tensor) -> Tensor:
    """Return which `images` (n 1 h w in [-1, 1]) are drawings: n, bool."""
    inner = (images[:, 0, 3:-3, 3:-3] < -0.5).float()  # more than half disc, also beside a band
    rows, columns = (torch.arange(size).float() for size in inner.shape[1:])
    area = inner.sum((1, 2)).clamp(min=1)
    down, right = (inner.sum(2) * rows).sum(1) / area, (inner.sum(1) * columns).sum(1) / area
    centred = ((down - rows.mean()).abs() < 0.75) & ((right - columns.mean()).abs() < 0.75)
    high, wide = (inner.amax(axis).sum(1) for axis in (2, 1))
    is_round = (high - wide).abs() <= 1
    # The dark pixels of a disc fill pi / 4 of its box, and more if it is small.
    full = area / (high * wide).clamp(min=1) > 0.6
    return framed(images) & centred & is_round & full & (high >= 3)


def framed(images: Tensor) -> Tensor:
    """Return which `images` have a dark line along each edge: n, bool."""
    dark = images[:, 0] < -0.2
    edges = [dark[:, :2].any(1), dark[:, -2:].any(1), dark[:, :, :2].any(2), dark[:, :, -2:].any(2)]
    return torch.stack([edge.float().mean(1) >= 0.9 for edge in edges]).all(0)


def pictures(folder: Path) -> Path:
    """Draw the training pictures, unless they are there."""
    if not folder.exists():
        folder.mkdir(parents=True)
        numbers = random.Random(0)
        for number in range(NUM):
            width, height = map(int, SIZES[number % 3].split("x"))
            draw(width, height, numbers).save(folder / f"{number:04}.png")
    return folder


def corner(num: int, side: int, device: torch.device) -> Tensor:
    """Count the first token as 0."""
    return torch.arange(num, dtype=torch.float32, device=device)


def scaled(num: int, side: int, device: torch.device) -> Tensor:
    """Spread the tokens over the positions of the square."""
    return (torch.arange(num, dtype=torch.float32, device=device) + 0.5) * side / num - 0.5


ORIGINS: dict[str, Callable[..., Tensor] | None] = {"corner": corner, "middle": None, "scaled": scaled}


def train(work: Path, name: str, seed: int, minutes: float, steps: int | None, origin: str, squares: bool) -> None:
    """Train once, and write how many images of each size pass."""
    import hookdiff_networks.dit
    from hookdiff import load_config
    from hookdiff.experiment import build_loop

    torch.set_num_threads(1)
    if instead := ORIGINS[origin]:
        hookdiff_networks.dit._places = instead
    config: dict[str, Any] = {
        "run": {"steps": steps or 10**7, "batch_size": 48, "seed": seed, "threads": 1, "device": "cpu"},
        "data": {"source": "folder", "path": str(pictures(work / "pictures")), "image_size": 16, "flip": False},
        "model": {"use": "dit", "patch_size": 2, "hidden_size": 96, "depth": 4, "num_heads": 4},
        "sampling": {"steps": 40},
        "plugins": {"ema": {"decay": [0.99]}},
    }
    config["run"] |= {"plugins": ["ema", "clip"], "channels_last": False}
    config["data"] |= {} if squares else {"buckets": SIZES}
    path = work / f"{name}.toml"
    path.write_text(_toml(config))
    loop = build_loop(load_config(path), work / f"run-{name}")
    with loop:
        start, done = time.process_time(), 0
        for step in loop.steps():
            done = step.step
            if steps is None and time.process_time() - start > 60 * minutes:
                break
        results: dict[str, Any] = {"steps": done, "seconds": time.process_time() - start}
        for size in [*SIZES, *UNTRAINED]:
            width, height = map(int, size.split("x"))
            generators = [torch.Generator().manual_seed(1000 * seed + number) for number in range(IMAGES)]
            assert loop.sampler is not None
            with loop.weights(None), torch.no_grad():
                images = loop.sampler.sample(
                    loop.model.eval(), loop.objective, (1, height, width), generators, loop.device
                )
            results[size] = {"passed": int(passes(images).sum()), "framed": float(framed(images).float().mean())}
            torch.save(images, work / f"{name}-{size}.pt")
    (work / f"{name}.json").write_text(json.dumps(results))


def _toml(config: dict[str, Any]) -> str:
    import tomli_w

    return tomli_w.dumps(config)


def jobs(options: argparse.Namespace) -> list[tuple[str, list[str]]]:
    """Return the name and the arguments of each training."""
    seeds = options.seeds
    if options.what == "crops":
        limit = ["--minutes", str(options.minutes)]
        pairs = [("buckets", []), ("squares", ["--squares"])]
        return [(f"{name}-{seed}", [*limit, *more, "--seed", str(seed)]) for seed in seeds for name, more in pairs]
    limit = ["--steps", str(options.steps)]
    return [(f"{o}-{s}", [*limit, "--origin", o, "--seed", str(s)]) for s in seeds for o in ORIGINS]


def table(work: Path) -> None:
    """Print the images that pass, of each size and seed."""
    print("| | " + " | ".join([*SIZES, *UNTRAINED]) + " | framed | steps |")
    print("|---" * (len(SIZES) + len(UNTRAINED) + 3) + "|")
    for file in sorted(work.glob("*.json")):
        found = json.loads(file.read_text())
        columns = [f"{found[size]['passed']} of {IMAGES}" for size in [*SIZES, *UNTRAINED]]
        closed = " ".join(f"{found[size]['framed']:.0%}" for size in SIZES)
        print(f"| {file.stem} | " + " | ".join(columns) + f" | {closed} | {found['steps']:,} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["crops", "positions", "table", "train"])
    parser.add_argument("--work", type=Path, default=Path("build/shapes"))
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--steps", type=int, default=None)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--name", default="", help=argparse.SUPPRESS)
    parser.add_argument("--origin", choices=ORIGINS, default="middle", help=argparse.SUPPRESS)
    parser.add_argument("--squares", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    work: Path = options.work
    work.mkdir(parents=True, exist_ok=True)
    if options.what == "table":
        table(work)
        return
    if options.what == "train":
        train(work, options.name, options.seed, options.minutes, options.steps, options.origin, options.squares)
        return
    options.steps = options.steps or 340
    pictures(work / "pictures")
    for name, arguments in jobs(options):
        if not (work / f"{name}.json").exists():
            command = [sys.executable, __file__, "train", "--work", str(work), "--name", name, *arguments]
            subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    table(work)


if __name__ == "__main__":
    main()
