"""The network `example_model`: convolutions that know the time."""

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

_FREQUENCIES = 8


class ExampleModel(nn.Module):
    """Three convolutions, with an embedding of the time after the first.

    Args:
        in_channels: channels of the images; those of the data unless given
        channels: channels between the convolutions
    """

    def __init__(self, in_channels: int, channels: int = 16) -> None:
        super().__init__()
        self.first = nn.Conv2d(in_channels, channels, 3, padding=1)
        self.time = nn.Linear(2 * _FREQUENCIES, channels)
        self.middle = nn.Conv2d(channels, channels, 3, padding=1)
        self.last = nn.Conv2d(channels, in_channels, 3, padding=1)

    def forward(self, x: Tensor, timesteps: Tensor) -> Tensor:
        """Return the prediction, of the shape of `x`, for images `x` (n c h w) at `timesteps` (n, 0 to 1000)."""
        h = self.first(x) + self.time(_waves(timesteps).to(x.dtype))[:, :, None, None]
        h = h + self.middle(silu(h))
        predicted: Tensor = self.last(silu(h))
        return predicted


def _waves(timesteps: Tensor) -> Tensor:
    """Return sines and cosines of `timesteps` (n) at rising frequencies, n 16."""
    frequencies = 1e-3 * 2.0 ** torch.arange(_FREQUENCIES, device=timesteps.device)
    angles = timesteps.float()[:, None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], dim=1)
