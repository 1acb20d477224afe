from typing import Any

import pytest
import torch

from hookdiff import InMemory
from hookdiff.data.memory import to_unit_range
from hookdiff.images import Transforms, feed_of
from tests.conftest import as_list, refused


@pytest.mark.parametrize(
    "images", [torch.zeros(4), torch.zeros(4, 1, 2, 2, dtype=torch.int64), torch.zeros(4, 1, 2, 2, dtype=torch.bool)]
)
def test_images_of_another_shape_or_dtype_are_refused(images: torch.Tensor) -> None:
    with refused(ValueError, tuple(images.shape), images.dtype):
        InMemory(images)


@pytest.mark.parametrize("labels", [torch.zeros(3).long(), torch.zeros(4, 1).long(), torch.zeros(4)])
def test_labels_of_another_shape_or_dtype_are_refused(labels: torch.Tensor) -> None:
    with refused(ValueError, 4, "int64", tuple(labels.shape), labels.dtype):
        InMemory(torch.zeros(4, 1, 2, 2), labels)


@pytest.mark.parametrize("samples", [[["a"]] * 3, ["a"] * 4, [["a"], [], "b", ["c"]]])
def test_texts_that_are_no_lists_of_captions_are_refused(samples: Any) -> None:
    with refused(ValueError, "'text'", 4, "captions"):
        InMemory(torch.zeros(4, 1, 2, 2), texts={"text": samples})


def test_resized_images_keep_their_texts() -> None:
    texts = {"text": [["a"], [], ("b", "c"), ["d"]]}
    feed = feed_of(InMemory(torch.zeros(4, 1, 8, 8, dtype=torch.uint8), texts=texts), Transforms(image_size=4))
    assert (feed.shape, feed.samples.texts) == ((1, 4, 4), texts)


def test_bytes_are_scaled_to_minus_one_to_one() -> None:
    scaled = to_unit_range(torch.arange(256, dtype=torch.uint8))
    assert (scaled[0].item(), scaled[255].item(), scaled.dtype) == (-1, 1, torch.float32)
    torch.testing.assert_close(scaled.double(), torch.arange(256).double() / 127.5 - 1, rtol=0, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_floats_become_float32(dtype: torch.dtype) -> None:
    assert torch.equal(to_unit_range(torch.tensor([-1.0, 0.5, 3.0], dtype=dtype)), torch.tensor([-1.0, 0.5, 3.0]))


def test_scaling_leaves_the_images_as_they_are() -> None:
    stored = torch.full((2, 1, 1, 1), 255, dtype=torch.uint8)
    InMemory(stored).rows(torch.tensor([0, 1]))[0].zero_()
    assert stored.tolist() == [[[[255]]], [[[255]]]]
    floats = InMemory(torch.ones(2, 1, 1, 1))
    floats.rows(torch.tensor([0, 1]))[0].zero_()
    assert floats.images.sum() == 2


def test_fetching_takes_rows_in_the_order_asked_for() -> None:
    numbers = torch.arange(5)
    data = InMemory(numbers.float().reshape(5, 1, 1, 1), numbers * 2, conditions={"number": numbers * 3})
    images, labels, conditions = data.rows(torch.tensor([3, 0, 3]))
    values = [images.flatten().tolist(), as_list(labels), conditions["number"].tolist()]
    assert values == [[3, 0, 3], [6, 0, 6], [9, 0, 9]]
    assert InMemory(torch.zeros(2, 1)).rows(torch.tensor([1]))[1:] == (None, {})
