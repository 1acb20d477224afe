"""Trains the network of the digits features: `python -m hookdiff_fid.train_digits --out digits.safetensors`.

It takes seconds on one core. The same torch on the same processor gives the same bytes; elsewhere rounding differs,
and so do the features: compare only distances that were computed with one file of weights.
"""

import argparse
import json
from pathlib import Path

import torch
import torch.nn.functional as F
from attrs import asdict, define
from torch import Generator, Tensor, nn

from hookdiff.data import Feed, digits
from hookdiff_fid.digits import DigitsNet


@define(frozen=True)
class TrainingOptions:
    """The options of the training, which are saved with the weights."""

    data: str = "hookdiff.data.digits"
    augmentation: str = "shift by -1, 0 or 1 pixel"  # noise and blur would teach the net to ignore them
    optimizer: str = "AdamW, one cycle"
    epochs: int = 12
    batch_size: int = 64
    max_lr: float = 6e-3
    weight_decay: float = 0.01
    label_smoothing: float = 0.1
    held_out: int = 360  # images
    seed: int = 0


def train(options: TrainingOptions) -> tuple[DigitsNet, float]:
    """Return the trained net in eval mode and its accuracy, in [0, 1], on the images held out."""
    data = digits()
    batch = next(Feed(data).unaugmented(torch.arange(len(data)), len(data)))
    images, labels = batch.inputs, batch.labels
    assert labels is not None
    generator = Generator().manual_seed(options.seed)
    order = torch.randperm(len(data), generator=generator)
    held_out, rest = order[: options.held_out], order[options.held_out :]

    with torch.random.fork_rng(devices=[]):  # the initial values come from the default generator
        torch.manual_seed(options.seed)
        net = DigitsNet()
    optimizer = torch.optim.AdamW(net.parameters(), weight_decay=options.weight_decay)
    num_batches = len(rest) // options.batch_size
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.max_lr, options.epochs * num_batches)
    for _ in range(options.epochs):
        rest = rest[torch.randperm(len(rest), generator=generator)]
        for rows in torch.split(rest, options.batch_size)[:num_batches]:
            logits = net.classify(_shifted(images[rows], generator))
            loss = F.cross_entropy(logits, labels[rows], label_smoothing=options.label_smoothing)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()

    # The running statistics become those of all training images.
    for module in net.modules():
        if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d)):
            module.reset_running_stats()
            module.momentum = None  # the mean over all forward passes, of which there is one
    with torch.no_grad():
        net(images[rest])
        net.eval()
        right = net.classify(images[held_out]).argmax(dim=1) == labels[held_out]
    return net, float(right.float().mean())


def main(arguments: list[str] | None = None) -> None:
    """Train, print the accuracy, and write the weights with options, accuracy and torch version as metadata."""
    from safetensors.torch import save

    parser = argparse.ArgumentParser(prog="python -m hookdiff_fid.train_digits", description=main.__doc__)
    parser.add_argument("--out", type=Path, required=True, help="file to write")
    out: Path = parser.parse_args(arguments).out

    options, threads = TrainingOptions(), torch.get_num_threads()
    torch.set_num_threads(1)  # how sums are split over threads changes their rounding
    try:
        net, accuracy = train(options)
    finally:
        torch.set_num_threads(threads)
    print(f"accuracy on {options.held_out} digits held out: {accuracy:.2%}")
    made = {"recipe": asdict(options), "accuracy": round(accuracy, 4), "torch": torch.__version__}
    # One entry, because safetensors writes several in an order that changes from run to run.
    out.write_bytes(save(net.state_dict(), {"made": json.dumps(made)}))


def _shifted(images: Tensor, generator: Generator) -> Tensor:
    """Return `images`, n 1 8 8, each moved by a shift of its own; new pixels are background, -1."""
    windows = F.pad(images, (1, 1, 1, 1), value=-1.0).unfold(2, 8, 1).unfold(3, 8, 1)  # n 1 3 3 8 8
    down, right = torch.randint(0, 3, (2, len(images)), generator=generator)
    return windows[torch.arange(len(images)), :, down, right]


if __name__ == "__main__":
    main()
