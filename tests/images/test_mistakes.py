"""Objects that are no data sets, and the code that the message gives."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from hookdiff import InMemory, UserError
from hookdiff.authors.testing.toy import toy_loop
from hookdiff.images import feed_of
from tests.conftest import refused


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield torch.zeros(4)


class CountedStream(Stream):
    def __len__(self) -> int:
        return 1


@pytest.mark.parametrize(
    ("given", "facts"),
    [
        (DataLoader(TensorDataset(torch.zeros(40, 4))), ["DataLoader", "loader.dataset"]),
        (Stream(), ["Stream", "list(data)"]),
        (CountedStream(), ["CountedStream", "list(data)"]),
        ((torch.zeros(4) for _ in range(40)), ["generator", "list(data)"]),
        (map(torch.zeros, [4]), ["map", "list(data)"]),
        ((torch.zeros(40, 4), torch.zeros(40)), ["tuple", "InMemory(images, labels)"]),
        ((numpy.zeros((40, 4)), numpy.zeros(40)), ["tuple", "InMemory(images, labels)"]),
        ({"image": torch.zeros(40, 4)}, ["dict", "InMemory(images, labels, conditions="]),
        ("pictures/cats", ["str", "Folder('pictures/cats')"]),
        (Path("cats"), ["Path", "Folder('cats')"]),
        (3, ["int", "InMemory"]),
        (numpy.zeros((40, 4)), ["ndarray", "torch.from_numpy(array)"]),
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("use", [feed_of, lambda data: toy_loop(data=data)])
def test_what_is_no_data_set_is_refused_with_a_way_out(given: Any, facts: list[str], use: Callable[[Any], Any]) -> None:
    facts = [fact.replace("Path", type(given).__name__) for fact in facts]
    with refused(UserError, *facts):
        use(given)


def test_the_lines_give_data() -> None:
    loader = DataLoader(TensorDataset(torch.zeros(40, 4)))
    for data in (
        loader.dataset,
        list(Stream()) * 8,
        [torch.zeros(4)] * 8,
        torch.from_numpy(numpy.zeros((8, 4))),
        InMemory(torch.zeros(8, 4)),
    ):
        assert len(next(feed_of(data).bind(8).batches(0))) == 8
