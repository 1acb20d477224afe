"""Tests of the features."""

import torch

from hookdiff_example_features import ExampleFeatures


def test_the_features_are_the_means_of_the_squares() -> None:
    space = ExampleFeatures(side=2).open(torch.device("cpu"))
    images = torch.zeros(3, 1, 8, 8, dtype=torch.uint8)
    images[0, :, :4, 4:] = 255
    features, logits = space(images)
    assert features.tolist() == [[-1, 1, -1, -1], [-1] * 4, [-1] * 4]
    assert logits is None


def test_spaces_of_other_options_have_other_names() -> None:
    names = {ExampleFeatures(side=side).open(torch.device("cpu")).name for side in (2, 3)}
    assert len(names) == 2
