"""`hookdiff fid` compares folders, archives, runs and published statistics, and refuses all else in one message."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import tomli_w
import torch
from PIL import Image

from hookdiff import SampleRequest, load_run
from hookdiff.authors import MeasuredImages
from hookdiff.data import digits
from hookdiff.features import Collected, Features, Moments, frechet_distance
from hookdiff.images import Folder, feed_of
from hookdiff.log.pixels import save_image, to_uint8
from hookdiff_features import Digits
from tests.conftest import SMALL, Command, Succeed, check_facts, check_refused, output, records, wide, write_small
from tests.plugins.test_samples_sizes import CONFIG, write_pictures

Row = Callable[..., dict[str, Any]]


@pytest.fixture
def sets(here: Path) -> Path:
    """Return a folder with the pictures odd/ and even/ of digits, and with odd.npz of the same pixels."""
    images = digits().images[:80]
    for number, image in enumerate(images):
        save_image(image, here / ("odd" if number % 2 else "even") / "deep" / f"{number:03}.png")
    numpy.savez("odd.npz", arr_0=images[1::2].permute(0, 2, 3, 1).numpy())
    numpy.savez("flat.npz", arr_0=images[1::2, 0].numpy())
    return here


@pytest.fixture
def compare(succeed: Succeed) -> Row:
    """Return a function that compares two sets, and returns the values by name."""

    def call(*words: object) -> dict[str, Any]:
        return json.loads(succeed("fid", *words, "--json"))

    return call


@pytest.fixture
def train(here: Path, write_config: Any, succeed: Succeed) -> Row:
    """Return a function that trains in the folder `run`, and returns the values of the plugin."""

    def call(**model: object) -> dict[str, Any]:
        run = {"steps": 2, "plugins": ["checkpoint", "fid"]}
        config = write_config(run=run, model={**SMALL["model"], **model}, plugins={"fid": {"num_samples": 40}})
        succeed("run", config, "--out", "run")
        (values,) = (line for line in records(Path("run")) if "fd/digits" in line)
        return values

    return call


def expected(a: slice, b: slice) -> float:
    space, images = Digits().open(torch.device("cpu")), digits().images[:80]
    first, second = (Collected.of(space, [images[rows]]).moments for rows in (a, b))
    return frechet_distance(first, second)


def perfect(b: slice) -> float:
    """Return the distance that 40 images of a perfect model have to 40 of the digits, as half of these show it."""
    images = digits().images[:80][b]
    rows = Digits().open(torch.device("cpu"))(images[torch.randperm(40, generator=torch.Generator().manual_seed(0))])[0]
    return frechet_distance(Moments.of(rows[:20]), Moments.of(rows)) * (1 / 40 + 1 / 40) / (1 / 20 - 1 / 40)


ODD, EVEN = slice(1, None, 2), slice(0, None, 2)


def test_folders_and_archives(sets: Path, compare: Row) -> None:
    for a in ("odd", "odd.npz", "flat.npz"):
        row = compare(a, "even")
        assert row["num"] == [40, 40]
        assert row["fd/digits"] == pytest.approx(expected(ODD, EVEN), rel=1e-6)
        assert {"kid/digits", "precision/digits", "recall/digits", "density/digits", "coverage/digits"} < row.keys()
    assert compare("odd", "odd.npz")["fd/digits"] == pytest.approx(0, abs=1e-6)


def _noisy(mode: str, height: int = 8, width: int = 8) -> list[Image.Image]:
    """Return 12 pictures of this mode, with any colours and any transparency."""
    pixels = numpy.random.default_rng(0).integers(0, 256, (12, height, width, 4), dtype=numpy.uint8)
    return [Image.fromarray(picture[..., : len(mode)].squeeze()) for picture in pixels]


@pytest.mark.parametrize(
    ("mode", "sides", "data", "remarks"),
    [
        ("RGB", (20, 20), {"image_size": 8, "resize": 12}, ["12 resized", "12 cropped"]),
        *wide(
            ("RGBA", (8, 8), {"background": "black"}, []),
            (
                *("RGBA", (12, 20), {"image_size": 8, "background": "#c04020", "channels": 1}),
                ["12 resized", "12 cropped", "8x8"],
            ),
        ),
    ],
)
@pytest.mark.usefixtures("here")
def test_pictures_are_compared_with_a_run_as_its_data(
    mode: str, sides: Any, data: Any, remarks: Any, hookdiff: Command, compare: Row, caplog: pytest.LogCaptureFixture
) -> None:
    Path("pictures").mkdir()
    for number, picture in enumerate(_noisy(mode, *sides)):
        picture.save(f"pictures/{number}.png")
    parts = "lambda images: images.mean(1).unfold(1, 4, 4).unfold(2, 4, 4).mean((3, 4)).flatten(1)"
    Path("parts_here.py").write_text(f"def parts(images):\n    return ({parts})(images)")
    run = {"steps": 1, "batch_size": 4, "plugins": ["checkpoint"]}
    config = write_small(Path("small.toml"), run=run, data={"source": "folder", "path": "pictures", **data})
    output(hookdiff("run", config, "--out", "run"))
    words = ("--features", "parts_here:parts", "--num", 12)
    expected = compare("run", *words)["fd/parts_here.parts"]
    for pair in (("run", "pictures"), ("pictures", "run")):
        assert compare(*pair, *words)["fd/parts_here.parts"] == pytest.approx(expected, rel=1e-4), pair
    check_facts(caplog.text, *remarks)
    assert ("resized" in caplog.text) == bool(remarks)
    if data == {"background": "black"}:  # so are the pictures of an archive
        numpy.savez("pictures.npz", arr_0=numpy.stack([numpy.array(image) for image in _noisy(mode, *sides)]))
        assert compare("pictures.npz", "run", *words)["fd/parts_here.parts"] == pytest.approx(expected, rel=1e-4)
        other = compare("run", "pictures", *words, "--set", "data.background=lime")["fd/parts_here.parts"]
        assert other != pytest.approx(expected, rel=0.1)
        check_refused(hookdiff("fid", "run", "pictures", *words, "--set", "data.background=lme"), "background", "lime")


def test_golden_text(sets: Path, succeed: Succeed) -> None:
    first, second, distance, kid, *others = succeed("fid", "odd", "even").splitlines()
    assert (first, second) == ("40 images of odd", "against 40 images of even")
    assert distance.split() == ["fd/digits", f"{expected(ODD, EVEN):.6g}", "(floor", f"{perfect(EVEN):.4g})"]
    assert (kid.split()[0], kid.split()[2]) == ("kid/digits", "+-")
    assert [line.split("/")[0].strip() for line in others] == ["precision", "recall", "density", "coverage", "is"]


def test_statistics_are_written_and_read(sets: Path, succeed: Succeed, compare: Row) -> None:
    check_facts(succeed("fid", "odd", "--save", "odd-stats.npz"), "odd-stats.npz", "40 images of odd", "digits")
    with numpy.load("odd-stats.npz") as file:
        assert (file["mu"].shape, file["sigma"].shape, file["num"]) == ((64,), (64, 64), 40)
    succeed("fid", "odd", "--save", "odd-stats.npz", "--overwrite")
    for a, b in (("even", "odd-stats.npz"), ("odd-stats.npz", "even")):
        row = compare(a, b)
        assert row["fd/digits"] == pytest.approx(expected(ODD, EVEN), rel=1e-6)
        assert "kid/digits" not in row
    both = ["odd-stats.npz"] * 2
    assert succeed("fid", *both).split()[-2:] == ["fd", "0"]
    row = compare(*both)
    assert (row["sets"], row["num"], row["space"], row["fd"]) == (both, [40, 40], None, 0)
    with numpy.load("odd-stats.npz") as file:
        numpy.savez("published.npz", mu=file["mu"], sigma=file["sigma"])
    assert compare("published.npz", "published.npz")["num"] == [None, None]


def test_what_is_left_out_for_too_few_images_is_said(sets: Path, hookdiff: Command) -> None:
    for k in range(9):
        save_image(digits().images[k], sets / "few" / f"{k}.png")
    for words in (["few", "even"], ["even", "few"]):
        code, out, err = hookdiff("fid", *words, "--json")
        names = ["kid", "precision", "is"] if words[0] == "few" else ["kid", "precision"]
        assert code == 0
        assert not any(name.startswith(tuple(names)) for name in json.loads(out))
        assert f"without {', '.join(names)}, which need at least 10 images" in err.splitlines()


def test_few_images_are_warned_of(sets: Path, hookdiff: Command) -> None:
    for name, num in (("few.npz", 1999), ("many.npz", 2000)):
        numpy.savez(name, arr_0=digits().images[torch.arange(num) % 1797, 0].numpy())
    for name, warned in (("few.npz", True), ("many.npz", False)):
        code, _, err = hookdiff("fid", name, "many.npz")
        assert (code, "2,000" in err) == (0, warned), name


def test_a_run_is_compared_with_its_training_images(train: Row, compare: Row) -> None:
    values = train(num_classes=10)  # classes are as frequent as in the data
    rows = [compare(*words, "--num", 40) for words in (["run"], ["run/checkpoints/step-00000002"], ["run", "run"])]
    names = [row.pop("sets") for row in rows]
    assert [row["num"] for row in rows] == [[40, 1797], [40, 1797], [40, 40]]
    assert rows[0] == rows[1]
    assert rows[2]["fd/digits"] == 0
    check_facts(names[0][0], "run", "model weights", "step 2")
    # The images are those that the plugin makes, so its values are found again.
    for name in ("fd/digits", "kid/digits", "coverage/digits"):
        assert rows[0][name] == pytest.approx(values[name], rel=1e-3)


RECIPES = """
from attrs import define, field
from hookdiff import UserError
from hookdiff.features import Features, Space
from hookdiff.options import one_of

@define(frozen=True)
class Both(Features):
    recipe: str = field(default="mean", validator=one_of(("mean", "max")))

    def open(self, device):
        def embed(images):
            return getattr(images.float().flatten(2), {"mean": "mean", "max": "amax"}[self.recipe])(2), None
        return Space(f"both/{self.recipe}", None, embed, device=device)

@define(frozen=True)
class Half(Both):
    def open(self, device):
        if self.recipe == "max":
            raise UserError("no weights here")
        return super().open(device)

def flat(images):
    return images.flatten()
"""


@pytest.mark.wide
def test_no_image_is_made_of_a_run_before_all_is_known_to_fit(
    sets: Path, write_config: Callable[..., Path], hookdiff: Command, succeed: Succeed, monkeypatch: pytest.MonkeyPatch
) -> None:
    succeed("run", write_config(run={"steps": 1, "plugins": ["checkpoint"]}))
    save_image(torch.zeros(3, 6, 9, dtype=torch.uint8), sets / "small" / "0.png")
    numpy.savez("three.npz", mu=numpy.zeros(3), sigma=numpy.eye(3))
    Path("recipes_here.py").write_text(RECIPES)
    (run,) = Path("runs").iterdir()
    made: list[int] = []
    make = MeasuredImages.parts

    def parts(images: MeasuredImages, numbers: range) -> Iterator[Any]:
        made.append(len(numbers))
        print("now", file=sys.stderr)
        return make(images, numbers)

    monkeypatch.setattr(MeasuredImages, "parts", parts)
    for words, fact in (
        (["even", "--features", "fashion-mnist"], "1 x 8 x 8"),
        (["small"], "9 x 6 is smaller than 8 x 8; upscale = true"),
        (["even", "--features", "inception", "--feature-weights", "nowhere.pth"], "nowhere.pth"),
        (["three.npz"], "three.npz"),
        (["even", "--features", "recipes_here:Half", "--recipe", "all"], "no weights here"),
        (["even", "--features", "recipes_here:flat"], "recipes_here.flat"),
    ):
        check_refused(hookdiff("fid", run, *words, "--num", 20), fact)
    assert made == []
    code, _, err = hookdiff("fid", run, "even", "--num", 20)
    announced, begun, *_ = err.splitlines()
    assert (code, made, begun) == (0, [20], "now")
    check_facts(announced, "making 20 images of", run)
    out = succeed("fid", run, "even", "--num", 20, "--features", "recipes_here:Both", "--recipe", "all")
    assert made == [20, 20]  # once for both recipes
    assert [line.split()[0] for line in out.splitlines()[-2:]] == ["both/mean", "both/max"]


def test_the_images_of_runs_are_made_as_the_options_say(train: Row, hookdiff: Command, compare: Row) -> None:
    train(num_classes=10)
    options = {"weights": "model", "sampler": "ddim", "steps": 3, "guidance_scale": 2.0, "seed": 5}
    words = [text for name, value in options.items() for text in (f"--{name.replace('_', '-')}", value)]
    labels = SampleRequest(40, 5, stream="evaluate").default_labels(10, digits().labels)
    with load_run("run") as run:
        parts = list(run.batches(40, stream="evaluate", labels=labels, **options))
    samples = Collected.of(Digits().open(torch.device("cpu")), map(to_uint8, parts)).moments
    data = Collected.of(Digits().open(torch.device("cpu")), [digits().images]).moments
    code, out, err = hookdiff("fid", "run", *words, "--num", 40, "--json")
    assert code == 0
    check_facts(err, "40 images of run", "ddim", "3 steps", "guidance 2")
    row = json.loads(out)
    check_facts(row["sets"][0], "run", "model weights", "step 2", "ddim", "3 steps")
    assert row["fd/digits"] == pytest.approx(frechet_distance(samples, data), rel=1e-5)
    assert {name: row[name] for name in options} == {name: [value, None] for name, value in options.items()}
    assert (row["step"], 0 < row["fd/digits/floor"] < row["fd/digits"]) == ([2, None], True)
    both = compare("run", "run", *words, "--num", 40)
    assert (both["fd/digits"], both["steps"], both["weights"]) == (0, [3, 3], ["model", "model"])
    numpy.savez("data.npz", arr_0=digits().images[:, 0].numpy())
    check_refused(hookdiff("fid", "data.npz", "data.npz", "--guidance-scale", 2), "--guidance-scale")
    check_refused(hookdiff("fid", "run", "--weights", "emma"), "run", "--weights", "emma", "model")
    check_refused(hookdiff("fid", "run", "--sampler", "dim"), "sampling.sampler", "dim", "ddim")


@pytest.mark.wide
def test_the_order_of_the_images_does_not_matter(sets: Path, compare: Row) -> None:
    images, labels = digits().images[:400], digits().labels
    assert labels is not None
    by_class = images[labels[:400].argsort(stable=True)]
    for number, image in enumerate(by_class):
        save_image(image, sets / "sorted" / f"{number:03}.png")
    for name, some in (("mixed", images), ("sorted", by_class), ("data", digits().images[400:800])):
        numpy.savez(f"{name}.npz", arr_0=some[:, 0].numpy())
    rows = {name: compare(name, "data.npz") for name in ("mixed.npz", "sorted.npz", "sorted")}
    for name, values in rows.items():
        assert values["is/digits"] > 5  # of each class alone it is 1
        for metric in ("precision/digits", "recall/digits", "coverage/digits"):
            assert values[metric] == pytest.approx(rows["mixed.npz"][metric], abs=0.1), name


def test_pictures_of_several_sizes_fit_a_space_that_resizes(sets: Path, hookdiff: Command, compare: Row) -> None:
    for side in (8, 20):
        save_image(torch.full((3, side, side + 1), 100, dtype=torch.uint8), sets / "mixed" / f"{side}.png")
    Path("mine.py").write_text("def mean(images):\n    return images.mean(dim=(2, 3)).expand(-1, 3)\n")
    row = compare("mixed", "even", "--features", "mine:mean")
    assert row["num"] == [2, 40]
    assert "fd/mine.mean" in row
    check_refused(hookdiff("fid", "mixed", "even", "--features", "digits"), "mixed", "3 x 20 x 21", "1 x 8 x 8")


@pytest.mark.parametrize(
    ("words", "facts"),
    [
        (["nowhere", "even"], ("nowhere", "has no 'nowhere'")),
        (["evn"], ("evn", "has no 'evn'", "even")),
        (["even", "evn"], ("evn", "even")),
        (["even"], ("even", "run")),
        (["text.txt", "even"], ("text.txt",)),
        (["empty", "even"], ("empty",)),
        (["broken", "even"], ("broken.png",)),
        (["other.npz", "even"], ("other.npz", "arr_0", "mu")),
        (["floats.npz", "even"], ("floats.npz", "float64", "uint8")),
        (["odd", "even", "--features", "digist"], ("digist", "digits")),
        (["odd", "even", "--features", "digits", "--recipe", "clean-fid"], ("digits", "recipe")),
        (["odd", "even", "--recipe", "claen-fid"], ("claen-fid", "clean-fid")),
        (["odd", "even", "--features", "digits", "--recipe", "all"], ("digits", "recipe")),
        (["odd", "--save", "stats.txt"], ("stats.txt", ".npz")),
        (["half.npz", "even"], ("half.npz", "symmetric")),
        (["empty.npz", "even"], ("empty.npz", "(0,)")),
        (["number.npz", "two.npz"], ("number.npz", "()")),
        (["three.npz", "even"], ("three.npz", "64", "3")),
        (["three.npz", "two.npz"], ("three.npz", "two.npz", "3", "2")),
        (["three.npz", "--save", "out.npz"], ("three.npz", "statistics")),
        (["one", "--save", "out.npz"], ("one", "2 samples")),
        (["odd", "--save", "out.npz", "--recipe", "all"], ("--save", "--recipe all")),
        (["one", "even"], ("one", "2 samples")),
    ],
)
def test_what_cannot_be_compared(words: list[str], facts: tuple[str, ...], sets: Path, hookdiff: Command) -> None:
    Path("text.txt").write_text("text")
    Path("empty").mkdir()
    Path("broken").mkdir()
    Path("broken/broken.png").write_bytes(b"no picture")
    save_image(digits().images[0], sets / "one" / "0.png")
    numpy.savez("other.npz", images=numpy.zeros((2, 8, 8)))
    numpy.savez("floats.npz", arr_0=numpy.zeros((2, 8, 8)))
    numpy.savez("half.npz", mu=numpy.zeros(2), sigma=numpy.array([[1.0, 2.0], [0.0, 1.0]]))
    numpy.savez("three.npz", mu=numpy.zeros(3), sigma=numpy.eye(3))
    numpy.savez("empty.npz", mu=numpy.zeros(0), sigma=numpy.zeros((0, 0)))
    numpy.savez("number.npz", mu=numpy.float64(1), sigma=numpy.float64(1))
    numpy.savez("two.npz", mu=numpy.zeros(2), sigma=numpy.eye(2))
    check_refused(hookdiff("fid", *words), *facts)


PARTS = """
import torch

def parts(images):
    rows = images.flatten(1)
    return torch.stack([rows.mean(1), rows.std(1)], 1)
"""


def test_a_run_of_several_sizes_is_compared_in_the_sizes_of_its_data(
    here: Path,
    user_module: Callable[[str, str], None],
    succeed: Succeed,
    compare: Row,
    hookdiff: Command,
    caplog: pytest.LogCaptureFixture,
) -> None:
    user_module("sized_here", PARTS)
    write_pictures(here / "pictures")
    features = {"use": "sized_here:parts"}
    tables = {**CONFIG, "optimizer": {"lr": 0.2}, "plugins": {"fid": {"features": features, "num_samples": 60}}}
    tables["run"] = {**CONFIG["run"], "steps": 4, "plugins": ["checkpoint", "fid"]}
    (here / "c.toml").write_text(tomli_w.dumps(tables))
    succeed("run", "c.toml", "--out", "run", "--trust")
    (values,) = (line for line in records(Path("run")) if "fd/sized_here.parts" in line)
    words = ("--features", "sized_here:parts", "--trust", "--num", 60)
    row = compare("run", *words)
    for name in ("fd", "kid", "recall", "coverage"):
        assert row[f"{name}/sized_here.parts"] == pytest.approx(values[f"{name}/sized_here.parts"], rel=1e-4), name

    # The same pictures in a folder are cut in the same way; the classes are then in turn.
    space = Features.of("sized_here:parts").open(torch.device("cpu"))
    with load_run("run", trust=True) as run:
        labels = lambda request, size: request.default_labels(3, None)  # noqa: E731
        made = [part for _, part in MeasuredImages(run.loop, labels=labels).parts(range(60))]
        feed = feed_of(Folder("pictures"), run.transforms)
    own = Collected.of(space, map(to_uint8, made)).moments
    data = Collected.of(space, (to_uint8(batch.inputs) for batch in feed.unaugmented(feed.training))).moments
    expected = frechet_distance(own, data)
    for pair in (("run", "pictures"), ("pictures", "run")):
        assert compare(*pair, *words)["fd/sized_here.parts"] == pytest.approx(expected, rel=1e-4), pair
    assert row["fd/sized_here.parts"] != pytest.approx(expected, rel=1e-3)
    check_facts(caplog.text, "22 images", "22 resized", "sizes")
    check_refused(hookdiff("fid", "run", "--features", "digits", "--trust"), "digits", "3 x 8 x 16", "1 x 8 x 8")
