"""Trains a classifier of this package: `python -m hookdiff_features.train_classifiers digits --out FILE`.

For Fashion-MNIST, the arguments are `fashion-mnist --root FOLDER --out FILE`, where FOLDER holds FashionMNIST/raw.

On one core the digits take seconds, and Fashion-MNIST takes minutes. The same torch on the same processor gives the
same bytes. Elsewhere the rounding differs, and so do the features. Compare only distances that were computed
with the same file of weights.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from attrs import asdict, define
from torch import Generator, Tensor, nn

from hookdiff.data import InMemory, digits, fashion_mnist, to_unit_range
from hookdiff_features.classifiers import DIGITS, FASHION_MNIST, Architecture, Classifier

_CHUNK = 2000  # images per forward pass after the training


@define(frozen=True)
class TrainingOptions:
    """The options of a training; they are saved with the weights."""

    data: str
    augmentation: str  # a name in `AUGMENTATIONS`
    optimizer: str = "AdamW, one cycle"
    epochs: int = 12
    batch_size: int = 64
    max_lr: float = 6e-3
    weight_decay: float = 0.01
    label_smoothing: float = 0.1
    held_out: int = 360  # images
    seed: int = 0


@define(frozen=True, eq=False)
class Split:
    """The training images (n 1 h w, uint8) and labels (n), and the held-out images and labels."""

    images: Tensor
    labels: Tensor
    held_out_images: Tensor
    held_out_labels: Tensor


def split_digits(options: TrainingOptions, generator: Generator) -> Split:
    """Return the digits; the held-out images are drawn at random."""
    images, labels = _tensors(digits())
    order = torch.randperm(len(images), generator=generator)
    held_out, rest = order[: options.held_out], order[options.held_out :]
    return Split(images[rest], labels[rest], images[held_out], labels[held_out])


def split_fashion_mnist(root: str) -> Split:
    """Return Fashion-MNIST; its test images are held out."""
    return Split(*_tensors(fashion_mnist(root)), *_tensors(fashion_mnist(root, train=False)))


def train_classifier(
    architecture: Architecture, options: TrainingOptions, split: Split, generator: Generator
) -> tuple[Classifier, float]:
    """Return the trained net in eval mode and its accuracy, in [0, 1], on the images held out.

    `generator` draws the order and the augmentation; `options.seed` gives the initial values.
    """
    augment = AUGMENTATIONS[options.augmentation]
    with torch.random.fork_rng(devices=[]):  # the initial values come from the default generator
        torch.manual_seed(options.seed)
        net = Classifier(architecture)
    optimizer = torch.optim.AdamW(net.parameters(), weight_decay=options.weight_decay)
    num_batches = len(split.images) // options.batch_size
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.max_lr, options.epochs * num_batches)
    order = torch.arange(len(split.images))
    for _ in range(options.epochs):
        order = order[torch.randperm(len(order), generator=generator)]
        for rows in torch.split(order, options.batch_size)[:num_batches]:
            _, logits = net(augment(to_unit_range(split.images[rows]), generator))
            loss = F.cross_entropy(logits, split.labels[rows], label_smoothing=options.label_smoothing)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()

    # Replace the running statistics by the statistics of all training images.
    for module in net.modules():
        if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d)):
            module.reset_running_stats()
            module.momentum = None  # the mean over all forward passes, one for each chunk
    with torch.no_grad():
        for rows in torch.split(order, _CHUNK):
            net(to_unit_range(split.images[rows]))
        net.eval()
        parts = torch.split(split.held_out_images, _CHUNK)
        right = torch.cat([net(to_unit_range(part))[1].argmax(dim=1) for part in parts]) == split.held_out_labels
    return net, float(right.float().mean())


def main(arguments: list[str] | None = None) -> None:
    """Train, print the accuracy, and write the weights with options, accuracy and torch version as metadata."""
    from safetensors.torch import save

    parser = argparse.ArgumentParser(prog="python -m hookdiff_features.train_classifiers", description=main.__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for known in OPTIONS:
        command = commands.add_parser(known.name)
        command.set_defaults(architecture=known)
        command.add_argument("--out", type=Path, required=True, help="file to write")
        if known == FASHION_MNIST:
            command.add_argument("--root", required=True, help="folder with the four idx files in FashionMNIST/raw")
    chosen = parser.parse_args(arguments)

    options, threads = OPTIONS[chosen.architecture], torch.get_num_threads()
    generator = Generator().manual_seed(options.seed)
    is_digits = chosen.architecture == DIGITS
    split = split_digits(options, generator) if is_digits else split_fashion_mnist(chosen.root)
    torch.set_num_threads(1)  # the split of a sum over threads changes its rounding
    try:
        net, accuracy = train_classifier(chosen.architecture, options, split, generator)
    finally:
        torch.set_num_threads(threads)
    print(f"accuracy on {len(split.held_out_images):,} images held out: {accuracy:.2%}")
    facts = {"recipe": asdict(options), "accuracy": round(accuracy, 4), "torch": torch.__version__}
    # A single entry, because safetensors writes several entries in a random order.
    chosen.out.write_bytes(save(net.state_dict(), {"made": json.dumps(facts)}))


def _tensors(data: InMemory) -> tuple[Tensor, Tensor]:
    assert data.labels is not None
    return data.images, data.labels


def _shifted(images: Tensor, generator: Generator, by: int = 1) -> Tensor:
    """Return `images`, n 1 h w, each moved by a random shift of its own; new pixels are background, -1."""
    height, width = images.shape[2:]
    windows = F.pad(images, (by, by, by, by), value=-1.0).unfold(2, height, 1).unfold(3, width, 1)  # n 1 s s h w
    down, right = torch.randint(0, 2 * by + 1, (2, len(images)), generator=generator)
    return windows[torch.arange(len(images)), :, down, right]


def _shifted_and_mirrored(images: Tensor, generator: Generator) -> Tensor:
    shifted = _shifted(images, generator, by=2)
    mirrored = torch.rand(len(images), 1, 1, 1, generator=generator) < 0.5
    return torch.where(mirrored, shifted.flip(3), shifted)


AUGMENTATIONS: dict[str, Callable[[Tensor, Generator], Tensor]] = {
    # No noise and no blur, or the net would learn to ignore noise and blur.
    "shift by -1, 0 or 1 pixel": _shifted,
    "shift by up to 2 pixels, mirror": _shifted_and_mirrored,
}

OPTIONS = {
    DIGITS: TrainingOptions("hookdiff.data.digits", "shift by -1, 0 or 1 pixel"),
    FASHION_MNIST: TrainingOptions(
        "hookdiff.data.fashion_mnist", "shift by up to 2 pixels, mirror", epochs=10, batch_size=128, held_out=10_000
    ),
}


if __name__ == "__main__":
    main()
