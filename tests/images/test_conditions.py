"""Samples with more than an image and a label: masks, captions, paired images."""

import traceback
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, strategies as st
from PIL import Image
from torch import Tensor, nn

from hookdiff import Batch, InMemory, UserError
from hookdiff.images import Transforms, feed_of
from hookdiff.testing.compare import assert_same, weights
from tests.conftest import Restores, as_list, pixels, refused, toy_run, wide

ALL = Transforms(resize=12, image_size=8, flip=0.5)


def batches(source: Any, batch_size: int = 4, epoch: int = 0, **options: Any) -> list[Batch]:
    return list(feed_of(source, drop_last=False, **options).bind(batch_size).batches(epoch))


def by_index(made: list[Batch]) -> dict[str, Tensor]:
    """Return inputs and conditions of all batches, in the order of the data set."""
    order = torch.cat([batch.indices for batch in made if batch.indices is not None]).argsort()
    columns = {name: torch.cat([batch.conditions[name] for batch in made])[order] for name in made[0].conditions}
    return {"inputs": torch.cat([batch.inputs for batch in made])[order], **columns}


shapes = st.lists(st.integers(1, 4), max_size=3).map(tuple)
columns = st.dictionaries(
    st.text(min_size=1).filter(lambda name: name not in ("image", "inputs", "label")),
    st.tuples(shapes, st.sampled_from([torch.float32, torch.float64, torch.int64, torch.bool, torch.uint8])),
    max_size=4,
)


@given(
    given=columns, num=st.integers(1, 9), batch_size=st.integers(1, 4), size=st.integers(1, 4), labelled=st.booleans()
)
def test_any_mix_of_columns_is_stacked_and_sliced_exactly(
    given: dict[str, tuple[tuple[int, ...], torch.dtype]], num: int, batch_size: int, size: int, labelled: bool
) -> None:
    values = {name: (torch.rand(num, *shape) * 255).to(dtype) for name, (shape, dtype) in given.items()}
    vectors = torch.rand(num, 5)  # not pictures, so that no column is an image of their size
    items = [
        {"inputs": vectors[k], **({"label": k} if labelled else {}), **{name: values[name][k] for name in values}}
        for k in range(num)
    ]
    for source in (items, InMemory(vectors, torch.arange(num) if labelled else None, conditions=values)):
        for batch in batches(source, min(batch_size, num)):
            rows = batch.indices
            assert rows is not None
            assert torch.equal(batch.inputs, vectors[rows])
            assert as_list(batch.labels) == (rows.tolist() if labelled else None)
            assert_same(batch.conditions, {name: column[rows] for name, column in values.items()})
            assert all(batch.conditions[name].dtype == column.dtype for name, column in values.items())
            parts = batch.split(size)
            for name in values:
                assert torch.equal(torch.cat([part.conditions[name] for part in parts]), batch.conditions[name])
            assert all(part.conditions.keys() == values.keys() for part in parts)


def coordinates(num: int = 6, side: int = 12) -> Tensor:
    """Return pictures that hold the number, the row and the column of each pixel, times 3."""
    rows, across = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    return torch.stack([torch.stack([torch.full_like(rows, k), rows, across]) for k in range(num)]).mul(3).byte()


@pytest.mark.parametrize("in_memory", [True, False])
@pytest.mark.parametrize("workers", [0, *wide(1)])
def test_images_of_the_same_size_share_crop_and_flip(in_memory: bool, workers: int) -> None:
    images = coordinates()
    conditions = {
        "pair": images.clone(),
        "mask": images[:, 1:2].long() * 256 + images[:, 2:],  # int64
        "plane": images[:, 2].float(),  # n h w
        "large": torch.rand(6, 1, 24, 24),  # not of this size
    }
    source: Any = InMemory(images, conditions=conditions)
    if not in_memory:
        source = [{"image": images[k], **{name: conditions[name][k] for name in conditions}} for k in range(6)]
    seen = set()
    for epoch in range(3):
        made = by_index(batches(source, epoch=epoch, transforms=ALL, workers=0 if in_memory else workers))
        kept = made["inputs"].add(1).mul(127.5).round().long()
        assert (kept.shape, kept[:, 0, 0, 0].tolist()) == ((6, 3, 8, 8), [0, 3, 6, 9, 12, 15])
        assert torch.equal(made["pair"], made["inputs"])
        assert torch.equal(made["mask"][:, 0], kept[:, 1] * 256 + kept[:, 2])
        assert torch.equal(made["plane"], kept[:, 2].float())
        assert torch.equal(made["large"], conditions["large"])
        seen.update((int(top), int(left), bool(left > right)) for top, left, right in kept[:, [1, 2, 2], 0, [0, 0, -1]])
    assert len(seen) > 5


@pytest.mark.parametrize("kind", [Image.Image, Tensor])
@pytest.mark.parametrize("jitter", [(0.0,) * 4, (0.4, 0.4, 0.4, 0.1)])
def test_paired_images_are_resized_alike_and_only_the_picture_changes_its_colours(kind: type, jitter: Any) -> None:
    class Pairs:
        def __len__(self) -> int:
            return 6

        def __getitem__(self, index: int) -> Any:
            image = Image.fromarray(pixels(index, 20)).resize((20, 31))
            if kind is Image.Image:
                grey, corner = image.convert("L"), image.getpixel((0, 0))
                return {"image": image, "pair": image.copy(), "mask": grey, "alone": corner}
            values = torch.from_numpy(numpy.array(image)).permute(2, 0, 1)
            return {"image": values, "pair": values.clone(), "mask": values[1], "alone": values[:, 0, 0]}

    made = by_index(batches(Pairs(), transforms=Transforms(resize=12, image_size=8, flip=True, color_jitter=jitter)))
    plain = by_index(batches(Pairs(), transforms=Transforms(resize=12, image_size=8, flip=True)))
    assert torch.equal(made["pair"], plain["inputs"])
    assert torch.equal(made["inputs"], plain["inputs"]) == (not any(jitter))
    assert made["mask"].shape == ((6, 1, 8, 8) if kind is Image.Image else (6, 8, 8))
    assert made["mask"].aminmax() != (0, 0)
    assert made["alone"].shape == (6, 3)


def test_data_in_memory_are_resized_with_their_conditions() -> None:
    images = coordinates(side=17)
    made = by_index(batches(InMemory(images, conditions={"a": images, "b": images[:, 1]}), transforms=ALL))
    assert made["inputs"].shape == (6, 3, 8, 8)
    assert torch.equal(made["a"], made["inputs"])
    assert torch.equal(made["b"], made["inputs"][:, 1])
    with refused(UserError, "'a'", "uint8", "bool"):
        feed_of(InMemory(images, conditions={"a": images > 5}), ALL)


def test_without_augmentation_the_centre_of_all_images_is_cut_out() -> None:
    images = coordinates()
    (batch,) = feed_of(InMemory(images, conditions={"mask": images[:, 0].bool()}), ALL).unaugmented(torch.arange(6))
    assert torch.equal(batch.inputs, images[:, :, 2:10, 2:10].float() / 127.5 - 1)
    assert torch.equal(batch.conditions["mask"], images[:, 0, 2:10, 2:10].bool())


@pytest.mark.parametrize("workers", [0, *wide(1)])
def test_tuples_have_their_conditions_by_place(workers: int) -> None:
    image, mask = torch.zeros(1, 2, 2), torch.eye(2).bool()
    for item, label, names in (
        ((image,), None, []),
        ((image, 3), 3, []),
        ((image, torch.tensor([3])), 3, []),
        ((image, None), None, []),
        ((image, 0.5), None, ["item1"]),
        ((image, mask), None, ["item1"]),
        ((image, 3, mask), 3, ["item2"]),
        ([image, numpy.int64(3), mask, numpy.zeros(4), [1, 2]], 3, ["item2", "item3", "item4"]),
        ((image, mask, 7), None, ["item1", "item2"]),
    ):
        (batch,) = batches([item] * 4, workers=workers)
        assert (list(batch.conditions), as_list(batch.labels)) == (names, None if label is None else [label] * 4)


def test_numbers_and_lists_become_columns() -> None:
    items = [{"image": torch.zeros(3), "age": k, "weight": k / 2, "is_old": k > 2, "tokens": [k, k]} for k in range(4)]
    (batch,) = batches(items)
    dtypes = {"age": torch.int64, "weight": torch.float32, "is_old": torch.bool, "tokens": torch.int64}
    assert {name: column.dtype for name, column in batch.conditions.items()} == dtypes
    for name, column in batch.conditions.items():
        assert column.tolist() == [items[k][name] for k in as_list(batch.indices)]


def test_vectors_and_tokens_are_inputs_as_they_are() -> None:
    for values in (torch.rand(4, 6), torch.rand(4, 6, 5), torch.randint(0, 9000, (4, 7)), torch.randint(9, (4, 7, 2))):
        made = by_index(batches([{"inputs": value} for value in values]))
        assert torch.equal(made["inputs"], values)
        assert made["inputs"].dtype == values.dtype


def sample(**changed: Any) -> dict[str, Any]:
    return {"image": torch.zeros(1, 4, 4), "label": 1, "caption": torch.zeros(7), **changed}


def without(key: str) -> dict[str, Any]:
    return {name: value for name, value in sample().items() if name != key}


@pytest.mark.parametrize("workers", [0, *wide(1)])
@pytest.mark.parametrize(
    ("broken", "facts"),
    [
        (sample(caption="a cat"), ["'caption'", "str", "tensor", "[data.encode]"]),
        (sample(caption=["a cat"]), ["'caption'", "list", "tensor", "[data.encode]"]),
        (sample(caption=None), ["'caption'", "NoneType", "tensor"]),
        (sample(caption={"a": 1}), ["'caption'", "dict", "tensor"]),
        (sample(caption=torch.zeros(8)), ["'caption'", 8, 7, "float32"]),
        (sample(caption=torch.zeros(7).long()), ["'caption'", "int64", "float32"]),
        (sample(caption=Image.new("L", (5, 9))), ["'caption'", "9 x 5", "4 x 4"]),
        (without("caption"), ["'caption'", "nothing"]),
        (sample(extra=1), ["'caption'", "'extra'"]),
        (without("image"), ["'label'", "'caption'", "'image'", "'inputs'"]),
        (sample(image="a.png"), ["str", "tensor", "Pillow"]),
        (sample(label="cat"), ["'label'", "str", "integer"]),
        (sample(label=0.5), ["'label'", "float", "integer"]),
        (sample(image=torch.zeros(1, 5, 5)), ["1 x 5 x 5", "1 x 4 x 4"]),
    ],
)
def test_items_that_do_not_collate_are_refused_with_sample_and_key(broken: Any, facts: list[Any], workers: int) -> None:
    source = [*[sample() for _ in range(5)], broken, *[sample() for _ in range(2)]]
    with refused(UserError, 5, *facts) as caught:
        batches(source, 8, workers=workers)
    traceback.clear_frames(caught.tb)  # otherwise the workers end seconds later, at a garbage collection


def test_masks_that_cannot_be_resized_are_refused_with_their_key() -> None:
    items = [{"image": torch.zeros(3, 20, 20).byte(), "mask": torch.zeros(20, 20).long()}] * 4
    with refused(UserError, "'mask'", "int64", "uint8"):
        batches(items, transforms=ALL)


@pytest.mark.parametrize(("column", "got"), [(torch.zeros(5, 2), "(5, 2)"), (torch.zeros(()), "()"), ([1] * 6, "list")])
def test_conditions_with_other_rows_are_refused(column: Any, got: str) -> None:
    with refused(ValueError, "'mask'", 6, got):
        InMemory(torch.zeros(6, 1, 2, 2), conditions={"mask": column})


def masked(net: nn.Module, batch: Batch) -> Tensor:
    """A loss on part of each sample."""
    return (net(batch.inputs) - batch.inputs).square() * batch.conditions["mask"]


def items() -> list[dict[str, Tensor]]:
    return [{"inputs": row, "mask": row > 0.3 * row.mean()} for row in torch.linspace(-1, 1, 160).reshape(40, 4)]


@pytest.mark.parametrize("data", [items, lambda: InMemory(torch.ones(40, 4), conditions={"mask": torch.rand(40, 4)})])
def test_a_run_with_conditions_resumes_exactly_and_in_any_micro_batch(data: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    options = {"data": data(), "objective": masked, "steps": 13}
    whole = toy_run({"keeps": (kept := Restores(at=7))}, **options)
    assert_same(weights(whole), weights(toy_run({"keeps": Restores(kept.state)}, **options)))
    for name, value in weights(toy_run(**options, micro_batch=3)).items():
        torch.testing.assert_close(value, weights(whole)[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("workers", [0, *wide(1)])
def test_the_keys_of_items_can_be_named(workers: int) -> None:
    """As the processors of transformers name them; a "label" that is not the label is a condition."""
    values = torch.linspace(-1, 1, 24).reshape(6, 1, 2, 2)
    items = [{"pixel_values": values[k], "class": k, "label": 2 * k} for k in range(6)]
    for batch in batches(items, workers=workers, image_key="pixel_values", label_key="class"):
        assert batch.labels is not None
        assert torch.equal(batch.inputs, values[batch.labels])
        assert_same(batch.conditions, {"label": 2 * batch.labels})


@pytest.mark.parametrize(
    ("item", "keys", "facts"),
    [
        (
            {"id": 3, "pixel_values": torch.zeros(1, 2, 2)},
            {},
            ["sample", "'id', 'pixel_values'", "'image' or 'inputs'", "image_key='pixel_values'"],
        ),
        ({"pixel_values": torch.zeros(4)}, {"image_key": "pixel_value"}, ["no 'pixel_value'", "'pixel_values'?"]),
        ({"image": torch.zeros(4)}, {"label_key": "class"}, ["the keys 'image'", "no 'class'", "label_key"]),
        ({"image": torch.zeros(4), "class": "cat"}, {"label_key": "class"}, ["'class' is a str", "an integer"]),
        ({}, {}, ["no keys", "'image' or 'inputs'"]),
    ],
)
def test_an_item_without_its_keys_is_refused_with_those_that_it_has(
    item: dict[str, Any], keys: dict[str, str], facts: list[str]
) -> None:
    with refused(UserError, *facts):
        batches([item] * 6, **keys)
