"""A feed without data, for a run that only makes images."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from attrs import define, field

from hookdiff.data.batch import Batch
from hookdiff.data.facts import Facts
from hookdiff.data.feed import Feed, FeedState
from hookdiff.data.memory import InMemory
from hookdiff.data.store import Prepared
from hookdiff.data.survey import Survey
from hookdiff.errors import UserError
from hookdiff.structure import structured

_CPU = torch.device("cpu")


@define(eq=False)
class Remembered(Feed):
    """The facts about the data of a run, in place of the data. Raises UserError if a sample of the data is needed."""

    names: Mapping[int, str] = field(factory=dict, kw_only=True)  # of samples, by their positions in the data

    def __attrs_post_init__(self) -> None:
        self.samples = InMemory(torch.empty(0, *self.facts.shape))
        self.prepared = Prepared(self.samples, survey=Survey(self.facts.shape))
        self.classes, self.drop_last = self.facts.classes, self.facts.drop_last
        self.usable = self.training = torch.arange(self.facts.num_samples)
        self.held_out_indices = self.training[:0]

    def bind(
        self, batch_size: int, seed: int = 0, device: torch.device = _CPU, rank: int | None = None, num_ranks: int = 0
    ) -> Feed:
        """Note the device and the numbers of the run. Returns self."""
        self.batch_size, self.seed, self.device = batch_size, seed, device
        self.rank, self.num_ranks = rank or 0, num_ranks or 1
        return self

    @property
    def facts(self) -> Facts:
        known: Facts = self.source
        return known

    @property
    def are_pictures(self) -> bool:
        return self.facts.are_pictures

    @property
    def num_classes(self) -> int | None:
        return self.facts.num_classes

    def describe(self, index: int) -> str:
        return self.names.get(index, f"sample {index}")

    def examples(self, choose: Callable[[int], Sequence[int]]) -> Batch:
        """Return the kept examples that `choose` picks by their number, with zeros for their images."""
        known = self.facts
        if not known.conditions:
            raise self._absent()
        columns = known.conditions if known.labels is None else {"labels": known.labels, **known.conditions}
        rows = choose(len(next(iter(columns.values()))))
        chosen = {name: column[rows].to(self.device) for name, column in columns.items()}
        labels = chosen.pop("labels", None)
        return Batch(torch.zeros(len(rows), *self.shape, device=self.device), labels, conditions=chosen)

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError unless `state` is one of a Feed; its weights are of samples that are not here."""
        structured(FeedState, state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the epoch."""
        self.epoch = state.get("epoch")

    @property
    def _first(self) -> Batch:
        if self.facts.conditions:
            return self.examples(lambda _: [0])
        labels = None if self.facts.num_classes is None else torch.zeros(1, dtype=torch.int64)
        return Batch(torch.zeros(1, *self.shape), labels)

    def _make(self, *_: Any) -> Iterator[Batch]:
        raise self._absent()

    def _absent(self) -> UserError:
        return UserError("the data of the run is not loaded here: it can make images, but no batches")
