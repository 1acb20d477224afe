"""Train a small autoencoder on a folder of pictures, for `[data.encode.image] use = "autoencoder"`.

python examples/train_autoencoder.py emoji vae [--image-size 64] [--steps 2000] [--batch-size 16]

It writes a folder that `AutoencoderKL.from_pretrained` reads, and reconstructions.png, which shows held-out pictures
above their reconstructions, of each class if there are classes. 64 x 64 pixels become latents of 4 x 16 x 16.
"""

import argparse
from itertools import count, islice
from pathlib import Path

import torch
from diffusers import AutoencoderKL
from torch import Tensor
from torch.nn.functional import mse_loss

from hookdiff import Feed
from hookdiff.images import Folder, Transforms, feed_of
from hookdiff.log import save_grid

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LR = 2e-3
KL = 1e-6  # weight of the KL divergence from a normal distribution: just enough to bound the latents


def make_autoencoder() -> AutoencoderKL:
    torch.manual_seed(0)
    channels = (16, 32, 64)  # each level after the first halves the side
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * len(channels),
        up_block_types=("UpDecoderBlock2D",) * len(channels),
        block_out_channels=channels,
        latent_channels=4,
        norm_num_groups=8,
    ).to(DEVICE)


def train(vae: AutoencoderKL, feed: Feed, steps: int) -> None:
    optimizer = torch.optim.AdamW(vae.parameters(), lr=LR, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LR, steps, pct_start=0.05)
    batches = (batch for epoch in count() for batch in feed.batches(epoch))
    for step, batch in enumerate(islice(batches, steps), 1):
        posterior = vae.encode(batch.inputs).latent_dist
        loss = mse_loss(vae.decode(posterior.sample()).sample, batch.inputs) + KL * posterior.kl().mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0:
            print(f"step {step}: loss {loss:.4f}", flush=True)


@torch.no_grad()
def reconstructed(vae: AutoencoderKL, pictures: Tensor) -> Tensor:
    return vae.decode(vae.encode(pictures).latent_dist.mean).sample.clamp(-1, 1)


def psnr(vae: AutoencoderKL, feed: Feed, indices: Tensor) -> float:
    """Return the peak signal-to-noise ratio in dB, from the mean squared error over all samples `indices`."""
    batches = [batch.inputs for batch in feed.unaugmented(indices, feed.batch_size)]
    errors = torch.cat([(reconstructed(vae, batch) - batch).square().mean((1, 2, 3)) for batch in batches])
    return float(10 * torch.log10(4 / errors.mean()))  # 4: the square of the range of [-1, 1]


def evenly(indices: Tensor, most: int) -> Tensor:
    """Return at most `most` of `indices`, evenly spread."""
    num = min(most, len(indices))
    return indices[torch.arange(num) * len(indices) // num]


def of_many_kinds(feed: Feed, most: int = 16) -> Tensor:
    """Return the indices of at most `most` held-out samples: equally many of each class, evenly spread."""
    indices = feed.held_out_indices
    labels = torch.zeros_like(indices) if feed.labels is None else feed.labels[indices]
    classes = evenly(labels.unique(), most)
    return torch.cat([evenly(indices[labels == label], most // len(classes)) for label in classes])


def show(vae: AutoencoderKL, feed: Feed, path: Path) -> None:
    """Draw held-out pictures of many kinds above their reconstructions."""
    (batch,) = feed.unaugmented(of_many_kinds(feed))
    save_grid(torch.cat([batch.inputs, reconstructed(vae, batch.inputs)]), path, columns=len(batch))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("out", type=Path)
    parser.add_argument("--image-size", type=int, default=64)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch-size", type=int, default=16)
    options = parser.parse_args()
    transforms = Transforms(image_size=options.image_size, channels=3, flip=True)
    feed = feed_of(Folder(options.folder), transforms, held_out=0.05).bind(options.batch_size, device=DEVICE)
    vae = make_autoencoder()
    train(vae, feed, options.steps)
    vae.eval().save_pretrained(options.out)  # in safetensors
    show(vae, feed, options.out / "reconstructions.png")
    print(f"{options.out}: PSNR {psnr(vae, feed, feed.held_out_indices):.1f} dB on held-out pictures")
