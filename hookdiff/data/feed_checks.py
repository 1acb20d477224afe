"""Checks of a feed that few runs need: of other readers, of several ranks, and of weights of samples."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from inspect import getattr_static
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from hookdiff.data.feed_state import FeedState
from hookdiff.data.memory_reader import PlainReader
from hookdiff.errors import UserError
from hookdiff.machine.ranks import gathered
from hookdiff.options.structure import structured

if TYPE_CHECKING:
    from hookdiff.data.feed import Feed
    from hookdiff.data.reader import Reader

_LACKS = object()
_NAMED = 64  # samples whose names all ranks compare


def checked_reader(data: object) -> Reader:
    """Return `data`; raise UserError unless it has all members of a `Reader`."""
    if not hasattr(data, "stacks"):
        raise UserError(
            f"expected a tensor, an InMemory or a Reader, got a {type(data).__name__}; "
            "call hookdiff.images.feed_of, which takes any data"
        )
    lacking = [name for name in dir(PlainReader) if name[0] != "_" and getattr_static(data, name, _LACKS) is _LACKS]
    if lacking:
        raise UserError(
            f"the reader {type(data).__name__} lacks {', '.join(lacking)}: derive its class from "
            "hookdiff.data.PlainReader, which has their defaults"
        )
    return cast("Reader", data)


def check_same(feed: Feed) -> None:
    """Raise UserError unless all ranks have the same data, as far as number, shape, labels and some names show."""
    labels = None if feed.labels is None else hashlib.sha256(feed.labels.numpy().tobytes()).hexdigest()[:12]
    places = torch.linspace(0, len(feed.training) - 1, min(_NAMED, len(feed.training)), dtype=torch.float64).long()
    named = {f"sample {index}": feed.describe(index) for index in feed.training[places].tolist()}
    facts = {"number of samples": len(feed.reader), "shape": feed.shape, "labels": labels}
    if feed.by_shape:
        facts["digest of the sizes"] = feed.by_shape.digest
    first, *others = gathered({**facts, **named})
    for number, other in enumerate(others, 1):
        for what in dict.fromkeys((*first, *other)):
            ours, theirs = first.get(what, "none"), other.get(what, "none")
            if ours != theirs:
                raise UserError(f"all ranks need the same data: {what}: rank 0 has {ours}, rank {number} {theirs}")


def checked_weights(feed: Feed, weights: Tensor) -> Tensor:
    """Return weights of samples (n) for `feed`, the highest of which is 1, so that their sum is finite.

    Raises:
        ValueError: for a wrong number of weights, negative or not finite ones, or 0 for all training samples.
        UserError: for balanced data.
    """
    weights = weights.detach().double().cpu()
    if weights.shape != (len(feed.reader),):
        raise ValueError(f"expected weights of {len(feed.reader):,} samples, got shape {tuple(weights.shape)}")
    if not (weights.isfinite() & (weights >= 0)).all() or not weights[feed.training].any():
        raise ValueError("weights of samples must be finite, at least 0, and not all 0")
    if feed.balanced:
        raise UserError("samples can be weighted only with data.balanced = false")
    return weights / weights.max()


def check_state(feed: Feed, state: Mapping[str, Any]) -> None:
    """Raise ValueError unless `feed` can load `state`."""
    weights = structured(FeedState, state).weights
    if weights is not None:
        checked_weights(feed, weights)
