import shutil

import numpy
import pytest
import tomli
import tomli_w
import torch
from PIL import Image
from safetensors.torch import load_file

from hookdiff import build_loop, load_config, load_run
from hookdiff.testing.compare import assert_same
from hookdiff_samples.pictures import single_name
from tests.conftest import check_facts, check_refused, output, wide, write_small
from tests.plugins.test_samples import info_of

NEWEST = "run/checkpoints/step-00000002"


def train(folder, *settings):
    """Make a run of two steps in a folder, and return the folder."""
    run = {"steps": 2, "log_every": 2, "plugins": ["ema", "lr", "checkpoint"]}
    tables = {"optimizer": {"lr": 0.1}, "plugins": {"lr": {"schedule": "cosine", "total": 6}}}
    config = load_config(write_small(folder / "small.toml", run=run, **tables), settings=settings)
    build_loop(config, folder / "run").run()
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Return a folder with a run of two steps."""
    return train(tmp_path_factory.mktemp("made"))


@pytest.fixture(scope="module")
def made_of_classes(tmp_path_factory):
    """Return a folder with a run of three steps, with ten classes."""
    return train(tmp_path_factory.mktemp("classes"), "model.num_classes=10", "run.steps=3")


@pytest.fixture
def run_of_classes(made_of_classes, here):
    """Return the path of a copy of the run with classes, in the folder of the test."""
    return shutil.copytree(made_of_classes / "run", here / "run")


@pytest.fixture
def run(made, here):
    """Return the path of a copy of the run, in the folder of the test."""
    return shutil.copytree(made / "run", here / "run")


def test_samples_come_from_a_checkpoint(hookdiff, here, run):
    before = sorted(path for path in run.rglob("*") if path.is_file())

    def sample(*words):
        out = output(hookdiff("sample", "run", "--num", 3, "--out", "x.png", "--overwrite", *words))
        return pixels(here / "x.png"), out

    def pixels(path):
        with Image.open(path) as image:
            assert image.format == "PNG"
            return image.tobytes()

    averaged, out = sample()
    check_facts(out, "x.png", 3, "ema", 2)
    info = info_of(here / "x.png")
    assert {"weights": "ema", "step": 2, "seed": 0, "sampler": "dpmpp_2m", "steps": 2}.items() <= info.items()
    assert sample()[0] == averaged
    assert sample("--weights", "ema")[0] == averaged
    own, out = sample("--weights", "model")
    check_facts(out, "x.png", 3, "model", 2)
    assert own != averaged
    assert sample("--seed", 1)[0] != averaged
    assert sample("--steps", 3)[0] != averaged
    assert sample("--sampler", "ddpm")[0] != averaged
    sample("--precision", "bf16")
    assert info_of(here / "x.png")["precision"] == "bf16"
    assert sorted(path for path in run.rglob("*") if path.is_file()) == before

    from_file, out = sample("--weights", f"{NEWEST}/ema.safetensors")
    assert from_file == averaged
    check_facts(out, "x.png", 3, f"{NEWEST}/ema.safetensors")

    output(hookdiff("resume", "run", "--steps", 3))
    assert sample()[0] != averaged
    check_facts(output(hookdiff("sample", NEWEST, "--num", 3)), "run/samples/seed-0.png", 3, "ema", 2)
    assert pixels(run / "samples" / "seed-0.png") == averaged
    check_facts(hookdiff("sample", "run", "--num", 1, "--seed", 7)[1], "run/samples/seed-7.png", 1)


@pytest.mark.parametrize(
    ("words", "facts"),
    [
        (["--weights", "no.safetensors"], ("weights", "no.safetensors")),
        (["--weights", f"{NEWEST}/optimizers.safetensors"], (f"{NEWEST}/optimizers.safetensors",)),
        (["--steps", 21], ("steps", 21, "timesteps", 20)),
        (["--steps", 0], ("--steps", 1, 0)),
        (["--sampler", "dim"], ("sampling.sampler", "ddim", "ddpm", "euler", "heun", "dpmpp_2m", "'dim'", "'ddim'")),
        (["--out", "run/config.toml/x.png"], ("run/config.toml/x.png",)),
        (["--out", "run.png"], ("run.png", "directory")),
        (["--out", "x.jpg"], ("--out", "x.jpg", ".png", ".npz")),
        (["--images", "run/config.toml"], ("run/config.toml",)),
        (["--labels", "1"], ("labels",)),
    ],
)
def test_a_wrong_input_is_reported_in_one_message(hookdiff, made, monkeypatch, words, facts):
    monkeypatch.chdir(made)
    (made / "run.png").mkdir(exist_ok=True)
    check_refused(hookdiff("sample", "run", "--num", 1, *words), *facts)


def test_golden_message_of_unknown_weights(hookdiff, made, monkeypatch):
    monkeypatch.chdir(made)
    assert hookdiff("sample", "run", "--weights", "emma")[::2] == (
        2,
        "hookdiff: run: --weights: no weights of this run are named 'emma'; did you mean 'ema'?; known: ema, "
        "ema/std=0.1, model, or a file that ends in .safetensors\n",
    )


@pytest.mark.wide
def test_samples_have_classes_and_guidance(hookdiff, here, run_of_classes):
    assert tomli.loads((here / "run" / "config.toml").read_text())["diffusion"]["conditional"] is True

    def sample(*words):
        output(hookdiff("sample", "run", "--num", 20, "--out", "x.npz", "--overwrite", *words))
        return numpy.load(here / "x.npz")["arr_0"].tobytes()

    each = sample()  # by default the images take the classes in turn
    assert sample("--labels", "0,1,2,3,4,5,6,7,8,9") == each
    assert sample("--labels", "3") != each
    assert sample("--labels", "-1") != each
    assert sample("--guidance-scale", 1) == each
    assert sample("--guidance-scale", 3) != each
    assert sample("--guidance-scale", 0) == sample("--labels", "-1")
    output(hookdiff("sample", "run", "--labels", "7,3,-1", "--guidance-scale", 2, "--num", 4, "--out", "x.png"))
    info = info_of(here / "x.png")
    assert (info["classes"], info["guidance_scale"]) == (["7", "3", "-"], 2)
    for words, facts in (
        (["--labels", "10"], (10, 0, 9, -1)),
        (["--labels", "one"], ("one", 0, 9, -1)),
        (["--guidance-scale", -1], ("sampling.guidance", "scale", 0, -1.0)),
    ):
        check_refused(hookdiff("sample", "run", "--num", 20, *words), *facts)


def array(path):
    """Return the pixels of a picture."""
    with Image.open(path) as image:
        return numpy.asarray(image.convert("L")).astype(int)


def singles(folder):
    """Return the pixels of the pictures in a folder, in the order of their names."""
    return [array(path) for path in sorted(folder.iterdir())]


def test_strips_lead_from_one_noise_to_the_next(hookdiff, here, run):
    words = ("sample", "run", "--steps", 5)
    out = output(hookdiff(*words, "--interpolate", 3, "--num", 2, "--out", "x.png", "--each", "strips"))
    check_facts(out, "x.png", "x.gif", "strips", "6 images")
    output(hookdiff(*words, "--num", 4, "--sampler", "ddim", "--each", "ends"))
    strips, ends = singles(here / "strips"), singles(here / "ends")
    for strip, end in ((0, 0), (2, 1), (3, 2), (5, 3)):
        assert abs(strips[strip] - ends[end]).max() <= 1
    assert not numpy.array_equal(strips[1], strips[0])
    info = info_of(here / "x.png")
    assert (info["sampler"], info["interpolate"]) == ("ddim", 3)
    assert [(place["columns"], place["num"]) for place in info["panels"]] == [(3, 6)]
    with Image.open(here / "x.gif") as animation:
        assert animation.n_frames == 4  # there and back
    before = (here / "x.gif").read_bytes()
    (here / "x.png").unlink()
    check_refused(hookdiff(*words, "--interpolate", 3, "--out", "x.png"), "x.gif", "--overwrite")
    assert (here / "x.gif").read_bytes() == before
    check_facts(hookdiff(*words, "--interpolate", 2, "--num", 1)[1], "run/samples/interpolation-seed-0.gif")
    for more, facts in (
        (["--columns", 2], ("--interpolate", "--columns")),
        (["--images", "x.gif"], ("--interpolate", "--images")),
        (["--out", "x.npz"], ("--out", "x.npz", ".png")),
        (["--labels", "1,2"], ("labels",)),
    ):
        check_refused(hookdiff(*words, "--interpolate", 3, *more), *facts)


@pytest.mark.wide
def test_strips_lead_from_one_class_to_another(hookdiff, here, run_of_classes):
    words = ("sample", "run", "--guidance-scale", 3, "--num", 2)
    output(hookdiff(*words, "--interpolate", 4, "--labels", "7,2", "--out", "x.png", "--each", "strips"))
    strips = singles(here / "strips")
    for column, label in ((0, 7), (3, 2)):
        output(hookdiff(*words, "--labels", label, "--sampler", "ddim", "--each", f"only{label}"))
        for row, image in enumerate(singles(here / f"only{label}")):
            assert abs(strips[4 * row + column] - image).max() <= 1
    assert not any(numpy.array_equal(strips[k], strips[k + 1]) for k in (0, 1, 2))
    info = info_of(here / "x.png")
    assert (info["classes"], info["guidance_scale"]) == (["7", "2"], 3)
    output(hookdiff(*words, "--interpolate", 2, "--labels", "5", "--out", "y.png"))
    assert info_of(here / "y.png")["classes"] == ["5", "5"]
    check_refused(hookdiff(*words, "--interpolate", 2, "--labels", "1,2,3"), "--interpolate", "--labels")


def test_single_pictures_have_class_and_description(hookdiff, here, run_of_classes):
    words = ("sample", "run", "--steps", 3, "--num", 3)
    output(hookdiff(*words, "--labels", "7,-1,2", "--each", "singles", "--seed", 5))
    names = [path.name for path in sorted((here / "singles").iterdir())]
    assert names == ["000000-7.png", "000001.png", "000002-2.png"]
    for number, (name, label) in enumerate(zip(names, ("7", "-", "2"), strict=True)):
        made = {"classes": [label], "number": number, "seed": 5, "steps": 3, "step": 3, "weights": "ema"}
        assert made.items() <= info_of(here / "singles" / name).items()
    # A picture of the same number is refused and replaced, though its class has another name.
    check_refused(hookdiff(*words, "--labels", "3", "--each", "singles"), "000000-7.png", "--overwrite")
    output(hookdiff(*words, "--labels", "3,-1", "--num", 2, "--each", "singles", "--overwrite"))
    assert {path.name for path in (here / "singles").iterdir()} == {"000000-3.png", "000001.png", "000002-2.png"}


def test_a_name_of_a_class_is_made_fit_for_a_file():
    for name, file in (("a/b: c", "000007-a_b_c.png"), ("..", "000007.png"), ("é" * 99, f"000007-{'é' * 60}.png")):
        assert single_name(7, name) == file


def test_samples_start_from_a_picture(hookdiff, here, run):
    Image.new("RGB", (30, 20), (250, 250, 250)).save(here / "white.jpg")

    def sample(*words):
        output(hookdiff("sample", "run", "--num", 4, "--steps", 20, "--out", "x.png", "--overwrite", *words))
        return numpy.asarray(Image.open(here / "x.png").convert("L"), dtype=float).mean()

    # One of twenty steps changes the picture little; twenty steps keep little of it.
    assert sample("--images", "white.jpg", "--strength", 0.05) > sample("--images", "white.jpg", "--strength", 1) > 0


def test_a_grid_says_how_it_was_made(hookdiff, here, run):
    Image.new("L", (8, 8), 255).save(here / "white.png")
    words = ("--num", 2, "--sampler", "euler", "--steps", 4, "--seed", 3, "--weights", "model", "--out", "x.png")
    output(hookdiff("sample", "run", *words))
    info = info_of(here / "x.png")
    used = {"sampler": "euler", "steps": 4, "seed": 3, "weights": "model", "guidance_scale": 1, "step": 2}
    assert used.items() <= info.items()
    assert info["options"]["sampler"]["churn"] == 0
    assert not {"images", "strength", "mask", "classes"} & info.keys()
    for more, strength in ((("--mask", "white.png"), 1), (("--strength", 0.5), 0.5)):
        output(hookdiff("sample", "run", *words, "--overwrite", "--images", "white.png", *more))
        info = info_of(here / "x.png")
        assert (info["images"], info["strength"]) == (["white.png"], strength)
        assert info.get("mask") == ("white.png" if "--mask" in more else None)


def test_single_pictures_are_those_of_the_archive_and_replace_none(hookdiff, here, run):
    output(hookdiff("sample", "run", "--num", 3, "--each", "singles", "--out", "x.npz"))
    (pixels,) = numpy.load(here / "x.npz").values()  # without classes there are no labels
    assert (pixels.shape, pixels.dtype) == ((3, 8, 8, 1), numpy.uint8)
    names = sorted(path.name for path in (here / "singles").iterdir())
    assert names == ["000000.png", "000001.png", "000002.png"]
    for row, name in zip(pixels, names, strict=True):
        assert numpy.array_equal(numpy.asarray(Image.open(here / "singles" / name)), row[..., 0])
    (here / "singles" / names[0]).unlink()
    before = [path.stat().st_mtime_ns for path in (here / "singles").iterdir()]
    for words, fact in ((["--each", "singles"], names[1]), (["--out", "x.npz"], "x.npz")):
        check_refused(hookdiff("sample", "run", "--num", 3, *words), fact, "--overwrite")
    assert [path.stat().st_mtime_ns for path in (here / "singles").iterdir()] == before
    assert not (run / "samples").exists()
    for name in ("seed-0.png", "seed-0-2.png"):
        check_facts(hookdiff("sample", "run", "--num", 1)[1], f"run/samples/{name}", "1 image from")
    check_facts(hookdiff("sample", "run", "--num", 1, "--overwrite")[1], "run/samples/seed-0.png")
    (here / "singles" / "notes.png").write_text("mine")
    out = output(hookdiff("sample", "run", "--num", 2, "--each", "singles", "--overwrite"))
    check_facts(out, "2 images from", "singles still has 1 of an earlier call", "000002.png")


@pytest.mark.wide
def test_only_the_white_part_of_a_mask_is_painted(hookdiff, here, run):
    picture = numpy.arange(64, dtype=numpy.uint8).reshape(8, 8) * 4
    (here / "a").mkdir()
    for name, values in {"1": picture, "2": picture[::-1].copy()}.items():
        Image.fromarray(values).save(here / "a" / f"{name}.png")
    mask = numpy.zeros((8, 8), numpy.uint8)
    mask[:, 3:6] = 255
    Image.fromarray(mask).save(here / "mask.png")
    for sampler in ("ddim", "ddpm", "euler", "heun", "dpmpp_2m"):
        words = ["--images", "a", "--mask", "mask.png", "--sampler", sampler, "--steps", 4, "--out", f"{sampler}.npz"]
        output(hookdiff("sample", "run", *words))
        made = numpy.load(here / f"{sampler}.npz")["arr_0"][..., 0]
        for row, known in zip(made, (picture, picture[::-1]), strict=True):
            assert numpy.array_equal(row[mask == 0], known[mask == 0])
            assert not numpy.array_equal(row[mask == 255], known[mask == 255])
    for words, facts in (
        (["--mask", "mask.png"], ("--mask", "--images")),
        (["--images", "a", "--mask", "a/3.png"], ("a/3.png",)),
        (["--images", "run/checkpoints"], ("--images", "run/checkpoints")),
        (["--images", "a", "--images", "wide.png", "--mask", "mask.png"], ("mask.png", "8 x 8", "wide.png", "12 x 8")),
    ):
        Image.new("L", (12, 8)).save(here / "wide.png")
        check_refused(hookdiff("sample", "run", *words), *facts)


def _strokes(mode, turn):
    """A mask of 12 x 8 in `mode`, white in its right third; by `turn`, a value of Exif, stored on its side."""
    white = numpy.zeros((8, 12), bool)
    white[:, 8:] = True
    stored = numpy.rot90(white) if turn == 6 else white
    if mode in ("LA", "RGBA"):  # white everywhere, and transparent where nothing is to be painted
        values = numpy.stack([numpy.full(stored.shape, 255), 255 * stored], -1)
        return Image.fromarray(values.astype(numpy.uint8)).convert(mode)
    if mode == "I;16":
        return Image.fromarray(stored.astype(numpy.uint16) * 65535)
    image = Image.fromarray(255 * stored.astype(numpy.uint8))
    if mode == "P":
        image = image.convert("P")
        image.putpalette([*(255, 255, 255) * 256])  # each colour is white, and the first is transparent
        image.info["transparency"] = 0
        return image
    return image.convert(mode)


@pytest.mark.parametrize(
    ("mode", "turn"), [("LA", 1), ("L", 6), *wide(("L", 1), ("1", 1), ("RGBA", 1), ("I;16", 1), ("P", 1))]
)
def test_a_mask_lies_on_its_picture_whatever_its_format(mode, turn, hookdiff, here, run):
    """Of 12 x 8, the 8 x 8 in the centre are kept: in them, the mask has its last two columns."""
    picture = numpy.tile(numpy.arange(12, dtype=numpy.uint8) * 20, (8, 1))
    Image.fromarray(picture).save(here / "wide.png")
    exif = Image.Exif()
    exif[0x0112] = turn
    _strokes(mode, turn).save(here / "mask.png", **({"exif": exif} if turn != 1 else {}))
    words = ("--images", "wide.png", "--mask", "mask.png", "--steps", 2, "--out", "x.npz")
    output(hookdiff("sample", "run", *words))
    made, known = numpy.load(here / "x.npz")["arr_0"][0, ..., 0], picture[:, 2:10]
    assert numpy.array_equal(made[:, :6], known[:, :6])
    assert not numpy.array_equal(made[:, 6:], known[:, 6:])


@pytest.mark.wide
def test_a_transparent_picture_lies_on_the_background_of_the_run(hookdiff, here, run):
    Image.new("LA", (8, 8), (9, 0)).save(here / "clear.png")
    plain = (run / "config.toml").read_text()
    words = ("--images", "clear.png", "--steps", 20, "--strength", 0.05, "--out", "x.npz", "--overwrite")
    for background, value in (("white", 255), ("black", 0)):
        (run / "config.toml").write_text(plain.replace('background = "white"', f'background = "{background}"'))
        output(hookdiff("sample", "run", *words))
        assert abs(float(numpy.load(here / "x.npz")["arr_0"].mean()) - value) < 40


FLAT = """
import torch
from hookdiff import InMemory
from torch import nn

def rows(height: int = 1) -> InMemory:
    return InMemory(torch.zeros(8, height, 64))

class Flat(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def get_extra_state(self):
        return {"notes": [1, 2]}

    def set_extra_state(self, state):
        assert state == {"notes": [1, 2]}

    def forward(self, x, times):
        return self.layer(x)
"""


@pytest.mark.wide
def test_samples_that_are_no_images_are_refused_and_exported_without_what_is_no_tensor(hookdiff, here, user_module):
    user_module("flat", FLAT)
    tables = {"data": {"source": "flat:rows"}, "model": {"use": "flat:Flat"}, "sampling": {"steps": 1}}
    run = {"steps": 1, "batch_size": 4, "device": "cpu", "plugins": ["checkpoint"]}
    (here / "c.toml").write_text(tomli_w.dumps({"run": run, **tables}))
    build_loop(load_config(here / "c.toml"), here / "run").run()
    for out in ([], ["--out", "x.npz"], ["--each", "each"]):
        check_refused(hookdiff("sample", "run", "--trust", *out), "1 x 64", "images")
    code, out, err = hookdiff("export", "run", "x.safetensors", "--trust")
    assert (code, err) == (0, "")
    check_facts(out, "strict=False", "_extra_state")
    saved = load_file("x.safetensors")
    with load_run("run", trust=True) as opened:
        assert_same(saved, dict(opened.model().layer.named_parameters(prefix="layer")))
        assert torch.equal(opened.sample(2), opened.sample(2, weights="x.safetensors"))
