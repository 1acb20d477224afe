"""Images of several sizes: of `hookdiff sample` and a script, whose data is gone, and in the sheets of a run."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy
import pytest
import tomli_w
import torch
from PIL import Image

from hookdiff import UserError, build_loop, load_config, load_run
from hookdiff.data import to_unit_range
from hookdiff.log import to_uint8
from hookdiff.run_dir import picture_files
from tests.conftest import Command, check_facts, check_refused, output
from tests.plugins.test_samples import Gallery, info_of, panels

KINDS = {"ant": (48, 24), "bee": (30, 30), "cat": (20, 30)}  # width and height; they become 16x8, 8x8 and 8x12
NUMBERS = {"ant": 12, "bee": 6, "cat": 4}
CONFIG: dict[str, Any] = {
    "run": {"steps": 2, "batch_size": 4, "device": "cpu", "plugins": ["checkpoint"]},
    "data": {"source": "folder", "path": "pictures", "image_size": 8, "buckets": ["16x8", "8x8", "8x12"]},
    "model": {"use": "dit", "patch_size": 2, "hidden_size": 16, "depth": 1, "num_heads": 2, "num_classes": 3},
    "diffusion": {"process": {"use": "vp", "timesteps": 20}},
    "sampling": {"steps": 2, "batch_size": 16},
}


def write_pictures(folder: Path) -> None:
    generator = numpy.random.default_rng(0)
    for name, (width, height) in KINDS.items():
        (folder / name).mkdir(parents=True)
        for number in range(NUMBERS[name]):
            values = generator.integers(0, 256, (height, width, 3), dtype=numpy.uint8)
            Image.fromarray(values).save(folder / name / f"{number}.png")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a run, whose data was removed."""
    folder = tmp_path_factory.mktemp("made")
    write_pictures(folder / "pictures")
    data = {**CONFIG["data"], "path": str(folder / "pictures")}
    (folder / "c.toml").write_text(tomli_w.dumps({**CONFIG, "data": data}))
    build_loop(load_config(folder / "c.toml"), folder / "run").run()
    shutil.rmtree(folder / "pictures")
    return folder


@pytest.fixture
def run(made: Path, here: Path) -> Path:
    """Return the path of a copy of the run, in the folder of the test."""
    return shutil.copytree(made / "run", here / "run")


def archive(path: Path) -> Any:
    return numpy.load(path)["arr_0"]


@pytest.mark.parametrize(
    ("size", "shape", "near"),
    [
        (None, (8, 16), ()),
        ("16x8", (8, 16), ()),
        ("8x12", (12, 8), ()),
        ("20x8", (8, 20), ("20x8", "16x8", "8x8", "8x12")),
    ],
)
def test_any_size_is_made_without_the_data(
    size: str | None,
    shape: tuple[int, int],
    near: tuple[str, ...],
    hookdiff: Command,
    here: Path,
    run: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    words = () if size is None else ("--size", size)
    output(hookdiff("sample", "run", "--num", 40, "--out", "x.npz", *words))  # in several batches
    assert len(caplog.messages) == bool(near)
    check_facts(caplog.text, *near)
    pixels = archive(here / "x.npz")
    assert pixels.shape == (40, *shape, 3)
    with load_run("run") as opened:
        images = opened.sample(40, size=size)
        assert numpy.array_equal(to_uint8(images).permute(0, 2, 3, 1).numpy(), pixels)
        few = opened.sample(2, size=size, numbers=(31, 7), labels=["bee", "bee"])  # 31 % 3 is 1, as 7 % 3
        assert torch.allclose(few, images[[31, 7]], atol=1e-5)
        assert opened.sample(0, size=size).shape == (0, 3, *shape)
        noise = torch.randn(2, 3, *shape, generator=torch.Generator().manual_seed(1))
        assert opened.sample(2, size=size, noise=noise).shape == (2, 3, *shape)
        with pytest.raises(ValueError, match="noise has the shape"):
            opened.sample(2, size="10x10", noise=noise)


@pytest.mark.parametrize(
    ("size", "facts"),
    [
        ("80", ("--size", "WIDTHxHEIGHT", "80")),
        ("8x", ("--size", "WIDTHxHEIGHT", "8x")),
        ("0x8", ("--size", "WIDTHxHEIGHT", "0x8")),
        ("17x8", ("17x8", "patch_size", 16, 18, "16x8", "8x8", "8x12")),
    ],
)
def test_a_wrong_size_is_one_message(size: str, facts: tuple[object, ...], hookdiff: Command, run: Path) -> None:
    check_refused(hookdiff("sample", "run", "--num", 2, "--size", size), *facts)


def write_starts(folder: Path) -> list[Path]:
    """Write pictures of three sizes, and return their paths; the last one is nearest to the first."""
    folder.mkdir()
    paths = [folder / f"{number}.png" for number in range(4)]
    for number, (path, sides) in enumerate(zip(paths, ((12, 8), (16, 8), (50, 50), (4, 5)), strict=True)):
        Image.fromarray(numpy.full((*sides, 3), 60 * number, numpy.uint8)).save(path)
    return paths


def test_each_picture_goes_to_its_nearest_size_and_keeps_its_place(hookdiff: Command, here: Path, run: Path) -> None:
    paths = write_starts(here / "starts")
    words = ("sample", "run", "--images", "starts", "--labels", "bee,cat", "--strength", 0.5)
    output(hookdiff(*words, "--num", 7, "--each", "each", "--out", "x.png"))
    sizes = [(8, 12), (8, 12), (8, 8), (8, 8)]
    names = sorted(path.name for path in (here / "each").iterdir())
    assert names == [f"{number:06}-{('bee', 'cat')[number % 2]}.png" for number in range(7)]
    with load_run("run") as opened:
        for number, name in enumerate(names):
            with Image.open(here / "each" / name) as image:
                pixels, size = numpy.asarray(image), sizes[number % 4]
            assert pixels.shape == (size[1], size[0], 3)
            with Image.open(paths[number % 4]) as start:
                fitted = to_unit_range(opened.transforms.fit(start.resize(size), (size[1], size[0])))
            alone = opened.sample(
                1,
                numbers=[number],
                size=f"{size[0]}x{size[1]}",
                images=fitted[None],
                labels=[("bee", "cat")[number % 2]],
                strength=0.5,
            )
            assert abs(to_uint8(alone)[0].permute(1, 2, 0).numpy().astype(int) - pixels.astype(int)).max() <= 1
    (place,) = info_of(here / "x.png")["panels"]
    assert (place["width"] * 12, place["num"]) == (place["height"] * 8, 8)  # padded to 8x12; a row for each class
    check_refused(hookdiff(*words, "--out", "x.npz"), "x.npz", "8x12", "8x8", "--size")
    output(hookdiff(*words, "--out", "x.npz", "--size", "16x8"))
    assert archive(here / "x.npz").shape == (4, 8, 16, 3)


def test_a_mask_gets_the_size_of_its_pictures(hookdiff: Command, here: Path, run: Path) -> None:
    picture = numpy.arange(16 * 8 * 3, dtype=numpy.uint8).reshape(8, 16, 3)
    mask = numpy.zeros((8, 16), numpy.uint8)
    mask[:, 10:] = 255
    Image.fromarray(picture).save(here / "picture.png")
    Image.fromarray(mask).save(here / "mask.png")
    words = ("sample", "run", "--images", "picture.png", "--mask", "mask.png", "--out", "x.npz", "--overwrite")
    output(hookdiff(*words))
    made = archive(here / "x.npz")[0]
    assert numpy.array_equal(made[mask == 0], picture[mask == 0])
    assert not numpy.array_equal(made[mask > 0], picture[mask > 0])
    output(hookdiff(*words, "--size", "8x8"))
    assert numpy.array_equal(archive(here / "x.npz")[0, :, :6], picture[:, 4:10])


def test_strips_have_a_size(hookdiff: Command, here: Path, run: Path) -> None:
    for more in ((), ("--labels", "ant,cat")):
        words = ("sample", "run", "--interpolate", 3, "--num", 2, "--size", "8x12", "--out", "x.png", "--overwrite")
        output(hookdiff(*words, *more, "--each", f"each{len(more)}"))
        info = info_of(here / "x.png")
        assert (info["size"], info["interpolate"]) == ("8x12", 3)
        for path in (here / f"each{len(more)}").iterdir():
            with Image.open(path) as image:
                assert image.size == (8, 12)


def test_the_transforms_of_a_run_give_other_pictures_its_sizes(run: Path) -> None:
    with load_run("run") as opened:
        transforms = opened.transforms
        for width, height, size in ((90, 40, (8, 16)), (40, 90, (12, 8)), (41, 40, (8, 8))):
            assert transforms.sized.nearest(height, width) == size
            assert transforms.fit(Image.new("L", (width, height)), size).shape == (3, *size)


@pytest.mark.parametrize("sides", [[120, 128], [8, 16]])
def test_a_run_with_several_sides_gives_pictures_the_sizes_of_its_training(
    sides: list[int], hookdiff: Command, here: Path
) -> None:
    """Sizes of two sides may have the same shape, or about the pixels of the other square."""
    known = [(150, 90), (160, 96), (130, 130), (90, 150), (250, 190), (12, 9)] * 2
    (here / "pictures").mkdir()
    for number, size in enumerate(known):
        Image.new("RGB", size, (20 * number, 0, 0)).save(here / "pictures" / f"{number:02}.png")
    data = {"source": "folder", "path": "pictures", "image_size": sides, "buckets": True, "upscale": True}
    model = {"use": "tests.experiment.test_size_checks:Picky", "multiple": 1}
    run = {**CONFIG["run"], "steps": 1, "batch_size": 2}
    (here / "c.toml").write_text(tomli_w.dumps({**CONFIG, "run": run, "data": data, "model": model}))
    with build_loop(load_config(here / "c.toml"), here / "run") as loop:
        loop.run()
        chosen = [loop.feed.reader.shapes[number][1:] for number in loop.feed.reader.shape_numbers.tolist()]
    with load_run("run", trust=True) as opened:
        assert [opened.transforms.sized.nearest(height, width) for width, height in known] == chosen
    output(hookdiff("sample", "run", "--images", "pictures/00.png", "--out", "x.npz", "--trust"))


def sheets(folder: Path, *settings: str, **options: Any) -> Gallery:
    """Train a run with the plugin `samples` and these options in a new folder, and return what it has shown."""
    write_pictures(folder / "pictures")
    run = {**CONFIG["run"], "plugins": ["samples", "checkpoint"]}
    data = {**CONFIG["data"], "path": str(folder / "pictures")}
    tables = {**CONFIG, "run": run, "data": data, "plugins": {"samples": {"num": 6, "scale": 1, **options}}}
    (folder / "c.toml").write_text(tomli_w.dumps(tables))
    gallery = Gallery()
    build_loop(load_config(folder / "c.toml", settings=settings), folder / "run", plugins={"gallery": gallery}).run()
    return gallery


@pytest.mark.parametrize(
    ("options", "settings", "titles", "shapes"),
    [
        ({}, (), ["16x8", "8x8", "8x12"], [(8, 16), (8, 8), (12, 8)]),
        ({"sizes": ["8x12", "16x8"]}, (), ["8x12", "16x8"], [(12, 8), (8, 16)]),
        ({"sizes": ["10x10"]}, (), ["10x10"], [(10, 10)]),
        (
            {"guidance_scales": [1.0, 2.0], "sizes": ["8x8"]},
            (),
            ["8x8, model, guidance 1", "8x8, model, guidance 2"],
            [],
        ),
        ({}, ("data.buckets=false",), [""], [(8, 8)]),
    ],
)
def test_a_sheet_has_a_panel_for_each_size(
    options: dict[str, Any],
    settings: tuple[str, ...],
    titles: list[str],
    shapes: list[tuple[int, int]],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    picture = sheets(tmp_path, *settings, **options).pictures["samples"]
    shown = panels(picture)
    assert [title for title, _ in shown] == titles
    assert [images.shape[1:3] for _, images in shown][: len(shapes)] == shapes
    sizes = [title.partition(",")[0] for title in titles]
    assert picture.info.get("sizes") == ([*dict.fromkeys(sizes)] if sizes[0] else None)
    for path, (_, images) in zip(picture_files(tmp_path / "run", "samples").values(), shown[:1], strict=True):
        with load_run(tmp_path / "run") as opened:
            made = to_uint8(opened.sample(6, size=sizes[0] or None, guidance_scale=1.0))
        assert path.name == "step-00000002.png"
        by_class = made[[0, 3, 1, 4, 2, 5]].permute(0, 2, 3, 1)  # a row for each class
        assert (by_class.int() - images.int()).abs().max() <= 1
    assert ("10x10" in caplog.text) == (titles == ["10x10"])


def test_strips_and_animations_have_the_most_frequent_size(tmp_path: Path) -> None:
    gallery = sheets(tmp_path, sizes=["8x8", "16x8"], interpolation=3, every=1)
    for name in ("samples/denoising", "samples/interpolation"):
        assert {images.shape[1:3] for _, images in panels(gallery.pictures[name])} == {(8, 16)}
        assert gallery.pictures[name].info["size"] == "16x8"
    with Image.open(tmp_path / "run" / "samples" / "denoising.webp") as animation:
        columns, rows = (animation.size[k] // (side + 4) for k, side in ((0, 16), (1, 8)))
        assert columns * rows == 6
    with Image.open(tmp_path / "run" / "samples" / "filmstrip.png") as film:  # of the first panel
        assert film.size == (4 + 2 * (8 + 4), 18 + 5 * (8 + 4))


@pytest.mark.parametrize(
    ("size", "facts"),
    [
        ("80", ("plugins.samples", "sizes", "WIDTHxHEIGHT", "80")),
        ("17x8", ("plugins.samples.sizes", "17x8", "patch_size", "16x8")),
    ],
)
def test_a_wrong_size_is_refused_before_the_first_step(size: str, facts: tuple[str, ...], tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        sheets(tmp_path, sizes=[size])
    check_facts(error.value, *facts)
    assert not (tmp_path / "run").exists()
