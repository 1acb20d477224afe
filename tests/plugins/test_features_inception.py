"""The network of FID and its recipes, against torchvision, Pillow and formulas."""

import hashlib
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from attrs import evolve
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional
from torchvision.models import inception

import hookdiff_features.spaces as spaces
from hookdiff import UserError
from hookdiff.features.space import Space
from hookdiff_features import Inception, TorchvisionInception
from hookdiff_features.inception import InceptionV3
from hookdiff_features.recipes import RECIPES
from tests.conftest import refused
from tests.random_inception import pictures, random_network

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def network() -> inception.Inception3:
    return random_network()


@pytest.fixture(scope="module")
def weights(network: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "random.pth"
    torch.save(network.state_dict(), path)
    return path


@pytest.fixture(scope="module")
def sha256(weights: Path) -> str:
    return hashlib.sha256(weights.read_bytes()).hexdigest()


# The network


def uniform() -> Tensor:
    return torch.rand(2, 3, 171, 171, generator=torch.Generator().manual_seed(0)) * 2 - 1


def features_of(network: inception.Inception3, images: Tensor) -> tuple[Tensor, Tensor]:
    """Return features and logits of torchvision's network."""
    features: list[Tensor] = []
    hook = network.avgpool.register_forward_hook(lambda _, __, output: features.append(output.flatten(1)))
    logits: Any = network(images)
    hook.remove()
    return features[0], logits


def test_the_network_is_that_of_torchvision(network: inception.Inception3) -> None:
    expected = features_of(network, uniform())
    output = InceptionV3(network.state_dict(), as_in_fid=False)(uniform())
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-4)


def test_the_network_of_fid_pools_another_way(network: inception.Inception3, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def pool(x: Tensor, kernel_size: int, stride: int, padding: int) -> Tensor:
        calls.append(x.shape)
        if len(calls) == 9:  # in the last block
            return functional.max_pool2d(x, kernel_size, stride, padding)
        return functional.avg_pool2d(x, kernel_size, stride, padding, count_include_pad=False)

    changed = SimpleNamespace(**{**vars(functional), "avg_pool2d": pool})
    monkeypatch.setattr(inception, "F", changed)
    expected, _ = features_of(network, uniform())
    assert len(calls) == 9
    features, logits = InceptionV3(network.state_dict(), as_in_fid=True)(uniform())
    assert torch.allclose(features, expected, rtol=1e-4, atol=1e-4)
    assert torch.allclose(logits, expected @ network.fc.weight.T, rtol=1e-4, atol=1e-3)  # without a bias
    others, _ = InceptionV3(network.state_dict(), as_in_fid=False)(uniform())
    assert float((features - others).abs().max()) > 0.1


# The recipes


def by_tensorflow_1(image: Tensor, side: int = 299) -> Tensor:
    """Resize c h w by the formula of TensorFlow 1, in float64."""
    _, height, width = image.shape
    image = image.double()
    rows, columns = (torch.arange(side, dtype=torch.float64) * size / side for size in (height, width))
    top, left = rows.floor().long(), columns.floor().long()
    down, right = (top + 1).clamp(max=height - 1), (left + 1).clamp(max=width - 1)
    dy, dx = (rows - top)[:, None], columns - left
    upper = image[:, top][:, :, left] * (1 - dx) + image[:, top][:, :, right] * dx
    lower = image[:, down][:, :, left] * (1 - dx) + image[:, down][:, :, right] * dx
    return (upper * (1 - dy) + lower * dy - 128) / 128


def by_pillow(image: Tensor, side: int = 299) -> Tensor:
    layers = [Image.fromarray(layer.float().numpy()).resize((side, side), Image.Resampling.BICUBIC) for layer in image]
    return (torch.from_numpy(numpy.stack([numpy.asarray(layer) for layer in layers])).clamp(0, 255) - 128) / 128


def by_torch(antialias: bool, scale: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def resized(image: Tensor) -> Tensor:
        size = (299, 299)
        return scale(functional.interpolate(image[None].double(), size, mode="bilinear", antialias=antialias)[0])

    return resized


EXPECTED: dict[str, Callable[[Tensor], Tensor]] = {
    "torch-fidelity": by_tensorflow_1,
    "pytorch-fid": by_torch(False, lambda x: 2 * x / 255 - 1),
    "torchmetrics": by_torch(True, lambda x: (x - 128) / 128),
    "clean-fid": by_pillow,
}


@pytest.mark.parametrize("sides", [(8, 8), (32, 32), (299, 299), (512, 300), (1, 1)])
@pytest.mark.parametrize("recipe", EXPECTED)
def test_recipes_resize_and_scale_as_their_formulas_say(recipe: str, sides: tuple[int, int]) -> None:
    assert set(EXPECTED) == set(RECIPES)
    images = pictures(2, 3, *sides)
    expected = torch.stack([EXPECTED[recipe](image) for image in images])
    # A hundredth of a grey level: float32 rounds places of pixels, and Pillow its weights.
    assert float((RECIPES[recipe](images).double() - expected.double()).abs().max()) < 1e-4


def test_recipes_differ_where_they_should() -> None:
    large, equal = pictures(2, 3, 512, 512), pictures(2, 3, 299, 299)
    inputs = [recipe(large) for recipe in RECIPES.values()]
    distances = [float((a - b).abs().max()) for i, a in enumerate(inputs) for b in inputs[:i]]
    assert min(distances) > 0.02
    at_size = [recipe(equal) for recipe in RECIPES.values()]
    assert all(float((image - at_size[0]).abs().max()) < 0.01 for image in at_size)  # 127.5 or 128 is grey


# The spaces


def opened(weights: Path, sha256: str, **options: Any) -> Space:
    return Inception(weights=str(weights), sha256=sha256, **options).open(CPU)


def test_features_of_any_size_and_of_grey_images(weights: Path, sha256: str) -> None:
    before = torch.get_rng_state()
    space = opened(weights, sha256)
    assert torch.equal(torch.get_rng_state(), before)
    for shape in ((3, 32, 32), (3, 20, 50)):
        features, logits = space(pictures(1, *shape))
        assert (features.shape, features.dtype) == ((1, 2048), torch.float32)
        assert logits is not None
        assert logits.shape == (1, 1008)
    grey = pictures(1, 1, 16, 16)
    assert torch.equal(space(grey)[0], space(grey.expand(-1, 3, -1, -1))[0])
    with refused(UserError, "4 x 16 x 16", "inception"):
        space(pictures(2, 4, 16, 16))


def test_the_name_tells_space_recipe_and_weights(weights: Path, sha256: str, monkeypatch: pytest.MonkeyPatch) -> None:
    unpublished = opened(weights, sha256, recipe="clean-fid")
    assert unpublished.distance == f"fd/inception-{sha256[:8]}/clean-fid"  # other weights give no FID
    monkeypatch.setattr(spaces, "FID_WEIGHTS", evolve(spaces.FID_WEIGHTS, sha256=sha256))
    published = Inception(weights=str(weights)).open(CPU)
    assert published.distance == "fid/inception/torch-fidelity"
    half = Inception(weights=str(weights), precision="bf16").open(CPU)
    assert half.distance == "fid/inception/torch-fidelity/bf16"
    assert len({unpublished.key, published.key, half.key}) == 3
    images = pictures(1, 3, 64, 64)
    exact, rounded = published(images)[0], half(images)[0]
    assert 0 < float((exact - rounded).norm() / exact.norm()) < 0.02


def test_torchvisions_network_is_another_space(network: inception.Inception3, weights: Path, sha256: str) -> None:
    space = TorchvisionInception(str(weights), sha256).open(CPU)
    assert space.distance == f"fd/inception-torchvision-{sha256[:8]}"
    images = pictures(1, 3, 299, 299)
    assert torch.allclose(space(images)[1], network(images / 127.5 - 1), rtol=1e-4, atol=1e-4)  # type: ignore[arg-type]


# The weights


def test_other_weights_than_the_published_ones_are_refused(weights: Path, sha256: str) -> None:
    for digest in (None, "0" * 64):
        with refused(UserError, weights, sha256, digest or spaces.FID_WEIGHTS.sha256):
            Inception(weights=str(weights), sha256=digest).open(CPU)
    with refused(UserError, "random.pth"):
        Inception(weights=str(weights.with_name("rando.pth"))).open(CPU)


@pytest.mark.wide
def test_weights_are_fetched_once(weights: Path, sha256: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    source = Path(shutil.copy(weights, tmp_path))
    cached = tmp_path / "hub" / "checkpoints" / weights.name
    monkeypatch.setattr(spaces, "FID_WEIGHTS", evolve(spaces.FID_WEIGHTS, url=source.as_uri(), sha256=sha256))
    first = Inception().open(CPU)
    assert cached.exists()
    source.unlink()
    assert Inception().open(CPU).key == first.key
    cached.rename(cached.with_name(spaces.FID_WEIGHTS.names[0]))  # as another package keeps it
    assert Inception().open(CPU).key == first.key


def test_offline_the_message_says_what_to_fetch_and_where_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    url = (tmp_path / "nowhere" / "weights.pth").as_uri()
    monkeypatch.setattr(spaces, "FID_WEIGHTS", evolve(spaces.FID_WEIGHTS, url=url))
    with refused(UserError, url, tmp_path / "hub" / "checkpoints" / "weights.pth", "weights = FILE"):
        Inception().open(CPU)


def test_a_damaged_download_is_refused(weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr(spaces, "FID_WEIGHTS", evolve(spaces.FID_WEIGHTS, url=weights.as_uri()))
    with refused(UserError, weights.as_uri()):
        Inception().open(CPU)
    assert not list((tmp_path / "hub" / "checkpoints").iterdir())


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("exploded"),)


@pytest.mark.usefixtures("here")
def test_what_is_no_file_of_weights_is_refused_and_runs_nothing() -> None:
    torch.save({"fc.weight": Bomb()}, "bomb.pth")
    Path("pickle.pth").write_bytes(pickle.dumps(Bomb()))
    Path("text.safetensors").write_text("text")
    torch.save([torch.zeros(2)], "list.pth")
    torch.save({"fc.weight": torch.zeros(2)}, "other.pth")
    facts = {name: name for name in ("bomb.pth", "pickle.pth", "text.safetensors", "list.pth")}
    for name, fact in {**facts, "other.pth": "Conv2d_1a_3x3_weight"}.items():
        digest = hashlib.sha256(Path(name).read_bytes()).hexdigest()
        with refused(UserError, fact):
            Inception(weights=name, sha256=digest).open(CPU)
    assert not Path("exploded").exists()
