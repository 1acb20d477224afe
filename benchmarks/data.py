"""Compare the images per second of hookdiff's feed with those of torchvision's ImageFolder and a DataLoader.

    python benchmarks/data.py [png jpeg photo] [--rounds N] [--images N] [--workers 0 2]

All make the same samples of the same generated files: resize (bicubic, antialiased), centre crop, mirror half of them,
scale to [-1, 1], batches of 64. They take turns: each round times one epoch of each, in a shuffled order, so that other
load on the machine affects all alike. All keep their workers from epoch to epoch. Decoding into memory or onto disk
happens before, and its time is listed separately. The table has medians over the rounds.
"""

import argparse
import random
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import PIL
import torch
import torchvision
from attrs import define
from PIL import Image
from torch import Tensor

from hookdiff.images import Folder, Store, Transforms, feed_of

BATCH = 64


@define(frozen=True)
class Files:
    suffix: str
    stored: int  # side of the files
    wanted: int  # side of the samples
    images: int


WORKLOADS = {"png": Files("png", 32, 28, 2048), "jpeg": Files("jpg", 64, 32, 2048), "photo": Files("jpg", 512, 64, 256)}


def write(root: Path, files: Files, images: int) -> None:
    """Write pictures with some structure in two classes: pure noise would compress worse than a picture."""
    draw = numpy.random.default_rng(0)
    for k in range(images):
        coarse = Image.fromarray(draw.integers(0, 256, (8, 8, 3), dtype=numpy.uint8))
        smooth = numpy.asarray(coarse.resize((files.stored, files.stored), Image.Resampling.BICUBIC), numpy.int16)
        pixels = (smooth + draw.integers(-12, 13, smooth.shape)).clip(0, 255).astype(numpy.uint8)
        path = root / str(k % 2) / f"{k:05}.{files.suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)


Epoch = Callable[[int], Iterator[Tensor]]


def hookdiff(root: Path, side: int, store: Any, workers: int, cache: Path) -> Epoch:
    feed = feed_of(
        Folder(str(root)),
        transforms=Transforms(image_size=side, flip=True),
        store=Store(store=store, cache_dir=str(cache)),
        workers=workers,
    ).bind(BATCH)
    return lambda epoch: (batch.inputs for batch in feed.batches(epoch))


def image_folder(root: Path, side: int, workers: int) -> Epoch:
    from torchvision import datasets, transforms

    chain = transforms.Compose(
        [
            transforms.Resize(side, transforms.InterpolationMode.BICUBIC),
            transforms.CenterCrop(side),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize([0.5] * 3, [0.5] * 3),
        ]
    )
    loader = torch.utils.data.DataLoader(
        datasets.ImageFolder(str(root), chain),
        BATCH,
        shuffle=True,
        drop_last=True,
        num_workers=workers,
        persistent_workers=workers > 0,
    )
    return lambda _: (images for images, _ in loader)


def check(epochs: dict[str, Epoch], shape: tuple[int, ...]) -> None:
    """Check that all make equal samples: equal shapes, and means that differ by rounding and mirroring only."""
    means = {}
    for name, epoch in epochs.items():
        batches = list(epoch(0))
        assert all(batch.shape == shape and batch.dtype == torch.float32 for batch in batches), name
        means[name] = float(torch.cat(batches).mean())
    assert max(means.values()) - min(means.values()) < 0.02, means


def measure(files: Files, images: int, rounds: int, workers: list[int], folder: Path) -> Iterator[str]:
    root = folder / "pictures"
    write(root, files, images)
    makers: dict[str, Callable[[], Epoch]] = {}
    for number in workers:
        makers[f"ImageFolder, {number} workers"] = partial(image_folder, root, files.wanted, number)
        makers[f"hookdiff none, {number} workers"] = partial(
            hookdiff, root, files.wanted, "none", number, folder / "cache"
        )
    for store in ("memory", "disk"):
        makers[f"hookdiff {store}"] = partial(hookdiff, root, files.wanted, store, 0, folder / "cache")
    epochs, took = {}, {}
    for name, make in makers.items():
        began = time.perf_counter()
        epochs[name] = make()
        took[name] = time.perf_counter() - began
    check(epochs, (BATCH, 3, files.wanted, files.wanted))
    seconds: dict[str, list[float]] = {name: [] for name in epochs}
    order = random.Random(0)
    for number in range(-1, rounds):  # the first round is a warm-up
        for name in order.sample(list(epochs), len(epochs)):
            began = time.perf_counter()
            for _ in epochs[name](number + 1):
                pass
            if number >= 0:
                seconds[name].append(time.perf_counter() - began)
    count = images // BATCH * BATCH
    for name, times in seconds.items():
        rates = [f"{count / statistics.median(times):10,.0f} img/s"]
        for number in workers:
            base = seconds[f"ImageFolder, {number} workers"]
            ratios = [other / mine for mine, other in zip(times, base, strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            rates.append(f"{middle:7.2f} ({low:.2f} to {high:.2f}) x ImageFolder, {number}")
        yield f"{name:<24} {'  '.join(rates)}   made in {took[name]:.2f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", help=f"of {', '.join(WORKLOADS)}; all unless given")
    parser.add_argument("--rounds", type=int, default=9, help="epochs of each")
    parser.add_argument("--images", type=int, help="files; the workload's own number unless given")
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 2])
    options = parser.parse_args()
    if unknown := set(options.workloads) - set(WORKLOADS):
        parser.error(f"no workload named {unknown.pop()!r}; known: {', '.join(WORKLOADS)}")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    print(f"torch {torch.__version__}, torchvision {torchvision.__version__}, Pillow {PIL.__version__}")
    for name in options.workloads or WORKLOADS:
        files = WORKLOADS[name]
        images = options.images or files.images
        print(f"{name}: {images} files of {files.stored} x {files.stored} become {files.wanted} x {files.wanted}")
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            for line in measure(files, images, options.rounds, options.workers, Path(folder)):
                print(f"  {line}")


if __name__ == "__main__":
    main()
