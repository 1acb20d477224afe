"""A U-Net for diffusion, from 8x8 digits on two CPU cores to 64x64 images on a GPU."""

import math

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
from hookdiff.models.embedding import LabelEmbedding, TimeEmbedding

# A fixed number of sines and cosines, so that a narrow net reads the time as sharply as a wide one.
_TIME_FEATURES = 128
_MOST_ATTENTION = 32  # pixels: the largest side with attention that was not asked for


class UNet(nn.Module):
    """Predicts, from noisy images and their times, what the objective asks for: noise, image or velocity.

    Each level halves the side of the one before it and has `channels * mult` channels. A level is
    `num_res_blocks` residual blocks on the way down and as many on the way up, each of which also sees the
    output of its mirror image on the way down; two more blocks sit at the bottom. A fresh model predicts
    exactly zero. Parameters are named after their level, `down.0` and `up.0` being full size:
    `down.0.1.conv1.weight`.

    The layout is that of Ho et al. 2020 (arXiv:2006.11239); scale and shift by the time, and heads of a
    fixed width, are from Dhariwal and Nichol 2021 (arXiv:2105.05233).

    Args:
        in_channels: channels of the images, in and out.
        image_size: side of the square training images in pixels, at least 8; only `attention_resolutions`
            depends on it, since the net takes any height and width that its levels divide.
        channels: channels of the first level.
        channel_mults: one number a level, finest first: its channels as a multiple of `channels`.
        num_res_blocks: residual blocks a level, each way.
        attention_resolutions: sides, in pixels at `image_size`, of the levels that use self-attention; its
            cost grows with the fourth power of the side, so it is for levels of 32 and below. None: the last
            level, if its side is not above that.
        head_dim: channels of an attention head; the number of heads follows from the channels of the level.
        dropout: probability in [0, 1) that an activation is dropped inside a residual block while training.
        num_classes: classes that the net is told of, labels 0 to num_classes - 1; 0 makes it unconditional. One
            more row of the embedding stands for "no class", label -1.
        gradient_checkpointing: keep only the inputs of the residual blocks while training and compute the rest
            once more on the way back: the same gradients for less memory and about a third more time.

    Raises:
        ValueError: an argument is out of range or does not fit another; it names the nearest that does.
    """

    def __init__(
        self,
        *,
        in_channels: int = 1,
        image_size: int = 8,
        channels: int = 64,
        channel_mults: tuple[int, ...] = (1, 2),
        num_res_blocks: int = 2,
        attention_resolutions: tuple[int, ...] | None = None,
        head_dim: int = 32,
        dropout: float = 0.0,
        num_classes: int = 0,
        gradient_checkpointing: bool = False,
    ) -> None:
        super().__init__()
        counts = {"in_channels": in_channels, "channels": channels}
        check_counts(**counts, num_res_blocks=num_res_blocks, head_dim=head_dim)
        check_counts(0, num_classes=num_classes)
        divisor = _check_levels(image_size, channel_mults)
        widths = [channels * mult for mult in channel_mults]
        sides = [image_size >> level for level in range(len(widths))]
        if attention_resolutions is None:
            attention_resolutions = (sides[-1],) if sides[-1] <= _MOST_ATTENTION else ()
        _check_attention(attention_resolutions, head_dim, sides, widths)
        check_dropout(dropout)

        self.in_channels = in_channels
        self.num_classes = num_classes
        self.divisor = divisor  # height and width must be multiples of it
        time_width = 4 * channels
        bottom = len(widths) - 1

        def block(level: int, width_in: int, *, attend: bool = True) -> ResBlock:
            attend = attend and sides[level] in attention_resolutions
            num_heads = widths[level] // head_dim if attend else 0
            return ResBlock(
                width_in,
                widths[level],
                time_width,
                num_heads=num_heads,
                dropout=dropout,
                gradient_checkpointing=gradient_checkpointing,
            )

        self.time = TimeEmbedding(time_width, _TIME_FEATURES)
        if num_classes:
            self.label = LabelEmbedding(num_classes, time_width)
        self.conv_in = nn.Conv2d(in_channels, channels, 3, padding=1)
        self.down = nn.ModuleList()
        width = channels
        for level in range(bottom + 1):
            widths_in = [width, *[widths[level]] * (num_res_blocks - 1)]
            self.down.append(DownLevel(block(level, width_in) for width_in in widths_in))
            width = widths[level]
        self.mid = nn.ModuleList([block(bottom, width), block(bottom, width, attend=False)])
        # Keyed by level, so that up.0 pairs with down.0 and parameters still list in the order they are used.
        self.up = nn.ModuleDict()
        for level in reversed(range(bottom + 1)):
            parts: dict[str, nn.Module] = {}
            if level < bottom:
                parts["upsample"] = nn.Conv2d(widths[level + 1], widths[level], 3, padding=1)
            for i in range(num_res_blocks):
                parts[str(i)] = block(level, 2 * widths[level])
            self.up[str(level)] = UpLevel(parts)
        self.norm_out = _group_norm(widths[0])
        self.conv_out = nn.Conv2d(widths[0], in_channels, 3, padding=1)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all weights afresh, as a model built on the meta device needs after `to_empty`."""
        # Torch's own small uniform weights, which train better here than those of LeCun or Xavier: by about 1
        # percent of the loss on 8x8 digits.
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear | nn.GroupNorm | LabelEmbedding):
                module.reset_parameters()
        # A residual branch that starts as zero keeps a deep net as easy to train as a shallow one (Goyal et
        # al. 2017, arXiv:1706.02677), and a zero output makes the first loss that of predicting nothing.
        last: list[nn.Conv2d | nn.Linear] = [self.conv_out]
        last += [module.conv2 for module in self.modules() if isinstance(module, ResBlock)]
        last += [module.proj for module in self.modules() if isinstance(module, Attention)]
        for layer in last:
            for parameter in layer.parameters():
                nn.init.zeros_(parameter)

    def forward(self, x: Tensor, timesteps: Tensor, labels: Tensor | None = None) -> Tensor:
        """Return the prediction for a batch of noisy images.

        Args:
            x: images, n c h w; h and w are multiples of `divisor`. Keeps channels_last if the model has it.
            timesteps: times of the images, n integers, or floats of at least 32 bits, on a scale of about
                0 to 1000: the net barely tells times apart that differ by much less than 1.
            labels: classes of the images, n integers from -1, which is no class, to num_classes - 1; for a net
                with classes, and for no other. A label above is told on the CPU, and is undefined on a GPU.

        Returns:
            n c h w, in the dtype of `x`.

        Raises:
            ValueError: the size, the channels, the times or the labels do not fit; it names what does.
        """
        check_images(x, self.in_channels, self.divisor, f"the {len(self.down)} levels of channel_mults")
        check_timesteps(timesteps, len(x))
        check_labels(labels, len(x), self.num_classes)
        time = self.time(timesteps)
        if labels is not None:
            time = time + self.label(labels)
        time = F.silu(time)
        h = self.conv_in(x)
        skips: list[list[Tensor]] = []
        for i, level in enumerate(self.down):
            if i:
                # The mean weighs all pixels alike, so its gradient has no checkerboard (Odena et al. 2016,
                # doi:10.23915/distill.00003), nor does it move the image half a pixel as strides do.
                h = F.avg_pool2d(h, 2)
            skips.append(level(h, time))
            h = skips[-1][-1]
        for block in self.mid:
            h = block(h, time)
        for level in self.up.values():
            h = level(h, time, skips.pop())
        out: Tensor = self.conv_out(F.silu(self.norm_out(h)))
        return out.to(x.dtype)  # under autocast it has half precision, and a sampler would go on in that


class DownLevel(nn.ModuleList):
    """The residual blocks of a level on the way down."""

    def forward(self, h: Tensor, time: Tensor) -> list[Tensor]:
        """Return the output of every block, n c h w each: the last goes on, all are shown on the way up."""
        outputs: list[Tensor] = []
        for block in self:
            h = block(h, time)
            outputs.append(h)
        return outputs


class UpLevel(nn.ModuleDict):
    """The residual blocks of a level on the way up, after the step up to it if there is a level below."""

    def forward(self, h: Tensor, time: Tensor, skips: list[Tensor]) -> Tensor:
        """Return n c h w; `skips` are the outputs on the way down, of which the last is read first."""
        if "upsample" in self:
            # Repeat, then smooth: a transposed convolution draws checkerboards.
            h = self["upsample"](F.interpolate(h, scale_factor=2.0, mode="nearest"))
        for i, skip in enumerate(reversed(skips)):
            h = self[str(i)](torch.cat([h, skip], dim=1), time)
        return h


class ResBlock(nn.Module):
    """Two convolutions beside a skip, scaled and shifted by the time, then attention if it has heads.

    `time` is whatever all blocks read: the time, or the time and the class.
    """

    def __init__(
        self,
        width_in: int,
        width: int,
        time_width: int,
        *,
        num_heads: int,
        dropout: float,
        gradient_checkpointing: bool = False,
    ) -> None:
        super().__init__()
        self.gradient_checkpointing = gradient_checkpointing
        self.norm1 = _group_norm(width_in)
        self.conv1 = nn.Conv2d(width_in, width, 3, padding=1)
        self.time = nn.Linear(time_width, 2 * width)
        self.norm2 = _group_norm(width, affine=False)  # the time brings the scale and the shift
        self.dropout = nn.Dropout(dropout)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1)
        self.skip = nn.Identity() if width_in == width else nn.Conv2d(width_in, width, 1)
        self.attention = Attention(width, num_heads) if num_heads else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """Map n width_in h w to n width h w, given the embedded time, n time_width."""
        if self.gradient_checkpointing and self.training and torch.is_grad_enabled():
            out: Tensor = checkpoint(self._forward, x, time, use_reentrant=False)
            return out
        return self._forward(x, time)

    def _forward(self, x: Tensor, time: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x)))
        scale, shift = self.time(time)[:, :, None, None].chunk(2, dim=1)
        h = torch.addcmul(shift, self.norm2(h), scale + 1)
        h = self.conv2(self.dropout(F.silu(h)))
        out: Tensor = self.attention(self.skip(x) + h)
        return out


class Attention(nn.Module):
    """Lets each pixel read all others; added to its input (Vaswani et al. 2017, arXiv:1706.03762)."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm = _group_norm(width)
        # No bias: softmax cancels that of the keys, and the shift of the norm serves the others.
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map n c h w to the same."""
        # Pixels by channels is how channels_last lies in memory, so there these are views.
        tokens = self.norm(x).flatten(2).transpose(1, 2)
        parts = self.qkv(tokens).chunk(3, dim=2)
        q, k, v = (part.unflatten(2, (self.num_heads, -1)).transpose(1, 2) for part in parts)
        h = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        out: Tensor = self.proj(h).transpose(1, 2).unflatten(2, x.shape[2:])
        return x + out


def _group_norm(width: int, *, affine: bool = True) -> nn.GroupNorm:
    # Several channels a group: a channel alone would lose the bias of its convolution, and at 1x1 everything.
    most = max(1, min(32, width // 4))
    num_groups = max(n for n in range(1, most + 1) if width % n == 0)
    return nn.GroupNorm(num_groups, width, affine=affine)


def _check_levels(image_size: int, channel_mults: tuple[int, ...]) -> int:
    """Return what heights and widths must be multiples of."""
    if not channel_mults:
        raise ValueError("channel_mults is empty, expected one number a level; nearest: (1,)")
    if min(channel_mults) < 1:
        nearest = tuple(max(1, mult) for mult in channel_mults)
        raise ValueError(f"channel_mults={channel_mults} has a number less than 1; nearest: {nearest}")
    divisor: int = 2 ** (len(channel_mults) - 1)
    if image_size < 8 or image_size % divisor:
        raise ValueError(
            f"image_size={image_size} does not fit, expected at least 8 and a multiple of {divisor} "
            f"for the {len(channel_mults)} levels of channel_mults; "
            f"nearest: {either(nearest_multiples(max(8, image_size), divisor))}"
        )
    return divisor


def _check_attention(sides: tuple[int, ...], head_dim: int, levels: list[int], widths: list[int]) -> None:
    """Check the sides that use attention against the sides and the widths of the levels."""
    for side in sides:
        if side not in levels:
            nearest = min(levels, key=lambda level: abs(level - side))
            raise ValueError(
                f"attention_resolutions={sides} has {side}, but the levels have sides "
                f"{', '.join(map(str, levels))}; nearest: {nearest}"
            )
    used = [width for side, width in zip(levels, widths, strict=True) if side in sides]
    if any(width % head_dim for width in used):
        raise ValueError(
            f"head_dim={head_dim} does not divide the channels of each level with attention "
            f"({', '.join(map(str, used))}); nearest: {nearest_divisor(math.gcd(*used), head_dim)}"
        )
