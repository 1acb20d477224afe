"""Parts that the U-Net and the DiT share."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hookdiff.models import Form, attention, check_labels
from hookdiff.options import Fixed
from hookdiff_networks.checks import check_images, check_text, check_timesteps

OF_WEIGHTS = Fixed("the weights belong to the network as it was")


class Network(nn.Module, ABC):
    """Base of networks that predict from noisy images, their times, their classes and their text; see `predict`.

    `divisor` divides the height and the width of all images; `divisor_reason` names the cause in messages.
    """

    def __init__(
        self, in_channels: int, num_classes: int, text_dim: int, time: TimeEmbedding, divisor: int, divisor_reason: str
    ) -> None:
        super().__init__()
        self.in_channels = in_channels
        self.num_classes = num_classes
        self.text_dim = text_dim
        self.divisor = divisor
        self.divisor_reason = divisor_reason
        self.time = time
        if num_classes:
            self.label = LabelEmbedding(num_classes, time.linear2.out_features)

    def forward(
        self,
        x: Tensor,
        timesteps: Tensor,
        labels: Tensor | None = None,
        *,
        text: Tensor | None = None,
        text_mask: Tensor | None = None,
    ) -> Tensor:
        """Return the prediction for a batch of noisy images, n c h w in the dtype of `x`.

        Args:
            x: images, n c h w; h and w are multiples of `divisor`
            timesteps: times of the images, n integers, or floats of at least 32 bits, on a scale of about 0 to 1000:
                the net barely distinguishes times that differ by much less than 1
            labels: classes of the images, n integers from -1, which is no class, to num_classes - 1; needed by a net
                with classes, refused by a net without
            text: embedded tokens of a text for each image, n tokens text_dim, floats; needed by a net with text,
                refused by a net without
            text_mask: the tokens that count, n tokens, bool or 0 and 1; default: all of them. An image without any is
                predicted without cross-attention.

        Raises:
            ValueError: the size, the channels, the times, the labels, the text or its mask do not fit. Labels that are
                too large, and a mask of other values, are noticed on the CPU only.
        """
        check_images(x, self.in_channels, self.divisor, self.divisor_reason)
        check_timesteps(timesteps, len(x))
        check_labels(labels, len(x), self.num_classes)
        check_text(text, text_mask, len(x), self.text_dim)
        condition = self.time(timesteps)
        if labels is not None:
            condition = condition + self.label(labels)
        # Under autocast the prediction has half precision, and a sampler would continue in it.
        read = () if text is None else (text.to(x.dtype), None if text_mask is None else text_mask[:, None, None] != 0)
        return self.predict(x, F.silu(condition), *read).to(x.dtype)

    @abstractmethod
    def predict(self, x: Tensor, condition: Tensor, *text: Tensor | None) -> Tensor:
        """Return the prediction, n c h w, given the features of times and classes, n width.

        A net with text also gets its `text`, n tokens text_dim, and the tokens that count, n 1 1 tokens, bool, or None.
        """


class Block(nn.Module, ABC):
    """Base of blocks with gradient checkpointing, which keeps only their inputs and recomputes the rest in backward."""

    def __init__(self, gradient_checkpointing: bool) -> None:
        super().__init__()
        self.gradient_checkpointing = gradient_checkpointing

    def forward(self, x: Tensor, condition: Tensor, *text: Tensor | None) -> Tensor:
        if self.gradient_checkpointing and self.training and torch.is_grad_enabled():
            out: Tensor = checkpoint(self.compute, x, condition, *text, use_reentrant=False)
            return out
        return self.compute(x, condition, *text)

    @abstractmethod
    def compute(self, x: Tensor, condition: Tensor, *text: Tensor | None) -> Tensor:
        """Return the output of the block for `x`, given the features and the text of `Network.predict`."""


class TimeEmbedding(nn.Module):
    """Maps n times to n width through `num_features` sines and cosines; `autocast=False` keeps full precision."""

    def __init__(self, width: int, num_features: int, autocast: bool = True) -> None:
        super().__init__()
        self.num_features = num_features
        self.autocast = autocast
        self.linear1 = nn.Linear(num_features, width)
        self.linear2 = nn.Linear(width, width)

    def forward(self, timesteps: Tensor) -> Tensor:
        device = timesteps.device.type
        unchanged = self.autocast or device == "meta"  # the meta device has no autocast
        with nullcontext() if unchanged else torch.autocast(device, enabled=False):
            # A model that is cast as a whole needs features in its dtype; under autocast the weights stay float32.
            features = sinusoids(timesteps, self.num_features).to(self.linear1.weight.dtype)
            out: Tensor = self.linear2(F.silu(self.linear1(features)))
            return out


class LabelEmbedding(nn.Embedding):
    """Maps n labels to n width: a row for each class, and a last row for "no class", label -1."""

    def __init__(self, num_classes: int, width: int) -> None:
        super().__init__(num_classes + 1, width)

    def forward(self, labels: Tensor) -> Tensor:
        return super().forward(torch.where(labels < 0, self.num_embeddings - 1, labels))


def sinusoids(timesteps: Tensor, num_features: int) -> Tensor:
    """Embed n times as n num_features cosines, then sines, in float32 whatever the dtype or the autocast.

    Cosine i and sine i have the angular frequency 10000^(-2i / num_features), `num_features` being even
    (Vaswani et al. 2017, arXiv:1706.03762): periods from 2 pi to almost 20000 pi.
    """
    # No buffer, because it would turn bf16 with the model and be lost in to_empty; and no matrix product, because
    # autocast computes it in half precision.
    half = num_features // 2
    exponents = torch.arange(half, dtype=torch.float32, device=timesteps.device) / half
    angles = timesteps.float()[:, None] * torch.exp(-math.log(10000.0) * exponents)
    return torch.cat([angles.cos(), angles.sin()], dim=1)


def self_attention(qkv: Tensor, num_heads: int, form: Form) -> Tensor:
    """Return the attention of each token to all, n tokens width; `qkv` is n tokens 3*width, the queries first."""
    return _by_heads(qkv.chunk(3, dim=2), num_heads, form)


class CrossAttention(nn.Module):
    """Attention of tokens, n tokens width, to a text, n words text_dim.

    `mask`, n 1 1 words, is True for words that count. A sample for which no word counts gets zeros, and so does a
    sample with a text of zeros.
    """

    def __init__(self, width: int, num_heads: int, text_dim: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_form: Form = "by_layer"
        self.query = nn.Linear(width, width)
        # No biases: softmax cancels a bias of the keys, and a dropped text, which is all zeros, must add nothing.
        self.key_value = nn.Linear(text_dim, 2 * width, bias=False)
        self.proj = nn.Linear(width, width, bias=False)

    def forward(self, tokens: Tensor, text: Tensor, mask: Tensor | None) -> Tensor:
        query = self.query(F.layer_norm(tokens, tokens.shape[-1:], eps=1e-6))
        parts = (query, *self.key_value(text).chunk(2, dim=2))
        out: Tensor = self.proj(_by_heads(parts, self.num_heads, self.attention_form, mask))
        return out


def _by_heads(parts: Iterable[Any], num_heads: int, form: Form, mask: Tensor | None = None) -> Tensor:
    q, k, v = (part.unflatten(2, (num_heads, -1)).transpose(1, 2) for part in parts)
    return attention(q, k, v, form, mask).transpose(1, 2).flatten(2)
