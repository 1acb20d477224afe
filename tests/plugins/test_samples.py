import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from attrs import evolve
from PIL import Image
from torch import Generator, Tensor, nn

from hookdiff import Batch, Every, Loop, LoopConfig, SampleRequest, UserError, build_loop, hookimpl, load_config
from hookdiff.builtin.pictures import Pictures
from hookdiff.data import digits
from hookdiff.diffusion import DDIM, Diffusion, Process, Sampling, Solver
from hookdiff.log import Picture, grid, panel_layouts, read_info
from hookdiff.run_dir.pictures_png import find_pictures, picture_files, picture_path
from hookdiff.testing.toy import ToySampler
from hookdiff_checkpoint import Checkpoint
from hookdiff_samples import SampleGrid
from hookdiff_samples.between import Towards, noise_between
from hookdiff_samples.chain import Recorded
from hookdiff_samples.film import frames, growing_up
from tests.conftest import SMALL, Still, check_facts, refused, warnings, wide


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
        self.batch_size = 256

    def sample(self, net: nn.Module, objective: Any, shape: Any, generators: Any, device: torch.device) -> Tensor:
        self.sizes.append(len(generators))
        shape = (self.channels or shape[0], *shape[1:])
        images: Tensor = net(torch.stack([torch.randn(*shape, generator=g) for g in generators]).to(device))
        return images


class Gallery:
    """A sink that keeps the sheets, and the images on their first panel: n h w, uint8."""

    def __init__(self) -> None:
        self.seen: dict[int, Tensor] = {}
        self.pictures: dict[str, Picture] = {}

    @hookimpl
    def on_images(self, step: int, images: Mapping[str, Picture]) -> None:
        self.seen[step] = panels(images["samples"])[0][1]
        self.pictures |= images


def panels(picture: Picture) -> list[tuple[str, Tensor]]:
    """Return the title and the images of each panel, n h w (3), uint8."""
    found = []
    for place in panel_layouts(picture.info):
        boxes = [place.box(number) for number in range(place.num)]
        tiles = [picture.pixels[top:bottom, left:right] for left, top, right, bottom in boxes]
        found.append((place.title, torch.from_numpy(numpy.stack(tiles))))
    return found


def loss(net: nn.Module, batch: Batch) -> Tensor:
    result: Tensor = (net(torch.zeros_like(batch.inputs)) - batch.inputs).square()
    return result


def make_loop(plugin: SampleGrid, run_dir: Path | None = None, **options: Any) -> tuple[Loop, Gallery]:
    torch.manual_seed(0)
    gallery, sampler = Gallery(), options.pop("sampler", TinySampler())
    plugins: dict[str, object] = {"gallery": gallery, "images": Pictures(), "samples": plugin}
    plugins |= options.pop("plugins", {})
    config = LoopConfig(**{"steps": 5, "batch_size": 128, **options})
    model = Brightness()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    return Loop(model, optimizer, loss, digits(), config, plugins, sampler=sampler, run_dir=run_dir), gallery


def run_with(plugin: SampleGrid, run_dir: Path | None = None, **options: Any) -> Gallery:
    """Run such a loop to its end, and return what it has shown."""
    loop, gallery = make_loop(plugin, run_dir, **options)
    assert loop.run() == "done"
    return gallery


def test_sheets_are_made_when_due_and_when_done(tmp_path: Path) -> None:
    gallery = run_with(SampleGrid(every=Every(2), num=10), tmp_path)
    names = ["step-00000002.png", "step-00000004.png", "step-00000005.png"]
    assert [path.name for path in find_pictures(tmp_path)["samples"].values()] == names
    assert list(gallery.seen) == [2, 4, 5]
    for images in gallery.seen.values():
        assert (images.shape, images.dtype) == ((10, 64, 64), torch.uint8)  # each is enlarged
    others = ["filmstrip.png", "training.webp"]
    assert sorted(path.name for path in (tmp_path / "samples").iterdir()) == sorted([*others, *names])


def test_columns_and_scale(tmp_path: Path) -> None:
    run_with(SampleGrid(every=Every(5), num=6, columns=6, scale=1), tmp_path)
    with Image.open(tmp_path / "samples" / "step-00000005.png") as picture:
        assert picture.height < 3 * 8
        assert picture.width > 6 * 8


def test_the_noise_is_always_the_same() -> None:
    still: dict[str, Any] = {"plugins": {"still": Still()}}
    images = run_with(SampleGrid(every=Every(1), num=6), steps=2, **still).seen
    assert torch.equal(images[1], images[2])
    assert len({image.numpy().tobytes() for image in images[1]}) == 6
    others = run_with(SampleGrid(every=Every(1), num=6, seed=1), steps=2, **still).seen
    assert not torch.equal(images[1], others[1])


def test_images_do_not_depend_on_how_they_are_divided() -> None:
    sampler = TinySampler()
    sampler.batch_size = 4
    whole = run_with(SampleGrid(num=10), steps=1, plugins={"still": Still()})
    parts = run_with(SampleGrid(num=10), steps=1, plugins={"still": Still()}, sampler=sampler)
    assert sampler.sizes == [4, 4, 2]
    assert torch.equal(whole.seen[1], parts.seen[1])


def test_other_ranks_make_the_images_too_and_show_none(second_rank: None, tmp_path: Path) -> None:
    sampler = TinySampler()
    gallery = run_with(SampleGrid(every=Every(1), num=4), tmp_path, sampler=sampler)
    assert (sampler.sizes, gallery.seen) == ([4] * 5, {})
    assert list(tmp_path.iterdir()) == []


def test_latents_are_shown_channel_by_channel(tmp_path: Path) -> None:
    gallery = run_with(SampleGrid(num=2, scale=1), tmp_path, sampler=TinySampler(channels=4))
    assert gallery.seen[5].shape == (8, 8, 8)
    with Image.open(tmp_path / "samples" / "step-00000005.png") as picture:
        assert picture.width > 3 * 8 > picture.width - 3 * 8  # 8 pictures in 3 columns


@pytest.mark.parametrize(("value", "shown"), [(math.nan, 0), (math.inf, 255), (-math.inf, 0)])
def test_images_that_are_not_finite_are_warned_of(value: float, shown: int, caplog: pytest.LogCaptureFixture) -> None:
    class Breaking(TinySampler):
        def sample(self, *arguments: Any) -> Tensor:
            images = super().sample(*arguments)
            images[[1, 3], :, 0, 0] = value
            return images

    gallery = run_with(SampleGrid(num=5, scale=1), sampler=Breaking())
    (warning,) = warnings(caplog)
    check_facts(warning, "samples", "step 5", "2 of 5")
    assert gallery.seen[5][[1, 3], 0, 0].tolist() == [shown, shown]
    assert gallery.seen[5][0].float().mean() > 1


class Averages:
    """Offers weights that make black images."""

    @hookimpl
    def offer_weights(self) -> dict[str, Callable[[], dict[str, Tensor]]]:
        return {"black": lambda: {"level": torch.tensor(-2.0)}}


@pytest.mark.parametrize(("weights", "titles"), [((), ["black", "model"]), (("model",), [""]), (("model", "black"), 2)])
def test_weights_stand_side_by_side_with_the_same_noise(weights: tuple[str, ...], titles: Any) -> None:
    gallery = run_with(SampleGrid(num=4, weights=weights), steps=1, plugins={"average": Averages()})
    found = [(title.partition(",")[0], images) for title, images in panels(gallery.pictures["samples"])]
    assert [title for title, _ in found] == (titles if titles != 2 else ["model", "black"])
    assert gallery.pictures["samples"].info["weights"] == list(weights or titles)
    for title, images in found:
        assert (images.float().mean() < 20) == (title == "black")


def test_unknown_weights_are_refused_before_the_first_step() -> None:
    loop, _ = make_loop(SampleGrid(weights=("blakc",)), plugins={"average": Averages()})
    with refused(UserError, "'blakc'", "'black'"):
        loop.run()
    assert loop.progress.step == 0


Trained = Callable[..., dict[str, Picture]]


@pytest.fixture
def trained(write_config: Callable[..., Path], tmp_path: Path) -> Trained:
    """Return a function that trains a small model with the plugin, and returns the newest pictures by name."""

    def train(name: str, options: dict[str, Any], **tables: Any) -> dict[str, Picture]:
        gallery = Gallery()
        config = write_config(run={"steps": 2, "plugins": ["samples"]}, plugins={"samples": options}, **tables)
        build_loop(load_config(config), tmp_path / name, plugins={"gallery": gallery}).run()
        return gallery.pictures

    return train


CLASSES: dict[str, Any] = {"model": {**SMALL["model"], "num_classes": 10}, "optimizer": {"lr": 0.1}}


def test_classes_without_a_row_are_named_in_the_sheet(trained: Trained) -> None:
    tables = {**CLASSES, "model": {**CLASSES["model"], "num_classes": 12}}
    ((title, _),) = panels(trained("all", {"num": 10, "scale": 1}, **tables)["samples"])
    check_facts(title, "2 of 12 classes are not shown", "10, 11")
    chosen = {"num": 10, "scale": 1, "classes": [11, 3]}
    ((title, _),) = panels(trained("some", chosen, **tables)["samples"])
    assert title == ""


def test_each_class_has_rows_beside_its_name(trained: Trained) -> None:
    made = trained("all", {"num": 20, "scale": 1}, **CLASSES)
    (place,) = panel_layouts(made["samples"].info)
    assert (place.columns, place.num) == (2, 20)
    assert place.left > 8  # the names stand there
    some = trained("some", {"num": 20, "scale": 1, "classes": [3, "7"]}, **CLASSES)
    (place,) = panel_layouts(some["samples"].info)
    assert (place.columns, place.num) == (5, 20)
    assert some["samples"].info["classes"] == ["3", "7"]
    # With the same noise: the second image of the first sheet was of class 1, that of the second is of class 7.
    assert not torch.equal(panels(made["samples"])[0][1][2], panels(some["samples"])[0][1][10])


def test_classes_stand_in_the_order_of_the_config(trained: Trained) -> None:
    options: dict[str, Any] = {"num": 20, "scale": 1, "classes": [3, "7", -1]}
    made = trained("run", options, **CLASSES)["samples"]
    assert made.info["classes"] == ["3", "7", "-"]
    ((_, images),) = panels(made)
    assert len(images) == 18
    alone = trained("one", {**options, "num": 3}, **CLASSES)["samples"]
    assert torch.equal(images[::6], panels(alone)[0][1])


@pytest.mark.parametrize("wrong", ["cat", 10, -2])
def test_an_unknown_class_is_refused(trained: Trained, wrong: Any) -> None:
    with refused(UserError, "plugins.samples.classes", repr(wrong), "0 to 9"):
        trained("run", {"classes": [wrong]}, **CLASSES)
    with refused(UserError, "plugins.samples.classes", "model.num_classes"):
        trained("run", {"classes": [wrong]})


def test_a_panel_for_each_guidance_scale(trained: Trained) -> None:
    options = {"num": 4, "classes": [1], "guidance_scales": [1.0, 4.0], "scale": 1}
    made = trained("run", options, **CLASSES)
    (one, weak), (other, strong) = panels(made["samples"])
    assert (one, other) == ("model, guidance 1", "model, guidance 4")
    assert not torch.equal(weak, strong)
    with refused(UserError, "plugins.samples", "guidance"):
        trained("no", {"guidance_scales": [4.0]})


def info_of(path: Path) -> dict[str, Any]:
    """Return what a picture says about itself."""
    with Image.open(path) as picture:
        return read_info(picture)


def test_sampler_and_steps_of_the_sheet_are_in_its_file(trained: Trained, tmp_path: Path) -> None:
    trained("run", {"num": 4, "sampler": "euler", "steps": 3, "seed": 5})
    info = info_of(tmp_path / "run" / "samples" / "step-00000002.png")
    known = {"name": "samples", "step": 2, "sampler": "euler", "steps": 3, "seed": 5, "weights": ["model"]}
    assert known.items() <= info.items()
    with refused(UserError, "plugins.samples", "steps", 21, 20):
        trained("long", {"steps": 21})


@pytest.mark.wide
def test_each_file_says_how_its_own_images_were_made(write_config: Callable[..., Path], tmp_path: Path) -> None:
    rows = {"num": 4, "every": 1, "classes": [3, -1], "interpolation": 2}
    panels = {"weights": ["model", "ema"], "guidance_scales": [1.0, 3.0]}
    options = {**rows, **panels, "sampler": {"use": "heun", "churn": 2.0}, "steps": 4}
    config = write_config(
        run={"steps": 2, "plugins": ["samples", "ema"]},
        plugins={"samples": options},
        sampling={"steps": 2, "guidance": {"interval": [0.5, 2.0]}},
        **CLASSES,
    )
    build_loop(load_config(config), tmp_path / "run").run()
    folder = tmp_path / "run" / "samples"
    files = {
        "sheet": folder / "step-00000002.png",
        "film": folder / "filmstrip.png",
        "denoising": folder / "denoising" / "step-00000002.png",
        "interpolation": folder / "interpolation" / "step-00000002.png",
    }
    info = {name: info_of(path) for name, path in files.items()}
    assert info["sheet"]["weights"] == ["model", "ema"]
    assert info["sheet"]["guidance_scale"] == [1, 3]
    assert info["sheet"]["classes"] == ["3", "-"]
    for one in (info["film"], info["denoising"], info["interpolation"]):
        assert one["weights"] == ["model"]
        assert one["guidance_scale"] == 1
    for one in (info["sheet"], info["film"], info["denoising"]):
        assert (one["sampler"], one["options"]["sampler"]["churn"]) == ("heun", 2)
        assert one["options"]["guidance"] == {"interval": [0.5, 2]}
    assert (info["interpolation"]["sampler"], info["interpolation"]["options"]["sampler"]) == (
        *("ddim", {"eta": 0, "final": "image"}),
    )
    assert info["film"]["training_steps"] == [1, 2]
    assert info["film"]["classes"] == ["3", "3", "-", "-"]
    assert info["denoising"]["classes"] == info["interpolation"]["classes"] == ["3", "-", "3", "-"]


@pytest.mark.parametrize("process", ["vp", *wide("flow", "edm")])
def test_the_denoising_leads_from_noise_to_the_image(trained: Trained, tmp_path: Path, process: str) -> None:
    options = {"num": 5, "scale": 1, "steps": 4, "denoising": 3}
    table = {"use": process, **({"schedule": "cosine", "timesteps": 20} if process == "vp" else {})}
    tables = {"diffusion": {"process": table}, "optimizer": {"lr": 0.01}}
    made = trained("run", options, **tables)
    ((_, sheet),), ((_, strip),) = (panels(made[name]) for name in ("samples", "samples/denoising"))
    assert len(strip) == 3 * 4
    for row in range(4):
        assert torch.equal(strip[3 * row + 2], sheet[row])
        noise = torch.randn(1, 8, 8, generator=SampleRequest(5).generators()[row])
        start = strip[3 * row].flatten().float()
        assert torch.corrcoef(torch.stack([start, noise.clamp(-1, 1).flatten()]))[0, 1] > 0.9
    with Image.open(tmp_path / "run" / "samples" / "denoising.webp") as animation:
        assert 1 < animation.n_frames <= 5  # equal frames are one
    assert "samples/denoising" not in trained("none", {"num": 1, "denoising": 0})


def test_few_steps_have_a_column_each_in_the_strip(trained: Trained) -> None:
    options = {"num": 1, "scale": 1, "steps": 2, "denoising": 5}
    (place,) = panel_layouts(trained("run", options)["samples/denoising"].info)
    assert (place.columns, place.num) == (3, 3)


@pytest.mark.parametrize("process", ["flow", "vp", "ddpm", "edm"])
def test_strip_and_animation_of_the_denoising_are_at_even_signal_to_noise(process: str) -> None:
    diffusion = Diffusion(Process.of(process))
    sampling = Sampling(sampler="ddim", steps=100, clipping="none").fit(diffusion)
    image = torch.randn(1, 3, 32, 32, generator=Generator().manual_seed(1))

    def knows_the_image(x: Tensor, time: Tensor) -> Tensor:
        at = min(points, key=lambda point: abs(point.time - time[0].item()))
        if not at.alpha:  # a flow starts at pure noise, where the output is noise - image
            return x - image
        noise = (x - at.alpha * image) / at.sigma
        alpha, sigma = torch.tensor(at.alpha), torch.tensor(at.sigma)
        return diffusion.prediction.target(image, noise, alpha, sigma)

    points, recorded = sampling.points(diffusion), Recorded(sampling.sampler or DDIM(), 1, lambda images: images)
    evolve(sampling, sampler=recorded).sample(knows_the_image, diffusion, (3, 32, 32), [Generator()], "cpu")
    for shown in (recorded.strip(7, 1).images, torch.cat([recorded.frames[k] for k in recorded.evenly(32)])):
        rows = shown.flatten(1).float()
        likeness = [float(torch.corrcoef(torch.stack((one, rows[-1])))[0, 1]) for one in rows]
        # Of an image with variance 1 the noisy one has the correlation sqrt(snr / (1 + snr)).
        even = torch.linspace(-5, 5, len(rows)).sigmoid().sqrt().tolist()
        assert likeness[1:-1] == pytest.approx(even[1:-1], abs=0.06)
        assert abs(likeness[0]) < 0.06


def test_images_between_two_noises_begin_and_end_with_the_images_of_both(trained: Trained) -> None:
    options = {"num": 8, "scale": 1, "interpolation": 5, "sampler": "ddim", "weights": ["model"]}
    made = trained("run", options)
    ((_, sheet),), ((_, rows),) = (panels(made[name]) for name in ("samples", "samples/interpolation"))
    assert len(rows) == 4 * 5
    for row in range(4):
        assert (rows[5 * row].int() - sheet[2 * row].int()).abs().max() <= 1
        assert (rows[5 * row + 4].int() - sheet[2 * row + 1].int()).abs().max() <= 1
        assert not torch.equal(rows[5 * row + 1], rows[5 * row])


def test_noise_between_two_noises_has_their_variance() -> None:
    noise = noise_between((3, 64, 64), seed=1, rows=2, num=7)
    assert noise.shape == (14, 3, 64, 64)
    assert (noise.flatten(1).var(1) - 1).abs().max() < 0.05
    first, second = (torch.randn(3, 64, 64, generator=one) for one in SampleRequest(2, 1).generators())
    assert torch.equal(noise[0], first)
    torch.testing.assert_close(noise[6], second, atol=1e-6, rtol=0)


@pytest.mark.parametrize("scale", [1.0, 2.0])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_on_the_way_to_a_class_the_outputs_for_both_classes_are_mixed(scale: float, share: float) -> None:
    def net(x: Tensor, _: Tensor, labels: Tensor) -> Tensor:
        return x * 0.1 + (labels + 2).view(-1, 1, 1, 1).float() ** 2  # 1 without a class

    def mixed(x: Tensor, _: Tensor) -> Tensor:
        one, other = (1 + scale * ((label + 2) ** 2 - 1) for label in (3, 7))
        return x * 0.1 + (1 - share) * one + share * other

    def made(net: Any, solver: Any, diffusion: Diffusion, **options: Any) -> Tensor:
        sampling = Sampling(sampler=solver, steps=4, clipping="none", **options)
        labels = torch.tensor([3, 3]) if diffusion.conditional else None
        return sampling.sample(net, diffusion, (1, 4, 4), SampleRequest(2).generators(), "cpu", labels=labels)

    for solver in (Solver.of("dpmpp_2m"), Solver.of("heun")):
        towards = Towards(solver, {"labels": torch.tensor([7])}, share)
        found = made(net, towards, Diffusion(conditional=True), guidance={"use": "cfg", "scale": scale})
        torch.testing.assert_close(found, made(mixed, solver, Diffusion()), rtol=1e-4, atol=1e-4)


def test_the_filmstrip_has_a_column_for_each_sheet_and_the_animation_a_frame(tmp_path: Path) -> None:
    gallery = run_with(SampleGrid(every=Every(1), num=10, scale=8), tmp_path, plugins={"average": Averages()})
    with Image.open(tmp_path / "samples" / "filmstrip.png") as film:
        pixels = torch.from_numpy(numpy.array(film))
    columns = [left for left in range(pixels.shape[1]) if left % 68 == 4]
    assert len(columns) == 5
    model = dict(panels(gallery.pictures["samples"]))["black"]
    for row in range(5):
        top = 18 + 68 * row
        assert torch.equal(pixels[top : top + 64, columns[-1] : columns[-1] + 64], model[2 * row])
    with Image.open(tmp_path / "samples" / "training.webp") as animation:
        assert animation.n_frames == 5


@pytest.mark.wide
def test_many_sheets_become_few_columns_and_frames_with_the_first_and_the_last(tmp_path: Path) -> None:
    for step in range(1, 201):
        sheet = grid(torch.full((4, 1, 64, 64), step / 100 - 1)).with_info(name="samples", step=step)
        sheet.save(picture_path(tmp_path, "samples", step))
    sheets = find_pictures(tmp_path)["samples"]
    chosen = [frame.step for frame in frames(sheets, 10)]
    assert (len(chosen), chosen[0], chosen[-1]) == (10, 1, 200)
    assert len(growing_up(sheets)) == 60
    grid(torch.zeros(9, 1, 64, 64)).with_info(name="samples", step=201).save(picture_path(tmp_path, "samples", 201))
    assert [frame.step for frame in frames(find_pictures(tmp_path)["samples"], 10)] == [201]  # of another layout


@pytest.mark.wide
def test_each_sheet_opens_few_of_the_sheets_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, open_image = [], Image.open
    monkeypatch.setattr(Image, "open", lambda *args, **kwargs: opened.append(args) or open_image(*args, **kwargs))
    run_with(SampleGrid(every=Every(1), num=1, scale=1, animation="none"), tmp_path, steps=40)
    assert len(opened) <= 10 * 40


def test_a_damaged_sheet_is_left_out(tmp_path: Path) -> None:
    class Damages:
        @hookimpl(trylast=True)
        def between_steps(self, loop: Loop) -> None:
            if loop.progress.step == 3:
                path = picture_path(tmp_path, "samples", 3)
                path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])

    run_with(SampleGrid(every=Every(1), num=4), tmp_path, plugins={"damages": Damages()})
    assert [frame.step for frame in frames(picture_files(tmp_path, "samples"), 10)] == [1, 2, 4, 5]
    with Image.open(tmp_path / "samples" / "training.webp") as animation:
        assert animation.n_frames == 4


@pytest.mark.wide
def test_sheets_are_made_while_checkpoints_are_saved_at_every_step(tmp_path: Path) -> None:
    plugins = {"checkpoint": Checkpoint(every=1, keep_last=1)}
    run_with(SampleGrid(every=Every(1), num=1, scale=1), tmp_path, steps=40, plugins=plugins)
    assert len(find_pictures(tmp_path)["samples"]) == 40


@pytest.mark.parametrize("error", [OSError, RuntimeError, ValueError])
def test_an_animation_that_cannot_be_written_costs_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: type[Exception]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error("no")

    monkeypatch.setitem(Image.SAVE_ALL, "WEBP", fail)
    run_with(SampleGrid(every=Every(2), num=1), tmp_path)
    (warning,) = [text for text in warnings(caplog) if "training.webp" in text]
    check_facts(warning, "samples", tmp_path / "samples" / "training.webp", "no")


@pytest.mark.wide
def test_wide_sheets_have_an_animation(tmp_path: Path) -> None:
    run_with(SampleGrid(every=Every(3), num=300, columns=300), tmp_path)
    with Image.open(tmp_path / "samples" / "training.webp") as animation:
        assert (animation.width, animation.n_frames) == (16_383, 2)


@pytest.mark.wide
def test_a_gif_or_no_animation(trained: Trained, tmp_path: Path) -> None:
    for animation in ("gif", "none"):
        trained(animation, {"num": 1, "every": 1, "animation": animation})
    assert {path.suffix for path in (tmp_path / "gif" / "samples").iterdir()} == {".png", ".gif", ""}
    assert {path.suffix for path in (tmp_path / "none" / "samples").iterdir()} == {".png", ""}


def test_what_cannot_be_sampled_is_refused_before_the_first_step() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor, t: Tensor, labels: Tensor) -> Tensor:
            return self.weight * x

    def start(plugin: SampleGrid, objective: Any, data: Any, sampler: Any) -> None:
        net = Net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        config = LoopConfig(steps=1, batch_size=8)
        Loop(net, optimizer, objective, data, config, {"samples": plugin}, sampler=sampler).__enter__()

    conditional = Diffusion(conditional=True)
    with refused(UserError, "plugins.samples.classes", "num_classes"):
        start(SampleGrid(), conditional, digits(), Sampling(steps=2))
    with refused(UserError, "plugins.samples", 4):
        start(SampleGrid(), Diffusion(), torch.zeros(8, 4), Sampling(steps=2))
    with refused(UserError, "plugins.samples.interpolation", "noise"):
        start(SampleGrid(interpolation=2), loss, digits(), TinySampler())
    start(SampleGrid(interpolation=2), loss, digits(), ToySampler())  # which takes any argument
