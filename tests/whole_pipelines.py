"""Whole pipelines of diffusers, small and with random weights, and pictures to train them on."""

from pathlib import Path
from typing import Any

import torch
from PIL import Image

from tests.plugins.test_text_pipeline import SD3_MODEL, XL_MODEL, save_pipeline

SD, XL, SD3, SANA = (f"{name}Pipeline" for name in ("StableDiffusion", "StableDiffusionXL", "StableDiffusion3", "Sana"))
BETAS = {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012}
DDIM = {**BETAS, "clip_sample": False, "steps_offset": 1, "timestep_spacing": "trailing"}
CROSS = {"down_block_types": ("CrossAttnDownBlock2D",) * 2, "up_block_types": ("CrossAttnUpBlock2D",) * 2}
SIZES = {"sample_size": 8, "in_channels": 4, "out_channels": 4}
UNET = {**SIZES, **CROSS, "block_out_channels": (32, 64), "layers_per_block": 1, "norm_num_groups": 8}
SANA_MODEL = {
    "in_channels": 4,
    "out_channels": 4,
    "sample_size": 8,
    "patch_size": 1,
    "num_layers": 2,
    "num_attention_heads": 2,
    "attention_head_dim": 8,
    "num_cross_attention_heads": 2,
    "cross_attention_head_dim": 8,
    "cross_attention_dim": 16,
    "caption_channels": 64,
}


def save_whole(kind: str, folder: Path, scheduler: Any = None) -> Any:
    """Save a pipeline whose autoencoder makes 8 x 8 latents of 16 x 16 pictures, and return it."""
    import diffusers

    torch.manual_seed(0)
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    scale = {"scaling_factor": 1.5305, "shift_factor": 0.0609} if kind == SD3 else {}
    vae: Any = diffusers.AutoencoderKL(
        **blocks, block_out_channels=(8, 8), norm_num_groups=4, latent_channels=4, **scale
    )
    network: Any
    if kind == SD:
        network = diffusers.UNet2DConditionModel(**UNET, cross_attention_dim=64, attention_head_dim=16)
    elif kind == XL:
        network = diffusers.UNet2DConditionModel(**{k: v for k, v in XL_MODEL.items() if k != "use"}, **SIZES)
    elif kind == SD3:
        options = {key: value for key, value in SD3_MODEL.items() if key != "use"}
        network = diffusers.SD3Transformer2DModel(**options, in_channels=4, out_channels=4, sample_size=8)
    else:
        network = diffusers.SanaTransformer2DModel(**SANA_MODEL)
        vae = diffusers.AutoencoderDC(
            latent_channels=4,
            attention_head_dim=8,
            **{f"{side}_block_types": "ResBlock" for side in ("encoder", "decoder")},
            **{f"{side}_block_out_channels": (8, 16) for side in ("encoder", "decoder")},
            **{f"{side}_layers_per_block": (1, 1) for side in ("encoder", "decoder")},
            **{f"{side}_qkv_multiscales": ((), ()) for side in ("encoder", "decoder")},
        )
    if scheduler is None:
        flows = kind in (SD3, SANA)
        scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0) if flows else diffusers.DDIMScheduler(**DDIM)
    name = "unet" if kind in (SD, XL) else "transformer"
    options = {"requires_safety_checker": False} if kind == SD else {}
    pipeline = save_pipeline(kind, folder, vae=vae, scheduler=scheduler, **{name: network}, **options)
    (folder / "None.py").unlink()  # diffusers refuses code
    return pipeline


def save_pictures(folder: Path, num: int = 8, side: int = 16, height: int | None = None) -> None:
    """Save pictures of noise; default: squares."""
    folder.mkdir(parents=True)
    for k in range(num):
        pixels = torch.randint(256, (height or side, side, 3), generator=torch.Generator().manual_seed(k)).to(
            torch.uint8
        )
        Image.fromarray(pixels.numpy()).save(folder / f"{k}.png")
