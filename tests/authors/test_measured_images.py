"""The images of metrics have the sizes of the data, and their features the order of the images."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor, nn

from hookdiff import Loop, LoopConfig, SampleRequest
from hookdiff.authors import InOrder, MeasuredImages
from hookdiff.data import FeedWithoutData
from hookdiff.features import Collected
from hookdiff.images import Transforms, feed_of
from hookdiff.testing import ToySampler

COUNTS = {(4, 8): 40, (6, 6): 15, (8, 4): 5}  # of the pictures of each size: height and width


class Scale(nn.Module):
    """Multiplies images by a number."""

    num_classes = 3

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor([0.3]))

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * x


def pictures() -> list[dict[str, Any]]:
    sizes = [size for size, num in COUNTS.items() for _ in range(num)]
    return [{"image": torch.full((3, *size), number, dtype=torch.uint8)} for number, size in enumerate(sizes)]


def sized_loop(data: Any = None, batch_size: int = 7) -> Loop:
    """Return a loop with pictures of three sizes."""
    if data is None:
        buckets = tuple(f"{width}x{height}" for height, width in COUNTS)
        data = feed_of(pictures(), Transforms(image_size=6, buckets=buckets))
    net = Scale()
    loss = lambda net, batch: net(batch.inputs).square().mean()  # noqa: E731
    optimizer, config = torch.optim.SGD(net.parameters(), 1e-9), LoopConfig(steps=1, batch_size=4)
    sampler = ToySampler()
    sampler.batch_size = batch_size
    return Loop(net, optimizer, loss, data, config, sampler=sampler)


def noise(number: int, size: Sequence[int], seed: int = 0) -> Tensor:
    """Return the noise of an image of metrics."""
    (generator,) = SampleRequest(1, seed, number, stream="evaluate").generators()
    return torch.randn(3, *size, generator=generator)


def test_each_size_is_as_frequent_as_in_the_data_and_depends_on_the_number_alone() -> None:
    loop, num = sized_loop(), 6000
    sizes = MeasuredImages(loop, 5).sizes(range(num))
    for size, count in Counter(sizes).items():
        share = COUNTS[size] / sum(COUNTS.values())
        assert count / num == pytest.approx(share, abs=4 * (share * (1 - share) / num) ** 0.5)
    assert MeasuredImages(loop, 5).sizes(range(100, 200)) == sizes[100:200]
    assert MeasuredImages(loop, 6).sizes(range(100)) != sizes[:100]
    without = sized_loop(FeedWithoutData(loop.feed.facts))
    assert MeasuredImages(without, 5).sizes(range(num)) == sizes


@pytest.mark.parametrize("batch_size", [1, 7, 300])
def test_batches_have_one_size_and_each_image_the_noise_of_its_number(batch_size: int) -> None:
    loop = sized_loop(batch_size=batch_size)
    with loop:
        images = MeasuredImages(loop, 3, "model")
        sizes = dict(enumerate(images.sizes(range(60))))
        parts = list(images.parts(range(20, 60)))
    made = {number: image for own, part in parts for number, image in zip(own, part, strict=True)}
    assert sorted(made) == list(range(20, 60))
    assert max(len(part) for _, part in parts) == min(batch_size, max(Counter(sizes[k] for k in made).values()))
    for number, image in made.items():
        assert image.shape[1:] == sizes[number]
        assert torch.allclose(image, (0.3 * noise(number, sizes[number], 3)).clamp(-1, 1), atol=1e-6)


def test_of_one_size_they_come_in_their_order_and_in_full_batches() -> None:
    loop = sized_loop(torch.zeros(9, 3, 4, 5))
    with loop:
        parts = list(MeasuredImages(loop).parts(range(10, 40)))
    assert [list(own) for own, _ in parts] == [list(range(start, min(start + 7, 40))) for start in range(10, 40, 7)]
    assert {part.shape[1:] for _, part in parts} == {(3, 4, 5)}


@given(st.data(), st.integers(0, 40), st.integers(0, 9), st.booleans())
def test_features_are_put_in_order(data: st.DataObject, num: int, start: int, have_logits: bool) -> None:
    order = data.draw(st.permutations(range(start, start + num)))
    collected = Collected()
    in_order = InOrder(collected, start)
    while order:
        many = data.draw(st.integers(0, len(order)))
        part, order = order[:many], order[many:]
        features = torch.tensor(part, dtype=torch.float32)[:, None].expand(-1, 2)
        in_order.add(part, features, features[:, :1] if have_logits else None)
    if num:
        expected = torch.arange(start, start + num).float()
        assert torch.equal(collected.rows[:, 0], expected)
        assert collected.num == num
        assert (collected.logits is not None) == have_logits
        assert not have_logits or torch.equal(collected.logits[:, 0], expected)
