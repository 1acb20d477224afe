"""Requests for images of a size, and for images with numbers of their own."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hookdiff import Loop, LoopConfig, SampleRequest
from hookdiff.data import labels_for
from hookdiff.diffusion import Diffusion, Sampling
from hookdiff.images import Transforms, feed_of
from hookdiff.models import conditions_of_samples

NUM, WIDE = 60, 40  # pictures, and those of them that are 12x6; the others are 8x8
FEW = [0, 7]  # the wide pictures with the label 1


class Net(nn.Module):
    """Predicts an image that has the caption in every pixel; keeps what it was given."""

    num_classes = 2

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.labels: list[int] = []

    def forward(self, x: Tensor, timesteps: Tensor, labels: Tensor, **given: Tensor) -> Tensor:
        self.labels = labels.tolist()
        return self.scale * (given["caption"].view(-1, 1, 1, 1).expand_as(x) if given else x)


class Pictures:
    """Wide pictures seldom have the label 1, square ones always. The outline of a picture is the picture."""

    labels = torch.tensor([int(number >= WIDE or number in FEW) for number in range(NUM)])

    def __len__(self) -> int:
        return NUM

    def __getitem__(self, number: int) -> dict[str, Any]:
        image = torch.full((3, *((6, 12) if number < WIDE else (8, 8))), number, dtype=torch.uint8)
        return {"image": image, "caption": torch.tensor([number / 100]), "outline": image}


def loop(data: Any = None, **options: Any) -> Loop:
    net = Net()
    data = feed_of(Pictures(), Transforms(image_size=8, buckets=("8x8", "12x6"))) if data is None else data
    objective = Diffusion(prediction="sample", conditional=True, **options)
    config, optimizer = LoopConfig(steps=1, batch_size=4), torch.optim.SGD(net.parameters(), lr=0)
    sampling = Sampling(sampler="ddim", steps=2, clipping="none")
    return Loop(net, optimizer, objective, data, config, sampler=sampling)


def made(of: Loop, num: int, **request: Any) -> Tensor:
    with of:
        return of.sample(SampleRequest(num, raw=True, **request)).images


def test_the_size_of_the_pictures_is_the_requested_one_or_the_most_frequent() -> None:
    for size, shape in ((None, (3, 6, 12)), ((8, 8), (3, 8, 8)), ((7, 9), (3, 7, 9))):
        assert made(loop(), 2, size=size).shape == (2, *shape)
    assert made(loop(torch.zeros(9, 3, 5, 7)), 2).shape == (2, 3, 5, 7)
    assert made(loop(torch.zeros(9, 3, 5, 7)), 2, size=(4, 4)).shape == (2, 3, 4, 4)


def test_an_image_has_the_noise_and_the_class_of_its_number() -> None:
    options: dict[str, Any] = {"size": (8, 8), "stream": "evaluate"}
    running = loop()
    whole = made(running, 12, **options)
    labels = list(running.net.labels)
    for numbers in ((3, 9, 4), (11,)):
        assert torch.equal(made(running, len(numbers), numbers=numbers, **options), whole[list(numbers)])
        assert running.net.labels == [labels[k] for k in numbers]
    with pytest.raises(ValueError, match="'numbers' has 2 numbers, expected 3"):
        SampleRequest(3, numbers=(1, 2))


def test_the_classes_of_metrics_are_those_of_the_size() -> None:
    running, num = loop(), 250
    for size, share in (((8, 8), 1.0), ((6, 12), len(FEW) / WIDE), (None, len(FEW) / WIDE)):
        made(running, num, size=size, stream="evaluate")
        assert Counter(running.net.labels)[1] / num == pytest.approx(share, abs=0.03)
    every = running.feed.labels.float().mean()  # a size that was not trained has the classes of all samples
    made(running, num, size=(7, 9), stream="evaluate")
    assert Counter(running.net.labels)[1] / num == pytest.approx(float(every), abs=0.06)
    assert len(labels_for(running.feed, (8, 8))) == NUM - WIDE


@pytest.mark.parametrize(("size", "first"), [(None, 0), ((6, 12), 0), ((8, 8), WIDE), ((7, 9), 0)])
def test_conditions_are_those_of_samples_of_the_size(size: Any, first: int) -> None:
    running = loop(conditions="caption", label_dropout=0.0)
    images = made(running, 3, size=size)
    captions = torch.stack([Pictures()[first + k]["caption"] for k in range(3)])
    assert torch.allclose(images.flatten(1), captions.expand(3, images[0].numel()), atol=1e-5)


def test_an_image_among_the_conditions_gets_the_size() -> None:
    running = loop(conditions={"caption": "outline"}, label_dropout=0.0)
    given = conditions_of_samples(running.objective, running.feed, lambda _: [0, 1], (3, 7, 9))
    assert given["outline"].shape[-2:] == (7, 9)
    assert loop().sample(SampleRequest(0, size=(7, 9))).images.shape == (0, 3, 7, 9)


def test_images_masks_and_noise_must_have_the_size() -> None:
    running = loop()
    images = torch.rand(2, 3, 8, 8) * 2 - 1
    mask = torch.zeros(2, 1, 8, 8, dtype=torch.bool)
    mask[:, :, :, 4:] = True
    filled = made(running, 2, size=(8, 8), images=images, mask=mask, strength=1.0)
    assert torch.allclose(filled[..., :4], images[..., :4], atol=1e-6)
    assert not torch.allclose(filled[..., 4:], images[..., 4:], atol=1e-3)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"images": images}, "images has pictures of 8x8, expected 12x6"),
        ({"images": images, "size": (6, 12)}, "images has pictures of 8x8, expected 12x6"),
        ({"images": images, "mask": mask[..., :6], "size": (8, 8)}, "mask has pictures of 6x8, expected 8x8"),
        ({"noise": images}, r"noise has shape \(2, 3, 8, 8\), expected \(2, 3, 6, 12\)"),
    ]
    for request, text in wrong:
        with running, pytest.raises(ValueError, match=text):
            running.sample(SampleRequest(2, **request))
