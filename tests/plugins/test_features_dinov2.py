"""The space of FD-DINOv2 against answers of the official code, and against Pillow."""

import hashlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from attrs import evolve
from PIL import Image
from torch import Tensor
from torch.nn import functional

import hookdiff_features.dinov2 as dinov2
from hookdiff import UserError
from hookdiff.features.space import Space
from hookdiff_features.dinov2 import RECIPES, DINOv2, resampled
from tests.conftest import refused, wide
from tests.random_inception import pictures

CPU = torch.device("cpu")
WIDTH, DEPTH = 128, 2


def formula(*shape: int, scale: float, around: float = 0) -> Tensor:
    """Return numbers that look random, and are the same with every release of torch."""
    k = torch.arange(torch.Size(shape).numel(), dtype=torch.float64)
    return (around + scale * (2 * (k * k * 0.6180339887 % 1) - 1)).float().reshape(shape)


def official_weights() -> dict[str, Tensor]:
    """Return the weights of a small DINOv2, named and shaped as the official ones."""
    state = {
        "cls_token": formula(1, 1, WIDTH, scale=1),
        "pos_embed": formula(1, 1 + 37 * 37, WIDTH, scale=1),
        "mask_token": formula(1, WIDTH, scale=1),
        "patch_embed.proj.weight": formula(WIDTH, 3, 14, 14, scale=0.05),
        "patch_embed.proj.bias": formula(WIDTH, scale=0.1),
    }
    norms = ["norm"]
    for k in range(DEPTH):
        norms += [f"blocks.{k}.norm1", f"blocks.{k}.norm2"]
        for name, rows, columns in (("attn.qkv", 3, 1), ("attn.proj", 1, 1), ("mlp.fc1", 4, 1), ("mlp.fc2", 1, 4)):
            size, scale = (rows * WIDTH, columns * WIDTH), (3 + k) * (columns * WIDTH) ** -0.5
            state[f"blocks.{k}.{name}.weight"] = formula(*size, scale=scale)
            state[f"blocks.{k}.{name}.bias"] = formula(rows * WIDTH, scale=0.1)
        for name in ("ls1.gamma", "ls2.gamma"):
            state[f"blocks.{k}.{name}"] = formula(WIDTH, scale=0.2, around=0.5)
    for name in norms:
        state[f"{name}.weight"] = formula(WIDTH, scale=0.3, around=1)
        state[f"{name}.bias"] = formula(WIDTH, scale=0.1)
    return state


@pytest.fixture
def opened(tmp_path: Path) -> Callable[..., Space]:
    """Return a function that opens the space."""
    pytest.importorskip("timm")

    def call(state: dict[str, Tensor] | None = None, **options: Any) -> Space:
        path = tmp_path / "weights.pth"
        torch.save(official_weights() if state is None else state, path)
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        return DINOv2(weights=str(path), sha256=digest, **options).open(CPU)

    return call


# The network: the expected numbers were computed with the official code, facebookresearch/dinov2 at e1277af


def test_positions_are_resampled_as_the_official_code_does() -> None:
    r, c = torch.meshgrid(torch.arange(37.0), torch.arange(37.0), indexing="ij")
    grid = torch.stack((torch.sin(0.7 * r + 0.2 * c), torch.cos(0.3 * r * c)), dim=-1).reshape(1, -1, 2)
    positions = torch.cat((torch.tensor([[[5.0, 6.0]]]), grid), dim=1)
    small = resampled(positions)
    assert small.shape == (1, 257, 2)
    expected = {
        0: (5.0, 6.0),
        1: (0.489700, 0.995295),
        2: (0.828435, 0.851008),
        17: (0.830353, 0.851008),
        100: (-0.829877, -0.300794),
        256: (0.226415, -0.867347),
    }
    for place, numbers in expected.items():
        assert small[0, place].tolist() == pytest.approx(numbers, abs=1e-5)


def test_features_are_those_of_the_official_network(opened: Callable[..., Space]) -> None:
    space = opened()
    r, c = torch.meshgrid(torch.arange(224), torch.arange(224), indexing="ij")
    image = torch.stack([(7 * r + 13 * c + 50 * k) % 256 for k in range(3)]).to(torch.uint8)
    features, logits = space(image[None])
    assert logits is None
    assert (features.shape, features.dtype) == ((1, WIDTH), torch.float32)
    # In float64; in float32 the official network is off by 3e-6.
    assert features[0, :4].tolist() == pytest.approx([-0.728146, 0.145007, -0.364160, -1.028453], abs=2e-5)
    assert features[0, -4:].tolist() == pytest.approx([-0.085521, -0.322151, 0.124788, 0.375255], abs=2e-5)


def test_features_are_float32_and_opening_draws_no_random_numbers(opened: Callable[..., Space]) -> None:
    images = pictures(2, 3, 32, 32)
    before = torch.get_rng_state()
    space = opened()
    assert torch.equal(torch.get_rng_state(), before)
    features, _ = space(images)
    assert float((features[0] - features[1]).abs().max()) > 0.01
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(space(images)[0], features)
    halves = {name: value.half() for name, value in official_weights().items()}
    rounded = {name: value.float() for name, value in halves.items()}
    assert torch.equal(opened(halves)(images)[0], opened(rounded)(images)[0])


# The recipes


def by_pillow(image: Tensor) -> Tensor:
    # Two calls, because Pillow 13 resizes tall images in height first; dgm-eval requires 9.2, which does not.
    picture = Image.fromarray(image.permute(1, 2, 0).numpy())
    for size in ((224, picture.height), (224, 224)):
        picture = picture.resize(size, Image.Resampling.BICUBIC)
    return torch.from_numpy(numpy.array(picture)).permute(2, 0, 1)


def normalised(pixels: Tensor) -> Tensor:
    mean, std = (torch.tensor(colours).view(3, 1, 1) for colours in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    return (pixels / 255 - mean) / std


SIDES = [(8, 8), (32, 32), (224, 224), (7, 500), *wide(((64, 48),), ((256, 256),), ((512, 300),), ((1, 1),))]


@pytest.mark.parametrize("sides", SIDES)
def test_the_recipe_of_dgm_eval_is_exactly_that_of_pillow(sides: tuple[int, int]) -> None:
    noise = torch.randint(0, 256, (2, 3, *sides), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    images = torch.cat((pictures(2, 3, *sides), noise))
    expected = normalised(torch.stack([by_pillow(image) for image in images]))
    # All grey levels are equal: one level would be 0.017.
    assert torch.allclose(RECIPES["dgm-eval"](images), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("sides", SIDES)
def test_the_recipe_of_edm2_neither_rounds_nor_clips(sides: tuple[int, int]) -> None:
    images = torch.randint(0, 256, (2, 3, *sides), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    expected = normalised(functional.interpolate(images.double(), size=(224, 224), mode="bicubic", antialias=True))
    # A hundredth of a grey level: float32 rounds the places of pixels.
    assert torch.allclose(RECIPES["edm2"](images).double(), expected, rtol=0, atol=2e-4)
    if sides == (32, 32):
        black = normalised(torch.zeros(3, 1, 1))
        assert bool((RECIPES["edm2"](images) < black - 0.1).any())
        assert float((RECIPES["edm2"](images) - RECIPES["dgm-eval"](images)).abs().max()) > 0.1


# The space


def test_a_grey_image_has_three_equal_channels(opened: Callable[..., Space]) -> None:
    space = opened()
    grey = pictures(2, 1, 20, 30)
    assert torch.equal(space(grey)[0], space(grey.expand(-1, 3, -1, -1))[0])
    with refused(UserError, "4 x 16 x 16", "dinov2"):
        space(pictures(2, 4, 16, 16))


def test_name_and_key_tell_recipe_and_weights(opened: Callable[..., Space], monkeypatch: pytest.MonkeyPatch) -> None:
    other = opened()
    assert other.key is not None
    digest = other.key.split()[-1]
    monkeypatch.setattr(dinov2, "DINOV2_WEIGHTS", evolve(dinov2.DINOV2_WEIGHTS, sha256=digest))
    published, by_edm2 = opened(), opened(recipe="edm2")
    assert other.distance == f"fd/dinov2-{digest[:8]}"
    assert (published.distance, by_edm2.distance) == ("fd/dinov2", "fd/dinov2/edm2")
    keys = {space.key: space for space in (other, published, by_edm2)}
    assert len(keys) == 3
    assert all(key and digest in key for key in keys)
    images = pictures(2, 3, 32, 32)
    assert 0 < float((published(images)[0] - by_edm2(images)[0]).abs().max()) < 0.2


def changed(**values: Tensor | None) -> dict[str, Tensor]:
    state: dict[str, Any] = {**official_weights(), **{name.replace("__", "."): value for name, value in values.items()}}
    return {name: value for name, value in state.items() if value is not None}


@pytest.mark.parametrize(
    ("state", "fact"),
    [
        ({"fc.weight": torch.zeros(2)}, "norm.weight"),
        (changed(blocks__1__mlp__fc1__weight=None, blocks__1__mlp__fc2__weight=None), "blocks.1.mlp.fc1.weight"),
        (changed(register_tokens=torch.zeros(1, 4, WIDTH)), "register_tokens"),
        (changed(blocks__1__mlp__fc1__weight=torch.zeros(3, WIDTH)), "blocks.1.mlp.fc1.weight"),
        (changed(pos_embed=torch.zeros(1, 257, WIDTH)), "pos_embed"),
        (changed(pos_embed=torch.zeros(5)), "pos_embed"),
        (changed(norm__weight=torch.zeros(96)), 96),
        (changed(norm__weight=torch.zeros(0)), 0),
    ],
    ids=["none", "missing", "registers", "shape", "positions", "flat", "width", "empty"],
)
def test_weights_of_another_net_are_refused(state: dict[str, Tensor], fact: Any, opened: Callable[..., Space]) -> None:
    with refused(UserError, "dinov2", fact):
        opened(state)


def test_without_timm_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    # The weights are not read, nor fetched: they are more than a gigabyte.
    with refused(UserError, "dinov2", "timm", "hookdiff[dinov2]"):
        DINOv2(weights="nowhere.pth").open(CPU)
