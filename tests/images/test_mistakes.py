"""Objects that are no data sets, and the code that the message gives."""

import re
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


@pytest.mark.parametrize("layout", [(40, 3, 8, 8), (40, 8, 8, 3), (40, 8, 8, 1), (40, 8, 8)])
@pytest.mark.parametrize(
    ("dtype", "top"), [("uint8", 255), ("int64", 255), ("float64", 255), ("float32", 1), ("bool", 1)]
)
def test_the_line_for_an_array_gives_images_in_range(layout: tuple[int, ...], dtype: str, top: int) -> None:
    array = numpy.zeros(layout).astype(dtype)
    array[0] = top
    with pytest.raises(UserError) as caught:
        feed_of(array)
    (line,) = re.findall("`(.+)`", str(caught.value))
    feed = feed_of(eval(line, {"torch": torch, "array": array}))
    assert feed.shape == (3 if 3 in layout else 1, 8, 8)
    (batch,) = feed.unaugmented(torch.arange(2))
    assert batch.inputs.flatten(1).unique(dim=1).tolist() == [[1], [-1]]


def test_the_other_lines_give_data() -> None:
    loader = DataLoader(TensorDataset(torch.zeros(40, 4)))
    for data in (loader.dataset, list(Stream()) * 8, [torch.zeros(4)] * 8, InMemory(torch.zeros(8, 4))):
        assert len(next(feed_of(data).bind(8).batches(0))) == 8
