"""The reader of samples with captions: it adds the conditions of captions to the samples of another reader."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from functools import cached_property

import torch
from attrs import define, evolve, field
from torch import Tensor

from hookdiff.data.batch import Batch
from hookdiff.data.memory import to_device
from hookdiff.data.reader import Parts, ReaderAround, Stack
from hookdiff.encoding.captions import CaptionKeys, CaptionsOf, captions_for
from hookdiff.encoding.encoder import INPUTS, TextEncoder
from hookdiff.encoding.latent_reader import LatentReader
from hookdiff.encoding.text_table import Nothing, TextConditions, TextTable
from hookdiff.encoding.time_ids import TimeIds, names_of
from hookdiff.errors import UserError
from hookdiff.images.source_reader import SourceReader
from hookdiff.images.store import Store
from hookdiff.images.transforms import size_text

logger = logging.getLogger("hookdiff")


@define(eq=False, slots=False)
class CaptionedReader(ReaderAround):
    """Reads the samples of `inner`, and adds the conditions that `encoders` make of their captions.

    If `encodes` is false, it only has the captions. While captions are `pending`, a caption is encoded when it is read.
    `encode` encodes all captions.
    """

    inner: SourceReader | LatentReader
    encoders: Mapping[str, TextEncoder]
    caption_keys: CaptionKeys
    store: Store
    device: torch.device
    encodes: bool = True
    alone: bool = False  # adds the condition `time_ids`, also without encoders
    seed: int = field(init=False, default=0)
    captions: dict[str, CaptionsOf] = field(init=False)
    texts: TextConditions = field(init=False)
    pending: bool = field(init=False)  # some captions are not encoded yet
    _usable: list[int] = field(init=False)
    _time_ids: TimeIds | None = field(init=False, default=None)

    def __attrs_post_init__(self) -> None:
        if INPUTS in self.encoders:
            raise UserError(f"encode.{INPUTS}: this name is for an encoder of pictures; rename the encoder of texts")
        self._usable = self._find_usable()
        self.captions = self._find_captions()
        encoders = self.encoders if self.encodes else {}
        rows_of = {name: TextTable(name, part, self.store, self.device) for name, part in encoders.items()}
        self.texts = self._conditions(rows_of)
        for name, rows in rows_of.items():
            if self.caption_keys.shuffle_tags is not None and rows.is_kept:
                raise UserError(f"shuffle_tags: captions change in each step, so encode.{name} needs store = 'none'")
        known = [rows.known(self.captions[rows.encoder.texts].every()) for rows in rows_of.values()]
        self.pending = not all(known)
        for rows in rows_of.values():
            rows.holds_network = self.pending

    def encode(self) -> None:
        """Encode the captions that are not encoded yet, after `inner` is encoded. All ranks must call this."""
        if (usable := self._find_usable()) != self._usable:  # encoding has found the pictures that cannot be decoded
            self._usable = usable
            self.captions = self._find_captions()
        self.texts = TextConditions(self.texts.rows, self.texts.time_ids)  # without the conditions of a trial
        self.pending = False
        for rows in self.texts.rows.values():
            rows.want(self.captions[rows.encoder.texts].every())

    def trial(self) -> CaptionedReader:
        """Return a copy to try a run before `encode`, with the same shapes as after it; see `LatentReader.trial`."""
        reader = copy(self)
        reader.inner = reader.inner.trial() if isinstance(reader.inner, LatentReader) else reader.inner
        reader.texts = TextConditions(self.texts.rows, self.texts.time_ids)
        return reader

    def _find_usable(self) -> list[int]:
        return [index for index in range(len(self.inner)) if index not in self.inner.unreadable]

    def _find_captions(self) -> dict[str, CaptionsOf]:
        source, keys = self.inner.source, self.caption_keys
        texts = captions_for(source.texts, self.encoders, keys, len(source))
        return {n: CaptionsOf(n, each, keys, self.inner.describe, self._usable) for n, each in texts.items()}

    def _conditions(self, rows_of: Mapping[str, TextTable]) -> TextConditions:
        """Return the conditions of captions; the sizes of the pictures are read now, if a condition has them."""
        texts = TextConditions(rows_of, names_of({name: rows.encoder for name, rows in rows_of.items()}, self.alone))
        if not texts.time_ids:
            return texts
        shape = self.inner.codec.shape if self.inner.codec else self.inner.shape
        if len(shape) != 3:
            asking = [f"encode.{name}" for name, rows in rows_of.items() if rows.encoder.time_ids] or ["time_ids"]
            raise UserError(f"{asking[0]}: needs sizes of pictures, but samples of {size_text(shape)} have none")
        if (sizes := self.inner.sizes()) is None:
            what = "the samples hold latents, and the sizes of their pictures are not here"
            logger.warning("data: %s, so there is no condition %s", what, " or ".join(texts.time_ids))
        else:
            targets = torch.tensor(shape[1:]).expand_as(sizes)
            if sized := self.inner.sized:
                targets = torch.tensor(sized.shapes)[sized.numbers, 1:]
            self._time_ids = TimeIds(sizes, self.inner.transforms, targets)
        return texts

    def bound(self, seed: int, device: torch.device, parts: Parts) -> CaptionedReader:
        reader = copy(self)
        reader.inner, reader.seed, reader.device = self.inner.bound(seed, device, parts), seed, device
        return reader

    @property
    def nothing(self) -> Nothing:
        """The conditions that stand for no caption, by name."""
        return self.texts.nothing

    @property
    def digests(self) -> dict[str, str]:
        """The digests of all encoders, by name."""
        return {**self.inner.digests, **self.texts.digests}

    def texts_of(self, indices: Tensor) -> dict[str, list[str]]:
        """Return the first caption of each of the samples `indices`, by the kinds of captions."""
        return {name: captions.drawn(indices, 0, None) for name, captions in self.captions.items()}

    @cached_property
    def first(self) -> Batch:
        batch = self.inner.first
        values = {name: value for name, value in self.nothing.items() if value is not None}
        rows = {name: value[None] for name, value in values.items()}
        rows |= self.texts.of_size(batch.inputs.shape[2:], 1) if self._time_ids else {}
        return evolve(batch, conditions={**batch.conditions, **rows})

    def stacks(self, shares: Sequence[Tensor], epoch: int | None) -> Iterator[Stack]:
        for inputs, labels, indices, conditions in self.inner.stacks(shares, epoch):
            drawn = {name: captions.drawn(indices, self.seed, epoch) for name, captions in self.captions.items()}
            encoded = self.texts.embed(drawn, are_prompts=False) if self.encodes else {}
            if self._time_ids:
                encoded |= dict.fromkeys(self.texts.time_ids, self._time_ids.of(indices, self.seed, epoch))
            added = {name: to_device(column, self.device) for name, column in encoded.items()}
            yield inputs, labels, indices, {**conditions, **added}

    def fingerprint(self) -> str | None:
        fingerprint = self.inner.fingerprint()
        if fingerprint is None or not self.encodes:
            return fingerprint
        digests = {name: captions.digest() for name, captions in self.captions.items()}
        return repr((fingerprint, self.texts.digests, digests))
