"""The sizes of aspect-ratio buckets: their geometry, and the size that each picture gets."""

import math

import pytest
import torch
from hypothesis import given, strategies as st

from hookdiff.errors import ConfigError
from hookdiff.images import Transforms
from hookdiff.images.buckets import Buckets, cut_off, default_step, size_name, size_of, sizes_of_side
from hookdiff.options.structure import structured


@pytest.mark.parametrize(
    ("side", "step", "names"),
    [
        (32, 4, "24x40 24x44 28x36 32x32 36x28 40x24 44x24"),
        (64, 8, "48x80 48x88 56x72 64x64 72x56 80x48 88x48"),
        (512, 64, "384x640 384x704 448x576 512x512 576x448 640x384 704x384"),
    ],
)
def test_sizes_have_about_the_pixels_of_the_square(side: int, step: int, names: str) -> None:
    assert default_step(side) == step
    assert sorted(map(size_name, sizes_of_side(side, step, 2.0))) == names.split()
    assert len(sizes_of_side(1024, default_step(1024), 2.0)) == 13


@given(st.integers(2, 600), st.floats(1, 8), st.data())
def test_sizes_are_multiples_of_the_step_in_both_directions(side: int, ratio: float, data: st.DataObject) -> None:
    divisors = [step for step in range(1, side + 1) if side % step == 0]
    step = data.draw(st.sampled_from([each for each in divisors if side // each <= 40] or [side]))
    sizes = sizes_of_side(side, step, ratio)
    assert (side, side) in sizes
    assert {(width, height) for height, width in sizes} == {*sizes}
    for height, width in sizes:
        assert height % step == width % step == 0
        assert max(height, width) / min(height, width) <= ratio
        assert abs(min(height, width) - side * side / max(height, width)) <= step / 2  # the nearest multiple


pictures = st.lists(st.tuples(st.integers(1, 3000), st.integers(1, 3000)), min_size=1, max_size=30)


@given(pictures, st.booleans())
def test_a_picture_gets_the_size_of_the_nearest_shape_that_it_fills(
    sides: list[tuple[int, int]], several: bool
) -> None:
    buckets = Buckets.of((64, 512) if several else (64,), True, None, 2.0)
    numbers, small = buckets.chosen(torch.tensor(sides))
    groups = [sizes_of_side(side, default_step(side), 2.0) for side in ((512, 64) if several else (64,))]
    for (height, width), number, is_small in zip(sides, numbers.tolist(), small.tolist(), strict=True):
        expected = None
        for group in groups:
            nearest = min(group, key=lambda size: abs(math.log(size[1] / size[0]) - math.log(width / height)))
            fills = height >= nearest[0] and width >= nearest[1]
            if expected is None and fills:
                expected = nearest
        found = buckets.sizes[number]
        assert is_small == (expected is None)
        wanted = expected or nearest
        distance = [abs(math.log(w / h) - math.log(width / height)) for h, w in (found, wanted)]
        assert distance[0] == pytest.approx(distance[1], abs=1e-12)  # two sizes may be equally near
        assert not expected or math.prod(found) == pytest.approx(math.prod(wanted), rel=0.2)


def test_the_share_that_is_cut_off() -> None:
    sizes, targets = torch.tensor([[98, 250], [64, 64], [100, 50]]), torch.tensor([[48, 88], [32, 32], [64, 64]])
    expected = [1 - 48 * 88 / (48 * 250 * 48 / 98), 0, 0.5]
    assert cut_off(sizes, targets).tolist() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("table", "text"),
    [
        ({"buckets": True}, "buckets: needs image_size"),
        ({"buckets": True, "image_size": 32, "resize": 40}, "leave out resize"),
        ({"buckets": ["80"], "image_size": 64}, "expected WIDTHxHEIGHT, such as 80x80, got '80'"),
        ({"buckets": ["64x64", "32x32"], "image_size": 64}, "64x64 and 32x32 have the same shape"),
        ({"buckets": [], "image_size": 64}, "buckets: has no size"),
        (
            {"buckets": True, "image_size": 64, "bucket_step": 7},
            "bucket_step: must divide image_size = 64, not 7; nearest: 8",
        ),
        ({"buckets": True, "image_size": 64, "bucket_ratio": 0.5}, "bucket_ratio"),
        ({"image_size": []}, "image_size: has no side"),
        ({"image_size": [64, 1]}, "image_size"),
        ({"image_size": [32, 64], "resize": 70}, "one image_size"),
    ],
)
def test_wrong_keys_are_refused(table: dict[str, object], text: str) -> None:
    with pytest.raises((ConfigError, ValueError), match=text):
        structured(Transforms, table)


def test_given_sizes_belong_to_the_nearest_side() -> None:
    made = structured(Transforms, {"image_size": [32, 64], "buckets": ["64x64", "80x48", "32x32"]})
    assert made.sized.groups == ((size_of("64x64"), size_of("80x48")), (size_of("32x32"),))
    assert (made.square, made.has_sizes) == (64, True)
