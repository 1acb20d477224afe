"""A transformer for diffusion (DiT), for images or latents of any size that its patches divide."""

from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hookdiff.models import Form
from hookdiff_networks.checks import check_counts, check_dropout, nearest_divisor, nearest_multiples
from hookdiff_networks.layers import (
    OF_WEIGHTS,
    Block,
    CrossAttention,
    LabelEmbedding,
    Network,
    TimeEmbedding,
    self_attention,
    sinusoids,
)

_TIME_FEATURES = 256


class DiT(Network):
    """A transformer for noisy images, or latents, with one token per patch.

    Each of its `depth` blocks has attention and an MLP, which are normalised, scaled, shifted and gated by the time and
    the class. All gates and the output start as zero, so a fresh model predicts exactly zero and each of its blocks is
    the identity. Layout and initialisation are those of Peebles and Xie 2023 (arXiv:2212.09748), with adaLN-Zero; no
    variance is learned. With `text_dim` each block also reads a text, by cross-attention between attention and MLP that
    starts as zero (Chen et al. 2023, arXiv:2310.00426).

    A row or a column of m = image_size / patch_size patches has the positions 0 to m - 1, as in the paper. In one of n
    patches, patch i is at i + (m - n) / 2, so the middle of the image has the same position in images of all sizes.
    Trained weights therefore need the `image_size` of their training.

    Args:
        in_channels: channels of the images, in and out; in a config the default is that of the data
        image_size: side of square training images in pixels, a multiple of `patch_size`; in a config the default is
            that of the data; the net also takes other sizes, in which the middle has the same position
        patch_size: side of a patch in pixels; 4 is several times faster than 2, and coarser
        hidden_size: features of a token, a multiple of `num_heads` and of 4
        depth: number of blocks
        num_heads: attention heads of a block
        mlp_ratio: features inside the MLP of a block, as a multiple of `hidden_size`
        num_classes: number of classes that the network is conditioned on, labels 0 to num_classes - 1; 0: none
        text_dim: features of each token of the encoded text, which each block reads; 0: no text
        dropout: probability that an activation is dropped in training, at the end of self-attention and MLP
        gradient_checkpointing: keep only the inputs of the blocks in training and compute the rest again in the
            backward pass: the same gradients for less memory and about a third more time

    Raises:
        ValueError: for an argument that is out of range or does not fit another, with the nearest valid value.
    """

    def __init__(
        self,
        *,
        in_channels: int = 1,
        image_size: int = 8,
        patch_size: Annotated[int, OF_WEIGHTS] = 2,
        hidden_size: Annotated[int, OF_WEIGHTS] = 128,
        depth: Annotated[int, OF_WEIGHTS] = 6,
        num_heads: Annotated[int, OF_WEIGHTS] = 4,
        mlp_ratio: Annotated[float, OF_WEIGHTS] = 4.0,
        num_classes: int = 0,
        text_dim: Annotated[int, OF_WEIGHTS] = 0,
        dropout: float = 0.0,
        gradient_checkpointing: bool = False,
    ) -> None:
        check_counts(in_channels=in_channels, image_size=image_size, patch_size=patch_size)
        check_counts(hidden_size=hidden_size, num_heads=num_heads)
        check_counts(1, 2**16, depth=depth)
        check_counts(0, 2**24, num_classes=num_classes, text_dim=text_dim)
        check_dropout(dropout)
        mlp_size = _check_sizes(image_size, patch_size, hidden_size, num_heads, mlp_ratio)
        # The weights of the time embedding start so small that bf16 would round neighbouring times to the same value.
        time = TimeEmbedding(hidden_size, _TIME_FEATURES, autocast=False)
        super().__init__(in_channels, num_classes, text_dim, time, patch_size, "patch_size")
        patch_values = in_channels * patch_size**2
        self.side = image_size // patch_size  # patches of a row of a square training image
        self.patch_in = nn.Linear(patch_values, hidden_size)
        self.blocks = nn.ModuleList(
            DiTBlock(hidden_size, num_heads, mlp_size, text_dim, dropout, gradient_checkpointing) for _ in range(depth)
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
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        for layer in (self.time.linear1, self.time.linear2):
            nn.init.normal_(layer.weight, std=0.02)
        modulations = [module.modulation for module in self.modules() if isinstance(module, DiTBlock)]
        projections = [module.proj for module in self.modules() if isinstance(module, CrossAttention)]
        for layer in (*modulations, *projections, self.modulation_out, self.patch_out):
            nn.init.zeros_(layer.weight)

    def predict(self, x: Tensor, condition: Tensor, *text: Tensor | None) -> Tensor:
        n, channels, height, width = x.shape
        rows, columns, size = height // self.divisor, width // self.divisor, self.divisor
        cut = x.reshape(n, channels, rows, size, columns, size).permute(0, 2, 4, 1, 3, 5)
        where = positions(rows, columns, self.side, self.patch_in.out_features, x.device)
        where = where.to(self.patch_in.weight.dtype)
        # Under autocast the sum makes the tokens float32, and they stay float32 from block to block.
        h = self.patch_in(cut.reshape(n, rows * columns, channels * size * size)) + where
        for block in self.blocks:
            h = block(h, condition, *text)
        scale, shift = self.modulation_out(condition)[:, None].chunk(2, dim=2)
        patches: Tensor = self.patch_out(_modulated(h, scale, shift))
        cut = patches.reshape(n, rows, columns, channels, size, size)
        return cut.permute(0, 3, 1, 4, 2, 5).reshape(x.shape)


class DiTBlock(Block):
    """Attention, then an MLP; each result is multiplied by a gate and added to its input, n tokens hidden_size.

    If `text_dim` is above 0, cross-attention to a text is added between them. Scales, shifts and gates are linear in
    the condition, n hidden_size.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        mlp_size: int,
        text_dim: int,
        dropout: float,
        gradient_checkpointing: bool,
    ) -> None:
        super().__init__(gradient_checkpointing)
        self.num_heads = num_heads
        self.attention_form: Form = "by_layer"
        self.dropout = dropout
        self.modulation = nn.Linear(hidden_size, 6 * hidden_size)
        self.qkv = nn.Linear(hidden_size, 3 * hidden_size)
        self.proj = nn.Linear(hidden_size, hidden_size)
        self.cross_attention = CrossAttention(hidden_size, num_heads, text_dim) if text_dim else None
        self.mlp_in = nn.Linear(hidden_size, mlp_size)
        self.mlp_out = nn.Linear(mlp_size, hidden_size)

    def compute(self, x: Tensor, condition: Tensor, *text: Tensor | None) -> Tensor:
        scale1, shift1, gate1, scale2, shift2, gate2 = self.modulation(condition)[:, None].chunk(6, dim=2)
        read = self_attention(self.qkv(_modulated(x, scale1, shift1)), self.num_heads, self.attention_form)
        h = torch.addcmul(x, gate1, F.dropout(self.proj(read), self.dropout, self.training))
        if self.cross_attention is not None:
            h = h + self.cross_attention(h, *text)
        inner = F.gelu(self.mlp_in(_modulated(h, scale2, shift2)), approximate="tanh")
        return torch.addcmul(h, gate2, F.dropout(self.mlp_out(inner), self.dropout, self.training))


def positions(rows: int, columns: int, side: int, num_features: int, device: torch.device) -> Tensor:
    """Return the position embedding of rows * columns patches, row by row: num_features sines and cosines, float32.

    The first half are the `sinusoids` of the row, the second those of the column; `num_features` is a multiple of 4.
    Rows and columns are counted so that the middle has the same position in every grid, and the first is at 0 in a grid
    of `side` x `side`. The positions of other grids may be negative, and halves.
    """
    half = num_features // 2
    row, column = (sinusoids(_places(num, side, device), half) for num in (rows, columns))
    return torch.cat([row.repeat_interleave(columns, dim=0), column.repeat(rows, 1)], dim=1)


def _places(num: int, side: int, device: torch.device) -> Tensor:
    first = (side - num) / 2
    return torch.arange(num, dtype=torch.float32, device=device) + first


def _modulated(h: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return torch.addcmul(shift, F.layer_norm(h, h.shape[-1:], eps=1e-6), scale + 1)


def _check_sizes(image_size: int, patch_size: int, hidden_size: int, num_heads: int, mlp_ratio: float) -> int:
    if image_size % patch_size:
        sides, side = nearest_multiples(image_size, patch_size), nearest_divisor(image_size, patch_size)
        raise ValueError(
            f"image_size={image_size} is no multiple of patch_size={patch_size}; nearest: image_size={sides}, or "
            f"patch_size={side}"
        )
    if hidden_size % 4:
        sizes = nearest_multiples(hidden_size, 4)
        raise ValueError(
            f"hidden_size={hidden_size} is no multiple of 4, as positions need; nearest: hidden_size={sizes}"
        )
    if hidden_size % num_heads:
        number = nearest_divisor(hidden_size, num_heads)
        raise ValueError(
            f"num_heads={num_heads} does not divide hidden_size={hidden_size}; nearest: num_heads={number}"
        )
    mlp_size = int(hidden_size * mlp_ratio) if 0 < mlp_ratio < float("inf") else 0
    if mlp_size < 1:
        raise ValueError(f"mlp_ratio={mlp_ratio} leaves no features inside the MLP; usual: 4.0")
    return mlp_size
