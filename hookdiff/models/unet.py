"""A U-Net for diffusion, from 8x8 digits on two CPU cores to 64x64 images on a GPU."""

import math
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Sines and cosines of the time: a fixed number, so that a narrow net reads the time as sharply as a wide one.
_TIME_FEATURES = 128


class UNet(nn.Module):
    """Predicts, from noisy images and their times, whatever the objective asks for: noise, image or velocity.

    Each level halves the side of the one before it and has `channels * mult` channels. A level is
    `num_res_blocks` residual blocks on the way down and as many on the way up, each of which also sees the
    output of its mirror image on the way down; two more blocks sit at the bottom. A fresh model predicts
    exactly zero. Parameters are named after their level, `down.0` and `up.0` being full size:
    `down.0.1.conv1.weight`.

    The layout is that of Ho et al. 2020 (arXiv:2006.11239) with the time as a scale and a shift, several
    attention heads and resampling without convolutions, after Dhariwal and Nichol 2021 (arXiv:2105.05233) and
    Karras et al. 2024 (arXiv:2312.02696).

    Args:
        in_channels: channels of the images, in and out.
        image_size: side of the square training images in pixels, at least 8; only `attention_resolutions`
            depends on it, since the net takes any height and width that its levels divide.
        channels: channels of the first level.
        channel_mults: one number a level, finest first: its channels as a multiple of `channels`.
        num_res_blocks: residual blocks a level, each way.
        attention_resolutions: sides, in pixels at `image_size`, of the levels that use self-attention; its
            cost grows with the fourth power of the side, so it is for levels of 32 and below.
        head_dim: channels of an attention head; the number of heads follows from the channels of the level.
        dropout: probability in [0, 1) that an activation is dropped inside a residual block while training.

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
        attention_resolutions: tuple[int, ...] = (4,),
        head_dim: int = 32,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        _at_least_one(
            in_channels=in_channels, channels=channels, num_res_blocks=num_res_blocks, head_dim=head_dim
        )
        divisor = _check_levels(image_size, channel_mults)
        widths = [channels * mult for mult in channel_mults]
        sides = [image_size >> level for level in range(len(widths))]
        _check_attention(attention_resolutions, sides, widths, head_dim)
        if not 0 <= dropout < 1:  # a NaN fails this too
            raise ValueError(f"dropout={dropout} is not in [0, 1); nearest: {0.0 if dropout < 0 else 0.99}")

        self.in_channels = in_channels
        self.divisor = divisor  # height and width must be multiples of it
        time_width = 4 * channels
        self.time = TimeEmbedding(time_width)
        self.conv_in = nn.Conv2d(in_channels, channels, 3, padding=1)

        def block(width_in: int, level: int) -> ResBlock:
            heads = widths[level] // head_dim if sides[level] in attention_resolutions else 0
            return ResBlock(width_in, widths[level], time_width, num_heads=heads, dropout=dropout)

        levels = range(len(widths))
        entering = [channels, *widths[:-1]]  # the channels that come down into each level
        self.down = nn.ModuleList(
            DownLevel(block(widths[i] if j else entering[i], i) for j in range(num_res_blocks)) for i in levels
        )
        self.mid = nn.ModuleList(block(widths[-1], levels[-1]) for _ in range(2))
        rising = [*widths[1:], widths[-1]]  # the channels that come up into each level
        # A dictionary, so that "up.0" pairs with "down.0" and the parameters still list in the order they run.
        self.up = nn.ModuleDict(
            {
                str(i): UpLevel(
                    block((widths[i] if j else rising[i]) + widths[i], i) for j in range(num_res_blocks)
                )
                for i in reversed(levels)
            }
        )
        self.norm_out = _group_norm(widths[0])
        self.conv_out = nn.Conv2d(widths[0], in_channels, 3, padding=1)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all weights afresh, as a model built on the meta device needs after `to_empty`."""
        for module in self.modules():
            if isinstance(module, nn.GroupNorm):
                module.reset_parameters()
            elif isinstance(module, nn.Conv2d | nn.Linear):
                # LeCun: unit variance stays unit variance.
                nn.init.kaiming_normal_(module.weight, nonlinearity="linear")
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        # Every residual branch starts as zero, so depth costs nothing at first (Goyal et al. 2017,
        # arXiv:1706.02677), and so does the output: the first loss is that of predicting nothing.
        branches = [m.conv2 for m in self.modules() if isinstance(m, ResBlock)]
        attention = [m.proj for m in self.modules() if isinstance(m, Attention)]
        for last in (*branches, *attention, self.conv_out):
            nn.init.zeros_(last.weight)
            if last.bias is not None:
                nn.init.zeros_(last.bias)

    def forward(self, x: Tensor, timesteps: Tensor) -> Tensor:
        """Return the prediction for a batch of noisy images.

        Args:
            x: images, n c h w; h and w are multiples of `divisor`. Keeps channels_last if the model has it.
            timesteps: times of the images, n integers or floats of at least 32 bits, roughly in 0 to 1000:
                the embedding barely tells times apart that differ by much less than 1.

        Returns:
            n c h w, in the dtype of `x`.

        Raises:
            ValueError: the size, the channels or the times do not fit; it names what does.
        """
        self._check_input(x, timesteps)
        time = self.time(timesteps)
        h = self.conv_in(x)
        skips: list[list[Tensor]] = []
        # Averaging down and repeating up weigh all pixels alike, so neither leaves a checkerboard (Odena et al.
        # 2016, doi:10.23915/distill.00003) nor moves the image by half a pixel as a strided convolution does.
        for i, level in enumerate(self.down):
            if i:
                h = F.avg_pool2d(h, 2)
            skips.append(level(h, time))
            h = skips[-1][-1]
        for block in self.mid:
            h = block(h, time)
        for i, level in enumerate(self.up.values()):
            if i:
                h = F.interpolate(h, scale_factor=2.0, mode="nearest")
            h = level(h, time, skips.pop())
        out: Tensor = self.conv_out(F.silu(self.norm_out(h)))
        return out.to(x.dtype)  # under autocast it is half precision, too coarse for a sampler to step with

    def _check_input(self, x: Tensor, timesteps: Tensor) -> None:
        if x.ndim != 4 or x.shape[1] != self.in_channels:
            raise ValueError(
                f"x has shape {tuple(x.shape)}, expected (n, {self.in_channels}, h, w) "
                f"as the model was built with in_channels={self.in_channels}"
            )
        n, _, height, width = x.shape
        if height % self.divisor or width % self.divisor or not (height and width):
            below, above = zip(*(_nearest_multiples(side, self.divisor) for side in (height, width)), strict=True)
            nearest = [f"{h}x{w}" for h, w in dict.fromkeys((below, above))]
            raise ValueError(
                f"images of {height}x{width} do not fit: the levels of the model need "
                f"multiples of {self.divisor}; nearest: {' or '.join(nearest)}"
            )
        if timesteps.shape != (n,):
            raise ValueError(f"timesteps has shape {tuple(timesteps.shape)}, expected ({n},): one for each image")
        if timesteps.dtype in (torch.bfloat16, torch.float16):
            raise ValueError(
                f"timesteps is {timesteps.dtype}, which has already rounded them (bfloat16 turns 999 into 1000); "
                "pass integers or float32"
            )


class DownLevel(nn.ModuleList):
    """The residual blocks of a level on the way down."""

    def forward(self, h: Tensor, time: Tensor) -> list[Tensor]:
        """Return the output of every block, n c h w each: the last goes on, all are shown on the way up."""
        outputs: list[Tensor] = []
        for block in self:
            h = block(h, time)
            outputs.append(h)
        return outputs


class UpLevel(nn.ModuleList):
    """The residual blocks of a level on the way up."""

    def forward(self, h: Tensor, time: Tensor, skips: list[Tensor]) -> Tensor:
        """Return n c h w; `skips` are the outputs of the level on the way down, of which the last is read first."""
        for block, skip in zip(self, reversed(skips), strict=True):
            h = block(torch.cat([h, skip], dim=1), time)
        return h


class ResBlock(nn.Module):
    """Two convolutions around a skip, told the time by a scale and a shift, and then attention if it has heads."""

    def __init__(
        self, width_in: int, width: int, time_width: int, *, num_heads: int = 0, dropout: float = 0.0
    ) -> None:
        super().__init__()
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
        h = self.conv1(F.silu(self.norm1(x)))
        scale, shift = self.time(time)[:, :, None, None].chunk(2, dim=1)
        h = torch.addcmul(shift, self.norm2(h), scale + 1)
        h = self.conv2(self.dropout(F.silu(h)))
        out: Tensor = self.attention(self.skip(x) + h)
        return out


class Attention(nn.Module):
    """Self-attention of all pixels with all others, added to its input (Vaswani et al. 2017, arXiv:1706.03762)."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm = _group_norm(width)
        # No bias: softmax cancels that of the keys, and the shift of the norm serves the others.
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map n c h w to the same."""
        n, c, height, width = x.shape
        # Pixels by channels is how channels_last lies in memory, so these are views there.
        tokens = self.norm(x).flatten(2).transpose(1, 2)
        qkv = self.qkv(tokens).unflatten(2, (3, self.num_heads, c // self.num_heads))
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each n heads pixels head_dim
        h = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        h = self.proj(h).transpose(1, 2).unflatten(2, (height, width))
        return x + h


class TimeEmbedding(nn.Module):
    """Turns times into features that every residual block reads."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear1 = nn.Linear(_TIME_FEATURES, width)
        self.linear2 = nn.Linear(width, width)

    def forward(self, timesteps: Tensor) -> Tensor:
        """Map n times to n width, after the last activation."""
        # The weights' dtype matters to a model that was cast whole; under autocast they are float32.
        features = sinusoids(timesteps, _TIME_FEATURES).to(self.linear1.weight.dtype)
        return F.silu(self.linear2(F.silu(self.linear1(features))))


def sinusoids(timesteps: Tensor, num_features: int) -> Tensor:
    """Embed n times as n num_features cosines and sines, in float32 whatever the dtype or the autocast.

    Feature i and its partner have the angular frequency 10000^(-2i / num_features), so the shortest period is
    2 pi times long and the longest nearly 20000 pi (Vaswani et al. 2017, arXiv:1706.03762). `num_features` is even.
    """
    # Computed on each call: a buffer would turn bf16 with the model, and be lost by to_empty. And multiplied,
    # for autocast would do a matrix product (also torch.outer) in half precision.
    half = num_features // 2
    exponents = torch.arange(half, dtype=torch.float32, device=timesteps.device) / half
    angles = timesteps.float()[:, None] * torch.exp(-math.log(10000.0) * exponents)
    return torch.cat([angles.cos(), angles.sin()], dim=1)


def _group_norm(width: int, *, affine: bool = True) -> nn.GroupNorm:
    # Groups of one channel would wipe out the bias of the convolution before them and, at 1x1 pixel, everything.
    most = max(1, min(32, width // 4))
    groups = max(n for n in range(1, most + 1) if width % n == 0)
    return nn.GroupNorm(groups, width, affine=affine)


def _at_least_one(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise ValueError(f"{name}={value} is less than 1; nearest: 1")


def _check_levels(image_size: int, channel_mults: tuple[int, ...]) -> int:
    """Return what heights and widths must be multiples of."""
    if not channel_mults:
        raise ValueError("channel_mults is empty, expected one number a level; nearest: (1,)")
    if min(channel_mults) < 1:
        nearest = tuple(max(1, mult) for mult in channel_mults)
        raise ValueError(f"channel_mults={channel_mults} has a number less than 1; nearest: {nearest}")
    if image_size < 8:
        raise ValueError(f"image_size={image_size} is less than 8; nearest: 8")
    divisor: int = 2 ** (len(channel_mults) - 1)
    if image_size % divisor:
        below, above = _nearest_multiples(image_size, divisor)
        raise ValueError(
            f"image_size={image_size} is not a multiple of {divisor}, as the {len(channel_mults)} levels of "
            f"channel_mults need; nearest: {_either({below, above})}"
        )
    return divisor


def _check_attention(resolutions: tuple[int, ...], sides: list[int], widths: list[int], head_dim: int) -> None:
    for side in resolutions:
        if side not in sides:
            nearest = min(sides, key=lambda s: abs(s - side))
            raise ValueError(
                f"attention_resolutions={resolutions} has {side}, but the sides of the levels are "
                f"{', '.join(map(str, sides))}; nearest: {nearest}"
            )
    used = [width for width, side in zip(widths, sides, strict=True) if side in resolutions]
    if any(width % head_dim for width in used):
        common = math.gcd(*used)
        nearest = min((d for d in range(1, common + 1) if common % d == 0), key=lambda d: abs(d - head_dim))
        raise ValueError(
            f"head_dim={head_dim} does not divide the channels of every level with attention "
            f"({', '.join(map(str, used))}); nearest: {nearest}"
        )


def _nearest_multiples(size: int, divisor: int) -> tuple[int, int]:
    """Return the positive multiples of `divisor` below and above `size`, equal if it is one or has none below."""
    above = max(1, math.ceil(size / divisor)) * divisor
    return max(size // divisor * divisor, min(above, divisor)), above


def _either(values: Iterable[int]) -> str:
    return " or ".join(map(str, sorted(values)))
