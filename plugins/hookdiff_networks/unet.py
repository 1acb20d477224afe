"""A U-Net for diffusion, from 8x8 digits on two CPU cores to 64x64 images on a GPU."""

import math
from typing import Annotated, Any

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
)

# A fixed number of sines and cosines, so that a narrow net distinguishes times as well as a wide one.
_TIME_FEATURES = 128
_MOST_ATTENTION = 32  # pixels: the largest side of a level with attention by default


class UNet(Network):
    """A U-Net for noisy images, with one level per resolution.

    Each level halves the side of the level before and has `channels * mult` channels. A level is `num_res_blocks`
    residual blocks on the way down and as many on the way up, each of which also gets the output of the matching block
    on the way down; two more blocks are at the bottom. A fresh model predicts exactly zero. Parameters are named after
    their level, `down.0` and `up.0` being full size: `down.0.1.conv1.weight`. A model in the memory format
    channels_last keeps images in it.

    The layout is that of Ho et al. 2020 (arXiv:2006.11239); scale and shift by the time, and heads of a fixed width,
    are from Dhariwal and Nichol 2021 (arXiv:2105.05233). With `text_dim`, each self-attention is followed by
    cross-attention to a text, which starts as zero (Chen et al. 2023, arXiv:2310.00426).

    Args:
        in_channels: channels of the images, in and out; in a config the default is that of the data
        image_size: side of square training images in pixels, at least 8; in a config the default is that of the data;
            the net also takes other sizes that its levels divide
        channels: channels of the first level
        channel_mults: one number per level, finest first: its channels as a multiple of `channels`
        num_res_blocks: residual blocks per level, each way
        attention_resolutions: sides, in pixels at `image_size`, of the levels with self-attention, which costs the
            fourth power of the side; default: the last level, if its side is at most 32
        head_dim: channels of an attention head; the number of heads follows from the channels of the level
        dropout: probability, below 1, that an activation is dropped in training, inside a residual block
        num_classes: number of classes that the network is conditioned on, labels 0 to num_classes - 1; 0: none
        text_dim: features of each token of the encoded text, which each block with self-attention reads; 0: no text
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
        channels: Annotated[int, OF_WEIGHTS] = 64,
        channel_mults: Annotated[tuple[int, ...], OF_WEIGHTS] = (1, 2),
        num_res_blocks: Annotated[int, OF_WEIGHTS] = 2,
        attention_resolutions: Annotated[tuple[int, ...] | None, OF_WEIGHTS] = None,
        head_dim: Annotated[int, OF_WEIGHTS] = 32,
        dropout: float = 0.0,
        num_classes: int = 0,
        text_dim: Annotated[int, OF_WEIGHTS] = 0,
        gradient_checkpointing: bool = False,
    ) -> None:
        check_counts(in_channels=in_channels, channels=channels, head_dim=head_dim)
        check_counts(1, 2**16, num_res_blocks=num_res_blocks)
        check_counts(0, 2**24, num_classes=num_classes, text_dim=text_dim)
        check_dropout(dropout)
        divisor, levels = _check_levels(image_size, channel_mults)
        widths = [channels * mult for mult in channel_mults]
        check_counts(**{f"channels * {mult}": channels * mult for mult in channel_mults})
        sides = [image_size >> level for level in range(len(widths))]
        if attention_resolutions is None:
            attention_resolutions = (sides[-1],) if sides[-1] <= _MOST_ATTENTION else ()
        _check_attention(attention_resolutions, head_dim, sides, widths)
        if text_dim and not attention_resolutions:
            raise ValueError(
                f"text_dim={text_dim}: a text is read where there is self-attention, and attention_resolutions=() has "
                f"none; nearest: attention_resolutions=({sides[-1]},)"
            )
        time_width = 4 * channels
        time = TimeEmbedding(time_width, _TIME_FEATURES)
        super().__init__(in_channels, num_classes, text_dim, time, divisor, levels)

        def block(level: int, width_in: int, *, attend: bool = True) -> ResBlock:
            num_heads = widths[level] // head_dim if attend and sides[level] in attention_resolutions else 0
            return ResBlock(width_in, widths[level], time_width, num_heads, text_dim, dropout, gradient_checkpointing)

        self.conv_in = nn.Conv2d(in_channels, channels, 3, padding=1)
        self.down = nn.ModuleList()
        for level, width in enumerate(widths):
            widths_in = [widths[level - 1] if level else channels, *[width] * (num_res_blocks - 1)]
            self.down.append(nn.ModuleList(block(level, width_in) for width_in in widths_in))
        bottom = len(widths) - 1
        self.mid = nn.ModuleList([block(bottom, widths[-1]), block(bottom, widths[-1], attend=False)])
        # Keyed by level, so that up.0 pairs with down.0 and parameters still list in the order they are used.
        self.up = nn.ModuleDict()
        for level in reversed(range(len(widths))):
            self.up[str(level)] = blocks = nn.ModuleDict()
            if level < bottom:
                blocks["upsample"] = nn.Conv2d(widths[level + 1], widths[level], 3, padding=1)
            for i in range(num_res_blocks):
                blocks[str(i)] = block(level, 2 * widths[level])
        self.norm_out = _group_norm(widths[0])
        self.conv_out = nn.Conv2d(widths[0], in_channels, 3, padding=1)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all weights afresh, as a model built on the meta device needs after `to_empty`."""
        # Torch's own small uniform weights, which train better here than those of LeCun or Xavier: the loss on 8x8
        # digits is about 1 percent lower.
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear | nn.GroupNorm | LabelEmbedding):
                module.reset_parameters()
        # A residual branch that starts as zero keeps a deep net as easy to train as a shallow one (Goyal et
        # al. 2017, arXiv:1706.02677), and a zero output makes the first loss that of predicting zero.
        convolutions = [module.conv2 for module in self.modules() if isinstance(module, ResBlock)]
        projections = [module.proj for module in self.modules() if isinstance(module, Attention | CrossAttention)]
        last: list[nn.Conv2d | nn.Linear] = [self.conv_out, *convolutions, *projections]
        for layer in last:
            for parameter in layer.parameters():
                nn.init.zeros_(parameter)

    def predict(self, x: Tensor, condition: Tensor, *text: Tensor | None) -> Tensor:
        h = self.conv_in(x)
        skips: list[Tensor] = []
        blocks: Any
        for level, blocks in enumerate(self.down):
            if level:
                # The mean weighs all pixels alike, so its gradient has no checkerboard (Odena et al. 2016,
                # doi:10.23915/distill.00003), and it does not shift the image by half a pixel as strides do.
                h = F.avg_pool2d(h, 2)
            for block in blocks:
                h = block(h, condition, *text)
                skips.append(h)
        for block in self.mid:
            h = block(h, condition, *text)
        for blocks in self.up.values():
            for name, layer in blocks.items():
                if name == "upsample":
                    # Repeat pixels, then convolve: a transposed convolution makes checkerboards.
                    h = layer(F.interpolate(h, scale_factor=2.0, mode="nearest"))
                else:
                    h = layer(torch.cat([h, skips.pop()], dim=1), condition, *text)
        out: Tensor = self.conv_out(F.silu(self.norm_out(h)))
        return out


class ResBlock(Block):
    """Two convolutions with a skip connection, scaled and shifted by the condition; then attention if it has heads.

    With heads and a `text_dim` above 0 it then reads a text. Maps n width_in h w to n width h w, given the condition, n
    time_width.
    """

    def __init__(
        self,
        width_in: int,
        width: int,
        time_width: int,
        num_heads: int,
        text_dim: int,
        dropout: float,
        gradient_checkpointing: bool,
    ) -> None:
        super().__init__(gradient_checkpointing)
        self.norm1 = _group_norm(width_in)
        self.conv1 = nn.Conv2d(width_in, width, 3, padding=1)
        self.time = nn.Linear(time_width, 2 * width)
        self.norm2 = _group_norm(width, affine=False)  # the time embedding gives the scale and the shift
        self.dropout = nn.Dropout(dropout)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1)
        self.skip = nn.Identity() if width_in == width else nn.Conv2d(width_in, width, 1)
        self.attention = Attention(width, num_heads) if num_heads else nn.Identity()
        self.cross_attention = CrossAttention(width, num_heads, text_dim) if num_heads and text_dim else None

    def compute(self, x: Tensor, condition: Tensor, *text: Tensor | None) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x)))
        scale, shift = self.time(condition)[:, :, None, None].chunk(2, dim=1)
        h = torch.addcmul(shift, self.norm2(h), scale + 1)
        h = self.conv2(self.dropout(F.silu(h)))
        out: Tensor = self.attention(self.skip(x) + h)
        if self.cross_attention is not None:
            read = self.cross_attention(out.flatten(2).transpose(1, 2), *text)
            out = out + read.transpose(1, 2).view_as(out)
        return out


class Attention(nn.Module):
    """Self-attention over the pixels of n c h w, added to its input (Vaswani et al. 2017, arXiv:1706.03762)."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_form: Form = "by_layer"
        self.norm = _group_norm(width)
        # No bias: softmax cancels a bias of the keys, and the bias of the norm replaces the others.
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        # With channels_last these are views, because it stores images as pixels by channels.
        tokens = self.norm(x).flatten(2).transpose(1, 2)
        read: Tensor = self.proj(self_attention(self.qkv(tokens), self.num_heads, self.attention_form))
        return x + read.transpose(1, 2).view_as(x)


def _group_norm(width: int, *, affine: bool = True) -> nn.GroupNorm:
    # Several channels per group: normalising a single channel cancels its bias, and at 1x1 all of its signal.
    most = max(1, min(32, width // 4))
    num_groups = max(n for n in range(1, most + 1) if width % n == 0)
    return nn.GroupNorm(num_groups, width, affine=affine)


def _check_levels(image_size: int, channel_mults: tuple[int, ...]) -> tuple[int, str]:
    """Return the number that must divide heights and widths, and the reason for messages."""
    if min(channel_mults, default=0) < 1:
        nearest = tuple(max(1, mult) for mult in channel_mults) or (1,)
        raise ValueError(
            f"channel_mults={channel_mults}: expected a number above 0 for each level; nearest: channel_mults={nearest}"
        )
    divisor: int = 2 ** (len(channel_mults) - 1)
    reason = f"the {len(channel_mults)} levels of channel_mults"
    if image_size < 8 or image_size % divisor:
        raise ValueError(
            f"image_size={image_size} does not fit, expected at least 8 and a multiple of {divisor} for {reason}; "
            f"nearest: image_size={nearest_multiples(max(8, image_size), divisor)}"
        )
    return divisor, reason


def _check_attention(sides: tuple[int, ...], head_dim: int, levels: list[int], widths: list[int]) -> None:
    for side in sides:
        if side not in levels:
            nearest = min(levels, key=lambda level: abs(level - side))
            raise ValueError(f"attention_resolutions={sides} has {side}, the sides are {levels}; nearest: {nearest}")
    used = [width for side, width in zip(levels, widths, strict=True) if side in sides]
    if any(width % head_dim for width in used):
        nearest = nearest_divisor(math.gcd(*used), head_dim)
        raise ValueError(
            f"head_dim={head_dim} does not divide the channels with attention, {used}; nearest: head_dim={nearest}"
        )
