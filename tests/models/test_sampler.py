import random
from collections.abc import Generator
from typing import Any, cast

import numpy
import pytest
import torch
from attrs import evolve
from hypothesis import given, settings, strategies as st
from PIL import Image
from torch import Tensor, nn

from hookdiff import InMemory, Loop, LoopConfig, SampleRequest, Samples, UnknownWeights, UserError, hookimpl
from hookdiff.data.absent_data import FeedWithoutData
from hookdiff.diffusion import Diffusion, Sampling
from hookdiff.testing import ToySampler, assert_same, toy_loop, weights
from tests.authors.test_evaluation import Measure
from tests.conftest import refused
from tests.diffusion.conftest import brightness

counts = st.integers(1, 40)


@given(counts, st.integers(0, 100), st.integers(1, 12), st.sampled_from(["sample", "evaluate"]), st.booleans())
@settings(deadline=None)
def test_the_label_of_an_image_is_the_same_in_any_request(
    num: int, start: int, num_classes: int, stream: str, known: bool
) -> None:
    labels = torch.arange(50) % num_classes if known else None
    whole = SampleRequest(start + num, seed=3, stream=stream).default_labels(num_classes, labels)
    assert SampleRequest(num, 3, start, stream).default_labels(num_classes, labels) == whole[start:]
    assert all(0 <= label < num_classes for label in whole)


def test_sampled_images_have_the_classes_in_turn() -> None:
    assert SampleRequest(5, start=2).default_labels(3, torch.zeros(9, dtype=torch.int64)) == (2, 0, 1, 2, 0)


def test_evaluated_images_have_the_classes_of_the_data() -> None:
    known = torch.tensor([0] * 70 + [1] * 30)
    labels = SampleRequest(4000, stream="evaluate").default_labels(3, known)
    assert [labels.count(k) / 4000 for k in range(3)] == pytest.approx([0.7, 0.3, 0], abs=0.03)
    assert SampleRequest(4000, seed=1, stream="evaluate").default_labels(3, known) != labels


class ByClass(nn.Module):
    """Predicts an image with a quarter of its label in each pixel."""

    num_classes = 4

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor, timesteps: Tensor, labels: Tensor) -> Tensor:
        return self.scale * (labels.float() / 4).view(-1, 1, 1, 1).expand_as(x)


def loop(*, conditional: bool = True) -> Loop:
    model = ByClass()
    data = InMemory(torch.zeros(12, 1, 4, 4), torch.arange(12) % 4)
    objective = Diffusion(prediction="sample", conditional=conditional)
    config = LoopConfig(steps=1, batch_size=4)
    return Loop(model, torch.optim.SGD(model.parameters(), lr=0), objective, data, config, sampler=Sampling(steps=2))


def test_a_loop_samples_the_classes_in_turn_or_the_given_labels() -> None:
    with loop() as running:
        assert brightness(running.sample(SampleRequest(5)).images) == pytest.approx([0, 0.25, 0.5, 0.75, 0])
        wanted = running.sample(SampleRequest(3, labels=(3, -1, 1))).images
        assert brightness(wanted) == pytest.approx([0.75, -0.25, 0.25])


@pytest.mark.parametrize("labels", [(0, 1, 4), (0, 1), (-2, 0, 0)])
def test_invalid_labels_are_refused(labels: tuple[int, ...]) -> None:
    with loop() as running, refused(UserError, "labels", 0, 3, -1):
        running.sample(SampleRequest(3, labels=labels))


def test_a_start_from_images_reaches_the_sampler() -> None:
    class Seen:
        def sample(self, *given: object, images: Tensor, strength: float, **_: object) -> Tensor:
            assert strength == 0.3
            return images + 0.5

    seen: Any = Seen()  # `Seen` has a shorter signature than a sampler
    with loop() as running, running.using(sampler=seen):
        images = torch.zeros(2, 1, 4, 4)
        assert brightness(running.sample(SampleRequest(2, images=images, strength=0.3)).images) == [0.5, 0.5]


WIDE = torch.tensor([-3.0, -1.0, -0.25, 0.5, 1.0, 2.0, torch.nan, torch.inf, -torch.inf])
CLAMPED = torch.tensor([-1.0, -1.0, -0.5, 1.0, 1.0, 1.0, torch.nan, torch.inf, -torch.inf])  # of twice these values


class Wide:
    def sample(self, net: object, objective: object, shape: torch.Size, generators: Any, *_: Any, **__: Any) -> Tensor:
        return WIDE.view(*shape).expand(len(generators), *shape)


class Doubled:
    @hookimpl(wrapper=True)
    def sample(self) -> Generator[None, Samples, Samples]:
        made = yield
        return evolve(made, images=2 * made.images)


def floats(*shape: int, number: int = 0, value: float = 1.0) -> Tensor:
    """Return numbers from -1 to 1; the last pixel of image `number` is `value`."""
    images = torch.linspace(-1, 1, torch.Size(shape).numel()).view(shape)
    images[number].view(-1)[-1] = value
    return images


PICTURES = {
    "bytes": (torch.arange(180).view(20, 1, 3, 3).to(torch.uint8), True),
    "floats": (floats(20, 1, 3, 3), True),
    "halves": (floats(20, 1, 3, 3).half(), True),
    "items of bytes": (list(torch.arange(180).view(20, 1, 3, 3).to(torch.uint8)), True),
    "pictures of Pillow": ([Image.new("L", (3, 3), 9 * k) for k in range(20)], True),
    "items": (list(floats(20, 1, 3, 3, number=16, value=1.1)), True),  # the first 16 decide
    "latents": (floats(20, 1, 3, 3, number=19, value=1.001), False),
    "items of latents": (list(floats(20, 1, 3, 3, number=15, value=-1.1)), False),
    "vectors": (floats(20, 9), False),
    "a grid of numbers": (floats(20, 3, 3), False),
}


@pytest.mark.parametrize("data", PICTURES)
def test_samples_are_clamped_behind_all_plugins_if_the_data_are_pictures(data: str) -> None:
    source, are_clamped = PICTURES[data]
    model, sampler = nn.Linear(1, 1), cast(Sampling, Wide())
    optimizer, config = torch.optim.SGD(model.parameters()), LoopConfig(steps=1, batch_size=2)
    loop = Loop(model, optimizer, no_loss, source, config, {"doubled": Doubled()}, sampler=sampler)
    assert loop.feed.shape  # which reads a sample
    expected = {False: CLAMPED if are_clamped else 2 * WIDE, True: 2 * WIDE}
    for raw, values in expected.items():
        before = states()
        made = loop.sample(SampleRequest(2, raw=raw)).images
        assert_same(states(), before)
        torch.testing.assert_close(made.flatten(1), values.expand(2, 9), rtol=0, atol=0, equal_nan=True)
    assert FeedWithoutData(loop.feed.facts).are_pictures == are_clamped  # as a checkpoint has them
    assert loop.sample(SampleRequest(0)).images.shape == (0, *loop.feed.shape)


def states() -> dict[str, Any]:
    """Return the states of the default generators."""
    _, numbers, *place = numpy.random.get_state()
    return {"python": random.getstate(), "numpy": [numbers.tolist(), *place], "torch": torch.get_rng_state()}


def no_loss(*_: object) -> Tensor:
    raise AssertionError("nothing is trained here")


def test_a_sampler_is_borrowed_and_given_back() -> None:
    with toy_loop() as loop:
        sampler, other = loop.sampler, ToySampler()
        with loop.using(sampler=other):
            assert loop.sampler is other
        assert loop.sampler is sampler
        with pytest.raises(ZeroDivisionError), loop.using(sampler=other):
            raise ZeroDivisionError
        assert loop.sampler is sampler


class Named(ToySampler):
    def __init__(self, weights: str) -> None:
        self.weights = weights


class Holds:
    """Offers two averages: the weights times two, and times three."""

    def __init__(self, prefix: str = "") -> None:
        self.prefix = prefix

    @hookimpl
    def offer_weights(self, loop: Loop) -> Any:
        def times(factor: int) -> Any:
            return lambda: {name: factor * p.detach() for name, p in loop.model.named_parameters()}

        return {f"{self.prefix}two": times(2), f"{self.prefix}three": times(3)}


def test_weights_are_lent_by_name_and_come_back() -> None:
    with toy_loop({"one": Holds(), "other": Holds("other/")}) as loop:
        own = weights(loop)
        for name, expected, factor in ((None, "two", 2), ("three", "three", 3), ("other/three",) * 2 + (3,)):
            with loop.weights(name) as lent:
                assert loop.weights.name == lent == expected
                assert_same(weights(loop), {key: factor * value for key, value in own.items()})
                with loop.weights(None) as again:  # a plugin may sample while weights are lent
                    assert again == expected
        with pytest.raises(ZeroDivisionError), loop.weights("two"):
            raise ZeroDivisionError
        assert loop.weights.name == "model"
        assert_same(weights(loop), own)
        with refused(UnknownWeights, "tree", "three") as caught, loop.weights("tree"):
            pass
        known = {"model", "two", "three", "other/two", "other/three"}
        assert (caught.value.name, set(caught.value.known)) == ("tree", known)


@pytest.mark.parametrize("name", ["model", "three"])
def test_the_sampler_names_the_weights_where_nobody_else_does(name: str) -> None:
    used: list[str] = []
    measure = Measure(every=1, read=lambda loop: used.append(loop.weights.name) or {})
    loop = toy_loop({"holds": Holds(), "measure": measure}, steps=1)
    with loop, loop.using(sampler=Named(name)):
        list(loop.steps())
        assert loop.sample(SampleRequest(1)).weights == name
        with loop.weights("two"):
            assert loop.sample(SampleRequest(1)).weights == "two"
    assert used == [name]


def test_a_name_of_the_sampler_that_nobody_offers_is_refused_before_the_training() -> None:
    with toy_loop({"holds": Holds()}) as loop, loop.using(sampler=Named("tree")):
        with refused(UserError, "sampling.weights", "'tree'", "'three'"):
            next(loop.steps())
        assert loop.progress.position == 0
