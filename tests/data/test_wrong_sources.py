"""Objects that are no data sets, and the code that the message gives."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from hookdiff import UserError
from hookdiff.images import feed_of
from hookdiff.testing.toy import toy_loop
from tests.conftest import check_facts, refused


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield torch.zeros(4)


class CountedStream(Stream):
    def __len__(self) -> int:
        return 1


@pytest.mark.parametrize(
    ("given", "facts"),
    [
        (DataLoader(Stream()), ["DataLoader", "list(data)", "loop.run_step(batch)"]),
        (Stream(), ["Stream", "list(data)", "loop.run_step(batch)"]),
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


@pytest.mark.parametrize("options", [{"batch_size": 3, "shuffle": True}, {"batch_size": None}, {"num_workers": 2}])
def test_of_a_loader_the_data_set_is_taken_and_the_rest_said_to_be_ignored(
    options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    images, labels = torch.linspace(-1, 1, 160).reshape(40, 1, 2, 2), torch.arange(40)
    data = TensorDataset(images, labels)
    loaded, plain = toy_loop(data=DataLoader(data, **options)), toy_loop(data=data)
    (warning,) = (record.getMessage() for record in caplog.records)
    check_facts(warning, "DataLoader", "order", "batch size", "workers", "feed_of(loader.dataset, workers=2)")
    for one, other in zip(loaded.feed.batches(0), plain.feed.batches(0), strict=True):
        assert torch.equal(one.inputs, other.inputs)
        assert torch.equal(one.inputs, images[one.labels])
