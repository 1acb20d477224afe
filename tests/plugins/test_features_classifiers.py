"""The classifiers that come with the package see when images of their kind get worse."""

import gzip
import hashlib
import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy
import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Generator, Tensor

from hookdiff import UserError
from hookdiff.data import digits, to_unit_range
from hookdiff.features import Features, Moments, Space, frechet_distance
from hookdiff_features import Digits, FashionMNIST, train_classifiers
from hookdiff_features.classifiers import DIGITS, FASHION_MNIST, Architecture, Classifier
from hookdiff_features.train_classifiers import AUGMENTATIONS, OPTIONS, Split, TrainingOptions
from tests.conftest import refused
from tests.data.test_fashion_mnist import write_part

CPU = torch.device("cpu")
FASHION = Path("/usr/share/datasets/fashion-mnist")  # of Debian's package dataset-fashion-mnist
NUM = 1000  # images of Fashion-MNIST that are compared


def fashion(part: str, num: int) -> tuple[Tensor, Tensor]:
    """Return the first `num` images, n 1 28 28, and labels of "train" or "t10k"."""
    if not FASHION.exists():
        pytest.skip(f"needs Fashion-MNIST in {FASHION}")

    def read(kind: str, head: int, size: int) -> Tensor:
        with gzip.open(FASHION / f"{part}-{kind}-ubyte.gz") as file:
            content = file.read(head + num * size)
        return torch.from_numpy(numpy.frombuffer(content, numpy.uint8, offset=head).copy())

    return read("images-idx3", 16, 784).view(num, 1, 28, 28), read("labels-idx1", 8, 1).long()


def all_digits() -> tuple[Tensor, Tensor]:
    data = digits()
    assert data.labels is not None
    return data.images, data.labels


class Real:
    """Real images and their space."""

    def __init__(self, chosen: Features, architecture: Architecture, images: Tensor, labels: Tensor) -> None:
        self.space, self.architecture = chosen.open(CPU), architecture
        self.images, self.labels = images, labels
        self.features, _ = self.space(images)
        self.moments = Moments.of(self.features)

    def away(self, images: Tensor) -> float:
        """Return the distance of `images`, uint8 or float in [-1, 1], to the real ones."""
        if images.is_floating_point():
            images = ((images.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
        return self.between(self.space(images)[0])

    def between(self, features: Tensor) -> float:
        return frechet_distance(Moments.of(features), self.moments)


@pytest.fixture(scope="module", params=["digits", "fashion-mnist"])
def real(request: pytest.FixtureRequest) -> Real:
    if request.param == "digits":
        return Real(Digits(), DIGITS, *all_digits())
    return Real(FashionMNIST(), FASHION_MNIST, *fashion("train", NUM))


def shuffled(num: int, seed: int = 0) -> Tensor:
    return torch.randperm(num, generator=Generator().manual_seed(seed))


def blurred(images: Tensor, sigma: float) -> Tensor:
    kernel = torch.exp(-torch.arange(-3.0, 4.0).square() / (2 * sigma**2))
    kernel = kernel / kernel.sum()
    padded = F.pad(images, (3, 3, 3, 3), value=-1.0)
    return F.conv2d(F.conv2d(padded, kernel.view(1, 1, 1, 7)), kernel.view(1, 1, 7, 1))


def made(architecture: Architecture) -> dict[str, Any]:
    with safe_open(architecture.weights, framework="pt") as file:
        described: dict[str, Any] = json.loads(file.metadata()["made"])
    return described


def accuracy_of(space: Space, images: Tensor, labels: Tensor) -> float:
    logits = space(images)[1]
    assert logits is not None
    assert logits.shape == (len(images), 10)
    return float((logits.argmax(1) == labels).float().mean())


# The weights


def test_the_shipped_weights_know_digits_they_never_saw() -> None:
    options = OPTIONS[DIGITS]
    assert made(DIGITS)["recipe"] == attrs.asdict(options)  # else: run train_classifiers again
    images, labels = all_digits()
    held_out = shuffled(len(images), options.seed)[: options.held_out]
    accuracy = accuracy_of(Digits().open(CPU), images[held_out], labels[held_out])
    assert accuracy >= 0.97
    assert accuracy == pytest.approx(made(DIGITS)["accuracy"], abs=0.004)  # one image, should rounding decide it
    assert DIGITS.weights.stat().st_size < 200_000


def test_the_shipped_weights_know_clothes_they_never_saw() -> None:
    accuracy = accuracy_of(FashionMNIST().open(CPU), *fashion("t10k", 10_000))
    assert accuracy >= 0.915
    assert accuracy == pytest.approx(made(FASHION_MNIST)["accuracy"], abs=0.0004)  # some images, as above


def test_the_shipped_weights_of_clothes_are_those_of_the_script() -> None:
    assert made(FASHION_MNIST)["recipe"] == attrs.asdict(OPTIONS[FASHION_MNIST])  # else: run train_classifiers again
    assert FASHION_MNIST.weights.stat().st_size < 600_000


@pytest.mark.parametrize(
    ("chosen", "architecture", "dim"), [(Digits(), DIGITS, 64), (FashionMNIST(), FASHION_MNIST, 128)]
)
def test_a_space_describes_itself_and_draws_nothing(chosen: Features, architecture: Architecture, dim: int) -> None:
    before = torch.get_rng_state()
    space, side = chosen.open(CPU), architecture.side
    assert torch.equal(torch.get_rng_state(), before)
    assert space.distance == f"fd/{architecture.name}"
    assert space.key == f"{architecture.name} {hashlib.sha256(architecture.weights.read_bytes()).hexdigest()}"
    features, logits = space(torch.zeros(3, 1, side, side, dtype=torch.uint8))
    assert features.shape == (3, dim)
    assert features.dtype == torch.float32
    assert logits is not None
    assert logits.shape == (3, 10)


@pytest.mark.parametrize(("chosen", "side"), [(Digits(), 8), (FashionMNIST(), 28)])
def test_nothing_is_trained_and_each_image_counts_alone(chosen: Features, side: int) -> None:
    space = chosen.open(CPU)
    images = torch.randint(0, 256, (6, 1, side, side), dtype=torch.uint8, generator=Generator().manual_seed(0))
    together, logits = space.embed(images)  # not in inference mode
    assert not together.requires_grad
    assert logits is not None
    assert not logits.requires_grad
    alone = torch.cat([space.embed(image[None])[0] for image in images])
    assert torch.allclose(together, alone, atol=1e-5)


@pytest.mark.parametrize(
    ("chosen", "shape", "facts"),
    [
        (Digits(), (3, 8, 8), ("digits", "8 x 8", "3 x 8 x 8")),
        (FashionMNIST(), (1, 8, 8), ("fashion-mnist", "28 x 28", "1 x 8 x 8")),
    ],
)
def test_images_of_another_shape_are_refused(chosen: Features, shape: Sequence[int], facts: Sequence[str]) -> None:
    with refused(UserError, *facts):
        chosen.open(CPU)(torch.zeros(4, *shape, dtype=torch.uint8))


# The script


@pytest.mark.parametrize(("options", "by", "mirror"), [(OPTIONS[DIGITS], 1, False), (OPTIONS[FASHION_MNIST], 2, True)])
def test_augmentation_draws_each_shift_equally_often(options: TrainingOptions, by: int, mirror: bool) -> None:
    images = torch.full((60_000, 1, 9, 9), -1.0)
    images[:, 0, 4, 3] = 1
    shifted = AUGMENTATIONS[options.augmentation](images, Generator().manual_seed(0))
    assert bool((shifted.flatten(1).sum(1) == 1 - 80).all())  # one pixel is 1, and 80 are background
    counts = shifted.gt(0).sum((0, 1))
    expected = torch.zeros(9, 9)
    for down, right in itertools.product(range(-by, by + 1), repeat=2):
        share = 60_000 / (2 * by + 1) ** 2 / (2 if mirror else 1)
        expected[4 + down, 3 + right] += share
        if mirror:
            expected[4 + down, 5 - right] += share
    assert torch.equal(counts > 0, expected > 0)
    assert bool(((counts - expected).abs() <= 5 * expected.sqrt()).all())


@pytest.mark.wide
def test_the_script_makes_such_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    train_classifiers.main(["digits", "--out", str(tmp_path / "weights")])
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_num_threads() == threads
    accuracy = float(capsys.readouterr().out.rsplit(maxsplit=1)[1].rstrip("%")) / 100
    assert accuracy >= 0.97
    Classifier(DIGITS).load_state_dict(load_file(tmp_path / "weights"))


@pytest.mark.wide
def test_the_script_reads_the_files_of_fashion_mnist(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for part, num in (("train", 256), ("t10k", 20)):  # class k is a square of a grey of its own
        labels = torch.arange(num) % 10
        images = torch.zeros(num, 28, 28)
        images[:, 8:20, 8:20] = (labels * 25 + 20)[:, None, None]
        write_part(tmp_path, part, images, labels)
    train_classifiers.main(["fashion-mnist", "--root", str(tmp_path), "--out", str(tmp_path / "weights")])
    printed = capsys.readouterr().out
    assert " 20 " in printed
    assert float(printed.rsplit(maxsplit=1)[1].rstrip("%")) > 50  # 10 by chance
    Classifier(FASHION_MNIST).load_state_dict(load_file(tmp_path / "weights"))


def trained(architecture: Architecture, read: Callable[[Generator], Split], epochs: int) -> tuple[Classifier, float]:
    options = attrs.evolve(OPTIONS[architecture], epochs=epochs)
    generator = Generator().manual_seed(options.seed)
    return train_classifiers.train_classifier(architecture, options, read(generator), generator)


def test_training_is_repeatable() -> None:
    options = OPTIONS[DIGITS]
    nets = [trained(DIGITS, lambda generator: train_classifiers.split_digits(options, generator), 1) for _ in range(2)]
    first, second = (net.state_dict() for net, _ in nets)
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.slow
def test_training_on_clothes_is_repeatable_and_learns() -> None:
    split = Split(*fashion("train", 12_000), *fashion("t10k", 2000))
    (net, accuracy), (again, _) = (trained(FASHION_MNIST, lambda _: split, 2) for _ in range(2))
    first, second = net.state_dict(), again.state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert accuracy > 0.84
    with torch.inference_mode():
        features = net(to_unit_range(split.images))[0]
    # The running statistics are those of 6 chunks of 2,000 images.
    assert float(features.mean(0).abs().max()) < 0.01
    assert float((features.var(0) - 1).abs().max()) < 0.01


# The distance


def test_features_are_standardised(real: Real) -> None:
    assert real.features.shape == (len(real.images), real.architecture.dim)
    assert float(real.features.mean(0).abs().max()) < 0.15
    assert float((real.features.var(0) - 1).abs().max()) < 0.2


def test_real_images_are_close_to_real_images(real: Real) -> None:
    num, dim = real.features.shape
    order = shuffled(num, seed=1)
    halves = (Moments.of(real.features[rows]) for rows in (order[: num // 2], order[num // 2 :]))
    assert frechet_distance(*halves) < 0.03 * dim
    assert real.between(real.features[order[: num // 2]]) < 0.01 * dim
    assert real.between(real.features[order]) < 1e-6


def test_clothes_held_out_are_close_to_clothes() -> None:
    space = FashionMNIST().open(CPU)
    seen, held_out = (Moments.of(space(fashion(part, 3000)[0])[0]) for part in ("train", "t10k"))
    assert frechet_distance(seen, held_out) < 0.8


@pytest.mark.parametrize(
    ("worse", "amounts"),
    [
        (blurred, (0.3, 0.4, 0.5, 0.6, 0.8, 1.0, 1.5)),  # pixels
        (lambda x, std: x + std * torch.randn(x.shape, generator=Generator().manual_seed(3)), (0.1, 0.2, 0.3, 0.5, 1)),
        (lambda x, share: share * x[shuffled(len(x), 4)] + (1 - share) * x, (0.1, 0.2, 0.3, 0.5)),  # ghosts
        (lambda x, faded: (x + 1) * (1 - faded) - 1, (0.1, 0.2, 0.4, 0.6, 0.8, 1.0)),
        (lambda x, share: torch.cat([x, torch.zeros(int(share * len(x)), *x.shape[1:])]), (0.01, 0.05, 0.2, 0.5)),
    ],
    ids=["blur", "noise", "ghosts", "contrast", "grey images"],
)
def test_distances_grow_as_images_get_worse(real: Real, worse: Callable[..., Tensor], amounts: Sequence[float]) -> None:
    images = to_unit_range(real.images)
    distances = [real.away(images), *(real.away(worse(images, amount)) for amount in amounts)]
    assert distances == sorted(distances)
    assert distances[-1] > 10
    assert len(set(distances)) == len(distances)


def test_the_distance_grows_as_classes_are_dropped(real: Real) -> None:
    for order in (range(10), range(9, -1, -1), [3, 1, 4, 5, 9, 2, 6, 8, 7, 0]):
        rank = torch.tensor([list(order).index(label) for label in range(10)])
        distances = [real.between(real.features[rank[real.labels] >= dropped]) for dropped in range(10)]
        assert distances == sorted(distances)
        assert distances[1] > 1


def test_noise_and_one_image_are_far_away(real: Real) -> None:
    shape, dim = real.images.shape[1:], real.architecture.dim
    assert real.away(torch.randn(500, *shape, generator=Generator().manual_seed(0))) > 0.6 * dim
    images = to_unit_range(real.images)
    for image in (images[0], images.mean(0), torch.zeros(*shape)):
        assert real.away(image.expand(500, *shape)) > 0.95 * dim
