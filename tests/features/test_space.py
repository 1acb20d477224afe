"""A space of features checks its images and its network; a function or a class of your own is one."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from attrs import define
from torch import Tensor, nn

from hookdiff import PluginError, UserError
from hookdiff.features import ROWS, Collected, Features, Space, usual_features
from hookdiff.options import parts, structured
from tests.conftest import output, refused
from tests.forked import python

CPU = torch.device("cpu")
IMAGES = torch.randint(0, 256, (100, 3, 4, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def means(images: Tensor) -> Tensor:
    return images.mean(dim=(2, 3))


PROJECTION = nn.Sequential(nn.Flatten(), nn.Linear(48, 5)).train()


@define(frozen=True)
class Halves(Features):
    """Features with an option."""

    factor: float = 0.5

    def open(self, device: torch.device) -> Space:
        return Space("halves", f"halves {self.factor}", lambda x: (means(x.float()) * self.factor, None))


@pytest.fixture
def module(user_module: Callable[[str, str], None]) -> str:
    user_module("own_features", Path(__file__).read_text("utf-8"))
    return "own_features"


def test_a_function_is_a_space(module: str) -> None:
    space = Features.of(f"{module}:means").open(CPU)
    assert (space.distance, space.key) == (f"fd/{module}.means", None)  # its code may change: nothing is kept
    features, logits = space(IMAGES)
    assert torch.allclose(features, IMAGES.float().div(127.5).sub(1).mean((2, 3)), atol=1e-6)
    assert logits is None


def test_a_network_is_a_space_in_eval_mode(module: str) -> None:
    space = Features.of(f"{module}:PROJECTION").open(CPU)
    assert space(IMAGES)[0].shape == (100, 5)
    assert not __import__(module).PROJECTION.training


def test_a_class_is_a_space_with_options(module: str) -> None:
    chosen = structured(Features, {"use": f"{module}:Halves", "factor": 0.25})  # type: ignore[type-abstract]
    assert torch.allclose(chosen.open(CPU)(IMAGES)[0], IMAGES.float().mean((2, 3)) / 4)
    assert chosen.use == f"{module}:Halves"
    with refused(ValueError, "factr", "factor"):
        structured(Features, {"use": f"{module}:Halves", "factr": 0.25})  # type: ignore[type-abstract]
    for name, kind in (("IMAGES", "Features"), ("Path", "Features")):
        with refused(PluginError, f"{module}:{name}", kind):
            Features.of(f"{module}:{name}")


def test_the_space_for_images_of_which_nothing_is_known() -> None:
    names = [usual_features(shape).use for shape in ((1, 8, 8), (1, 28, 28), (3, 8, 8), (3, 256, 256))]
    assert names == ["digits", "fashion-mnist", "inception", "inception"]
    assert {"digits", "dinov2", "fashion-mnist", "inception", "inception-torchvision"} <= parts(Features).keys()  # type: ignore[type-abstract]


def space_of(embed: Callable[[Tensor], Tensor], **options: object) -> Space:
    return Space("mine", None, lambda images: (embed(images), None), **options)  # type: ignore[arg-type]


def test_images_that_do_not_fit_are_refused() -> None:
    small = space_of(lambda x: x.float().flatten(1), channels=(1,), size=(4, 4))
    for shape in ((3, 4, 4), (1, 5, 4), (4,)):
        with refused(UserError, "mine", "1 x 4 x 4", " x ".join(map(str, shape))):
            small(torch.zeros(2, *shape, dtype=torch.uint8))


def test_features_that_are_none_are_refused() -> None:
    for embed, shape in ((lambda x: x.float(), "(100, 3, 4, 4)"), (lambda x: x[:1].flatten(1), "(2, 48)")):
        with refused(UserError, "mine", shape):
            space_of(embed)(IMAGES)
    with refused(ValueError, "mine", "100 of 100"):
        space_of(lambda x: x.flatten(1) / torch.tensor(0.0))(IMAGES + 1)


def test_features_are_computed_without_autocast_and_gradients() -> None:
    weight = torch.randn(48, 7, requires_grad=True)
    space = space_of(lambda x: x.flatten(1).float() @ weight)
    with torch.autocast("cpu", torch.bfloat16):
        features, _ = space(IMAGES)
    assert not features.requires_grad
    assert torch.allclose(features, IMAGES.flatten(1).float() @ weight.detach(), rtol=1e-5)


def test_collected_features_of_parts_are_those_of_the_whole() -> None:
    space = space_of(lambda x: means(x.float()))
    whole = Collected.of(space, [IMAGES])
    parts = [
        Collected.of(space, torch.split(IMAGES[rows], 7)) for rows in (slice(0, 40), slice(40, 40), slice(40, None))
    ]
    merged = Collected.merged(parts)
    assert merged.num == whole.num == 100
    assert torch.equal(merged.rows, whole.rows)
    assert torch.equal(Collected.from_tensors(merged.tensors()).rows, whole.rows)


def held(found: Collected) -> int:
    """Return the bytes of all storages that the rows keep alive."""
    return sum(rows.untyped_storage().nbytes() for rows in found._rows)


def test_no_more_rows_are_kept_than_metrics_of_all_pairs_can_use() -> None:
    found = Collected()
    for start in range(0, 2 * ROWS, 700):
        found.add(torch.full((700, 2), float(start)))
    assert (found.num, len(found.rows)) == (20_300, ROWS)
    both = Collected.merged([found, found])
    assert (both.num, len(both.rows)) == (40_600, ROWS)
    assert held(found) == held(both) == ROWS * 2 * 4
    more = Collected(most=15_000)
    more.add(torch.zeros(20_000, 2))
    assert len(more.rows) == len(Collected.from_tensors(more.tensors()).rows) == 15_000


@pytest.mark.parametrize("setting", ["none", "high", "medium", "matmul", "all", "old"])
def test_float32_is_exact_and_the_settings_of_the_script_come_back(setting: str) -> None:
    code = f"""
import torch
from hookdiff.features.space import Space
setting, backends = {setting!r}, torch.backends
if setting in ("high", "medium"):
    torch.set_float32_matmul_precision(setting)
if setting == "matmul":
    backends.cuda.matmul.fp32_precision = backends.mkldnn.matmul.fp32_precision = "tf32"
if setting == "all":
    backends.fp32_precision = "tf32"
if setting == "old":
    backends.cuda.matmul.allow_tf32 = backends.cudnn.allow_tf32 = True
places = (backends.cuda.matmul, backends.cudnn.conv, backends.mkldnn.matmul, backends.mkldnn.conv)
def state():
    return [place.fp32_precision for place in places]
before = state()
inside = []
Space("x", None, lambda images: (inside.append(state()) or images.float().mean((2, 3)), None))(IMAGES)
assert inside == [["ieee"] * 4], inside
assert state() == before
if setting in ("none", "high", "medium"):
    assert torch.get_float32_matmul_precision() == ("highest" if setting == "none" else setting)
"""
    images = "IMAGES = torch.zeros(2, 3, 4, 4, dtype=torch.uint8)\nbefore"
    output(python(code.replace("before", images, 1)))


def test_fewer_images_are_in_the_network_at_a_time_if_memory_is_short() -> None:
    seen = []

    def greedy(images: Tensor) -> tuple[Tensor, None]:
        seen.append(len(images))
        if len(images) > 10:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return means(images.float()), None

    features, _ = Space("greedy", None, greedy)(IMAGES)
    assert torch.equal(features, means(IMAGES.float()))
    assert seen[:4] == [64, 32, 16, 8]
    with refused(UserError, "not even one image", "cpu"):
        Space("full", None, lambda images: torch.empty(1 << 60))(IMAGES)
