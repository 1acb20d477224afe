import pickle
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from PIL import Image
from torchvision import datasets

from hookdiff import InMemory, UserError
from hookdiff.data.vision import Vision, vision
from hookdiff.images import feed_of
from hookdiff.options.structure import parameters
from tests.conftest import as_list, refused
from tests.images.conftest import write_folder


def test_the_keys_are_the_arguments_of_the_class() -> None:
    assert list(parameters(vision("CIFAR10"))) == ["root", "train", "download"]
    assert list(parameters(vision("FakeData"))) == ["size", "image_size", "num_classes", "random_offset"]
    assert "loader" not in parameters(vision("ImageFolder"))


@pytest.mark.parametrize("name", ["CIFAR1O", "folder", "__all__", "LSUN", "LSUNClass"])
def test_a_class_that_torchvision_lacks_or_that_reads_a_pickle_is_refused(name: str) -> None:
    with refused(UserError, "torchvision", name):
        vision(name)


def test_pictures_and_labels_match_torchvision(tmp_path: Path) -> None:
    write_folder(tmp_path, 9, size=(6, 6))
    data = vision("ImageFolder")(root=str(tmp_path))
    theirs = datasets.ImageFolder(str(tmp_path))
    assert (len(data), as_list(data.labels), data.classes) == (9, theirs.targets, ("ant", "bee", "cat"))
    assert data.describe(3) == "torchvision:ImageFolder[3]"
    assert pickle.loads(pickle.dumps(data)).load(5).tobytes() == theirs[5][0].tobytes()
    assert feed_of(data).shape == (3, 6, 6)


def test_labels_without_an_attribute_are_read_from_the_items() -> None:
    data = vision("FakeData")(size=5, image_size=(3, 4, 4))
    assert as_list(data.labels) == [int(datasets.FakeData(5, (3, 4, 4))[index][1]) for index in range(5)]
    assert data.classes is None


class Items:
    targets: Any = ()

    def __init__(self, label: Any) -> None:
        self.label = label

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        return self.label if isinstance(self.label, list) else (Image.new("L", (2, 2)), self.label)


@pytest.mark.parametrize(("label", "kind"), [("a caption", "str"), (torch.zeros(4), "Tensor"), ([1, 2], "list")])
def test_items_of_another_kind_are_refused(label: Any, kind: str) -> None:
    with refused(ValueError, "torchvision:X", kind):
        Vision("X", Items([label] if label == [1, 2] else label))


@pytest.mark.parametrize("name", ["targets", "labels", "_labels"])
@pytest.mark.parametrize("kept", [[5, 6, 7], torch.tensor([5, 6, 7]), [torch.tensor(k) for k in (5, 6, 7)]])
def test_labels_of_an_attribute_are_not_read_one_by_one(name: str, kept: Any) -> None:
    items = Items(5)
    setattr(items, name, kept)
    assert as_list(Vision("X", items).labels) == [5, 6, 7]


@pytest.mark.parametrize("kept", [[4, 5, 6], [5, 6], [5, None, 6], ["a", "b", "c"], [[1], [2, 3], []], "abc"])
def test_attributes_that_differ_from_the_labels_are_ignored(kept: Any) -> None:
    items = Items(5)
    items.targets = kept
    assert as_list(Vision("X", items).labels) == [5, 5, 5]


def test_items_without_labels_give_no_labels() -> None:
    assert Vision("X", Items(None)).labels is None


def test_items_that_draw_random_numbers_are_read_by_one_thread() -> None:
    data = vision("FakeData")(size=300, image_size=(3, 8, 8))  # one thread reads fewer than 300 items at a time
    alone = torch.stack([torch.from_numpy(numpy.array(data.load(index))).permute(2, 0, 1) for index in range(300)])
    for _ in range(3):
        samples = feed_of(data).samples
        assert isinstance(samples, InMemory)
        assert torch.equal(samples.images, alone)
