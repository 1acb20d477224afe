"""Train a classifier of digits: the Loop, its plugins and its data serve any network and any loss.

python examples/classifier.py [--steps 400] [--out runs/classifier]
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from hookdiff import Batch, Feed, Loop, LoopConfig, builtin_plugins, evaluating, hookimpl
from hookdiff.data import digits
from hookdiff_checkpoint import Checkpoint
from hookdiff_ema import EMA
from hookdiff_lr import LR


def loss(net: nn.Module, batch: Batch) -> Tensor:
    """Return the loss of each sample: the objective."""
    return cross_entropy(net(batch.inputs), batch.labels, reduction="none")


def accuracy(loop: Loop, weights: str) -> float:
    """Return the share of the held-out digits that the network classifies correctly."""
    with loop.weights(weights), evaluating(loop.model):
        held_out = loop.feed.unaugmented(loop.feed.held_out_indices)
        named = [loop.model(batch.inputs).argmax(1) == batch.labels for batch in held_out]
    return torch.cat(named).float().mean().item()


class Accuracy:
    """A plugin: logs the accuracy after each pass over the data."""

    @hookimpl
    def on_epoch_end(self, loop: Loop) -> None:
        loop.log({"accuracy": accuracy(loop, "ema")})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--out", type=Path, default=Path("runs/classifier"))
    options = parser.parse_args()
    torch.manual_seed(0)  # for the initial weights
    net = nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Dropout(0.5), nn.Linear(256, 10)),
    )
    loop = Loop(
        net,
        torch.optim.AdamW(net.parameters(), lr=3e-3),
        loss,
        Feed(digits(), held_out=0.2),
        LoopConfig(steps=options.steps, batch_size=64),
        plugins={
            **builtin_plugins(),
            "lr": LR("cosine"),
            "ema": EMA(),
            "checkpoint": Checkpoint(),
            "accuracy": Accuracy(),
        },
        run_dir=options.out,
    )
    loop.run()
    for weights in ("model", "ema"):
        print(f"{accuracy(loop, weights):.1%} of {len(loop.feed.held_out_indices)} held-out digits by the {weights}")
