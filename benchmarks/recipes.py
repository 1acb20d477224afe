"""The recipes that quality.py compares: each trains a network of 1.1 million weights, as its library does it."""

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from step import of_diffusers
from torch import Tensor, nn

from hookdiff.machine import keep_memory
from hookdiff.models import use_attention

STEPS, AT_A_TIME = 50, 50  # evaluations of the network, images in one call of it


def in_unit_range(images: Any) -> Tensor:
    """Return uint8 images (n h w) as n 1 h w, float32 in [-1, 1]."""
    return torch.from_numpy(numpy.array(images))[:, None].float() / 127.5 - 1


class Recipe(ABC):
    """A training that goes on as long as it is asked to, on the images in `folder`."""

    batch_size = 64

    @abstractmethod
    def __init__(self, folder: Path, seed: int, steps: int, **options: Any) -> None: ...

    @abstractmethod
    def train(self, steps: int) -> None: ...

    @abstractmethod
    def sample(self, num: int) -> Tensor:
        """Return images n c h w in [-1, 1]."""

    def close(self) -> None:
        """Let go of what the training holds."""
        return


class Hookdiff(Recipe):
    """A config as in examples: data, network, batch size and steps; hookdiff decides the rest."""

    batch_size = 32
    CONFIG = """
[run]
steps = {steps}
batch_size = {batch_size}
seed = {seed}

[data]
source = "array"
path = "{folder}/train.npy"

[model]
use = "diffusers:UNet2DModel"
layers_per_block = 1
block_out_channels = [32, 64, 64]
down_block_types = ["DownBlock2D", "DownBlock2D", "AttnDownBlock2D"]
up_block_types = ["AttnUpBlock2D", "UpBlock2D", "UpBlock2D"]
norm_num_groups = 8
"""

    def __init__(
        self, folder: Path, seed: int, steps: int, settings: tuple[str, ...] = (), batch_size: int = 32
    ) -> None:
        from hookdiff.experiment import build_loop, load_config

        self.batch_size = batch_size

        run = folder.parent / f"run-{os.getpid()}"
        path = run.with_suffix(".toml")
        path.write_text(self.CONFIG.format(folder=folder, seed=seed, steps=steps, batch_size=batch_size))
        config = load_config(path, ["no:progress"], [f"run.threads={torch.get_num_threads()}", *settings])
        self.loop = build_loop(config, run, overwrite=True)
        self.loop.__enter__()
        self.steps = self.loop.steps()

    def train(self, steps: int) -> None:
        for _ in range(steps):
            next(self.steps)

    def sample(self, num: int) -> Tensor:
        from hookdiff import SampleRequest

        parts = range(0, num, AT_A_TIME)
        return torch.cat([self.loop.sample(SampleRequest(AT_A_TIME, 0, first)).images for first in parts])

    def close(self) -> None:
        self.loop.__exit__(None, None, None)


class ByHand(Recipe):
    """What one writes today: v prediction, a cosine schedule of noise and of the rate, an average, bf16."""

    def __init__(self, folder: Path, seed: int, steps: int, lr: float = 2e-3, batch_size: int = 64) -> None:
        keep_memory()
        self.batch_size = batch_size
        torch.manual_seed(seed)
        self.images = in_unit_range(numpy.load(folder / "train.npy"))
        self.net = of_diffusers(self.images.shape[-1])
        use_attention(self.net, "by_layer")
        self.average = torch.optim.swa_utils.AveragedModel(self.net, multi_avg_fn=self.average_of)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=lr, fused=True)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: min((step + 1) / 60, (1 + math.cos(math.pi * min(1, step / steps))) / 2)
        )
        betas = [min(0.999, 1 - self.level((i + 1) / 1000) / self.level(i / 1000)) for i in range(1000)]
        self.alphas_cumprod = (1 - torch.tensor(betas, dtype=torch.float64)).cumprod(0)
        self.batches = self._batches()

    @staticmethod
    @torch.no_grad()
    def average_of(averages: list[Tensor], weights: list[Tensor], num_averaged: Tensor) -> None:
        """A decay of 0.999 that is reached slowly, as TensorFlow and many scripts have it."""
        n = float(num_averaged)
        torch._foreach_lerp_(averages, weights, 1 - min(0.999, (1 + n) / (10 + n)))

    @staticmethod
    def level(t: float) -> float:
        return math.cos((t + 0.008) / 1.008 * math.pi / 2) ** 2

    def _batches(self) -> Iterator[Tensor]:
        while True:
            yield from torch.randperm(len(self.images)).split(self.batch_size)[: len(self.images) // self.batch_size]

    def rates(self, t: Tensor) -> tuple[Tensor, Tensor]:
        level = self.alphas_cumprod[t].view(-1, 1, 1, 1)
        return level.sqrt().float(), (1 - level).sqrt().float()

    def train(self, steps: int) -> None:
        for _ in range(steps):
            x0 = self.images[next(self.batches)]
            noise, t = torch.randn_like(x0), torch.randint(0, 1000, (len(x0),))
            alpha, sigma = self.rates(t)
            with torch.autocast("cpu", torch.bfloat16):
                out = self.net(alpha * x0 + sigma * noise, t).sample
            loss = F.mse_loss(out.float(), alpha * noise - sigma * x0)
            self.optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
            self.optimizer.step()
            self.schedule.step()
            self.average.update_parameters(self.net)

    @torch.no_grad()
    def sample(self, num: int) -> Tensor:
        net, made = self.average.module.eval(), []
        times = [round(1000 - i * 1000 / STEPS) - 1 for i in range(STEPS)]
        for _ in range(num // AT_A_TIME):
            x = torch.randn(AT_A_TIME, *self.images.shape[1:])
            for t, after in zip(times, [*times[1:], None], strict=True):
                alpha, sigma = self.rates(torch.tensor([t]))
                v = net(x, torch.full((len(x),), t)).sample
                x0 = (alpha * x - sigma * v).clamp(-1, 1)
                noise = (x - alpha * x0) / sigma
                alpha, sigma = (1.0, 0.0) if after is None else self.rates(torch.tensor([after]))
                x = alpha * x0 + sigma * noise
            made.append(x)
        return torch.cat(made)


class Diffusers(Recipe):
    """The recipe of diffusers' examples/unconditional_image_generation, with its defaults."""

    batch_size = 16

    def __init__(
        self, folder: Path, seed: int, steps: int, lr: float = 1e-4, warmup: int = 500, batch_size: int = 16
    ) -> None:
        from diffusers import DDPMScheduler
        from diffusers.optimization import get_scheduler

        torch.manual_seed(seed)
        self.batch_size = batch_size
        images = in_unit_range(numpy.load(folder / "train.npy"))
        self.loader = torch.utils.data.DataLoader(images, batch_size, shuffle=True)
        self.net = of_diffusers(images.shape[-1])
        self.noises = DDPMScheduler(num_train_timesteps=1000, beta_schedule="linear")
        self.optimizer = torch.optim.AdamW(
            self.net.parameters(), lr=lr, betas=(0.95, 0.999), weight_decay=1e-6, eps=1e-8
        )
        self.schedule = get_scheduler(
            "cosine", self.optimizer, num_warmup_steps=warmup, num_training_steps=max(steps, warmup + 1)
        )
        self.batches = self._batches()

    def _batches(self) -> Iterator[Tensor]:
        while True:
            yield from self.loader

    def train(self, steps: int) -> None:
        for _ in range(steps):
            x0 = next(self.batches)
            noise, t = torch.randn_like(x0), torch.randint(0, 1000, (len(x0),)).long()
            out = self.net(self.noises.add_noise(x0, noise, t), t).sample
            F.mse_loss(out.float(), noise.float()).backward()
            nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()

    def sample(self, num: int) -> Tensor:
        from diffusers import DDPMPipeline

        pipeline = DDPMPipeline(self.net.eval(), self.noises)
        pipeline.set_progress_bar_config(disable=True)
        made = [
            pipeline(batch_size=AT_A_TIME, num_inference_steps=STEPS, output_type="np").images
            for _ in range(num // AT_A_TIME)
        ]
        return torch.from_numpy(numpy.concatenate(made)).permute(0, 3, 1, 2) * 2 - 1


class DenoisingDiffusionPytorch(Recipe):
    """Trainer of denoising-diffusion-pytorch with its defaults, without pictures and FID on the way."""

    batch_size = 16

    def __init__(
        self, folder: Path, seed: int, steps: int, lr: float = 1e-4, warmup: int = 0, batch_size: int = 16
    ) -> None:
        from denoising_diffusion_pytorch import GaussianDiffusion, Trainer, Unet

        torch.manual_seed(seed)
        self.batch_size = batch_size
        net = Unet(dim=20, dim_mults=(1, 2, 4), channels=1)
        side = numpy.load(folder / "train.npy", mmap_mode="r").shape[-1]
        diffusion = GaussianDiffusion(net, image_size=side, timesteps=1000, sampling_timesteps=STEPS)
        self.trainer = Trainer(
            diffusion,
            str(folder / "png"),
            train_batch_size=batch_size,
            train_lr=lr,
            train_num_steps=0,
            save_and_sample_every=10**9,
            calculate_fid=False,
            convert_image_to="L",
            results_folder=str(folder.parent / f"ddp-{os.getpid()}"),
        )
        if warmup:
            optimizer = self.trainer.opt.optimizer
            rise = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / warmup))
            optimizer.register_step_post_hook(lambda *_: rise.step())

    def train(self, steps: int) -> None:
        self.trainer.train_num_steps += steps
        self.trainer.train()

    @torch.no_grad()
    def sample(self, num: int) -> Tensor:
        model = self.trainer.ema.ema_model.eval()
        made = [model.sample(batch_size=AT_A_TIME) for _ in range(num // AT_A_TIME)]
        return torch.cat(made) * 2 - 1


ADAMW = ("optimizer.use=adamw", "optimizer.lr=2e-3")  # the best rate for it
GUIDED = ("sampling.steps=35",)  # 50 evaluations, as 15 of the steps ask the guide too
# Share of the run at which the guide is taken, scale, and the highest sigma / alpha at which it is asked.
GUIDES: tuple[tuple[float, float, tuple[float, ...]], ...] = (
    (0.3, 1.25, (math.inf,)),
    (0.3, 1.5, (1.0, 1.5, 2.33, 4.0, math.inf)),
    (0.3, 1.75, (1.5,)),
    (0.3, 2.0, (1.0,)),
    (0.4, 1.5, (2.33, math.inf)),
    (0.4, 2.0, (2.33,)),
    (0.5, 2.0, (1.0, 2.33, math.inf)),
)
UNGUIDED = ("plugins.autoguidance.scale=1.0", "sampling.steps=50")
# Of hookdiff's own keys, each beside the default.
VARIANTS: dict[str, tuple[str, ...]] = {
    "default": (),
    "lr 5e-4": ("optimizer.lr=5e-4",),
    "lr 2e-3": ("optimizer.lr=2e-3",),
    "lr 4e-3": ("optimizer.lr=4e-3",),
    "momentum 0.9": ("optimizer.momentum=0.9",),
    "AdamW, lr 1e-3": ("optimizer.use=adamw",),
    "AdamW": ADAMW,
    "AdamW, lr 4e-3": ("optimizer.use=adamw", "optimizer.lr=4e-3"),
    **{
        f"times of {mean:g}, {std:g}": tuple(
            f"diffusion.times.{option}"
            for option in ("use=logit_normal", f"mean={mean}", f"std={std}", "stratified=true")
        )
        for mean, std in ((0.5, 1.0), (0.0, 1.0), (-0.5, 1.3), (-0.75, 0.8), (-1.0, 0.8), (-1.0, 1.0), (-1.0, 1.3))
    },
    "uniform times": ("diffusion.times.use=uniform", "diffusion.times.stratified=true"),
    "not stratified": ("diffusion.times=logit_normal",),
    "cosine rate": ("plugins.lr.schedule=cosine",),
    "cooldown": ("plugins.lr.schedule=cooldown",),
    "EMA of 0.05": ("plugins.ema.std=0.05",),
    "EMA of 0.15": ("plugins.ema.std=0.15",),
    "betas of 0.9 and 0.99": (*ADAMW, "optimizer.betas=[0.9,0.99]"),
    "euler": ("sampling.sampler=euler",),
    "heun": ("sampling.sampler=heun", "sampling.steps=25"),
    "clamp": ("sampling.clipping=clamp",),
    "trailing": ("sampling.spacing=trailing",),
    "vp": ("diffusion.process=vp",),
    "vp, uniform weighting": ("diffusion.process=vp", "diffusion.weighting=uniform"),
    "vp, no clipping": ("diffusion.process=vp", "sampling.clipping=none"),
    "edm": ("diffusion.process=edm", "sampling.steps=25"),
}
# By name: the class and its options.
RECIPES: dict[str, tuple[type[Recipe], dict[str, Any]]] = {
    "hookdiff": (Hookdiff, {"settings": GUIDED}),
    "hookdiff, not guided": (Hookdiff, {"settings": UNGUIDED}),
    "hookdiff, AdamW": (Hookdiff, {"settings": (*UNGUIDED, *ADAMW)}),
    "hookdiff, AdamW, vp": (Hookdiff, {"settings": (*UNGUIDED, *ADAMW, "diffusion.process=vp")}),
    "hookdiff, AdamW, ddpm": (Hookdiff, {"settings": (*UNGUIDED, *ADAMW, "diffusion.process=ddpm")}),
    "by hand": (ByHand, {"lr": 2e-3, "batch_size": 32}),
    "diffusers, as installed": (Diffusers, {}),
    "diffusers, as installed, batches of 64": (Diffusers, {"batch_size": 64}),
    "diffusers, tuned": (Diffusers, {"lr": 4e-3, "warmup": 60, "batch_size": 32}),
    "denoising-diffusion-pytorch, as installed": (DenoisingDiffusionPytorch, {}),
    "denoising-diffusion-pytorch, tuned": (DenoisingDiffusionPytorch, {"lr": 4e-3, "warmup": 60}),
}
# What the tuning tries, on images of its own.
TUNED: dict[str, tuple[type[Recipe], dict[str, Any]]] = {
    **{
        f"diffusers, batch {size}, lr {lr:g}": (Diffusers, {"lr": lr, "warmup": 60, "batch_size": size})
        for size in (16, 32, 64)
        for lr in (1e-3, 2e-3, 4e-3, 8e-3)
    },
    **{
        f"denoising-diffusion-pytorch, batch {size}, lr {lr:g}": (
            DenoisingDiffusionPytorch,
            {"lr": lr, "warmup": 60, "batch_size": size},
        )
        for size in (16, 64)
        for lr in (1e-3, 2e-3, 4e-3)
    },
    **{
        f"by hand, batch {size}, lr {lr:g}": (ByHand, {"lr": lr, "batch_size": size})
        for size in (32, 64)
        for lr in (1e-3, 2e-3, 4e-3)
    },
    **{f"hookdiff, {name}": (Hookdiff, {"settings": (*UNGUIDED, *settings)}) for name, settings in VARIANTS.items()},
    **{
        f"hookdiff, guide at {at:g}, scale {scale:g}, up to {high:g}": (
            Hookdiff,
            {
                "settings": (
                    f"plugins.autoguidance.at={at}",
                    f"plugins.autoguidance.scale={scale}",
                    f"plugins.autoguidance.interval=[0,{high}]",
                )
            },
        )
        for at, scale, highs in GUIDES
        for high in highs
    },
    **{
        f"hookdiff, batch {size}, lr {lr:g}": (Hookdiff, {"settings": (f"optimizer.lr={lr}",), "batch_size": size})
        for size in (16, 64)
        for lr in (1e-3, 2e-3)
    },
}


def rate_of(name: str) -> str:
    """Return what the speed of a recipe depends on: its class, its batch size and its optimizer."""
    kind, options = {**RECIPES, **TUNED}[name]
    optimizer = ", AdamW" * ("optimizer.use=adamw" in options.get("settings", ()))
    return f"{kind.__name__}, batch {options.get('batch_size', kind.batch_size)}{optimizer}"
