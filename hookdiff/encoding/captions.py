"""The captions of samples: the random choice in each epoch, and the prefix and suffix."""

from __future__ import annotations

import hashlib
import logging
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from attrs import Attribute, define, field
from attrs.validators import ge, in_, optional
from torch import Tensor

from hookdiff.data.source import NamedCaptions
from hookdiff.encoding.encoder import TextEncoder
from hookdiff.errors import UserError, listed, nearest
from hookdiff.images.texts import captions_of, check_text
from hookdiff.machine.randomness import derive_seed, uniforms
from hookdiff.options.fields import about

logger = logging.getLogger("hookdiff")


def _is_text(_: object, attribute: Attribute[Any], value: str | None) -> None:
    try:
        check_text(value or "")
    except ValueError as error:
        raise ValueError(f"'{attribute.name}' {error}") from None


_NAMED = 3  # samples in a message


@define(frozen=True, kw_only=True)
class CaptionKeys:
    """The keys of [data] about captions."""

    caption: str | None = field(
        default=None,
        validator=_is_text,
        metadata=about("caption of samples without a caption; alone it is the caption of all samples"),
    )
    prefix: str = field(default="", validator=_is_text, metadata=about("text before each caption"))
    suffix: str = field(default="", validator=_is_text, metadata=about("text after each caption"))
    shuffle_tags: int | None = field(
        default=None,
        validator=optional(ge(0)),
        metadata=about(
            "shuffle the tags (parts between commas) of each caption in each step, but keep this number of tags at "
            'its beginning; needs encoders with `store = "none"`'
        ),
    )
    missing: Literal["stop", "empty"] = field(
        default="stop",
        validator=in_(("stop", "empty")),
        metadata=about('what to do if samples have no caption: "stop", or use an "empty" caption'),
    )


@define(eq=False)
class CaptionsOf:
    """The captions of all samples, under one name of the source. `describe` names a sample for messages.

    Raises:
        UserError: for samples without a caption, unless they may be empty, and for captions that are no texts.
    """

    name: str
    originals: Sequence[Sequence[str]]  # the captions of each sample, as the source has them
    keys: CaptionKeys
    describe: Callable[[int], str]
    usable: Sequence[int]  # samples that are trained on or held out
    counts: Tensor = field(init=False)  # captions of each sample: n, int64

    def __attrs_post_init__(self) -> None:
        self.counts = torch.tensor([len(self.of(index)) for index in range(len(self.originals))])
        empty = [index for index in self.usable if self.of(index) == ("",)]
        if not empty:
            return
        named = listed([self.describe(index) for index in empty], _NAMED)
        text = f"{len(empty):,} of {len(self.usable):,} samples have no caption: {named}"
        if self.keys.missing == "stop":
            raise UserError(f"{text}; set caption, or missing = 'empty'")
        logger.warning("data: %s; it is empty", text)

    def of(self, index: int) -> Sequence[str]:
        """Return the captions of a sample, without prefix and suffix; if all are blank, the `caption` of the config."""
        try:
            return captions_of(self.originals[index]) or captions_of(self.keys.caption) or ("",)
        except ValueError as error:
            raise UserError(f"{self.describe(index)}: {self.name}: {error}") from None

    def whole(self, caption: str) -> str:
        """Return a caption with prefix and suffix; an empty caption stays empty."""
        return f"{self.keys.prefix}{caption}{self.keys.suffix}" if caption else ""

    def every(self) -> Iterable[str]:
        """Yield the captions of all usable samples."""
        for index in self.usable:
            yield from map(self.whole, self.of(index))

    def drawn(self, indices: Tensor, seed: int, epoch: int | None) -> list[str]:
        """Return a caption of each of the samples `indices`, at random by (seed, epoch, sample); None: the first."""
        if epoch is None:
            return [self.whole(self.of(index)[0]) for index in indices.tolist()]
        chances = uniforms(seed, f"caption {self.name}", epoch, indices, 1)[:, 0]
        which = (chances * self.counts[indices]).long().tolist()
        pairs = zip(indices.tolist(), which, strict=True)
        return [self.whole(self._shuffled(self.of(index)[place], seed, epoch, index)) for index, place in pairs]

    def _shuffled(self, caption: str, seed: int, epoch: int, index: int) -> str:
        if (first := self.keys.shuffle_tags) is None:
            return caption
        tags = [tag for part in caption.split(",") if (tag := part.strip())]
        rest = tags[first:]
        random.Random(derive_seed(seed, f"tags {self.name}", epoch, part=index)).shuffle(rest)
        return ", ".join([*tags[:first], *rest])

    def digest(self) -> str:
        """Return a hash of all captions."""
        digest = hashlib.sha256()
        for text in self.every():
            digest.update(f"{text}\0".encode("utf-8", "surrogateescape"))
        return digest.hexdigest()


def captions_for(
    texts: NamedCaptions | None, encoders: Mapping[str, TextEncoder], keys: CaptionKeys, num: int
) -> dict[str, Sequence[Sequence[str]]]:
    """Return the captions `texts` of a source by name, after a check that `encoders` take exactly these.

    If a source of `num` samples has no captions at all, the `caption` of `keys` is that of each sample.

    Raises:
        UserError: if the source lacks captions that an encoder takes, or has captions that no encoder takes.
    """
    wanted = {encoder.texts: name for name, encoder in encoders.items()}
    texts = texts or (dict.fromkeys(wanted, [()] * num) if keys.caption else {})
    if lacking := [of for of in wanted if of not in texts]:
        way_out = "none: set captions, caption_column, or one caption for all; a source of your own has them as `texts`"
        known = f"{', '.join(texts) or way_out}{nearest(lacking[0], texts)}"
        raise UserError(f"encode.{wanted[lacking[0]]}.of: the source has no captions {lacking[0]!r}; it has {known}")
    if unused := [name for name in texts if name not in wanted]:
        way_out = "name them in the key `of` of an encoder in [data.encode]"
        raise UserError(f"texts: no encoder takes the captions {unused[0]!r}; {way_out}")
    return dict(texts)
