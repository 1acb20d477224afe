"""The features of generated images of several sizes: the same in all batches and on any number of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from attrs import define
from torch import Tensor

from hookdiff import UserError
from hookdiff.authors import Generated, MeasuredImages
from hookdiff.features import Features, Space
from hookdiff.log import to_uint8
from hookdiff_features import Digits
from tests.authors.test_measured_images import noise, sized_loop
from tests.conftest import refused, two_ranks


def means(images: Tensor) -> Tensor:
    return images.float().mean((2, 3))


@define(frozen=True)
class Means(Features):
    """The mean of each channel; with `by_width`, of each column too, so that their number depends on the width."""

    by_width: bool = False

    def open(self, device: torch.device) -> Space:
        features = (lambda images: images.float().mean(2).flatten(1)) if self.by_width else means
        return Space("means", None, lambda images: (features(images), None))


@pytest.mark.parametrize("batch_size", [1, 7, 300])
def test_row_k_is_of_image_k_whatever_the_batches(batch_size: int) -> None:
    num = 60 if batch_size == 1 else 4200  # more than a block
    with sized_loop(batch_size=batch_size) as loop:
        generated = Generated(loop, Means(), 3, "model")
        features = generated.features(num, "images")
        sizes = MeasuredImages(loop, 3).sizes(range(num))
        last = generated.image(num - 1)
    expected = torch.stack([means(to_uint8(0.3 * noise(k, size, 3)[None]))[0] for k, size in enumerate(sizes)])
    assert features.num == num
    assert torch.allclose(features.rows, expected, atol=0.3)  # 8 bits
    assert torch.allclose(features.moments.fit().mean.float(), expected.mean(0), atol=0.05)
    assert torch.allclose(means(to_uint8(last[None]))[0], features.rows[-1])
    assert last.shape[1:] == sizes[-1]


def test_features_for_one_size_alone_are_refused() -> None:
    with sized_loop() as loop, refused(UserError, "digits", "8 x 8", "3 x 4 x 8"):
        Generated(loop, Digits(), 0, None)
    with sized_loop() as loop, refused(UserError, 24, 18, "dimensions"):
        Generated(loop, Means(by_width=True), 0, None).features(40, "images")


RANKS = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from hookdiff.authors import Generated
from tests.authors.test_generation import Means
from tests.authors.test_measured_images import sized_loop

result = []
for is_sharded in (False, True):
    loop = sized_loop(batch_size=4)
    if is_sharded:
        fully_shard(loop.model, mesh=init_device_mesh("cpu", (2,)), reshard_after_forward=True)
    with loop:
        features = Generated(loop, Means(), 3, "model").features(61, "images")
    result.append(features.rows.tolist())
"""


def test_ranks_share_the_images_also_if_they_share_the_model(tmp_path: Path) -> None:
    with sized_loop(batch_size=4) as loop:
        expected = Generated(loop, Means(), 3, "model").features(61, "images").rows
    for copies, pieces in two_ranks(RANKS, tmp_path):
        assert torch.equal(torch.tensor(copies), expected)
        assert torch.equal(torch.tensor(pieces), expected)
