"""Tests of the encoder."""

import torch

from hookdiff_example_encode import ExampleEncode


def test_pictures_of_squares_come_back_as_they_are() -> None:
    squares = torch.linspace(-1, 1, 16).reshape(1, 1, 4, 4)
    pictures = squares.repeat_interleave(2, 2).repeat_interleave(2, 3)
    network = ExampleEncode(side=2).open(torch.device("cpu"))
    latents, deviation = network.encode(pictures)
    torch.testing.assert_close(latents, squares)
    torch.testing.assert_close(network.decode(latents), pictures)
    assert deviation is None


def test_encoders_of_other_options_have_other_digests() -> None:
    assert len({ExampleEncode(side=side).digest() for side in (1, 2, 4)}) == 3
