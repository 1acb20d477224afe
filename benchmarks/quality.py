"""Compare what recipes make of the same wall-clock: hookdiff, diffusers, denoising-diffusion-pytorch, a loop by hand.

    python benchmarks/quality.py rates                      # on a quiet machine
    python benchmarks/quality.py train [NAME ...] [--seeds 0 1 2] [--threads 1]
    python benchmarks/quality.py train --tune [NAME ...]    # another split
    python benchmarks/quality.py table [--tune]
    python benchmarks/quality.py precision RUN              # float32 and bf16 from the same noise

    pip install -e '.[diffusers]' denoising-diffusion-pytorch accelerate

`rates` lets the recipes train in turns, each in a process of its own, and writes images a second of each. `train` gives
each recipe the steps that fit in --minutes at its rate, so the training itself may share the machine, run on fewer
threads, be stopped and be started again: what is finished is kept in --work. It then makes 1,000 images with 50
evaluations of the network each, in bf16 for all, and scores them by the Fréchet distance between features: those of a
classifier that the script trains, for the images and for real ones that no recipe and no tuning saw.

All train a UNet2DModel of diffusers with 1.1 million weights; denoising-diffusion-pytorch trains its own U-Net of that
size. The data is Fashion-MNIST, padded to 32 x 32, the same reduced to 16 x 16 (--data fashion-mnist-16, quick enough
for a tuning), the digits of scikit-learn, enlarged to 16 x 16 (--data digits), or polygons that the script draws, of 16
x 16, which no tuning saw (--data polygons).
"""

import argparse
import gzip
import json
import math
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw
from recipes import RECIPES, TUNED, in_unit_range, rate_of
from torch import Tensor, nn

from hookdiff.features import Moments, frechet_distance

FASHION = Path("/usr/share/datasets/fashion-mnist")  # of Debian's package dataset-fashion-mnist


def _idx(name: str) -> Any:
    raw = gzip.decompress((FASHION / f"{name}-ubyte.gz").read_bytes())
    shape = [int.from_bytes(raw[4 + 4 * axis : 8 + 4 * axis], "big") for axis in range(raw[3])]
    return numpy.frombuffer(raw, numpy.uint8, offset=4 + 4 * raw[3]).reshape(shape)


def fashion_mnist() -> dict[str, Any]:
    images, others = (numpy.pad(_idx(f"{part}-images-idx3"), ((0, 0), (2, 2), (2, 2))) for part in ("train", "t10k"))
    return {"train": images, "labels": _idx("train-labels-idx1"), "test": others}


def small_fashion_mnist() -> dict[str, Any]:
    found = fashion_mnist()
    halves = {
        part: found[part].reshape(-1, 16, 2, 16, 2).mean((2, 4)).round().astype(numpy.uint8)
        for part in ("train", "test")
    }
    return {**found, **halves}


def digits() -> dict[str, Any]:
    from sklearn.datasets import load_digits

    found = load_digits()
    order = numpy.random.default_rng(0).permutation(len(found.images))
    small = (found.images[order] / 16 * 255).round().astype(numpy.uint8)
    images = numpy.stack(
        [numpy.asarray(Image.fromarray(one).resize((16, 16), Image.Resampling.BICUBIC)) for one in small]
    )
    return {"train": images[:1297], "labels": found.target[order][:1297], "test": images[1297:]}


def polygons() -> dict[str, Any]:
    """Regular polygons of three to seven corners, filled or not: ten classes."""
    rng = numpy.random.default_rng(0)
    labels = rng.integers(10, size=12_000)
    images = numpy.stack([_polygon(rng, 3 + label % 5, is_filled=label < 5) for label in labels.tolist()])
    return {"train": images[:10_000], "labels": labels[:10_000], "test": images[10_000:]}


def _polygon(rng: numpy.random.Generator, corners: int, is_filled: bool) -> Any:
    paper, ink = int(rng.integers(64)), int(rng.integers(128, 256))
    (x, y), radius = rng.uniform(22, 42, 2), rng.uniform(10, 20)
    turn, width = rng.uniform(0, math.tau), int(rng.integers(3, 7))
    angles = [turn + math.tau * number / corners for number in range(corners)]
    points = [(x + radius * math.cos(angle), y + radius * math.sin(angle)) for angle in angles]
    canvas = Image.new("L", (64, 64), paper)
    if is_filled:
        ImageDraw.Draw(canvas).polygon(points, ink)
    else:
        ImageDraw.Draw(canvas).line([*points, *points[:2]], ink, width, joint="curve")
    return numpy.asarray(canvas.resize((16, 16), Image.Resampling.BOX))


DATA = {"fashion-mnist": fashion_mnist, "fashion-mnist-16": small_fashion_mnist, "digits": digits, "polygons": polygons}


def split_for(work: Path, data: str, tune: bool) -> Path:
    """Return the folder with train.npy, test.npy and the images as files; the tuning never sees the test images."""
    folder = work / (f"{data}-tune" if tune else data)
    if not (folder / "done").exists():
        (folder / "png").mkdir(parents=True, exist_ok=True)
        parts = DATA[data]()
        if tune:
            half = len(parts["train"]) // 2
            parts = {"train": parts["train"][:half], "labels": parts["labels"][:half], "test": parts["train"][half:]}
        for name, values in parts.items():
            numpy.save(folder / f"{name}.npy", values)
        for number, image in enumerate(parts["train"]):
            Image.fromarray(image).save(folder / "png" / f"{number:05d}.png")
        (folder / "done").touch()
    return folder


class Classifier(nn.Module):
    """Three convolutions and 128 features."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for inner, outer in ((1, 32), (32, 64), (64, 128)):
            layers += [nn.Conv2d(inner, outer, 3, padding=1), nn.BatchNorm2d(outer), nn.ReLU(), nn.MaxPool2d(2)]
        self.body = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(512, 128))
        self.head = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).relu())


def score_for(work: Path, data: str) -> nn.Module:
    """Return the network of the features, trained on the labels of the training images the first time."""
    net, path = Classifier(), work / f"{data}.pt"
    if not path.exists():
        torch.manual_seed(0)
        net = Classifier()
        folder = split_for(work, data, tune=False)
        images, labels = (
            in_unit_range(numpy.load(folder / "train.npy")),
            torch.from_numpy(numpy.load(folder / "labels.npy")),
        )
        epochs = 3 if len(images) > 10_000 else 30
        optimizer = torch.optim.AdamW(net.parameters(), weight_decay=0.01)
        total = epochs * (len(images) // 128)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total)
        for _ in range(epochs):
            for rows in torch.randperm(len(images)).split(128)[: total // epochs]:
                loss = F.cross_entropy(net(images[rows]), labels[rows].long(), label_smoothing=0.1)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
        torch.save(net.state_dict(), path)
    net.load_state_dict(torch.load(path, weights_only=True))
    return net.eval().body


@torch.no_grad()
def distance(body: nn.Module, images: Tensor, real: Tensor) -> float:
    made, others = (Moments.of(body(part.clamp(-1, 1)) for part in each.split(500)) for each in (images, real))
    return frechet_distance(made, others)


def rates(given: argparse.Namespace) -> None:
    """Let the recipes train in turns, and write images a second: the median of the rounds."""
    names = {rate_of(name): name for name in [*TUNED, *RECIPES]}
    children = {}
    for rate, name in names.items():
        command = [sys.executable, __file__, "child", name, *_shared(given)]
        children[rate] = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    speeds: dict[str, list[float]] = {rate: [] for rate in children}
    order = random.Random(0)
    for number in range(-2, given.rounds):  # two do not count
        for rate in order.sample(list(children), len(children)):
            child = children[rate]
            assert child.stdin
            assert child.stdout
            print(given.seconds if number >= 0 else 3.0, file=child.stdin, flush=True)
            while not (line := child.stdout.readline()).startswith("speed "):
                if not line:
                    raise SystemExit(f"{rate} has ended")
            if number >= 0:
                speeds[rate].append(float(line.split()[1]))
    for child in children.values():
        child.communicate()
    known = _read(given.work / "rates.json")
    known[given.data] = {rate: statistics.median(found) for rate, found in speeds.items()}
    (given.work / "rates.json").write_text(json.dumps(known, indent=1))
    for rate, found in speeds.items():
        print(f"{rate:<44}", *(f"{speed:7.0f}" for speed in found), flush=True)


def measure(given: argparse.Namespace) -> None:
    """Train for about as long as each line of the input says, and print the speed."""
    name = given.names[0]
    make, options = {**RECIPES, **TUNED}[name]
    recipe = make(split_for(given.work, given.data, tune=False), 0, 100_000, **options)
    step_seconds = 0.5
    for line in sys.stdin:
        steps = max(3, int(float(line) / step_seconds))
        begun = time.perf_counter()
        recipe.train(steps)
        step_seconds = (time.perf_counter() - begun) / steps
        print(f"speed {recipe.batch_size / step_seconds}", flush=True)


def train(given: argparse.Namespace) -> None:
    """Train each recipe that has no result yet, and score it."""
    known = TUNED if given.tune else RECIPES
    split, body = split_for(given.work, given.data, given.tune), score_for(given.work, given.data)
    real = in_unit_range(numpy.load(split / "test.npy")[:10_000])
    done = _results(given)
    done.mkdir(parents=True, exist_ok=True)
    speeds = _read(given.work / "rates.json").get(given.data, {})
    for seed in given.seeds:
        for name in given.names or known:
            path = done / f"{name}, seed {seed}.json"
            try:
                path.touch(exist_ok=False)  # another process may train the next one
            except FileExistsError:
                continue
            make, options = known[name]
            size = options.get("batch_size", make.batch_size)
            steps = round((given.images or speeds[rate_of(name)] * 60 * given.minutes) / size)
            recipe = make(split, seed, steps, **options)
            recipe.train(steps)
            torch.manual_seed(1000 + seed)
            with torch.autocast("cpu", torch.bfloat16):
                images = recipe.sample(given.samples).float()
            recipe.close()
            found = distance(body, images, real)
            path.write_text(json.dumps({"distance": found, "steps": steps, "batch_size": size}))
            _grid(images[:64], path.with_suffix(".png"))
            print(f"{name}, seed {seed}: {steps} steps of {size}, distance {found:.2f}", flush=True)


def _grid(images: Tensor, path: Path) -> None:
    shown = ((images[:, 0].clamp(-1, 1) + 1) * 127.5).round().byte().numpy()
    rows = [numpy.concatenate(list(shown[first : first + 16]), axis=1) for first in range(0, len(shown), 16)]
    Image.fromarray(numpy.concatenate(rows)).save(path)


def table(given: argparse.Namespace) -> None:
    """Print mean and single distances of each recipe, and the grids of the first seeds as one picture."""
    speeds = _read(given.work / "rates.json").get(given.data, {})
    body, split = score_for(given.work, given.data), split_for(given.work, given.data, given.tune)
    real = in_unit_range(numpy.load(split / "test.npy")[:10_000])
    some = in_unit_range(numpy.load(split / "train.npy")[: given.samples])
    print(f"{given.samples} training images: {distance(body, some, real):.2f}")
    rows = []
    for name in TUNED if given.tune else RECIPES:
        paths = sorted(_results(given).glob(f"{name}, seed *.json"))
        if found := [json.loads(text)["distance"] for path in paths if (text := path.read_text())]:
            rows.append((statistics.mean(found), name, found))
    for mean, name, found in sorted(rows) if given.tune else rows:
        each = ", ".join(f"{value:.1f}" for value in sorted(found))
        print(f"| {name} | {speeds.get(rate_of(name), 0):.0f} | {mean:.1f} | {each} |")


def precision(given: argparse.Namespace) -> None:
    """Print the distance of images of a run in each precision of sampling, from the same noise."""
    from hookdiff import load_run

    body, split = score_for(given.work, given.data), split_for(given.work, given.data, given.tune)
    real = in_unit_range(numpy.load(split / "test.npy")[:10_000])
    made = {}
    with load_run(Path(given.names[0])) as run:
        for name in ("float32", "bf16"):
            made[name] = run.sample(given.samples, precision=name)
            print(f"{name}: distance {distance(body, made[name], real):.2f}", flush=True)
    apart = (made["float32"] - made["bf16"]).abs().mean() * 127.5
    print(f"a pixel differs by {apart:.2f} of 255 on average")


def _results(given: argparse.Namespace) -> Path:
    return Path(given.work / ("tuning" if given.tune else "results") / given.data)


def _read(path: Path) -> Any:
    return json.loads(path.read_text()) if path.exists() else {}


def _shared(given: argparse.Namespace) -> list[str]:
    return ["--work", str(given.work), "--data", given.data, "--threads", str(given.threads)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("rates", "train", "table", "precision", "child"))
    parser.add_argument("names", nargs="*", help="recipes; unless given, all")
    parser.add_argument("--work", type=Path, default=Path("quality"), help="folder of data and results")
    parser.add_argument("--data", choices=tuple(DATA), default="fashion-mnist")
    parser.add_argument("--minutes", type=float, default=4.0, help="of training")
    parser.add_argument("--images", type=int, help="of training, in place of minutes: needs no rates")
    parser.add_argument("--samples", type=int, default=1000, help="images that are scored")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--tune", action="store_true", help="the grid of the tuning, on its own images")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=10.0, help="of a round")
    given = parser.parse_intermixed_args()
    given.work.mkdir(parents=True, exist_ok=True)
    given.work = given.work.resolve()
    torch.set_num_threads(given.threads)
    {"rates": rates, "train": train, "table": table, "precision": precision, "child": measure}[given.what](given)


if __name__ == "__main__":
    main()
