"""A transformer for diffusion (DiT), for images or latents of any size that its patches divide."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hookdiff.models.checks import (
    check_counts,
    check_dropout,
    check_images,
    check_labels,
    check_timesteps,
    either,
    nearest_divisor,
    nearest_multiples,
)
from hookdiff.models.embedding import LabelEmbedding, TimeEmbedding, sinusoids

_TIME_FEATURES = 256


class DiT(nn.Module):
    """Predicts, from noisy images, their times and their classes, what the objective asks for.

    An image becomes one token a patch; `depth` blocks of attention and MLP follow, each of which is normalised,
    scaled, shifted and gated by the time and the class. All gates and the output start as zero, so a fresh model
    predicts exactly zero and each of its blocks is the identity.

    Layout and initialisation are those of Peebles and Xie 2023 (arXiv:2212.09748), with adaLN-Zero. The output has
    the channels of the input: no variance is learned.

    Args:
        in_channels: channels of the images, in and out.
        image_size: side of the square training images in pixels, a multiple of `patch_size`. No weight depends on
            it: positions are computed for the image at hand.
        patch_size: side of a patch in pixels; tokens, and with them time and memory, fall with its square.
        hidden_size: features of a token, a multiple of `num_heads` and of 4.
        depth: number of blocks.
        num_heads: attention heads of a block.
        mlp_ratio: features inside the MLP of a block, as a multiple of `hidden_size`.
        num_classes: classes that the net is told of, labels 0 to num_classes - 1; 0 makes it unconditional. One
            more row of the embedding stands for "no class", label -1.
        dropout: probability in [0, 1) that an activation is dropped at the end of attention and MLP while training.
        gradient_checkpointing: keep only the inputs of the blocks while training and compute the rest once more on
            the way back: the same gradients for less memory and about a third more time.

    Raises:
        ValueError: an argument is out of range or does not fit another; it names the nearest that does.
    """

    def __init__(
        self,
        *,
        in_channels: int = 1,
        image_size: int = 8,
        patch_size: int = 2,
        hidden_size: int = 128,
        depth: int = 6,
        num_heads: int = 4,
        mlp_ratio: float = 4.0,
        num_classes: int = 0,
        dropout: float = 0.0,
        gradient_checkpointing: bool = False,
    ) -> None:
        super().__init__()
        check_counts(in_channels=in_channels, image_size=image_size, patch_size=patch_size)
        check_counts(hidden_size=hidden_size, depth=depth, num_heads=num_heads)
        check_counts(0, num_classes=num_classes)
        check_dropout(dropout)
        mlp_size = _check_sizes(image_size, patch_size, hidden_size, num_heads, mlp_ratio)
        self.in_channels = in_channels
        self.patch_size = patch_size
        self.num_classes = num_classes
        patch_values = in_channels * patch_size**2

        self.time = TimeEmbedding(hidden_size, _TIME_FEATURES)
        if num_classes:
            self.label = LabelEmbedding(num_classes, hidden_size)
        self.patch_in = nn.Linear(patch_values, hidden_size)
        self.blocks = nn.ModuleList(
            DiTBlock(hidden_size, num_heads, mlp_size, dropout, gradient_checkpointing) for _ in range(depth)
        )
        self.modulation_out = nn.Linear(hidden_size, 2 * hidden_size)
        self.patch_out = nn.Linear(hidden_size, patch_values)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all weights afresh, as a model built on the meta device needs after `to_empty`."""
        for module in self.modules():
            if isinstance(module, LabelEmbedding):
                nn.init.normal_(module.weight, std=0.02)
            elif isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        for layer in (self.time.linear1, self.time.linear2):
            nn.init.normal_(layer.weight, std=0.02)
        modulations = [module.modulation for module in self.modules() if isinstance(module, DiTBlock)]
        for layer in (*modulations, self.modulation_out, self.patch_out):
            nn.init.zeros_(layer.weight)

    def forward(self, x: Tensor, timesteps: Tensor, labels: Tensor | None = None) -> Tensor:
        """Return the prediction for a batch of noisy images.

        Args:
            x: images, n c h w; h and w are multiples of `patch_size`.
            timesteps: times of the images, n integers, or floats of at least 32 bits, on a scale of about
                0 to 1000: the net barely tells times apart that differ by much less than 1.
            labels: classes of the images, n integers from -1, which is no class, to num_classes - 1; for a net
                with classes, and for no other. A label above is told on the CPU, and is undefined on a GPU.

        Returns:
            n c h w, in the dtype of `x`.

        Raises:
            ValueError: the size, the channels, the times or the labels do not fit; it names what does.
        """
        check_images(x, self.in_channels, self.patch_size, "patch_size")
        check_timesteps(timesteps, len(x))
        check_labels(labels, len(x), self.num_classes)
        with _without_autocast(x.device):  # the weights of the time start so small that bf16 blurs neighbours
            condition = self.time(timesteps)
        if labels is not None:
            condition = condition + self.label(labels)
        condition = F.silu(condition)  # as every modulation reads it
        grid = x.shape[2] // self.patch_size, x.shape[3] // self.patch_size
        where = positions(*grid, self.patch_in.out_features, x.device)
        # Under autocast this makes the tokens float32, and they stay so from block to block.
        h = self.patch_in(_to_patches(x, grid, self.patch_size)) + where.to(self.patch_in.weight.dtype)
        for block in self.blocks:
            h = block(h, condition)
        scale, shift = self.modulation_out(condition)[:, None].chunk(2, dim=2)
        out = _to_images(self.patch_out(_modulated(h, scale, shift)), grid, self.patch_size)
        return out.to(x.dtype)  # under autocast it has half precision, and a sampler would go on in that


class DiTBlock(nn.Module):
    """Attention, then an MLP, each added to its input through a gate; the condition scales, shifts and gates."""

    def __init__(
        self, hidden_size: int, num_heads: int, mlp_size: int, dropout: float, gradient_checkpointing: bool
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.dropout = dropout
        self.gradient_checkpointing = gradient_checkpointing
        self.modulation = nn.Linear(hidden_size, 6 * hidden_size)
        self.qkv = nn.Linear(hidden_size, 3 * hidden_size)
        self.proj = nn.Linear(hidden_size, hidden_size)
        self.mlp_in = nn.Linear(hidden_size, mlp_size)
        self.mlp_out = nn.Linear(mlp_size, hidden_size)

    def forward(self, h: Tensor, condition: Tensor) -> Tensor:
        """Map n tokens hidden_size to the same, given the condition, n hidden_size."""
        if self.gradient_checkpointing and self.training and torch.is_grad_enabled():
            out: Tensor = checkpoint(self._forward, h, condition, use_reentrant=False)
            return out
        return self._forward(h, condition)

    def _forward(self, h: Tensor, condition: Tensor) -> Tensor:
        scale1, shift1, gate1, scale2, shift2, gate2 = self.modulation(condition)[:, None].chunk(6, dim=2)
        h = torch.addcmul(h, gate1, self._dropped(self._attention(_modulated(h, scale1, shift1))))
        inner = F.gelu(self.mlp_in(_modulated(h, scale2, shift2)), approximate="tanh")
        return torch.addcmul(h, gate2, self._dropped(self.mlp_out(inner)))

    def _attention(self, h: Tensor) -> Tensor:
        parts = self.qkv(h).chunk(3, dim=2)
        q, k, v = (part.unflatten(2, (self.num_heads, -1)).transpose(1, 2) for part in parts)
        out: Tensor = self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return out

    def _dropped(self, h: Tensor) -> Tensor:
        return F.dropout(h, self.dropout, self.training)


def positions(rows: int, columns: int, num_features: int, device: torch.device) -> Tensor:
    """Return the place of each of rows * columns patches, row by row, as num_features sines and cosines, float32.

    The first half tells the row, the second the column, each as `sinusoids` tells a time; `num_features` is a multiple
    of 4.
    """
    half = num_features // 2
    row, column = (sinusoids(torch.arange(side, device=device), half) for side in (rows, columns))
    shape = rows, columns, half
    return torch.cat([row[:, None].expand(shape), column[None].expand(shape)], dim=2).flatten(0, 1)


def _to_patches(x: Tensor, grid: tuple[int, int], size: int) -> Tensor:
    """Cut n c h w into n patches values, of which a linear map is a convolution by whole patches."""
    n, channels, _, _ = x.shape
    rows, columns = grid
    cut = x.reshape(n, channels, rows, size, columns, size).permute(0, 2, 4, 1, 3, 5)
    return cut.reshape(n, rows * columns, channels * size * size)


def _to_images(patches: Tensor, grid: tuple[int, int], size: int) -> Tensor:
    """Undo `_to_patches`."""
    n, _, values = patches.shape
    (rows, columns), channels = grid, values // size**2
    parts = patches.reshape(n, rows, columns, channels, size, size).permute(0, 3, 1, 4, 2, 5)
    return parts.reshape(n, channels, rows * size, columns * size)


def _without_autocast(device: torch.device) -> AbstractContextManager[object]:
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)


def _modulated(h: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return torch.addcmul(shift, F.layer_norm(h, h.shape[-1:], eps=1e-6), scale + 1)


def _check_sizes(image_size: int, patch_size: int, hidden_size: int, num_heads: int, mlp_ratio: float) -> int:
    """Return the features inside the MLP."""
    if image_size % patch_size:
        raise ValueError(
            f"image_size={image_size} is no multiple of patch_size={patch_size}; "
            f"nearest: {either(nearest_multiples(image_size, patch_size))}, "
            f"or patch_size={nearest_divisor(image_size, patch_size)}"
        )
    if hidden_size % 4:
        raise ValueError(
            f"hidden_size={hidden_size} is no multiple of 4, as positions need: sines and cosines of row and column; "
            f"nearest: {either(nearest_multiples(hidden_size, 4))}"
        )
    if hidden_size % num_heads:
        raise ValueError(
            f"num_heads={num_heads} does not divide hidden_size={hidden_size}; "
            f"nearest: {nearest_divisor(hidden_size, num_heads)}"
        )
    mlp_size = int(hidden_size * mlp_ratio) if 0 < mlp_ratio < float("inf") else 0
    if mlp_size < 1:
        raise ValueError(f"mlp_ratio={mlp_ratio} leaves no features inside the MLP; usual: 4.0")
    return mlp_size
