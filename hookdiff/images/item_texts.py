"""The captions in the items of a map-style data set."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import cached_property, partial
from typing import Any

from attrs import define

from hookdiff.data.source import AnySource, NamedCaptions
from hookdiff.errors import UserError
from hookdiff.images.items import ItemKeys, parts_of, seed_all
from hookdiff.images.loader import Loader, Workers
from hookdiff.images.texts import captions_of, is_text
from hookdiff.machine.randomness import default_generators_kept
from hookdiff.terminal.pace import paced

_CHUNK = 64  # items that a worker takes at a time

_Captions = tuple[str, ...]  # of one sample


def with_texts(source: AnySource, keys: ItemKeys, workers: Workers) -> AnySource:
    """Return a copy of `source` in which the captions, by their keys, are in `texts` and not in the items.

    Only a map-style data set with a text, or a list of texts, in its first item is changed. All items are read once,
    when captions are first used. An item without captions then raises UserError.
    """
    if not len(source) or source.memory or source.is_images or source.texts:
        return source
    with default_generators_kept():
        names = tuple(name for name, value in _others(source, keys, 0).items() if is_text(value))
    if not names:
        return source
    return _Captioned(source.origin, keys, names, _ItemTexts(names, partial(_read, source, keys, names, workers)))


def _others(source: AnySource, keys: ItemKeys, index: int) -> dict[str, Any]:
    """Return the values of an item beside its picture and label, by name. Random ones are those of seed 0, epoch 0."""
    seed_all(0, 0, index)
    return parts_of(source[index], index, keys)[2]


@define(eq=False, slots=False)
class _Captioned(AnySource):
    """A map-style data set with its captions in `texts`, and none in its items."""

    keys: ItemKeys
    names: Sequence[str]  # of the values that are captions
    item_texts: _ItemTexts

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        self.kind = type(self).__qualname__

    @property
    def items(self) -> AnySource:
        """The source itself: its items hold no captions."""
        return self

    def __getitem__(self, index: int) -> dict[str, Any]:
        image, label, others = parts_of(self.origin[index], index, self.keys)
        conditions = {name: value for name, value in others.items() if name not in self.names}
        return {self.keys.image_key or "image": image, self.keys.label_key or "label": label, **conditions}

    @property
    def texts(self) -> NamedCaptions | None:
        return self.item_texts


@define(eq=False, slots=False)
class _ItemTexts(Mapping[str, Sequence[_Captions]]):
    """The captions of all samples, by `names`. The first use of any caption reads all of them."""

    names: Sequence[str]
    read: Callable[[], dict[str, Sequence[_Captions]]]

    @cached_property
    def _found(self) -> dict[str, Sequence[_Captions]]:
        return self.read()

    def __getitem__(self, name: str) -> Sequence[_Captions]:
        return self._found[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


def _read(source: AnySource, keys: ItemKeys, names: Sequence[str], workers: Workers) -> dict[str, Sequence[_Captions]]:
    """Return the captions of all samples under each of `names`."""
    num = len(source)
    chunks = [range(start, min(start + _CHUNK, num)) for start in range(0, num, _CHUNK)]
    loader = Loader(partial(_captions, source, keys, names), workers.workers, workers.prefetch, pin_memory=False)
    shown = paced(loader.load(chunks), num, "data: captions")
    with default_generators_kept(), closing(loader), closing(shown):
        rows = [row for part in shown for row in part]
    return {name: [row[place] for row in rows] for place, name in enumerate(names)}


def _captions(source: AnySource, keys: ItemKeys, names: Sequence[str], indices: Sequence[int]) -> list[list[_Captions]]:
    """Return the captions of the samples `indices`, under each of `names`."""
    rows = []
    for index in indices:
        others, row = _others(source, keys, index), list[_Captions]()
        for name in names:
            if name not in others:
                raise UserError(f"sample {index} of the data has no {name!r}: expected a caption, as in sample 0")
            try:
                row.append(captions_of(others[name]))
            except ValueError as error:
                raise UserError(f"sample {index} of the data: {name!r}: {error}") from None
        rows.append(row)
    return rows
