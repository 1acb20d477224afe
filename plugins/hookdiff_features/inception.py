"""Inception v3, for inference: the network of FID and, with other pooling, torchvision's network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

_EPS = 1e-3  # of the batch norm

# The branches of each block: the convolutions in their order, with their names in the weights.
_A = (("1x1",), ("5x5_1", "5x5_2"), ("3x3dbl_1", "3x3dbl_2", "3x3dbl_3"))
_B = (("3x3",), ("3x3dbl_1", "3x3dbl_2", "3x3dbl_3"))
_C = (("1x1",), ("7x7_1", "7x7_2", "7x7_3"), ("7x7dbl_1", "7x7dbl_2", "7x7dbl_3", "7x7dbl_4", "7x7dbl_5"))
_D = (("3x3_1", "3x3_2"), ("7x7x3_1", "7x7x3_2", "7x7x3_3", "7x7x3_4"))


class InceptionV3(nn.Module):
    """Inception v3 (Szegedy et al. 2016, arXiv 1512.00567), for images n 3 299 299, float32 in [-1, 1].

    `forward` returns the features after the last pooling (pool3, n 2048) and the logits. Batch norm is folded into the
    convolutions, and the tensors are in channels_last, in which processors convolve faster.

    `state` has the weights by their names in torchvision's network, which the published weights of FID use, too. If
    `as_in_fid`, the network pools as the TensorFlow graph of 2015-12-05, on which FID is defined (Heusel et al. 2017,
    arXiv 1706.08500): averages leave out the padding, and the last block takes a maximum. The logits then have no bias,
    as in the Inception Score. Otherwise the network is torchvision's.

    Raises KeyError for a weight that is missing.
    """

    fc_weight: Tensor
    fc_bias: Tensor | None

    def __init__(self, state: Mapping[str, Tensor], as_in_fid: bool) -> None:
        super().__init__()
        self.as_in_fid = as_in_fid
        names = [key.removesuffix(".conv.weight") for key in state if key.endswith(".conv.weight")]
        for name in names:
            weight, bias = _folded(state, name)
            self.register_buffer(_key(name, "weight"), weight.contiguous(memory_format=torch.channels_last))
            self.register_buffer(_key(name, "bias"), bias)
        self.register_buffer("fc_weight", state["fc.weight"].float())
        self.register_buffer("fc_bias", None if as_in_fid else state["fc.bias"].float())

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        x = images.contiguous(memory_format=torch.channels_last)
        x = self._conv(x, "Conv2d_1a_3x3", stride=2)
        x = self._conv(x, "Conv2d_2a_3x3")
        x = self._conv(x, "Conv2d_2b_3x3", padded=True)
        x = functional.max_pool2d(x, 3, 2)
        x = self._conv(x, "Conv2d_3b_1x1")
        x = self._conv(x, "Conv2d_4a_3x3")
        x = functional.max_pool2d(x, 3, 2)
        for block in ("Mixed_5b", "Mixed_5c", "Mixed_5d"):
            x = self._mixed(x, block, _A)
        x = self._smaller(x, "Mixed_6a", _B)
        for block in ("Mixed_6b", "Mixed_6c", "Mixed_6d", "Mixed_6e"):
            x = self._mixed(x, block, _C)
        x = self._smaller(x, "Mixed_7a", _D)
        x = self._wide(x, "Mixed_7b", self._average(x))
        x = self._wide(x, "Mixed_7c", functional.max_pool2d(x, 3, 1, 1) if self.as_in_fid else self._average(x))
        features = x.mean(dim=(2, 3))
        return features, functional.linear(features, self.fc_weight, self.fc_bias)

    def _mixed(self, x: Tensor, block: str, branches: Sequence[Sequence[str]]) -> Tensor:
        parts = [self._branch(x, block, names) for names in branches]
        return torch.cat([*parts, self._branch(self._average(x), block, ["_pool"])], dim=1)

    def _smaller(self, x: Tensor, block: str, branches: Sequence[Sequence[str]]) -> Tensor:
        """Halve height and width: the last convolution of each branch has a stride of 2."""
        parts = []
        for *first, last in branches:
            parts.append(self._conv(self._branch(x, block, first), f"{block}.branch{last}", stride=2))
        return torch.cat([*parts, functional.max_pool2d(x, 3, 2)], dim=1)

    def _wide(self, x: Tensor, block: str, pooled: Tensor) -> Tensor:
        single = self._branch(x, block, ["3x3_1"])
        double = self._branch(x, block, ["3x3dbl_1", "3x3dbl_2"])
        calls = ((x, "1x1"), (single, "3x3_2a"), (single, "3x3_2b"), (double, "3x3dbl_3a"), (double, "3x3dbl_3b"))
        parts = [self._branch(inner, block, [name]) for inner, name in (*calls, (pooled, "_pool"))]
        return torch.cat(parts, dim=1)

    def _branch(self, x: Tensor, block: str, names: Sequence[str]) -> Tensor:
        for name in names:
            x = self._conv(x, f"{block}.branch{name}", padded=True)
        return x

    def _conv(self, x: Tensor, name: str, stride: int = 1, padded: bool = False) -> Tensor:
        weight, bias = self.get_buffer(_key(name, "weight")), self.get_buffer(_key(name, "bias"))
        padding = (weight.shape[2] // 2, weight.shape[3] // 2) if padded else 0
        return functional.conv2d(x, weight, bias, stride, padding).relu_()

    def _average(self, x: Tensor) -> Tensor:
        return functional.avg_pool2d(x, 3, 1, 1, count_include_pad=not self.as_in_fid)


def _key(name: str, kind: str) -> str:
    return f"{name}_{kind}".replace(".", "_")  # a buffer's name has no dots


def _folded(state: Mapping[str, Tensor], name: str) -> tuple[Tensor, Tensor]:
    """Return weight and bias of a convolution with its batch norm: w g / s and b - m g / s, s = sqrt(v + eps)."""
    weight, gamma, beta, mean, variance = (
        state[f"{name}.{key}"].double()
        for key in ("conv.weight", "bn.weight", "bn.bias", "bn.running_mean", "bn.running_var")
    )
    scale = gamma / (variance + _EPS).sqrt()
    return (weight * scale[:, None, None, None]).float(), (beta - mean * scale).float()
