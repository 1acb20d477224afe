"""Compare the Fréchet distance, its moments and the features of Inception with those of other packages.

    python benchmarks/fid.py [distance moments features] [--num 256 1000 10000] [--rounds 5] [--threads 2]

    pip install pytorch-fid torch-fidelity torchmetrics

Distances start from features, float32 on the CPU, 2,048 dimensions: each package makes its moments of two sets and the
distance of them. The second set is the first one times two, which float32 holds exactly, so that the distance is known:
|m|^2 + tr C. The variances of the features fall by a factor of 10,000. Moments are compared with one call of numpy.cov.
Features are those of random images 3 x 299 x 299 with one set of random weights for all. The packages take turns in an
order shuffled for each round; tables have medians over the rounds and, in brackets, the interquartile range.
"""

import argparse
import random
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy
import torch
from torch import Tensor, nn
from torchvision.models.inception import Inception3

from hookdiff.features import Moments, frechet_distance
from hookdiff_features.inception import InceptionV3

DIM = 2048


def features(num: int) -> Tensor:
    generator = torch.Generator().manual_seed(num)
    spectrum = torch.logspace(0, -2, DIM)  # of standard deviations
    rotation = torch.linalg.qr(torch.randn(DIM, DIM, generator=generator))[0]
    return (torch.randn(num, DIM, generator=generator) * spectrum) @ rotation


def known(a: Tensor) -> float:
    """Return the distance of `a` to its double."""
    rows = a.double()
    mean = rows.mean(0)
    return float(mean.square().sum() + (rows - mean).square().sum() / (len(rows) - 1))


def numpy_moments(x: Tensor) -> tuple[numpy.ndarray, numpy.ndarray]:
    rows = x.numpy().astype(numpy.float64)
    return rows.mean(0), numpy.cov(rows, rowvar=False)


def by_hookdiff(a: Tensor, b: Tensor) -> float:
    return frechet_distance(Moments.of(a), Moments.of(b))


def by_pytorch_fid(a: Tensor, b: Tensor) -> float:
    from pytorch_fid.fid_score import calculate_frechet_distance

    return float(calculate_frechet_distance(*numpy_moments(a), *numpy_moments(b)))


def by_torch_fidelity(a: Tensor, b: Tensor) -> float:
    from torch_fidelity.metric_fid import fid_features_to_statistics, fid_statistics_to_metric

    found = fid_statistics_to_metric(fid_features_to_statistics(a), fid_features_to_statistics(b), False)
    return float(next(iter(found.values())))


def by_torchmetrics(a: Tensor, b: Tensor) -> float:
    from torchmetrics.image.fid import FrechetInceptionDistance

    class Same(nn.Module):
        num_features = DIM

        def forward(self, rows: Tensor) -> Tensor:
            return rows

    metric = FrechetInceptionDistance(Same()).set_dtype(torch.float64)
    metric.update(a.double(), real=True)
    metric.update(b.double(), real=False)
    return float(metric.compute())


DISTANCES: dict[str, Callable[[Tensor, Tensor], float]] = {
    "pytorch-fid": by_pytorch_fid,
    "torch-fidelity": by_torch_fidelity,
    "torchmetrics, float64": by_torchmetrics,
    "hookdiff": by_hookdiff,
}


def in_turns(calls: dict[str, Callable[[], float]], rounds: int) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Return the seconds of each call in each round, and its result."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    results = {}
    for _ in range(rounds):
        for name in random.sample(list(calls), len(calls)):
            start = time.perf_counter()
            results[name] = calls[name]()
            seconds[name].append(time.perf_counter() - start)
    return seconds, results


def report(title: str, seconds: dict[str, list[float]], base: str, notes: dict[str, str]) -> None:
    print(f"\n{title}\n{'':<24}{'s':>9}{'ratio to ' + base:>32}")
    for name, times in seconds.items():
        ratios = [mine / theirs for mine, theirs in zip(times, seconds[base], strict=True)]
        low, middle, high = numpy.percentile(ratios, (25, 50, 75))
        ratio = f"{middle:.3g} ({low:.3g} to {high:.3g})"
        print(f"{name:<24}{statistics.median(times):9.3f}{ratio:>32}   {notes.get(name, '')}")


def measure_distances(nums: list[int], rounds: int) -> None:
    for num in nums:
        a = features(num)
        exact = known(a)
        calls = {name: partial(call, a, 2 * a) for name, call in DISTANCES.items()}
        seconds, results = in_turns(calls, rounds)
        errors = {name: f"relative error {abs(value - exact) / exact:.0e}" for name, value in results.items()}
        report(f"distance of {num:,} to {num:,}", seconds, "pytorch-fid", errors)


def measure_moments(rounds: int) -> None:
    rows = features(10_000)

    def ours(size: int) -> float:
        return float(Moments.of(torch.split(rows, size)).fit().variance)

    calls: dict[str, Callable[[], float]] = {
        "numpy.cov": lambda: float(numpy.trace(numpy_moments(rows)[1])),
        "hookdiff, at once": lambda: ours(10_000),
        "hookdiff, chunks of 64": lambda: ours(64),
    }
    seconds, _ = in_turns(calls, rounds)
    report("moments of 10,000", seconds, "numpy.cov", {})


def measure_features(rounds: int) -> None:
    import pytorch_fid.inception as package

    torch.manual_seed(0)
    state = Inception3(num_classes=1008, aux_logits=False, init_weights=False).state_dict()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "weights.pth"
        torch.save(state, path)
        package.load_state_dict_from_url = lambda *_, **__: torch.load(path)
        theirs = package.InceptionV3([3]).eval()
    ours, half = InceptionV3(state, as_in_fid=True).eval(), InceptionV3(state, as_in_fid=True).eval().bfloat16()
    images = torch.rand(16, 3, 299, 299)

    def run(call: Callable[[], Tensor]) -> Callable[[], float]:
        def timed() -> float:
            with torch.inference_mode():
                return float(call().float().sum())

        return timed

    calls = {
        "pytorch-fid": run(lambda: theirs(images)[0]),
        "hookdiff": run(lambda: ours(2 * images - 1)[0]),
        "hookdiff, bf16": run(lambda: half((2 * images - 1).bfloat16())[0]),
    }
    in_turns(calls, 1)  # the first call of each allocates
    seconds, _ = in_turns(calls, rounds)
    speeds = {name: f"{len(images) / statistics.median(times):.1f} img/s" for name, times in seconds.items()}
    report(f"features of {len(images)} images", seconds, "pytorch-fid", speeds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=["distance", "moments", "features"])
    parser.add_argument("--num", nargs="+", type=int, default=[256, 1000, 10_000])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    random.seed(0)
    warnings.simplefilter("ignore")
    if "distance" in options.parts:
        measure_distances(options.num, options.rounds)
    if "moments" in options.parts:
        measure_moments(options.rounds)
    if "features" in options.parts:
        measure_features(options.rounds)


if __name__ == "__main__":
    main()
