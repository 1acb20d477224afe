"""Features of handwritten digits, 1 x 8 x 8, from a small classifier that is part of the package."""

from pathlib import Path

import torch
from torch import Tensor, nn

WEIGHTS = Path(__file__).with_name("digits.safetensors")  # made by train_digits.py


class DigitsNet(nn.Module):
    """A convolutional net for images n 1 8 8, float32 in [-1, 1]; `forward` returns features n 64, float32.

    The features are standardised: over real digits each has mean 0 and variance 1. So all count alike, and the
    distance of a single repeated image from the digits is at least 64.
    """

    shape: tuple[int, ...] = (1, 8, 8)  # c h w
    dim = 64

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *_block(1, 24, stride=1),
            *_block(24, 32, stride=2),
            *_block(32, 48, stride=2),
            nn.Flatten(),
            nn.Linear(48 * 2 * 2, self.dim, bias=False),
            nn.BatchNorm1d(self.dim, affine=False),
        )
        self.head = nn.Linear(self.dim, 10)

    def forward(self, images: Tensor) -> Tensor:
        if images.shape[1:] != self.shape:
            raise ValueError(f"the digits features take images n 1 8 8, got {tuple(images.shape)}")
        features: Tensor = self.body(images)
        return features

    def classify(self, images: Tensor) -> Tensor:
        """Return the logits of the classes 0 to 9, n 10; their cross-entropy is the training loss."""
        logits: Tensor = self.head(self(images).relu())
        return logits


def load_digits_net() -> DigitsNet:
    """Return the trained net in eval mode, on the CPU."""
    from safetensors.torch import load_file

    with torch.device("meta"):  # draws no initial values from the default generator
        net = DigitsNet()
    net.load_state_dict(load_file(WEIGHTS), assign=True)
    return net.eval().requires_grad_(False)


def _block(channels_in: int, channels_out: int, stride: int) -> list[nn.Module]:
    convolution = nn.Conv2d(channels_in, channels_out, 3, stride, padding=1, bias=False)
    return [convolution, nn.BatchNorm2d(channels_out), nn.ReLU()]
