"""The arguments of a sampler for a request: the objective, labels, conditions, and images to start from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hookdiff.data.feed import Feed
from hookdiff.data.memory import to_device
from hookdiff.data.picture_sizes import examples_for, fitted, labels_for, size_name, trained_sizes
from hookdiff.data.reader import TextEncoders
from hookdiff.errors import UserError
from hookdiff.models.adapters import num_classes_of
from hookdiff.models.objective import AnyObjective, LossFunction, Objective
from hookdiff.models.sample_request import SampleRequest


def bound(objective: Objective, request: SampleRequest, feed: Feed) -> LossFunction:
    """Return the objective that was given to the Loop, with the request's negative texts as null conditions."""
    if request.negative is not None:
        negative = _encoders(feed).embed({name: [text] for name, text in request.negative.items()})
        objective = objective.bind({**feed.nothing, **{name: rows[0] for name, rows in negative.items()}})
    if isinstance(objective, AnyObjective) and hasattr(objective.origin, "draw"):  # a function has none
        return objective.origin
    return objective


def arguments_for(request: SampleRequest, objective: Objective, feed: Feed, model: nn.Module) -> dict[str, Any]:
    """Return labels, conditions and the images to start from, as arguments of the sampler."""
    wanted: dict[str, Any] = {}
    shape = feed.input_shape(request.size)
    size = request.size or (next(iter(trained_sizes(feed)), None) if feed.by_shape else None)
    labels, conditions, names = request.labels, request.conditions, objective.condition_names
    embedded = {} if request.texts is None else _encoders(feed).embed(request.texts)
    if feed.reader.texts:
        embedded |= feed.reader.texts.of_size(size or feed.picture_shape[1:], request.num)
    embedded = {name: rows for name, rows in embedded.items() if name in names}
    if conditions is None and names:
        if len(embedded) == len(set(names)):
            conditions = {}
        else:
            conditions = conditions_of_samples(objective, feed, request.rows, shape)
            default = conditions.pop("labels", None)
            labels = labels or (None if default is None else tuple(default.tolist()))
        conditions |= embedded
    if conditions is not None:
        wanted["conditions"] = {**embedded, **conditions}
    if objective.conditional:
        num_classes = num_classes_of(model)
        labels = labels or request.default_labels(num_classes, labels_for(feed, request.size))
        if len(labels) != request.num or not all(-1 <= label < num_classes for label in labels):
            raise UserError(f"expected {request.num} labels from 0 to {num_classes - 1}, or -1 for none, got {labels}")
        wanted["labels"] = torch.tensor(labels)
    elif request.labels:
        raise UserError("labels were given, but the network was trained without labels; leave them out")
    if request.noise is not None:
        wanted["noise"] = request.noise
    codec, mask = feed.codec, request.mask
    for name, rows in (("images", request.images), ("mask", mask)):
        if rows is not None and size and tuple(rows.shape[-2:]) != tuple(size):
            why = "as requested" if request.size else "the most frequent size of the training"
            raise ValueError(f"{name} has pictures of {size_name(rows.shape)}, expected {size_name(size)}, {why}")
    if request.images is not None:
        images = codec.encode(to_device(request.images, feed.device)) if codec else request.images
        wanted |= {"images": images, "strength": request.strength}
    if mask is not None:
        # A latent is masked if any of its pixels is.
        wanted["mask"] = functional.adaptive_max_pool2d(mask.float(), shape[1:]).bool() if codec else mask
    return wanted


def conditions_of_samples(
    objective: Objective, feed: Feed, choose: Callable[[int], Sequence[int]], shape: Sequence[int]
) -> dict[str, Tensor]:
    """Return the conditions of the training samples that `choose` picks, given their number, by name.

    The samples have the `shape` (c h w), or the most frequent shape if no sample of this shape is there; images among
    their conditions then get its size, see `fitted`. Conditions that depend on the size alone are those of a picture
    for `shape`. Labels are among the conditions, as "labels", if the objective takes them.
    """
    samples = examples_for(feed, choose, shape)
    conditions = fitted(feed, objective.given(samples), shape)
    if texts := feed.reader.texts:
        factor = feed.picture_shape[-1] // feed.shape[-1]
        of_size = texts.of_size([factor * side for side in shape[1:]], len(samples))
        conditions |= {name: rows for name, rows in of_size.items() if name in conditions}
    return conditions


def _encoders(feed: Feed) -> TextEncoders:
    if not ((encoders := feed.reader.texts) and encoders.encoders):
        raise UserError("texts were given, but the network was trained without texts; leave them out")
    return encoders
