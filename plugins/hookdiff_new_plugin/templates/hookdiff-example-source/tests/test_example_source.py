"""Tests of the data source."""

import torch

from hookdiff.images import feed_of
from hookdiff_example_source import ExampleSource


def test_an_image_is_always_the_same_and_no_two_are_equal() -> None:
    images = [ExampleSource(num=20).load(index) for index in range(20)]
    assert all(torch.equal(image, ExampleSource().load(index)) for index, image in enumerate(images))
    assert len({image.numpy().tobytes() for image in images}) == 20


def test_a_training_gets_all_images_in_an_epoch() -> None:
    feed = feed_of(ExampleSource(num=12)).bind(4)
    batches = list(feed.batches(epoch=0))
    assert [batch.inputs.shape for batch in batches] == [(4, 1, 16, 16)] * 3
    assert all(set(batch.inputs.flatten().tolist()) == {-1, 1} for batch in batches)
