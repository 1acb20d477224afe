"""A feed without data, for a run that only makes images."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from attrs import define, field
from torch import Tensor

from hookdiff.data.batch import Batch
from hookdiff.data.feed import Feed
from hookdiff.data.feed_state import Facts, FeedState
from hookdiff.data.memory import InMemory
from hookdiff.data.memory_reader import PlainReader
from hookdiff.data.reader import Codec, Stack, TextEncoders
from hookdiff.errors import UserError
from hookdiff.options.structure import structured

_CPU = torch.device("cpu")


class _Absent(PlainReader):
    """The reader of a run without its data."""

    labels: Tensor | None = None
    left_out: Sequence[str] = ()
    unreadable: Sequence[int] = ()

    def __init__(self, facts: Facts, names: Mapping[int, str], codec: Codec | None, texts: TextEncoders | None) -> None:
        self.facts, self.names, self.codec, self.texts = facts, names, codec, texts
        self.nothing = texts.nothing if texts else {}
        self.shape, self.classes, self.are_pictures = facts.shape, facts.classes, facts.are_pictures
        if facts.shapes:
            self.shapes, self.shape_numbers = facts.shapes, torch.repeat_interleave(torch.tensor(facts.counts))

    def __len__(self) -> int:
        return self.facts.num_samples

    @property
    def samples(self) -> InMemory:
        return InMemory(torch.empty(0, *self.facts.shape))

    @property
    def first(self) -> Batch:
        known = self.facts
        labels = None if known.num_classes is None else torch.zeros(1, dtype=torch.int64)
        labels = labels if known.labels is None else known.labels[:1]
        conditions = {name: column[:1] for name, column in known.conditions.items()}
        conditions |= {name: value[None] for name, value in self.nothing.items() if value is not None}
        shape = known.shapes[0] if known.shapes else known.shape  # that of the conditions
        return Batch(torch.zeros(1, *shape), labels, conditions=conditions)

    def bound(self, *_: Any) -> _Absent:
        return self

    def stacks(self, *_: Any) -> Iterator[Stack]:
        raise absent()

    def describe(self, index: int) -> str:
        return self.names.get(index, f"sample {index}")

    def fingerprint(self) -> str | None:
        return None


def absent() -> UserError:
    """Return the error that a run without its data raises when it needs samples."""
    return UserError("this needs the data of the run, which is not loaded here; only images can be made without it")


@define(eq=False)
class FeedWithoutData(Feed):
    """A feed that knows the facts about the data of a run, and has no samples.

    Raises:
        UserError: if a sample of the data is needed.
    """

    names: Mapping[int, str] = field(factory=dict, kw_only=True)  # names of samples, by their positions in the data
    remembered: Codec | None = field(default=None, kw_only=True)  # the codec of the samples
    texts: TextEncoders | None = field(default=None, kw_only=True)

    def __attrs_post_init__(self) -> None:
        self.reader = _Absent(self.facts, self.names, self.remembered, self.texts)
        self.drop_last, self.limit = self.facts.drop_last, self.facts.limit
        self.usable = self.training = torch.arange(self.facts.num_samples)
        self.held_out_indices = self.training[:0]
        self._set_order()

    def bind(
        self, batch_size: int, seed: int = 0, device: torch.device = _CPU, rank: int | None = None, num_ranks: int = 0
    ) -> Feed:
        """Keep the device, batch size, seed and ranks of the run. Returns self."""
        self.batch_size, self.seed, self.device = batch_size, seed, device
        self.rank, self.num_ranks = rank or 0, num_ranks or 1
        self._set_order()
        return self

    @property
    def facts(self) -> Facts:
        assert isinstance(self.data, Facts)
        return self.data

    @property
    def num_classes(self) -> int | None:
        return self.facts.num_classes

    def examples(self, choose: Callable[[int], Sequence[int]], shape: Sequence[int] | None = None) -> Batch:
        """Return the examples that `choose` picks, given their number. Their images are zeros of `shape`."""
        known = self.facts
        if not (known.conditions or known.texts):
            raise absent()
        columns = known.conditions if known.labels is None else {"labels": known.labels, **known.conditions}
        sizes = [*map(len, columns.values()), *map(len, known.texts.values())]
        rows = choose(sizes[0])
        if known.texts and self.texts:
            columns |= self.texts.embed(known.texts, are_prompts=False)
        chosen = {name: column[rows].to(self.device) for name, column in columns.items()}
        labels = chosen.pop("labels", None)
        inputs = torch.zeros(len(rows), *(shape or self.shapes[0]), device=self.device)
        return Batch(inputs, labels, conditions=chosen)

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError unless `state` is the state of a Feed. The weights of the samples are not checked."""
        structured(FeedState, state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the epoch."""
        self.epoch = state.get("epoch")
