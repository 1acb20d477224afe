"""The facts about the data that a checkpoint keeps, so that its run can make images without the data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from attrs import Attribute, Factory, asdict, define, field
from attrs.validators import deep_iterable, ge, le, optional
from torch import Tensor

from hookdiff.data.marks import Mark, marks_of_data
from hookdiff.errors import UserError
from hookdiff.options.structure import Problems, shaped, structured

if TYPE_CHECKING:
    from hookdiff.data.feed import Feed

# Limits far above those of any run, but small enough for memory.
MOST_VALUES, MOST_SAMPLES, MOST_CLASSES = 1 << 31, 10**10, 10**7
MOST, LIMIT = 16, 1 << 22  # examples, and bytes of all examples together; one example is always kept


def _are_rows(facts: Any, _: Attribute[Any], __: Mapping[str, Any]) -> None:
    conditions, texts = (known if isinstance(known, Mapping) else {} for known in (facts.conditions, facts.texts))
    columns = [*conditions.values()] + ([] if facts.labels is None else [facts.labels])
    rows = {tuple(column.shape[:1]) for column in columns} | {(len(column),) for column in texts.values()}
    if len(rows) > 1 or not rows.isdisjoint({(), (0,)}):
        raise ValueError("conditions, labels and texts must have the same number of rows, and at least one")
    most = facts.num_classes
    if facts.labels is not None and most is not None and not bool((facts.labels < most).all()):
        raise ValueError(f"a label is {int(facts.labels.max())}, expected less than num_classes = {most}")


def _is_shape(instance: Any, attribute: Attribute[Any], shape: tuple[int, ...] | None) -> None:
    if shape is None:
        return
    deep_iterable(ge(1))(instance, attribute, shape)
    if math.prod(shape) > MOST_VALUES:
        raise ValueError(
            f"{attribute.name}: expected at most {MOST_VALUES:,} values a sample, got {' x '.join(map(str, shape))}"
        )


def another_encoder(name: str, digest: str, expected: str | None) -> str:
    """Return the text of the error that the training used another encoder."""
    way_out = f"restore its options and files; the digest is {digest} now, expected {expected}"
    return f"data.encode.{name}: the training used another encoder: {way_out}"


@define(frozen=True, eq=False, kw_only=True)
class Facts:
    """The facts about the data that a run needs after its training.

    If the samples have conditions, the first few training samples are kept as examples, without their images.
    """

    shape: tuple[int, ...] = field(validator=_is_shape)  # of one sample, c h w
    num_samples: int = field(validator=[ge(0), le(MOST_SAMPLES)])  # samples to train on
    # The shapes of the samples and the number to train on of each, the most frequent first; empty: all have one shape.
    shapes: tuple[tuple[int, ...], ...] = field(default=(), validator=deep_iterable(_is_shape))
    counts: tuple[int, ...] = field(default=(), validator=deep_iterable([ge(0), le(MOST_SAMPLES)]))
    drop_last: bool  # an epoch leaves out its last, smaller batch
    limit: int | None = field(default=None, validator=optional(ge(1)))  # an epoch repeats few samples to fill a batch
    # Of a picture that the codec decodes; None without a codec.
    picture_shape: tuple[int, ...] | None = field(default=None, validator=_is_shape)
    codec: str | None = None  # the digest of the codec
    are_pictures: bool = False  # with values in [-1, 1], to which samples of the model are clamped
    num_classes: int | None = field(default=None, validator=optional([ge(0), le(MOST_CLASSES)]))  # None: no labels
    classes: tuple[str, ...] | None = None  # the names of the classes
    labels: Tensor | None = field(default=None, validator=shaped(None, dtype=torch.int64))  # of the examples: n, int64
    conditions: dict[str, Tensor] = field(default=Factory(dict), validator=_are_rows)  # of the examples: n rows each
    # The captions of the examples, n of each kind, by kind. Encoders turn them into conditions.
    texts: dict[str, tuple[str, ...]] = field(default=Factory(dict), validator=_are_rows)
    encoders: dict[str, str] = Factory(dict)  # digests of all encoders, by name
    marks: dict[str, Mark] = Factory(dict)  # of the parts of the data, by name

    @classmethod
    def of(cls, state: Any) -> Facts:
        """Read the facts in the state of a checkpoint.

        Raises:
            UserError: for a state without facts.
        """
        try:
            return structured(cls, state)
        except Problems as error:
            raise UserError(f"the checkpoint's state of 'data' cannot be loaded: facts: {error}") from None

    @classmethod
    def about(cls, feed: Feed) -> Facts:
        """Return the facts about a `Feed`; if the samples have conditions, the first samples are loaded."""
        examples: dict[str, Any] = {}
        first, nothing = feed.reader.first.conditions, feed.nothing
        if columns := {name: column for name, column in first.items() if nothing.get(name) is None}:
            size = sum(column[:1].nbytes for column in columns.values())
            count = max(1, min(MOST, LIMIT // max(1, size)))
        if columns or feed.reader.texts:
            batch = feed.examples(lambda total: range(min(count if columns else MOST, total)))
            examples["labels"] = None if batch.labels is None else batch.labels.cpu()
            examples["conditions"] = {name: batch.conditions[name].cpu() for name in columns}
            assert batch.indices is not None
            examples["texts"] = feed.reader.texts_of(batch.indices) if feed.reader.texts else {}
        return cls(
            shape=feed.shape,
            num_samples=len(feed.training),
            shapes=tuple(feed.by_shape.counts) if feed.by_shape else (),
            counts=tuple(feed.by_shape.counts.values()) if feed.by_shape else (),
            drop_last=feed.drop_last,
            limit=feed.limit,
            are_pictures=feed.are_pictures,
            picture_shape=feed.codec.shape if feed.codec else None,
            codec=feed.codec.digest if feed.codec else None,
            num_classes=feed.num_classes,
            classes=None if feed.classes is None else tuple(map(str, feed.classes)),
            encoders=dict(feed.reader.digests),
            marks=marks_of_data(feed),
            **examples,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the facts as a part of a state, without facts that are None."""
        known = asdict(self, recurse=False, filter=lambda _, value: value is not None)
        return {**known, "marks": {name: asdict(mark) for name, mark in self.marks.items()}}


@define(frozen=True)
class Plan:
    """The batches of an epoch, or of its rest if an epoch goes on with another batch size: see `ShapeOrder`."""

    epoch: int = field(validator=ge(0))
    start: int = field(validator=ge(0))  # samples of the epoch that were consumed before
    batch_size: int = field(validator=ge(1))
    drop_last: bool
    taken: tuple[int, ...]  # by shape, the samples that were taken from its stream before
    digest: str  # of the shapes and their samples


@define(frozen=True)
class FeedState:
    """The state that `Feed.state_dict` returns."""

    facts: Facts | None = None
    epoch: int | None = field(default=None, validator=optional(ge(0)))
    weights: Tensor | None = None
    plan: Plan | None = None  # of samples of several shapes
