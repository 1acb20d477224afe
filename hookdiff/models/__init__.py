"""Networks for diffusion."""

from hookdiff.models.unet import UNet

__all__ = ["UNet"]
