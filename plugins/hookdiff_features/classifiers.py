"""The spaces of small images, 1 x 8 x 8 and 1 x 28 x 28: classifiers that are part of the package."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import ClassVar

import torch
from attrs import define
from torch import Tensor, nn

from hookdiff.data import to_unit_range
from hookdiff.features import Features, Space


@define(frozen=True)
class Architecture:
    """The sizes of a `Classifier`."""

    name: str  # name of the features in a config, and of the file with the weights
    side: int  # height and width of the images, pixels
    blocks: tuple[tuple[int, int], ...]  # channels and stride of each convolution
    dim: int  # of the features
    num_classes: int = 10

    @property
    def weights(self) -> Path:
        """The file with the weights, which train_classifiers.py has made."""
        return Path(__file__).with_name(f"{self.name}.safetensors")


DIGITS = Architecture("digits", side=8, blocks=((24, 1), (32, 2), (48, 2)), dim=64)
FASHION_MNIST = Architecture("fashion-mnist", side=28, blocks=((32, 2), (64, 2), (48, 2)), dim=128)


class Classifier(nn.Module):
    """A convolutional net for images n 1 h w, float32 in [-1, 1]; `forward` returns features n d and logits n k.

    The features are standardised: over the training images each has mean 0 and variance 1. So all features count alike,
    and the Fréchet distance of a single repeated image from these images is at least d.
    """

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        blocks: list[nn.Module] = []
        channels, side = 1, architecture.side
        for channels_out, stride in architecture.blocks:
            convolution = nn.Conv2d(channels, channels_out, 3, stride, padding=1, bias=False)
            blocks += [convolution, nn.BatchNorm2d(channels_out), nn.ReLU()]
            channels, side = channels_out, -(-side // stride)
        self.body = nn.Sequential(
            *blocks,
            nn.Flatten(),
            nn.Linear(channels * side * side, architecture.dim, bias=False),
            nn.BatchNorm1d(architecture.dim, affine=False),
        )
        self.head = nn.Linear(architecture.dim, architecture.num_classes)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        features = self.body(images)
        return features, self.head(features.relu())


@define(frozen=True)
class _Classified(Features):
    """Features of a classifier whose weights are part of this package."""

    architecture: ClassVar[Architecture]

    def open(self, device: torch.device) -> Space:
        from safetensors.torch import load

        architecture = self.architecture
        content = architecture.weights.read_bytes()
        with torch.device("meta"):  # draws no initial values from the default generator
            net = Classifier(architecture)
        net.load_state_dict(load(content), assign=True)
        net.to(device).eval().requires_grad_(False)
        return Space(
            architecture.name,
            f"{architecture.name} {hashlib.sha256(content).hexdigest()}",
            lambda images: net(to_unit_range(images)),
            channels=(1,),
            size=(architecture.side, architecture.side),
            device=device,
        )


@define(frozen=True)
class Digits(_Classified):
    """64 features of handwritten digits, 1 x 8 x 8, of a classifier that was trained on `hookdiff.data.digits`."""

    architecture = DIGITS


@define(frozen=True)
class FashionMNIST(_Classified):
    """128 features of articles of clothing, 1 x 28 x 28, of a classifier that was trained on Fashion-MNIST."""

    architecture = FASHION_MNIST
