"""Has networks for diffusion: a U-Net and a DiT."""

from hookdiff_networks.dit import DiT
from hookdiff_networks.unet import UNet

__all__ = ["DiT", "UNet"]
