"""A run as the last value of a cell: its newest picture and its curves, read from its files."""

import json
import math
from base64 import b64decode
from pathlib import Path
from xml.etree import ElementTree

import numpy
import pytest

from hookdiff import load_run
from hookdiff.log.picture import Picture
from hookdiff.run_dir.pictures_png import picture_path, write_picture


def make_run(run_dir: Path, losses: list[float], **others: float) -> ElementTree.Element:
    """Write a run with a loss for each step, and return what it shows."""
    run_dir.mkdir()
    (run_dir / "config.toml").write_text("[run]\nsteps = 9000\n")
    lines = [{"step": step, "time": 1.0, "loss": loss, **others} for step, loss in enumerate(losses, 1)]
    texts = (json.dumps({k: v if math.isfinite(v) else None for k, v in line.items()}) for line in lines)
    (run_dir / "metrics.jsonl").write_text("".join(f"{text}\n" for text in texts))
    run = load_run(run_dir)
    shown = ElementTree.fromstring(run._repr_html_())
    assert "loop" not in vars(run)  # no network is made, and no weights are loaded
    return shown


def curves(shown: ElementTree.Element) -> dict[str, list[tuple[float, float]]]:
    """Return the places of the points of each curve, by its title."""
    found = {}
    for svg in shown.iter("svg"):
        (line,) = svg.iter("polyline")
        found[svg.attrib["aria-label"]] = [
            (float(x), float(y)) for x, y in (place.split(",") for place in line.attrib["points"].split())
        ]
    return found


def test_it_shows_the_state_and_the_curves_without_what_is_not_finite(tmp_path: Path) -> None:
    shown = make_run(
        tmp_path / "a<b", [4.0, math.nan, 2.0, 1.0, 0.0], **{"lr": 0.5, "fd/x": 3.0, "fd/x/num": 9.0, "val/loss": 2.0}
    )
    assert "".join(shown[0].itertext()).startswith("a<b: crashed, step 5/9,000")
    loss, *others = curves(shown).items()
    assert loss == ("loss: 0", [(0.0, 0.0), (105.0, 45.0), (157.5, 67.5), (210.0, 90.0)])
    assert [title for title, _ in others] == ["val/loss: 2", "fd/x: 3", "lr: 0.5"]
    assert {height for _, points in others for _, height in points} == {45.0}  # a constant is in the middle
    assert not list(shown.iter("img"))


@pytest.mark.parametrize("num", [1, 250, 10_000])
def test_a_long_curve_keeps_its_ends_and_its_spikes(num: int, tmp_path: Path) -> None:
    losses = [1.0 + (step % 2) / 100 for step in range(num)]
    losses[num // 3] = 7.0
    (points,) = curves(make_run(tmp_path / "run", losses)).values()
    assert len(points) <= 421
    assert (min(x for x, _ in points), max(x for x, _ in points)) == (0.0, 210.0 * (num > 1))
    assert min(y for _, y in points) == (0.0 if num > 1 else 45.0)


def test_it_shows_the_newest_picture(tmp_path: Path) -> None:
    for step, name in ((5, "samples"), (20, "samples/z"), (20, "samples"), (20, "one"), (3, "val")):
        write_picture(tmp_path / "run", name, step, Picture(numpy.full((4, 4), step, numpy.uint8)))
    (tmp_path / "run" / "samples" / "step-00000030.png").write_bytes(b"not whole")
    (tmp_path / "run").rename(tmp_path / "kept")
    make_run(tmp_path / "run", [1.0])
    for folder in (tmp_path / "kept").iterdir():
        folder.rename(tmp_path / "run" / folder.name)
    shown = ElementTree.fromstring(load_run(tmp_path / "run")._repr_html_())
    (image,) = shown.iter("img")
    _, _, data = image.attrib["src"].partition("base64,")
    assert b64decode(data) == picture_path(tmp_path / "run", "samples", 20).read_bytes()
    assert image.attrib["alt"] == "samples, step 20"
