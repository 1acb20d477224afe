"""Features of pictures of several sizes belong to the samples that `numbers` names, also when they are read again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from PIL import Image
from torch import Tensor

from hookdiff import Feed
from hookdiff.features import Space, data_features
from hookdiff.images import Folder, Store, Transforms, feed_of
from hookdiff.log import to_uint8
from tests.conftest import refused


def means(images: Tensor) -> tuple[Tensor, None]:
    return images.float().mean((2, 3)), None


@pytest.fixture
def feed(tmp_path: Path) -> Feed:
    """Return a feed of random pictures of three sizes, in an order that mixes them."""
    generator = numpy.random.default_rng(0)
    (tmp_path / "pictures").mkdir()
    for number in range(60):
        height, width = ((8, 16), (8, 16), (16, 8), (8, 8))[number % 4]
        values = generator.integers(0, 256, (height, width, 3), dtype=numpy.uint8)
        Image.fromarray(values).save(tmp_path / "pictures" / f"{number:02}.png")
    buckets = Transforms(image_size=8, buckets=("16x8", "8x16", "8x8"))
    return feed_of(Folder(str(tmp_path / "pictures")), buckets, Store(cache_dir=str(tmp_path / "cache")), held_out=7)


@pytest.mark.parametrize("most", [12, 100])
def test_features_belong_to_the_samples_that_are_named(feed: Feed, most: int, tmp_path: Path) -> None:
    pixels: dict[int, Any] = {}
    for batch in feed.unaugmented(feed.usable, 5):
        pixels |= dict(zip(batch.indices.tolist(), to_uint8(batch.inputs), strict=True))
    for attempt in range(2):
        space = Space("means", "means", means if attempt == 0 else lambda images: pytest.fail("the file was not read"))
        features = data_features(feed, feed.training, space, "images", most)
        assert features.num == len(feed.training)
        assert features.numbers is not None
        assert len(features.numbers) == len(features.rows) == min(most, len(feed.training))
        expected = [means(pixels[number][None])[0][0] for number in features.numbers.tolist()]
        assert torch.equal(features.rows, torch.stack(expected))
        if most == 100:
            assert sorted(features.numbers.tolist()) == feed.training.tolist()
    every = torch.stack([means(pixels[number][None])[0][0] for number in feed.training.tolist()])
    assert torch.allclose(features.moments.fit().mean.float(), every.mean(0), atol=1e-4)


def test_a_space_of_one_size_is_refused(feed: Feed) -> None:
    with refused(Exception, "small", "3 x 8 x 16"):
        data_features(feed, feed.training, Space("small", None, means, size=(8, 8)), "images")
