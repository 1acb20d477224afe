"""Make the weights of the digits features: `python -m hookdiff_fid.train_digits --out digits.safetensors`.

Takes seconds on one core. The same torch on the same processor gives the same bytes; elsewhere rounding differs, and
the features with it: distances can be compared when they come from one file of weights.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.nn.functional as F
from attrs import asdict, define
from torch import Generator, Tensor, nn

from hookdiff.data import Feed, digits
from hookdiff_fid.digits import DigitsNet


@define(frozen=True)
class Recipe:
    """How the net is trained; saved with the weights."""

    data: str = "hookdiff.data.digits"
    augmentation: str = "shift by -1, 0 or 1 pixel"  # no more: a net that saw noise and blur learns not to see them
    optimizer: str = "AdamW, one cycle"
    epochs: int = 12
    batch_size: int = 64
    max_lr: float = 6e-3
    weight_decay: float = 0.01
    label_smoothing: float = 0.1
    held_out: int = 360  # images
    seed: int = 0


@contextmanager
def _one_thread() -> Iterator[None]:
    """Compute with one thread for the time of the `with`: how sums are split over threads changes their rounding."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@_one_thread()
def train(recipe: Recipe) -> tuple[DigitsNet, float]:
    """Return the trained net in eval mode and its accuracy, in [0, 1], on the images held out."""
    data = digits()
    batch = next(Feed(data).unaugmented(torch.arange(len(data)), len(data)))
    images, labels = batch.inputs, batch.labels
    assert labels is not None
    generator = Generator().manual_seed(recipe.seed)
    order = torch.randperm(len(data), generator=generator)
    held_out, rest = order[: recipe.held_out], order[recipe.held_out :]

    with torch.random.fork_rng(devices=[]):  # the initial values come from the default generator
        torch.manual_seed(recipe.seed)
        net = DigitsNet()
    optimizer = torch.optim.AdamW(net.parameters(), weight_decay=recipe.weight_decay)
    num_batches = len(rest) // recipe.batch_size
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, recipe.max_lr, recipe.epochs * num_batches)
    for _ in range(recipe.epochs):
        rest = rest[torch.randperm(len(rest), generator=generator)]
        for rows in torch.split(rest, recipe.batch_size)[:num_batches]:
            logits = net.classify(_shifted(images[rows], generator))
            loss = F.cross_entropy(logits, labels[rows], label_smoothing=recipe.label_smoothing)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()

    _standardise(net, images[rest])
    with torch.no_grad():
        right = net.classify(images[held_out]).argmax(dim=1) == labels[held_out]
    return net, float(right.float().mean())


def main(arguments: list[str] | None = None) -> None:
    """Train, print the accuracy, and write the weights with recipe, accuracy and torch version as metadata."""
    from safetensors.torch import save

    parser = argparse.ArgumentParser(prog="python -m hookdiff_fid.train_digits", description=main.__doc__)
    parser.add_argument("--out", type=Path, required=True, help="file to write")
    out: Path = parser.parse_args(arguments).out

    recipe = Recipe()
    net, accuracy = train(recipe)
    print(f"accuracy on {recipe.held_out} digits held out: {accuracy:.2%}")
    made = {"recipe": asdict(recipe), "accuracy": round(accuracy, 4), "torch": torch.__version__}
    # One entry, since safetensors writes several in an order that changes from run to run.
    out.write_bytes(save(net.state_dict(), {"made": json.dumps(made)}))


def _shifted(images: Tensor, generator: Generator) -> Tensor:
    """Return `images`, n 1 8 8, each moved on its own; what comes in from outside is paper, -1."""
    windows = F.pad(images, (1, 1, 1, 1), value=-1.0).unfold(2, 8, 1).unfold(3, 8, 1)  # n 1 3 3 8 8
    down, right = torch.randint(0, 3, (2, len(images)), generator=generator)
    return windows[torch.arange(len(images)), :, down, right]


@torch.no_grad()
def _standardise(net: DigitsNet, images: Tensor) -> None:
    """Put the statistics of `images`, as a whole, in place of the running ones, and the net in eval mode."""
    for module in net.modules():
        if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d)):
            module.reset_running_stats()
            module.momentum = None  # the mean over all forwards, of which there is one
    net(images)
    net.eval()


if __name__ == "__main__":
    main()
