import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Generator, Tensor, nn

from hookdiff import PASS, Batch, Every, Loop, LoopConfig, Objective, hookimpl
from hookdiff.data import digits
from hookdiff.structure import Problems, arguments
from hookdiff_samples import SampleGrid
from tests.conftest import check_facts, refused, warnings


class Brightness(nn.Module):
    """A picture of one grey: `level`, plus a little of the noise."""

    def __init__(self) -> None:
        super().__init__()
        self.level = nn.Parameter(torch.zeros(()))
        self.dropout = nn.Dropout(0.5)

    def forward(self, noise: Tensor) -> Tensor:
        shown: Tensor = self.dropout(self.level + 0.1 * noise)
        return shown


class TinySampler:
    def __init__(self, channels: int | None = None) -> None:
        self.channels, self.sizes = channels, list[int]()

    def sample(
        self,
        net: nn.Module,
        objective: Objective,
        shape: Sequence[int],
        generators: Sequence[Generator],
        device: torch.device,
    ) -> Tensor:
        self.sizes.append(len(generators))
        shape = (self.channels or shape[0], *shape[1:])
        images: Tensor = net(torch.stack([torch.randn(*shape, generator=g) for g in generators]).to(device))
        return images


class Gallery:
    """A sink that keeps the images."""

    def __init__(self) -> None:
        self.seen: dict[int, Tensor] = {}

    @hookimpl
    def on_images(self, step: int, images: Mapping[str, Tensor]) -> None:
        self.seen[step] = images["samples"]


def loss(net: nn.Module, batch: Batch) -> Tensor:
    result: Tensor = (net(torch.zeros_like(batch.inputs)) - batch.inputs).square()
    return result


def make_loop(plugin: SampleGrid | None, run_dir: Path | None = None, **options: Any) -> tuple[Loop, Gallery]:
    torch.manual_seed(0)
    gallery, sampler = Gallery(), options.pop("sampler", TinySampler())
    plugins = {"gallery": gallery} | ({"samples": plugin} if plugin else {}) | options.pop("plugins", {})
    config = LoopConfig(**{"steps": 5, "batch_size": 128, **options})
    model = Brightness()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    return Loop(model, optimizer, loss, digits(), config, plugins, sampler=sampler, run_dir=run_dir), gallery


def test_writes_grids_when_due_and_when_done(tmp_path: Path) -> None:
    loop, gallery = make_loop(SampleGrid(every=Every(2), num=10), tmp_path)
    loop.run()
    names = ["step-00000002.png", "step-00000004.png", "step-00000005.png"]
    assert sorted(path.name for path in (tmp_path / "samples").iterdir()) == names  # and nothing half-written
    assert list(gallery.seen) == [2, 4, 5]
    for images in gallery.seen.values():
        assert (images.shape, images.dtype, images.device.type) == ((10, 1, 8, 8), torch.uint8, "cpu")
    with Image.open(tmp_path / "samples" / names[0]) as picture:
        width, height = picture.size
    assert width > height >= 3 * 64  # 4 columns, 3 rows, every image enlarged


def test_columns_and_scale(tmp_path: Path) -> None:
    loop, _ = make_loop(SampleGrid(every=Every(5), num=6, columns=6, scale=1), tmp_path)
    loop.run()
    with Image.open(tmp_path / "samples" / "step-00000005.png") as picture:
        assert picture.height < 3 * 8
        assert picture.width > 6 * 8


def test_no_second_grid_at_the_last_step() -> None:
    sampler = TinySampler()
    make_loop(SampleGrid(every=Every(5), num=4), sampler=sampler)[0].run()
    assert sampler.sizes == [4]


@pytest.mark.parametrize(
    ("every", "steps"), [(0, [28]), ("1 epoch", [14, 28]), ("2 epochs", [28]), ("1 h", [28]), (20, [20, 28])]
)
def test_every(every: Any, steps: list[int]) -> None:
    loop, gallery = make_loop(SampleGrid(every=every, num=1), steps=None, epochs=2)
    loop.run()
    assert list(gallery.seen) == steps


def test_only_a_run_that_is_done_gets_a_last_grid() -> None:
    loop, gallery = make_loop(SampleGrid(num=1))
    with loop:
        for step in loop.steps():
            if step.step == 2:
                loop.stop()
    assert gallery.seen == {}


def test_the_noise_is_always_the_same() -> None:
    still: dict[str, Any] = {"plugins": {"still": Frozen()}}
    loop, gallery = make_loop(SampleGrid(every=Every(1), num=6), steps=2, **still)
    loop.run()
    assert torch.equal(gallery.seen[1], gallery.seen[2])
    assert len({image.numpy().tobytes() for image in gallery.seen[1]}) == 6
    other, other_gallery = make_loop(SampleGrid(every=Every(1), num=6, seed=1), steps=2, **still)
    other.run()
    assert not torch.equal(gallery.seen[1], other_gallery.seen[1])


class Frozen:
    @hookimpl
    def optimizer_step(self) -> bool:
        return True


def test_images_do_not_depend_on_how_they_are_divided() -> None:
    sampler = TinySampler()
    whole = make_loop(SampleGrid(num=10), steps=1, plugins={"still": Frozen()})
    parts = make_loop(SampleGrid(num=10), steps=1, plugins={"still": Frozen()}, sampler=sampler, micro_batch=4)
    for loop, _ in (whole, parts):
        loop.run()
    assert sampler.sizes == [4, 4, 2]
    assert torch.equal(whole[1].seen[1], parts[1].seen[1])


def test_sampling_does_not_change_the_training() -> None:
    plain, _ = make_loop(None)
    plain.run()
    watched, gallery = make_loop(SampleGrid(every=Every(1), num=3))
    watched.run()
    assert len(gallery.seen) == 5
    assert torch.equal(plain.model.level, watched.model.level)  # type: ignore[arg-type]
    assert watched.model.training


def test_other_ranks_make_no_images(second_rank: None, tmp_path: Path) -> None:
    sampler = TinySampler()
    loop, _ = make_loop(SampleGrid(every=Every(1), num=4), tmp_path, sampler=sampler)
    loop.run()
    assert sampler.sizes == []
    assert list(tmp_path.iterdir()) == []


def test_latents_are_shown_channel_by_channel(tmp_path: Path) -> None:
    loop, gallery = make_loop(SampleGrid(num=2, scale=1), tmp_path, sampler=TinySampler(channels=4))
    loop.run()
    assert gallery.seen[5].shape == (2, 4, 8, 8)
    with Image.open(tmp_path / "samples" / "step-00000005.png") as picture:
        assert picture.width > 3 * 8 > picture.width - 3 * 8  # 8 pictures in 3 columns


def break_images(rows: Sequence[int], value: float) -> Callable[..., Tensor]:
    class Breaking(TinySampler):
        def sample(self, *arguments: Any) -> Tensor:
            images = super().sample(*arguments)
            images[list(rows), :, 0, 0] = value
            return images

    return Breaking  # type: ignore[return-value]


@pytest.mark.parametrize(("value", "shown"), [(math.nan, 0), (math.inf, 255), (-math.inf, 0)])
def test_images_that_are_not_finite_are_warned_of(value: float, shown: int, caplog: pytest.LogCaptureFixture) -> None:
    loop, gallery = make_loop(SampleGrid(num=5), sampler=break_images([1, 3], value)())
    loop.run()
    (warning,) = warnings(caplog)
    check_facts(warning, "samples", "step 5", "2 of 5")
    assert gallery.seen[5][[1, 3], 0, 0, 0].tolist() == [shown, shown]
    assert gallery.seen[5][0].float().mean() > 1


def test_it_samples_with_the_configured_weights() -> None:
    asked = []

    class Listener:
        @hookimpl
        def sample(self, request: Any) -> Any:
            asked.append((request.weights, request.num, request.start, request.stream))
            return PASS

    make_loop(SampleGrid(num=200, weights="model"), steps=1, plugins={"listener": Listener()})[0].run()
    assert asked == [("model", 0, 0, "sample"), ("model", 128, 0, "sample"), ("model", 72, 128, "sample")]


@pytest.mark.parametrize(("key", "value"), [("num", 0), ("seed", -1), ("columns", 0), ("scale", 0), ("every", "soon")])
def test_a_bad_value_is_refused(key: str, value: Any) -> None:
    with refused(ValueError, key if key != "every" else "soon"):
        SampleGrid(**{key: value})


def test_it_is_configured_by_a_table() -> None:
    problems = Problems()
    table = {"every": "2 epochs", "num": 9, "weights": "ema"}
    assert arguments(SampleGrid, table, "plugins.samples", problems) == {**table, "every": Every(2, "epochs")}
    assert not problems.found
