"""Tests of the network."""

import torch

from hookdiff_example_model import ExampleModel


def test_its_prediction_has_the_shape_of_the_images_and_depends_on_the_time() -> None:
    model, x = ExampleModel(in_channels=3, channels=4), torch.randn(2, 3, 8, 8)
    early, late = model(x, torch.tensor([0, 10])), model(x, torch.tensor([999, 10]))
    assert early.shape == x.shape
    assert not torch.allclose(early[0], late[0])
    torch.testing.assert_close(early[1], late[1])  # each image has a time of its own


def test_all_weights_are_trained() -> None:
    model = ExampleModel(in_channels=1)
    model(torch.randn(2, 1, 8, 8), torch.tensor([3.5, 999.0])).square().sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []
