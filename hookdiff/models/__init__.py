"""Networks for diffusion."""

from hookdiff.models.adapters import adapt
from hookdiff.models.dit import DiT
from hookdiff.models.load import check_file, load_into
from hookdiff.models.unet import UNet

__all__ = ["DiT", "UNet", "adapt", "check_file", "load_into"]
