"""Samplers that are healthy, collapsed, or copy get different diagnoses, and the numbers are those of plain torch."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Generator, Tensor, nn

from hookdiff import Feed, InMemory, Loop, LoopConfig, UserError
from hookdiff.data import digits
from hookdiff.images import Transforms, feed_of
from hookdiff.log import Picture, panel_layouts
from hookdiff.loop.saved import restore_state, state_of
from hookdiff_diversity import Diversity
from hookdiff_diversity.copies import Copies, copies
from hookdiff_diversity.diagnosis import diagnose_samples
from hookdiff_diversity.modes import Modes, modes
from hookdiff_diversity.spread import Spread, spread
from tests.conftest import Logged, acting, check_facts, ran, refused, two_ranks, warnings


def rows(num: int, dim: int, seed: int = 0) -> Tensor:
    return torch.randn(num, dim, generator=Generator().manual_seed(seed))


# Spread

SETS = st.builds(
    lambda num, dim, seed, offset: rows(num, dim, seed) * torch.logspace(0, -2, dim) + offset,
    num=st.integers(3, 60),
    dim=st.integers(1, 9),
    seed=st.integers(0, 99),
    offset=st.floats(-100, 100),
)


@given(SETS, SETS)
def test_spread_is_that_of_all_pairs(samples: Tensor, data: Tensor) -> None:
    dim = min(samples.shape[1], data.shape[1])
    samples, data = samples[:, :dim].double(), data[:, :dim].double()
    found = spread(samples, data)
    apart = torch.pdist(samples).mean()
    assert found.distance == pytest.approx(float(apart), rel=1e-6)
    assert found.distance_ratio == pytest.approx(float(apart / torch.pdist(data).mean()), rel=1e-6)
    assert found.variance_ratio == pytest.approx(float(samples.var(0).sum() / data.var(0).sum()), rel=1e-9)


@given(SETS, st.integers(0, 99), st.floats(0.1, 10))
def test_spread_grows_with_scale_and_not_with_rotation_order_or_place(data: Tensor, seed: int, scale: float) -> None:
    data = data.double()
    rotation = torch.linalg.qr(rows(data.shape[1], data.shape[1], seed).double())[0]
    order = torch.randperm(len(data), generator=Generator().manual_seed(seed))
    found = spread(scale * data[order] @ rotation + 3, data)
    assert found.variance_ratio == pytest.approx(scale**2, rel=1e-6)
    assert found.distance_ratio == pytest.approx(scale, rel=1e-6)


def test_spread_of_one_image_is_0() -> None:
    found = spread(torch.ones(9, 4), rows(50, 4))
    assert (found.variance_ratio, found.distance, found.distance_ratio) == pytest.approx((0, 0, 0), abs=1e-7)
    assert spread(rows(50, 4), torch.ones(9, 4)).variance_ratio > 1e9


# Modes


def clusters(counts: Sequence[int], seed: int = 0) -> Tensor:
    """Return rows around as many far centres as there are counts."""
    centres = 100 * torch.eye(len(counts))
    return torch.cat([centre + rows(num, len(counts), seed) for centre, num in zip(centres, counts, strict=True)])


@pytest.mark.parametrize(
    ("data", "samples", "expected"),
    [
        ([100, 100, 100, 100], [50, 50, 50, 50], Modes(4, 4, 0.25, 0.25)),
        ([100, 100, 100, 100], [200, 0, 0, 0], Modes(4, 1, 1.0, 0.25)),
        ([100, 100, 100, 100], [150, 38, 12, 0], Modes(4, 2, 0.75, 0.25)),  # a quarter of 50 is 12.5
        ([100, 100, 100, 100], [149, 38, 13, 0], Modes(4, 3, 0.745, 0.25)),
        ([300, 90, 5, 5], [160, 40, 0, 0], Modes(2, 2, 0.8, 0.75)),  # 2.5 are expected of the rare ones
        ([160, 60, 60, 60, 60], [30, 116, 18, 18, 18], Modes(5, 5, 0.58, 0.15)),  # its own share, not the largest
    ],
)
def test_a_mode_is_covered_by_a_quarter_of_its_share(data: list[int], samples: list[int], expected: Modes) -> None:
    found = modes(clusters(samples, 1), clusters(data), len(data))
    assert found == expected
    order = torch.randperm(sum(samples), generator=Generator().manual_seed(0))
    assert modes(clusters(samples, 1)[order], clusters(data), len(data)) == expected


def test_there_are_no_more_modes_than_the_samples_can_show() -> None:
    found = modes(rows(40, 3, 1), rows(500, 3), 100)
    assert found.judged <= 4
    assert modes(rows(20, 3, 1), rows(15, 3), 100).judged <= 2
    assert Modes(0, 0, 0.1, 0.1).coverage == 1  # none that could be missed


# Copies


@pytest.mark.parametrize("share", [0.0, 0.2, 1.0])
def test_the_share_of_copies_is_found(share: float) -> None:
    training, other = rows(1500, 12), rows(800, 12, 1)
    num = round(share * 400)
    samples = torch.cat((training[3 : 3 + num] + 0.02 * rows(num, 12, 2), rows(400 - num, 12, 3)))
    for held_out in (other, None):
        found = copies(samples, training, held_out)
        assert found.memorised == pytest.approx(share + 0.01 * (1 - share), abs=0.02)
        assert sorted(found.closest[:num].tolist()) == list(range(num))
        assert found.numbers[:num].tolist() == list(range(3, 3 + num))
    expected = torch.cdist(samples.double(), training.double())
    assert torch.allclose(found.distances, expected.amin(1), atol=1e-5)
    near = copies(samples, training, other)
    usual = torch.cdist(other.double(), training.double()).amin(1).median()
    assert near.nearest_ratio == pytest.approx(float(expected.amin(1).median() / usual), rel=1e-6)


def test_copies_are_found_although_the_data_has_duplicates() -> None:
    training = rows(1500, 12)
    training = torch.cat((training, training[:100]))
    found = copies(training[200:600] + 0.02 * rows(400, 12, 2), training, None)
    assert found.memorised > 0.95
    assert copies(rows(400, 12, 3), training, None).memorised < 0.05


def test_a_part_of_the_training_images_shows_a_part_of_the_copies() -> None:
    training = rows(3000, 12)
    found = copies(training[:1500:2] + 0.02 * rows(750, 12, 2), training[750:1500], None, num_training=3000)
    assert (found.searched, found.memorised) == (0.25, pytest.approx(0.5, abs=0.05))


def test_means_of_many_images_are_no_copies() -> None:
    training = rows(1500, 12)
    means = training[:1200].reshape(300, 4, 12).mean(1)  # nearer to the training images than held-out images are
    found = copies(means, training, rows(500, 12, 1))
    assert found.nearest_ratio < 0.9
    assert found.memorised < 0.05


# The diagnosis


HEALTHY = {"variance": 1, "distance": 1, "covered": 10, "dominant": 0.1, "copied": 0.01, "searched": 1, "far": 1}


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ({}, "healthy"),
        ({"variance": 2, "distance": 1.5, "far": 0.5}, "healthy"),
        ({"covered": 6}, "collapsed to few modes"),
        ({"dominant": 0.5}, "collapsed to few modes"),
        ({"copied": 0.2}, "copies of the training set"),
        ({"copied": 0.06}, "healthy"),
        ({"copied": 0.06, "searched": 0.1}, "copies of the training set"),
        ({"copied": 0.03, "searched": 0.1}, "healthy"),
        ({"variance": 0.5}, "too uniform"),
        ({"distance": 0.5}, "too uniform"),
        ({"far": 3}, "unlike the data"),
        ({"covered": 1, "copied": 1, "variance": 0}, "collapsed to few modes"),
        ({"copied": 1, "variance": 0.5}, "copies of the training set"),
        ({"far": 3, "covered": 1, "variance": 0}, "unlike the data"),
    ],
)
def test_the_first_cause_is_named(numbers: dict[str, Any], expected: str) -> None:
    variance, distance, covered, dominant, copied, searched, far = {**HEALTHY, **numbers}.values()
    samples, none = Modes(10, covered, dominant, 0.1), torch.zeros(0)
    near = Copies(copied, searched, far, none, none, none)
    assert diagnose_samples(Spread(variance, 1.0, distance), samples, near).kind == expected


# The plugin, on digits: 1,000 to train on, 300 held out, and 497 that healthy samplers paint

DIGITS = digits()
ORDER = torch.randperm(len(DIGITS), generator=Generator().manual_seed(0))
IMAGES = DIGITS.images[ORDER].float() / 127.5 - 1
assert DIGITS.labels is not None
LABELS = DIGITS.labels[ORDER]
FRESH, TRAINED = slice(1300, None), slice(0, 1300)


class Painter:
    """Paints images of a pool, each with a little noise."""

    def __init__(self, pool: Tensor, noise: float = 0.03) -> None:
        self.pool, self.noise = pool, noise

    def sample(self, net: nn.Module, objective: Any, shape: Any, generators: Any, device: torch.device, /) -> Tensor:
        chosen = [int(torch.randint(len(self.pool), (), generator=generator)) for generator in generators]
        noise = torch.stack([torch.randn(*shape, generator=generator) for generator in generators])
        return (self.pool[chosen] + self.noise * noise).clamp(-1, 1)


def data(labels: bool = True) -> Feed:
    return Feed(InMemory(IMAGES[TRAINED], LABELS[TRAINED] if labels else None), held_out=300)


def training_images() -> Tensor:
    return IMAGES[TRAINED][data().training]


def blend() -> Tensor:
    """Return fresh images, each halfway to the mean of its class."""
    fresh, labels = IMAGES[FRESH], LABELS[FRESH]
    means = torch.stack([fresh[labels == label].mean(0) for label in range(10)])
    return (fresh + means[labels]) / 2


SAMPLERS: dict[str, Callable[[], Painter]] = {
    "healthy": lambda: Painter(IMAGES[FRESH]),
    "collapsed to few modes": lambda: Painter(IMAGES[FRESH][LABELS[FRESH] < 3]),
    "copies of the training set": lambda: Painter(training_images()),
    "too uniform": lambda: Painter(blend(), 0),
    "unlike the data": lambda: Painter(torch.zeros(1, 1, 8, 8), 1.0),
}


def make_loop(sampler: Painter, *plugins: object, feed: Feed | None = None, **config: Any) -> Loop:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Dropout(0.1), nn.Conv2d(4, 1, 3, padding=1))
    return Loop(
        model,
        torch.optim.SGD(model.parameters(), lr=0.01),
        lambda net, batch: (net(batch.inputs) - batch.inputs).square().mean(),
        data() if feed is None else feed,
        LoopConfig(**{"steps": 1, "batch_size": 16, **config}),
        {"logged": Logged(), **{f"p{k}": plugin for k, plugin in enumerate(plugins)}},
        sampler=sampler,
    )


def logged(loop: Loop) -> list[dict[str, float]]:
    """Return the values of each measurement that was logged."""
    sink: Any = loop.plugins["logged"]
    return [values for _, values in sink.calls if any(name.startswith("diversity/") for name in values)]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", SAMPLERS)
def test_samplers_get_their_diagnoses(kind: str, seed: int, caplog: pytest.LogCaptureFixture) -> None:
    plugin = Diversity(every=0, num_samples=500, seed=seed)
    loop = make_loop(SAMPLERS[kind](), plugin)
    with caplog.at_level(logging.INFO, logger="hookdiff"):
        loop.run()
    assert plugin.diagnosis is not None
    assert plugin.diagnosis.kind == kind
    check_facts(caplog.messages[-1], "diversity", kind)
    assert bool(warnings(caplog)) == (kind != "healthy")
    (values,) = logged(loop)
    assert values["diversity/digits/num"] == 500
    assert (values["diversity/digits/memorised"] > 0.5) == (kind == "copies of the training set")
    if kind == "healthy":
        assert values["diversity/digits/mode_coverage"] == 1
        assert 0.8 < values["diversity/digits/variance_ratio"] < 1.2


def test_the_pixels_of_images_of_any_size_are_a_space_too() -> None:
    for kind in ("healthy", "collapsed to few modes", "copies of the training set"):
        plugin = Diversity(every=0, num_samples=500, features="tests.plugins.test_diversity:as_rows")
        loop = ran(make_loop(SAMPLERS[kind](), plugin, feed=data(labels=False)))
        assert plugin.diagnosis is not None
        assert plugin.diagnosis.kind == kind
        (values,) = logged(loop)
        assert "diversity/tests.plugins.test_diversity.as_rows/num" in values


def as_rows(images: Tensor) -> Tensor:
    return images.flatten(1)


def test_the_picture_shows_each_copy_beside_its_original() -> None:
    shown: dict[str, Picture] = {}
    copier = Painter(training_images(), 0)
    note = acting(on_images=lambda images: shown.update(images))
    make_loop(copier, Diversity(every=0, num_samples=100), note).run()
    picture = shown["diversity"]
    (place,) = panel_layouts(picture.info)
    tiles = [picture.pixels[top:bottom, left:right] for left, top, right, bottom in map(place.box, range(16))]
    for copy, original in zip(tiles[::2], tiles[1::2], strict=True):
        assert abs(copy.astype(int) - original).max() <= 2
    assert len({tile.tobytes() for tile in tiles[::2]}) > 4
    assert picture.pixels.std() > 20


class SizedCopier:
    """Paints training images of the size that is asked for."""

    def __init__(self, feed: Feed) -> None:
        batches = list(feed.unaugmented(feed.training, 1000))
        self.pool = {tuple(batch.inputs.shape[1:]): batch.inputs for batch in batches}

    def sample(self, net: nn.Module, objective: Any, shape: Any, generators: Any, device: torch.device, /) -> Tensor:
        pool = self.pool[tuple(shape)]
        return pool[[int(torch.randint(len(pool), (), generator=generator)) for generator in generators]]


def in_squares(images: Tensor) -> Tensor:
    return torch.nn.functional.adaptive_avg_pool2d(images, 4).flatten(1)


def test_pairs_of_several_sizes_are_padded_to_the_largest() -> None:
    sizes = {(20, 40): 60, (30, 30): 30, (40, 20): 20}
    kinds = [size for size, num in sizes.items() for _ in range(num)]
    generator = Generator().manual_seed(0)
    pixels = [torch.randint(0, 250, (3, *size), generator=generator, dtype=torch.uint8) for size in kinds]
    feed = feed_of(
        [{"image": image} for image in pixels], Transforms(image_size=30, buckets=("40x20", "30x30", "20x40"))
    )
    shown: dict[str, Picture] = {}
    plugin = Diversity(every=0, num_samples=60, seed=2, features="tests.plugins.test_diversity:in_squares")
    note, model = acting(on_images=lambda images: shown.update(images)), nn.Conv2d(3, 3, 1)
    loss = lambda net, batch: net(batch.inputs).square().mean()  # noqa: E731
    limits, optimizer = LoopConfig(steps=1, batch_size=8), torch.optim.SGD(model.parameters(), lr=0)
    plugins = {"diversity": plugin, "note": note}
    Loop(model, optimizer, loss, feed, limits, plugins, sampler=SizedCopier(feed)).run()
    assert plugin.diagnosis is not None
    assert plugin.diagnosis.kind == "copies of the training set"
    (place,) = panel_layouts(shown["diversity"].info)
    assert place.width == place.height == 40
    found = set()
    for number in range(0, 16, 2):
        left, top, right, bottom = zip(*(place.box(number + k) for k in range(2)), strict=True)
        sides = zip(top, bottom, left, right, strict=True)
        copy, original = (shown["diversity"].pixels[a:b, c:d] for a, b, c, d in sides)
        assert abs(copy.astype(int) - original).max() <= 2
        painted = (original < 255).any(2)
        margins = [int(painted.any(axis).argmax()) for axis in (1, 0)]  # white above and beside the image
        found.add((40 - 2 * margins[0], 40 - 2 * margins[1]))
    assert found <= sizes.keys()
    assert len(found) > 1


def test_each_diagnosis_warns_once_until_it_changes(caplog: pytest.LogCaptureFixture) -> None:
    painter = SAMPLERS["copies of the training set"]()
    plugin = Diversity(every=1, num_samples=200)
    loop = make_loop(painter, plugin, steps=4)
    with caplog.at_level(logging.INFO, logger="hookdiff"), loop:
        for step in loop.steps():
            if step.step == 2:
                painter.pool = IMAGES[FRESH][LABELS[FRESH] == 0]
    first, second = warnings(caplog)
    check_facts(first, "step 1", "copies of the training set")
    check_facts(second, "collapsed to few modes")
    state = state_of(plugin)
    again = Diversity(every=1, num_samples=200)
    restore_state(again, state)
    assert state_of(again) == state
    caplog.clear()
    loop = make_loop(painter, again, steps=5)
    loop.progress.step = 4
    loop.run()
    assert warnings(caplog) == []


def test_what_cannot_be_measured_is_refused_before_training() -> None:
    plain = InMemory(torch.zeros(64, 3, 8, 8))
    for plugin, feed, facts in (
        (Diversity(weights="ema"), data(), ("ema",)),
        (Diversity(features="digits"), Feed(plain), ("plugins.diversity", "1 x 8 x 8", "3 x 8 x 8")),
        (Diversity(), Feed(InMemory(IMAGES[:9])), ("plugins.diversity", 16)),
    ):
        with refused(UserError, *facts):
            make_loop(SAMPLERS["healthy"](), plugin, feed=feed, batch_size=8).run()


def test_images_that_are_not_finite_are_an_error() -> None:
    with refused(ValueError, "diversity", "20 of 20"):
        make_loop(Painter(torch.full((1, 1, 8, 8), torch.nan)), Diversity(every=0, num_samples=20)).run()


RANKS = """
from hookdiff_diversity import Diversity
from tests.on_ranks import measured

plugin = Diversity(every=0, num_samples=101)
result = measured(plugin), plugin.diagnosis.kind
"""


@pytest.mark.wide
def test_ranks_share_the_images_and_agree(tmp_path: Path) -> None:
    one, other = two_ranks(RANKS, tmp_path)
    assert (other[0], other[1:]) == ({}, one[1:])  # the first rank has the log
    assert one[0]["diversity/digits/num"] == 101
    single: dict[str, Any] = {}
    exec(RANKS, single)
    assert one[0] == pytest.approx(single["result"][0], rel=1e-4, abs=1e-6)
