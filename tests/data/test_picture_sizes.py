"""The sizes of training pictures, and the shape of an input for a picture of any size."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from hookdiff import UserError
from hookdiff.data import Facts, FeedWithoutData, picture_shapes, trained_sizes, untrained_text
from hookdiff.data.picture_sizes import examples_for, fitted
from hookdiff.encoding.codec import PictureCodec


def feed(factor: int = 1, **facts: Any) -> FeedWithoutData:
    codec = None
    if factor > 1:
        _, height, width = facts["shape"]
        shape = (3, height * factor, width * factor)
        facts |= {"picture_shape": shape, "codec": "made up"}
        codec = PictureCodec(None, "made up", shape, lambda: None)  # type: ignore[arg-type, return-value]
    return FeedWithoutData(Facts(num_samples=sum(facts.get("counts", (9,))), drop_last=True, **facts), remembered=codec)


PIXELS = {"shape": (3, 64, 64), "shapes": ((3, 48, 80), (3, 64, 64), (3, 80, 48)), "counts": (5, 3, 1)}
LATENTS = {"shape": (4, 8, 8), "shapes": ((4, 6, 10), (4, 8, 8)), "counts": (5, 3)}


@pytest.mark.parametrize(
    ("known", "sizes", "size", "shape"),
    [
        (feed(shape=(1, 7, 9)), {(7, 9): 9}, (5, 6), (1, 5, 6)),
        (feed(**PIXELS), {(48, 80): 5, (64, 64): 3, (80, 48): 1}, (44, 92), (3, 44, 92)),
        (feed(8, **LATENTS), {(48, 80): 5, (64, 64): 3}, (48, 88), (4, 6, 11)),
        (feed(8, shape=(4, 8, 8)), {(64, 64): 9}, (64, 64), (4, 8, 8)),
        (feed(shape=(2,)), {}, None, (2,)),
    ],
)
def test_sizes_and_shapes(known: FeedWithoutData, sizes: dict[Any, int], size: Any, shape: tuple[int, ...]) -> None:
    assert trained_sizes(known) == sizes
    assert [*trained_sizes(known)] == [*sizes]  # the most frequent size comes first
    assert picture_shapes(known) == ([(known.picture_shape[0], *each) for each in sizes] or [(2,)])
    assert known.input_shape() == (known.shapes[0] if known.by_shape else known.shape)
    assert known.input_shape(size) == shape
    for trained, own in zip(sizes, known.shapes, strict=False):
        assert known.input_shape(trained) == own
        assert not untrained_text(known, trained)


@given(st.integers(1, 999), st.integers(1, 999))
def test_a_size_without_latents_is_refused_with_sizes_that_have_them(height: int, width: int) -> None:
    known = feed(8, **LATENTS)
    if height % 8 == 0 and width % 8 == 0:
        assert known.input_shape((height, width)) == (4, height // 8, width // 8)
        return
    with pytest.raises(UserError, match=rf"^size {width}x{height}: .* multiples of 8; nearest: ") as error:
        known.input_shape((height, width))
    for text in str(error.value).rpartition("nearest: ")[2].split(", "):
        wide, high = map(int, text.split("x"))
        assert wide % 8 == high % 8 == 0 < min(wide, high)
        assert max(abs(wide - width), abs(high - height)) < 8


@pytest.mark.parametrize(
    ("known", "size", "text"),
    [
        (feed(shape=(2,)), (4, 4), "samples of 2, which have no height and width"),
        (feed(**PIXELS), (0, 4), r"expected height and width in pixels, such as \(48, 80\), got \(0, 4\)"),
        (feed(**PIXELS), "80x48", "expected height and width in pixels"),
        (feed(**PIXELS), (3, 48, 80), "expected height and width in pixels"),
    ],
)
def test_what_is_no_size_is_refused(known: FeedWithoutData, size: Any, text: str) -> None:
    with pytest.raises(UserError, match=text):
        known.input_shape(size)


def test_a_size_that_was_not_trained_is_near_to_those_that_were() -> None:
    text = untrained_text(feed(**PIXELS), (48, 88))
    assert "88x48" in text
    assert text.endswith(": 80x48, 64x64, 48x80")


def test_images_among_the_conditions_get_the_size() -> None:
    outline = torch.zeros(5, 1, 48, 80)
    outline[..., :40] = 1  # the left half
    numbered = torch.arange(80).expand(5, 48, 80)
    known = feed(**PIXELS, conditions={"caption": torch.ones(5, 7), "outline": outline, "numbered": numbered})
    for shape in ((3, 48, 80), (3, 64, 64), (3, 48, 88), (3, 20, 80)):
        examples = fitted(known, examples_for(known, range, shape).conditions, shape)
        assert torch.equal(examples["caption"], torch.ones(5, 7))
        assert examples["outline"].shape == (5, 1, *shape[1:])
        half = shape[2] // 2
        assert (examples["outline"][..., : half - 1] == 1).all()
        assert (examples["outline"][..., half + 1 :] == 0).all()
        assert (examples["numbered"].dtype, tuple(examples["numbered"].shape)) == (torch.int64, (5, *shape[1:]))
        assert examples["numbered"].float().mean() == pytest.approx(39.5, abs=1)
