"""`hookdiff init` writes a config that fits a folder of images, and trains on it."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import tomli
import torch
from hypothesis import assume, given, strategies as st
from PIL import Image

from hookdiff import load_config
from hookdiff.experiment.build import build_feed
from hookdiff.log import panel_layouts, read_info
from hookdiff_init.fit import fit
from hookdiff_init.look import Pictures
from hookdiff_init.sizes import sizes_for
from hookdiff_init.steps import example
from hookdiff_init.write import text
from tests.conftest import Command, Succeed, check_facts, check_refused, pixels, wide

pytestmark = pytest.mark.usefixtures("here")


def save(name: str, mode: str = "RGB", size: tuple[int, int] = (12, 10), seed: int = 0) -> Path:
    path = Path("mine") / name
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels(seed, 16)).resize(size).convert(mode).save(path)
    return path


def several(num: int, *names: str, **options: Any) -> None:
    """Save `num` pictures with these names in turn, which have the place {k} for the number of each."""
    for k in range(num):
        save(names[k % len(names)].format(k=k), seed=k, **options)


classes = partial(several, 24, "bee/{k}.png", "ant/{k}.png", "ant/{k}.png")
rare_classes = partial(several, 6, "day 0/{k}.png", "day 1/{k}.png", "day 2/{k}.png")
odd_names = partial(several, 16, 'a # b/"{k}\\.png', 'line\nnew/"{k}\\.png')


def loose() -> None:
    classes()
    save("loose.png")


def mixed() -> None:
    for k in range(20):
        save(f"{k}.png", "L" if k % 2 else "RGB", (12 + k, 9 + k), k)
    save("small.png", size=(5, 5))


COLOUR, BUCKETS = (3, 8, 8), {"image_size": 8, "buckets": True, "bucket_step": 2}
FOLDERS: dict[str, tuple[Callable[..., object], dict[str, Any], tuple[int, ...], int | None]] = {
    # what saves them, keys of [data], the shape of the samples, the number of classes
    "grey": (partial(several, 6, "{k}.png", mode="L"), {"image_size": 8}, (1, 8, 8), None),
    "colour": (partial(several, 6, "{k}.jpg"), {"image_size": 8}, COLOUR, None),
    "alpha": (partial(several, 6, "{k}.png", mode="RGBA"), {"image_size": 8, "background": "white"}, COLOUR, None),
    "classes": (classes, {"image_size": 8}, COLOUR, 2),
    "rare classes": (rare_classes, {"image_size": 8, "labels": "none"}, COLOUR, None),
    "loose": (loose, {"image_size": 8, "labels": "none"}, COLOUR, None),
    "one": (partial(save, "0.png"), {"image_size": 8}, COLOUR, None),
    "mixed": (mixed, {"image_size": 8, "channels": 3, "upscale": True}, COLOUR, None),
    "squares": (partial(several, 4, "{k}.png", size=(12, 12)), {}, (3, 12, 12), None),
    "wide": (partial(several, 6, "{k}.png", size=(14, 10)), BUCKETS, COLOUR, None),
    "tiny": (partial(save, "0.png", size=(3, 2)), {**BUCKETS, "upscale": True}, COLOUR, None),
    "odd names": (odd_names, {"image_size": 8}, COLOUR, 2),
}
first = ("grey", "alpha", "classes", "rare classes", "mixed")


@pytest.mark.parametrize("kind", [*first, *wide(*(kind for kind in FOLDERS if kind not in first))])
def test_the_config_fits_the_folder(hookdiff: Command, succeed: Succeed, kind: str) -> None:
    images, data, shape, num_classes = FOLDERS[kind]
    images()
    out = succeed("init", "mine")
    check_facts(out, "mine.toml", "hookdiff run mine.toml", "hookdiff sample runs/mine")
    written = Path("mine.toml").read_text("utf-8")
    assert len(written.splitlines()) <= 45
    table = tomli.loads(written)
    assert table["data"] == {"source": "folder", "path": "mine", "flip": False, **data}
    assert table.get("diffusion", {}) == ({"conditional": True} if num_classes else {})
    assert table["plugins"]["samples"]["num"] in [times * (num_classes or 4) for times in (1, 2, 4)]
    assert hookdiff("check", "mine.toml")[::2] == (0, "")
    config = load_config(Path("mine.toml"))
    feed = build_feed(config)
    assert (feed.shape, feed.num_classes) == (shape, num_classes)
    feed.bind(config.run.batch_size)  # raises if there are too few images


def test_the_side_of_larger_images_becomes_a_power_of_two(succeed: Succeed) -> None:
    save("0.png", size=(23, 21))
    succeed("init", "mine", "-o", "other.toml", "--minutes", "0.1", "--schema")
    assert Path("other.toml").read_text().startswith("#:schema ./hookdiff.schema.json\n")
    assert Path("hookdiff.schema.json").exists()
    assert tomli.loads(Path("other.toml").read_text())["data"]["image_size"] == 16
    assert not Path("mine.toml").exists()


@pytest.mark.parametrize(("side", "trained"), [(7, 8), (16, 16), (20, 20), (21, 16), (52, 32), *wide((40, 40))])
def test_squares_keep_their_size_if_a_network_takes_it(hookdiff: Command, side: int, trained: int) -> None:
    save("0.png", size=(side, side))
    assert hookdiff("init", "mine", "--minutes", 1000)[0] == 0  # enough for the largest
    data = tomli.loads(Path("mine.toml").read_text())["data"]
    assert data.get("image_size") == (None if trained == side else trained)
    assert build_feed(load_config(Path("mine.toml"))).shape == (3, trained, trained)


@pytest.mark.parametrize("side", [8, 20])
def test_the_image_size_can_be_given(succeed: Succeed, side: int) -> None:
    save("0.png")
    succeed("init", "mine", "--image-size", side, "--minutes", "0.02")
    table = tomli.loads(Path("mine.toml").read_text())
    assert (table["data"]["image_size"], table["data"].get("upscale", False)) == (side, side > 10)
    assert side % 2 ** (len(table["model"]["channel_mults"]) - 1) == 0
    assert build_feed(load_config(Path("mine.toml"))).shape == (3, side, side)


@pytest.mark.parametrize(("side", "near"), [(18, "16 or 20"), (3, "8 or 10"), (50, "48 or 56")])
def test_a_size_that_no_network_takes_is_refused(hookdiff: Command, side: int, near: str) -> None:
    save("0.png")
    check_refused(hookdiff("init", "mine", "--image-size", side), f"--image-size {side}", near)
    assert not Path("mine.toml").exists()


def test_images_of_other_shapes_than_squares_keep_them(succeed: Succeed) -> None:
    for k, size in enumerate([(40, 22)] * 5 + [(22, 40)] * 3 + [(30, 30)]):
        save(f"{k}.png", size=size, seed=k)
    out = succeed("init", "mine", "--minutes", "0.02")
    check_facts(out, "at about 16 x 16, in 3 sizes")
    written = Path("mine.toml").read_text()
    table = tomli.loads(written)
    assert {key: table["data"][key] for key in BUCKETS} == {"image_size": 16, "buckets": True, "bucket_step": 4}
    # 40 x 22 becomes 22 x 12, which is cut to 20x12.
    check_facts(written, "squares cut off 40 % of the pixels, these sizes 7 %: 20x12, 12x20, 16x16")
    assert (table["run"]["batch_size"], table["plugins"]["samples"]["sizes"]) == (5, ["20x12", "12x20", "16x16"])
    check_facts(written, "no size has more images")
    feed = build_feed(load_config(Path("mine.toml"))).bind(5)
    assert feed.shapes == [(3, 12, 20), (3, 20, 12), (3, 16, 16)]
    succeed("run", "mine.toml", "--steps", 3, "--set", "sampling.steps=2", "--plugins", "no:samples")


def test_panoramas_get_a_larger_ratio(succeed: Succeed) -> None:
    for k in range(9):
        save(f"{k}.png", size=(200, 30), seed=k)
    check_facts(succeed("init", "mine", "--minutes", "0.02"), "in 1 size,")
    written = Path("mine.toml").read_text()
    ratio = tomli.loads(written)["data"]["bucket_ratio"]
    assert ratio == 8
    check_facts(written, "squares cut off 85 % of the pixels, these sizes")
    assert build_feed(load_config(Path("mine.toml"))).shape


wholes = st.integers(1, 400)


@given(
    st.dictionaries(st.tuples(wholes, wholes), st.integers(1, 9), min_size=1), st.integers(1, 16), st.integers(1, 12)
)
def test_the_sizes_fit_the_network_and_cut_off_less_than_squares(sizes: Any, divisor: int, times: int) -> None:
    pictures = Pictures("mine", sum(sizes.values()), 3, 8, sizes)
    side = divisor * times
    lost = {size: 1 - min(size) / max(size) for size in sizes}
    mean = sum(lost[size] * count for size, count in sizes.items()) / pictures.num
    assume(side >= 2 and abs(mean - 0.2) > 1e-6)
    found = sizes_for(pictures, side, divisor)
    if mean < 0.2 or found is None:
        assert found is None
        return
    assert found.cut_by_squares == pytest.approx(mean)
    assert found.cut < mean
    assert found.counts.total() == pictures.num
    taken = [[*map(int, name.split("x"))] for name in found.counts]
    assert all(each % divisor == 0 for size in taken for each in size)
    assert found.small >= sum(count for size, count in sizes.items() if min(size) < min(map(min, taken)))
    longest = max(map(max, taken))
    assert sizes_for(pictures, side, divisor, longest) == found
    shorter = sizes_for(pictures, side, divisor, longest - 1)
    if shorter is not None:  # with a smaller ratio
        assert shorter.cut > found.cut
        assert max(max(map(int, name.split("x"))) for name in shorter.counts) < longest


GRIDS: list[tuple[float | None, float, dict[str, int], list[int]]] = [
    # minutes, seconds of the smallest grid, keys of [run], keys of [plugins.samples]: every, num, steps
    (10, 2, {"steps": 5600}, [1120, 16]),
    (10, 25, {"steps": 5500}, [2750, 4]),
    (1, 2, {"steps": 540, "log_every": 27}, [180, 4]),
    (1, 10, {"steps": 560, "log_every": 28}, [0, 4, 10]),
    (0.02, 9, {"steps": 10, "log_every": 1}, [0, 4, 10]),
    (None, 0.1, {"steps": 1800}, [360, 16]),
]


def test_grids_take_a_tenth_of_the_time_and_few_steps_are_logged_often(monkeypatch: pytest.MonkeyPatch) -> None:
    pictures = Pictures("mine", 100, 3, 8, {(8, 8): 100})
    for minutes, grid, run, samples in GRIDS:
        trial = lambda _, plan, grid=grid: (0.1, grid * (plan.sampler_steps or 25) / 25)  # noqa: E731
        monkeypatch.setattr("hookdiff_init.fit.rehearse", trial)
        config = text(pictures, fit(pictures, minutes and 60 * minutes), Path("mine.toml"))
        table = tomli.loads(config)
        assert (table["run"], [*table["plugins"]["samples"].values()]) == ({"batch_size": 32, **run}, samples)
        assert ("too few" in config) == (run["steps"] < 200)
        assert ("78 % of the time" in config) == (minutes == 0.02)  # 3.6 s beside ten steps of 0.1 s


@pytest.mark.parametrize("side", [8, 20, 64])
def test_the_advice_names_minutes_that_suffice_and_a_run_of_the_docs(side: int, monkeypatch: Any) -> None:
    monkeypatch.setattr("hookdiff_init.fit.rehearse", lambda *_: (0.1, 0.5))
    pictures, docs = Pictures("mine", 100, 3, side, {(side, side): 100}), Path(__file__).parents[2] / "docs"
    assert example(side).time in (docs / "gallery.md").read_text() + (docs / "tutorial/pictures.md").read_text()
    few, way, *_ = fit(pictures, 5, side).advice
    check_facts(few, f"{side} x {side}", f"{25 * side:,}")
    assert not fit(pictures, 60 * int(re.findall(r"--minutes (\d+)", way)[0]), side).advice


def test_the_config_says_which_network_diffusers_loads_and_how_long_it_trains(succeed: Succeed) -> None:
    save("0.png")
    out = succeed("init", "mine", "--minutes", "0.5")
    config = Path("mine.toml").read_text()
    check_facts(config, "not a class of diffusers", "--model diffusers")
    for words in (out, config):
        assert re.search(r"about (29|30|31) s\b", words), words  # the number of steps is rounded


@pytest.mark.wide
@pytest.mark.parametrize("images", [classes, partial(several, 6, "{k}.png", mode="L")], ids=["classes", "grey"])
def test_a_network_of_diffusers_is_exported_to_it(succeed: Succeed, images: Callable[[], None]) -> None:
    diffusers = pytest.importorskip("diffusers")
    images()
    out = succeed("init", "mine", "--model", "diffusers", "--minutes", "0.02")
    check_facts(out, "hookdiff export runs/mine mine --to diffusers")
    few = ("--set", "run.steps=2", "--set", "sampling.steps=2", "--plugins", "no:samples")
    succeed("run", "mine.toml", *few)
    succeed("export", "runs/mine", "there", "--to", "diffusers")
    model = diffusers.UNet2DModel.from_pretrained("there", subfolder="unet")
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler.from_pretrained("there", subfolder="scheduler")
    assert (model.config.num_class_embeds, model.config.in_channels) == ((3, 3) if images is classes else (None, 1))
    assert scheduler.config.shift == 3


def test_three_commands_make_samples_of_each_class(hookdiff: Command, succeed: Succeed) -> None:
    classes()
    succeed("init", "mine", "--minutes", "0.02")
    code, _, err = hookdiff("run", "mine.toml", "--set", "run.steps=4", "--set", "sampling.steps=2")
    assert (code, "classes" in err) == (0, False), err
    assert load_config(Path("runs/mine/config.toml")).model.arguments["num_classes"] == 2
    succeed("sample", "runs/mine", "--steps", 2, "--num", 4)
    assert Path("runs/mine/samples/seed-0.png").is_file()


def test_without_a_folder_the_digits_are_trained(succeed: Succeed) -> None:
    succeed("init")
    assert tomli.loads(Path("digits.toml").read_text())["data"] == {"source": "digits"}
    succeed("check", "digits.toml")
    succeed("init", "--image-size", 20, "--minutes", "0.02", "--overwrite")
    assert build_feed(load_config(Path("digits.toml"))).shape == (1, 20, 20)


def no_images() -> None:
    save("0.png").rename("mine/0.txt")


def broken() -> None:
    for k in range(2):
        save(f"{k}.png").write_bytes(b"")


@pytest.mark.parametrize(
    ("images", "facts"),
    [(no_images, ("mine", "1 .txt")), (broken, ("mine/0.png", "mine/1.png", 2)), (lambda: None, ("'mine'",))],
)
def test_a_folder_without_usable_images_is_refused(hookdiff: Command, images: Callable[[], None], facts: Any) -> None:
    images()
    check_refused(hookdiff("init", "mine"), *facts)
    assert not Path("mine.toml").exists()


def captions(num: int) -> None:
    for k in range(num):
        Path(f"mine/{k}.txt").write_text("a disc")


def test_captions_are_seen(succeed: Succeed) -> None:
    several(7, "{k}.png")
    for num, is_seen in ((3, False), (4, True)):
        captions(num)
        out = succeed("init", "mine", "--minutes", "0.02", "--overwrite")
        assert ("--text-encoder DIR" in out) == is_seen
        assert "captions" not in tomli.loads(Path("mine.toml").read_text())["data"]


@pytest.mark.parametrize(
    ("num", "words", "facts"),
    [
        (3, ["mine", "--text-encoder", "."], ("3 of 7", ".txt", "half")),
        (7, ["mine", "--text-encoder", "."], ("--text-encoder", "config.json")),
        (7, ["mine", "--text-encoder", "min"], ("--text-encoder", "'mine'")),
        (7, ["mine", "--text-encoder", "some/clip"], ("--text-encoder", "hf download some/clip")),
        (7, ["mine", "--text-encoder", ".", "--model", "diffusers"], ("--text-encoder", "--model diffusers")),
        (7, ["--text-encoder", "."], ("digits", "captions")),
    ],
)
def test_captions_that_cannot_be_trained_on_are_refused(hookdiff: Command, num: int, words: Any, facts: Any) -> None:
    pytest.importorskip("transformers")
    several(7, "{k}.png")
    captions(num)
    check_refused(hookdiff("init", *words), *facts)
    assert not Path("mine.toml").exists()


@pytest.mark.slow
def test_the_samples_of_each_class_are_recognised(succeed: Succeed) -> None:
    for k in range(60):
        rows, columns = numpy.mgrid[:24, :30] - numpy.array([12, 15])[:, None, None]
        disc = rows**2 + columns**2 < (6 + k % 4) ** 2
        for name, picture in (("black", ~disc), ("white", disc)):
            path = Path("mine") / name / f"{k}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(picture.astype(numpy.uint8) * 255).save(path)
    succeed("init", "mine")
    assert tomli.loads(Path("mine.toml").read_text())["data"]["image_size"] == 16
    succeed("run", "mine.toml", "--set", "run.steps=150", "--set", "plugins.samples.every=0")
    succeed("sample", "runs/mine", "--num", 8, "--out", "made.png")
    with Image.open("made.png") as image:
        (place,) = panel_layouts(read_info(image))
        samples = torch.stack([torch.from_numpy(numpy.array(image.crop(place.box(k)))).float() for k in range(8)])
    middle, corner = samples[:, 24:40, 24:40].mean((1, 2)), samples[:, :8, :8].mean((1, 2))
    assert ((corner - middle)[:4] > 100).sum() >= 3  # black discs on white, in the rows of the first class
    assert ((middle - corner)[4:] > 100).sum() >= 3
