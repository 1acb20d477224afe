"""`hookdiff fid` compares folders, archives, runs and published statistics, and refuses all else in one message."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
import torch

from hookdiff.data import digits
from hookdiff.disk import save_image
from hookdiff.features import Collected
from hookdiff_features import Digits
from hookdiff_fid import frechet_distance
from tests.conftest import SMALL, check_facts

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with the pictures odd/ and even/ of digits, and with odd.npz of the same pixels."""
    monkeypatch.chdir(tmp_path)
    images = digits().images[:240]
    for number, image in enumerate(images):
        save_image(image, tmp_path / ("odd" if number % 2 else "even") / "deep" / f"{number:03}.png")
    numpy.savez("odd.npz", arr_0=images[1::2].permute(0, 2, 3, 1).numpy())
    numpy.savez("flat.npz", arr_0=images[1::2, 0].numpy())
    return tmp_path


def expected(a: slice, b: slice) -> float:
    space, images = Digits().open(torch.device("cpu")), digits().images[:240]
    one, other = (Collected.of(space, [images[rows]]).moments for rows in (a, b))
    return frechet_distance(one, other)


ODD, EVEN = slice(1, None, 2), slice(0, None, 2)


def test_folders_and_archives(sets: Path, hookdiff: Command) -> None:
    for a in ("odd", "odd.npz", "flat.npz"):
        code, out, err = hookdiff("fid", a, "even", "--json")
        assert code == 0, err
        row = json.loads(out)
        assert row["num"] == [120, 120]
        assert row["fd/digits"] == pytest.approx(expected(ODD, EVEN), rel=1e-6)
        assert {"kid/digits", "precision/digits", "recall/digits", "density/digits", "coverage/digits"} < row.keys()
    code, out, _ = hookdiff("fid", "odd", "odd.npz", "--json")
    assert json.loads(out)["fd/digits"] == pytest.approx(0, abs=1e-6)


def test_golden_text(sets: Path, hookdiff: Command) -> None:
    code, out, _ = hookdiff("fid", "odd", "even")
    assert code == 0
    first, distance, kid, *others = out.splitlines()
    assert first == "120 images against 120 images"
    assert distance.split() == ["fd/digits", f"{expected(ODD, EVEN):.6g}"]
    assert (kid.split()[0], kid.split()[2]) == ("kid/digits", "+-")
    assert [line.split("/")[0].strip() for line in others] == ["precision", "recall", "density", "coverage", "is"]


def test_statistics_are_written_and_read(sets: Path, hookdiff: Command) -> None:
    code, out, _ = hookdiff("fid", "odd", "--save", "odd-stats.npz")
    assert code == 0
    check_facts(out, "odd-stats.npz", "digits")
    with numpy.load("odd-stats.npz") as file:
        assert (file["mu"].shape, file["sigma"].shape) == ((64,), (64, 64))
    for a, b in (("even", "odd-stats.npz"), ("odd-stats.npz", "even")):
        code, out, _ = hookdiff("fid", a, b, "--json")
        assert json.loads(out)["fd/digits"] == pytest.approx(expected(ODD, EVEN), rel=1e-6)
        assert "kid/digits" not in json.loads(out)
    code, out, _ = hookdiff("fid", "odd-stats.npz", "odd-stats.npz")
    assert (code, out.split()[0]) == (0, "0")


def test_a_run_is_compared_with_its_training_images(
    tmp_path: Path, write_config: Callable[..., Path], hookdiff: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = write_config(
        run={**SMALL["run"], "steps": 2, "plugins": ["checkpoint", "fid"]},
        plugins={"fid": {"num_samples": 40}},
    )
    code, _, err = hookdiff("run", config, "--out", "run")
    assert code == 0, err
    logged = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert [line["fd/digits"] for line in logged if "fd/digits" in line]
    rows = []
    for words in (["run"], ["run/checkpoints/step-00000002"], ["run", "run"]):
        code, out, err = hookdiff("fid", *words, "--num", 50, "--json")
        assert code == 0, err
        rows.append(json.loads(out))
    assert [row["num"] for row in rows] == [[50, 1797], [50, 1797], [50, 50]]
    assert rows[0] == rows[1]
    assert rows[0]["fd/digits"] > 10
    assert rows[2]["fd/digits"] == 0


def test_pictures_of_several_sizes_are_read_for_a_space_that_resizes(sets: Path, hookdiff: Command) -> None:
    for side in (8, 20):
        save_image(torch.full((3, side, side + 1), 100, dtype=torch.uint8), sets / "mixed" / f"{side}.png")
    Path("mine.py").write_text("def mean(images):\n    return images.mean(dim=(2, 3)).expand(-1, 3)\n")
    code, out, err = hookdiff("fid", "mixed", "even", "--features", "mine:mean", "--json")
    assert code == 0, err
    assert json.loads(out)["num"] == [2, 120]
    assert "fd/mine.mean" in json.loads(out)
    code, _, err = hookdiff("fid", "mixed", "even", "--features", "digits")
    assert code == 2
    check_facts(err, "mixed", "3 x 20 x 21", "1 x 8 x 8")


@pytest.mark.parametrize(
    ("words", "facts"),
    [
        (["nowhere", "even"], ("nowhere",)),
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
        (["three.npz", "even"], ("three.npz", "64", "3")),
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
    code, out, err = hookdiff("fid", *words)
    assert (code, out) == (2, "")
    assert "Traceback" not in err
    check_facts(err, *facts)
