"""Train in a script of your own, in two ways: with `run()`, and step by step.

python examples/embed.py [--steps 400] [--out runs/embed]
"""

import argparse
from pathlib import Path

import torch

from hookdiff import Loop, LoopConfig, SampleRequest, builtin_plugins
from hookdiff.data import digits
from hookdiff.diffusion import Diffusion, Sampling
from hookdiff.log import save_grid
from hookdiff_checkpoint import Checkpoint
from hookdiff_ema import EMA
from hookdiff_networks import UNet

LR = 1e-3


def make_loop(steps: int, run_dir: Path) -> Loop:
    torch.manual_seed(0)  # for the initial weights; the loop seeds everything else
    return Loop(
        UNet(in_channels=1, image_size=8, channels=32, num_res_blocks=1),
        lambda model: torch.optim.AdamW(model.parameters(), lr=LR, fused=True),
        Diffusion(),
        digits(),
        LoopConfig(steps=steps, batch_size=64),
        plugins={**builtin_plugins(), "ema": EMA(), "checkpoint": Checkpoint()},
        sampler=Sampling(steps=25),
        hparams={"optimizer": {"use": "adamw", "lr": LR}},  # written to config.toml, beside the LoopConfig
        run_dir=run_dir,
    )


def push(steps: int, out: Path) -> None:
    """Train to the end."""
    loop = make_loop(steps, out / "push")
    reason = loop.run()
    print(f"push: {reason} after {loop.progress.step} steps")


def pull(steps: int, out: Path) -> None:
    """Train step by step: log the smoothed loss, stop once it is low enough, and sample with the average."""
    loop = make_loop(steps, out / "pull")
    smooth = 1.0
    with loop:
        for step in loop.steps():
            smooth += (step.loss - smooth) / 50
            if loop.log.due:
                loop.log({"smooth": smooth})
                print(f"pull: step {step.step}, {step.outcome}, loss {smooth:.3f}, gradient {step.grad_norm:.3f}")
            if smooth < 0.52:
                loop.stop()
        samples = loop.sample(SampleRequest(num=16, seed=1))
    save_grid(samples.images, out / "embed.png")
    print(f"pull: {out / 'embed.png'} from the {samples.weights} weights of step {loop.progress.step}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--out", type=Path, default=Path("runs/embed"))
    options = parser.parse_args()
    push(options.steps // 4, options.out)
    pull(options.steps, options.out)
