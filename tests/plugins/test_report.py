"""`hookdiff report` and the plugin `report`: numbers, pictures and events of a run in one file that loads nothing."""

import base64
import gzip
import io
import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy
import pytest
import tomli_w
import torch
from attrs import define, field
from hypothesis import given, strategies as st
from PIL import Image

from hookdiff.authors.sheets import sheet
from hookdiff.log import Panel, Picture
from hookdiff.run_dir import History, picture_path
from tests.conftest import Command, check_facts, check_refused, finish, locked, output, wait_for, warnings, write_small
from tests.forked import python

pytest.importorskip("bokeh", reason="the report needs the extra package bokeh")

from hookdiff_report.cli import command
from hookdiff_report.gallery import evenly
from hookdiff_report.goals import Goal
from hookdiff_report.run import ReportedRun

TIME = 1_700_000_000.0  # 2023-11-14 22:13 UTC
ATTACK = "</script ><script>alert(1)</script><!--<img src=x onerror=alert(2)>"


@define
class Page(HTMLParser):
    """A page, taken apart."""

    text: str = ""  # that is shown
    rows: list[list[str]] = field(factory=list)  # the cells of all tables
    scripts: list[str] = field(factory=list)
    tags: list[tuple[str, dict[str, str | None]]] = field(factory=list)
    _inside: list[str] = field(factory=list)

    @classmethod
    def of(cls, path: Path) -> "Page":
        page = cls()
        HTMLParser.__init__(page)
        page.feed(path.read_text("utf-8"))
        page.close()
        return page

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag in ("script", "style", "th", "td"):
            self._inside.append(tag)
            self.scripts += [""] if tag == "script" else []
        if tag == "tr":
            self.rows.append([])
        elif tag in ("th", "td"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        if self._inside and self._inside[-1] == tag:
            self._inside.pop()

    def handle_data(self, data: str) -> None:
        inside = self._inside[-1] if self._inside else ""
        if inside == "script":
            self.scripts[-1] += data
        elif inside != "style":
            self.text += f"{data}\n"
        if inside in ("th", "td"):
            self.rows[-1][-1] += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [found for name, found in self.tags if name == tag]

    @property
    def strips(self) -> list[dict[str, Any]]:
        found = [one for one in self.all("figure") if "data-panels" in one]
        return [{name: json.loads(one[f"data-{name}"] or "") for name in ("panels", "steps")} for one in found]

    def frame(self, strip: int, panel: int, place: int) -> Image.Image:
        source = json.loads(self.scripts[1])[strip][panel][place]
        return Image.open(io.BytesIO(base64.b64decode(source.partition(",")[2])))

    def parts(self, plot: str, name: str) -> list[dict[str, Any]]:
        """Return the attributes of the objects of this class in the plot with this title."""
        labels = [str(one["aria-label"]) for one in self.all("div") if one.get("class") == "plot"]
        titles = [label.partition(". ")[0].rpartition(" by ")[0] for label in labels]
        item = json.loads(self.scripts[0])[titles.index(plot)]
        return [one.get("attributes", {}) for one in walk(item) if one.get("name") == name]

    def curves(self, plot: str, axis: str = "y") -> dict[str, list[float]]:
        """Return the values of the curves and marks of a plot, by label; for the axis "x" their places."""
        found = {}
        for part in self.parts(plot, "GlyphRenderer"):
            data = dict(part["data_source"].get("attributes", {}).get("data", {}).get("entries", []))
            if isinstance(column := data.get(axis, []), dict):
                packed = base64.b64decode(column["array"]["data"])
                # Earlier versions of Bokeh do not compress.
                packed = gzip.decompress(packed) if packed.startswith(b"\x1f\x8b") else packed
                column = numpy.frombuffer(packed).tolist()
            if data:
                found[part["name"]] = column
        return found

    def is_log(self, plot: str) -> bool:
        return bool(self.parts(plot, "LogScale"))


def walk(value: object) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from walk(inner)


def write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def logged(step: int, kind: str, text: str, severity: str = "info", **details: Any) -> dict[str, Any]:
    more = {"details": details} if details else {}
    return {"step": step, "time": TIME + step, "kind": kind, "severity": severity, "text": text, **more}


def make_run(folder: Path, lr: float = 0.001, steps: int = 40) -> Path:
    """Write a run directory as a run does: 8 steps, of 10 samples each, a second."""
    folder.mkdir(parents=True)
    config = {"run": {"steps": 50, "batch_size": 10}, "optimizer": {"use": "adamw", "lr": lr}}
    (folder / "config.toml").write_text(tomli_w.dumps(config))
    lines = []
    for step in range(1, steps + 1):
        line = {"step": step, "time": TIME + step / 8, "loss": 1 / step, "loss/smooth": 2 / step, "lr": lr}
        line |= {"grad_norm": 3.0 + step, "clip/threshold": 5.0, "time/of_a_plugin": 1.0, "lr/head": lr / 10}
        line |= {"memory/peak": 512.0, "memory/allocated": 512.0}
        for number, bounds in enumerate(("-inf..-1.0", "-1.0..+1.0", "+1.0..+inf")):
            line[f"loss/snr-0{number}:{bounds}"] = (1 + (step <= 4) + (step <= 10)) / 2**number
            line[f"loss/floor-0{number}:{bounds}"] = 0.75
        if step % 20 == 0:
            line |= {"fd/digits": 100 / step, "fd/digits/num": 512.0, "fd/digits/floor": 1.5, "val/loss": 3 / step}
            line |= {f"{kind}/digits": step / 80 for kind in ("precision", "recall", "density", "coverage")}
        lines.append(line)
    write_lines(folder / "metrics.jsonl", lines)
    events = [logged(0, "start", "started", versions={"torch": "2.11.0"}, device="cpu")]
    events += [logged(step, "checkpoint", f"saved step-{step:08d}") for step in (10, 20, 30)]
    spike = "the loss spikes at step 31\n  9 times its median\n  try the plugin clip"
    events += [logged(31, "finding", spike, "warning"), logged(40, "stop", "time: out of time", "warning")]
    write_lines(folder / "events.jsonl", events)
    outcome = {"reason": "time", "message": "out of time", "step": steps, "epoch": 1}
    (folder / "outcome.json").write_text(json.dumps(outcome))
    return folder


def add_samples(
    run: Path, steps: Sequence[int], titles: Sequence[str] = ("ema", "model"), side: int = 16, **info: Any
) -> None:
    """Write sheets of panels that are black and white in turn."""
    for step in steps:
        panels = [Panel((-torch.ones(4, 1, side, side)) ** (k + 1), title=title) for k, title in enumerate(titles)]
        picture = sheet(panels, info={"sampler": "ddim", "steps": 7, "seed": 3, **info})
        picture.with_info(name="samples", step=step).save(picture_path(run, "samples", step))


def report(*runs: Path, out: Path | None = None) -> Page:
    """Write the report of a run, or of several into `out`, and return it."""
    words = ["--out", str(out)] if out else []
    command([*map(str, runs), *words], standalone_mode=False)
    return Page.of(out or runs[0] / "report.html")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "runs" / "first")


def test_what_a_report_says(run: Path, hookdiff: Command) -> None:
    path = run / "report.html"
    assert output(hookdiff("report", run)) == f"{path}: {path.stat().st_size / 2**20:.1f} MiB\n"
    page = Page.of(path)
    check_facts(page.text, "first", "stopped", "step 40/50", "out of time")
    check_facts(page.text, "0.05", "lowest 0.05 at step 40")  # the smoothed loss
    check_facts(page.text, "Fréchet distance (digits), n = 512", "2.5", "at step 40, n = 512", "80 img/s", "512 MiB")
    check_facts(page.text, "the loss spikes at step 31", "9 times its median", "Try the plugin clip.")
    check_facts(page.text, "10 to 30", "3 checkpoints", "2023-11-14 22:13", "lr = 0.001", "torch", "2.11.0")
    check_facts(page.text, "finding, such as a spike")  # in the legend
    assert not page.strips
    steps = range(1, 41)
    assert page.curves("Loss")["smoothed"] == [2 / step for step in steps]
    assert page.curves("Loss", "x") == {
        "smoothed": [*steps],
        "as logged": [*steps],
        "held-out images": [20, 40],
        "checkpoint": [10, 20, 30],
        "finding": [31],
    }
    assert page.curves("Loss by noise level") == {
        "up to step 4": [3.0, 1.5, 0.75],
        "up to step 10": [2.0, 1.0, 0.5],
        "up to step 20": [1.0, 0.5, 0.25],
        "up to step 40": [1.0, 0.5, 0.25],
        "floor": [0.75] * 3,
    }
    assert page.curves("Loss by noise level", "x")["floor"] == [-2.0, 0.0, 2.0]  # the outer levels are open
    assert page.curves("Fréchet distance (digits), n = 512") == {"generated images": [5.0, 2.5], "floor": [1.5, 1.5]}
    kinds = ("precision", "recall", "density", "coverage")
    assert page.curves("Fidelity and variety (digits)") == {kind: [0.25, 0.5] for kind in kinds}
    assert page.curves("Learning rate") == {"learning rate": [0.001] * 40, "head": [0.0001] * 40}
    assert page.curves("Gradient norm") == {"gradient norm": [3.0 + k for k in steps], "clip threshold": [5.0] * 40}
    assert page.curves("Throughput")["mean 80"] == pytest.approx([80.0] * 39)
    assert page.curves("Memory") == {"peak so far": [512.0] * 40, "in use": [512.0] * 40}
    assert [page.is_log(plot) for plot in ("Loss", "Gradient norm", "Learning rate")] == [True, True, False]
    # Rounded labels of an axis would not be powers of two, and a flat line at 512 would look like one at 0.
    assert [part["format"] for part in page.parts("Gradient norm", "PrintfTickFormatter")] == ["%.4g"]
    assert [part["default_span"] for part in page.parts("Memory", "DataRange1d") if "default_span" in part] == [512.0]


@pytest.mark.parametrize(
    ("values", "goal", "outlook"),
    [
        ({10: 10.0, 20: 5.0, 40: 2.5, 80: 1.25}, 2.5, "reached at step 40"),
        ({10: 10.0, 20: 5.0, 40: 2.5, 80: 1.25}, 0.5, "expected at about step 200"),  # 100 / step
        ({10: 10.0, 20: 5.0, 40: 2.5, 80: 1.25}, 0.01, "not in sight"),
        ({10: 1.0, 20: 2.0, 40: 4.0, 80: 8.0}, 20.0, "expected at about step 200"),  # from below
        ({10: 5.0, 20: 5.0, 40: 6.0, 80: 7.0}, 1.0, "not in sight"),  # it goes away
        ({10: 2.0, 20: -1.0, 40: 2.0}, -2.0, "not in sight"),  # without a logarithm
        ({10: 2.0, 20: 1.9}, 1.0, "not in sight"),
        ({10: None}, 1.0, "nothing is measured yet"),
    ],
)
def test_when_a_goal_is_reached(run: Path, values: dict[int, float], goal: float, outlook: str) -> None:
    write_lines(run / "metrics.jsonl", [{"step": step, "time": 1.0, "fd/x": one} for step, one in values.items()])
    assert Goal("fd/x", goal).outlook(ReportedRun.of(History(run), "")) == outlook


def test_goals_are_drawn(run: Path, hookdiff: Command) -> None:
    output(hookdiff("report", run, "--goal", "fd/digits=2", "--goal", "loss=0.5", "--goal", "time/of_a_plugin = 3"))
    page = Page.of(run / "report.html")
    plots = {"Fréchet distance (digits), n = 512": 2.0, "Loss": 0.5, "time/of_a_plugin": 3.0}
    for plot, goal in plots.items():
        assert [part["location"] for part in page.parts(plot, "Span") if "dimension" not in part] == [goal]
    check_facts(page.text, "Goal of Fréchet distance (digits)", "not in sight", "Goal of loss", "reached at step 4")
    check_refused(hookdiff("report", run, "--goal", "fd/digts=2"), "--goal", "fd/digts", "'fd/digits'")
    for text in ("fd/digits", "fd/digits=", "=3", "fd/digits=nan"):
        check_refused(hookdiff("report", run, "--goal", text), "--goal", text, "fd/digits=0.4")
    (run / "config.toml").write_text('[plugins.report]\ngoals = ["fd/digits=4", "fd/other=1", "damaged"]\n')
    check_facts(report(run).text, "The goal 4 is reached at step 40.")


def test_a_run_under_way_and_resumed(run: Path) -> None:
    (run / "outcome.json").unlink()
    (run / "config.toml").write_text(tomli_w.dumps({"run": {"epochs": 3, "batch_size": 10}}))
    old, new = ({"versions": {"torch": version}, "steps": 10_040} for version in ("2.11.0", "2.12.0"))
    events = [logged(0, "start", "started", **old), logged(300, "finding", "norm 5 too large", "warning")]
    events += [logged(step, "resume", f"resumed at step {step}", **new) for step in (200, 220)]
    events += [logged(250, "finding", "norm 6 too large", "warning")]
    events += [logged(100, "stop", "error: ArithmeticError: out of numbers", "error")]
    write_lines(run / "events.jsonl", events)
    with locked(run):
        page = report(run)
    check_facts(page.text, "running", "step 40/10,040", "about 21 min left")
    check_facts(page.text, "norm 6 too large", "steps 250 to 300, reported 2 times")
    assert page.text.index("ArithmeticError") < page.text.index("norm 6")  # an error is worse than a warning
    assert "no problem" not in page.text
    assert ["machine and versions", "from step 0", "from step 200"] in page.rows
    assert ["torch", "2.11.0", "2.12.0"] in page.rows


def test_values_that_some_lines_lack(run: Path) -> None:
    lines = [{"step": k, "time": TIME + k, "loss/snr-01:-1.0..+1.0": 1 / k} for k in range(1, 101)]
    for line in lines[:20]:
        line["loss/snr-00:-inf..-1.0"] = 5.0
    for line, value, num in zip(lines[::10], (1.0, 5.0, 6.0, None), (512, 50_000, 50_000, 50_000), strict=False):
        line |= {"fd/digits": value, "fd/digits/num": num, "fd/bare": value}
    write_lines(run / "metrics.jsonl", lines)
    page = report(run)
    check_facts(page.text, "5", "at step 11, n = 50,000")  # the best of those that can be compared
    assert page.curves("Fréchet distance (digits), n = 512 to 50,000").keys() == {"generated images"}
    assert page.curves("Fréchet distance (bare)").keys() == {"generated images"}
    assert "floor" not in page.text
    last = [5.0, pytest.approx(numpy.mean([1 / k for k in range(91, 101)]))]
    assert page.curves("Loss by noise level")["up to step 100"] == last


@pytest.mark.wide
def test_equal_runs_give_equal_files_without_torch(run: Path, tmp_path: Path) -> None:
    add_samples(run, [10, 20])
    code = "import sys; from hookdiff_report.cli import command; command(standalone_mode=False); print(*sys.modules)"
    folder = shutil.copytree(Path(sys.modules["hookdiff_report"].__file__ or "").parent, tmp_path / "hookdiff_report")
    for path in (folder / "templates").iterdir():  # as Git writes text on Windows
        path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    for name, paths in (("1", sys.path), ("2", [str(tmp_path), *sys.path])):
        around = {"PYTHONHASHSEED": name, "PYTHONPATH": os.pathsep.join(paths)}
        returned, out, err = python(code, run, "--out", tmp_path / f"{name}.html", fresh=True, **around)
        assert (returned, err) == (0, "")
        assert "torch" not in out.split()
    assert (tmp_path / "1.html").read_bytes() == (tmp_path / "2.html").read_bytes()


def test_samples_by_step_and_weights(run: Path) -> None:
    add_samples(run, [10, 20, 30])
    Picture(numpy.zeros((8, 8), numpy.uint8), {"name": "extra/one", "step": 5}).save(picture_path(run, "extra/one", 5))
    page = report(run)
    assert page.strips == [{"panels": ["ema", "model"], "steps": [10, 20, 30]}, {"panels": [""], "steps": [5]}]
    for place in range(3):
        black, white = (numpy.array(page.frame(0, panel, place).convert("L")) for panel in (0, 1))
        assert black.min() < 9  # WebP is lossy
        assert white.min() > 246
        assert numpy.median(black) < 9
    sliders = [(one["min"], one["max"]) for one in page.all("input") if one["type"] == "range"]
    assert sliders == [("1", "40")]  # steps
    scrubbed = json.loads(page.scripts[2])
    assert scrubbed["stops"] == [*range(1, 41)]
    assert {label: (texts[0], texts[19]) for label, texts in scrubbed["values"].items()} == {
        "loss": ("2", "0.1"),
        "learning rate": ("0.001", "0.001"),
        "Fréchet distance (digits)": ("", "5"),
    }
    assert len([one for one in page.all("input") if one["type"] == "radio"]) == 2
    check_facts(page.text, "sampler ddim, 7 steps, seed 3", "ema (moving average)", "model (raw weights)")


def test_panels_have_the_names_of_their_rows(run: Path) -> None:
    images = torch.full((4, 1, 16, 16), -1.0)
    for name, rows in (("named", ["1", "2"]), ("plain", [])):
        picture = sheet([Panel(images, title=title, row_names=rows) for title in ("ema", "model")])
        picture.with_info(name=name).save(picture_path(run, name, 1))
    page = report(run)
    (named, same), (plain, also) = ([page.frame(strip, panel, 0) for panel in (0, 1)] for strip in (0, 1))
    assert (named.size, plain.size) == (same.size, also.size)
    assert named.width > plain.width
    assert (named.crop((0, 0, named.width - plain.width, named.height)).convert("L").point(lambda v: v < 99)).getbbox()


def test_steps_with_other_panels(run: Path) -> None:
    for step, titles in ((5, [""]), (10, ["ema", "model"]), (20, ["model", "best"])):
        add_samples(run, [step], titles)
    pixels = numpy.zeros((8, 8), numpy.uint8)
    for name, step, weights in (("z", 5, ["ema"]), ("z", 10, "best"), ("several", 5, ["ema", "model"])):
        Picture(pixels, {"name": name, "weights": weights}).save(picture_path(run, name, step))
    page = report(run)
    assert page.strips == [
        {"panels": ["model", "best", "ema"], "steps": [5, 10, 20]},
        {"panels": [""], "steps": [5]},
        {"panels": ["best", "ema"], "steps": [5, 10]},
    ]
    assert all(str(one["src"]).startswith("data:image/webp;base64,") for one in page.all("img"))


@pytest.mark.wide
def test_animations_and_the_filmstrip(run: Path) -> None:
    folder = run / "samples"
    folder.mkdir()
    frames = [Image.new("L", (8, 8), shade) for shade in (0, 99, 255)]
    frames[0].save(folder / "training.webp", save_all=True, append_images=frames[1:])
    frames[0].save(folder / "filmstrip.png")
    (folder / "denoising.gif").write_bytes(b"GIF89a, but damaged")
    (folder / "denoising.webp").write_bytes(bytes(4_000_000))
    page = report(run)
    check_facts(page.text, "Filmstrip", "The training as an animation", "denoising.webp is too large")
    assert "denoising.gif" not in page.text
    sources = [str(one["src"]) for one in page.all("img")]
    assert [source.partition(",")[0] for source in sources] == ["data:image/webp;base64"] * 2
    animation = base64.b64encode((folder / "training.webp").read_bytes()).decode()
    assert any(animation in one for one in sources)


@pytest.mark.wide
def test_pictures_fill_their_budget(run: Path) -> None:
    noise = numpy.random.default_rng(0)
    for step in range(1, 111):
        pixels = noise.integers(0, 256, (450, 450, 3), dtype=numpy.uint8)
        Picture(pixels, {"name": "noise", "step": step}).save(picture_path(run, "noise", step))
    page = report(run)
    assert 8e6 < (run / "report.html").stat().st_size < 15e6
    (strip,) = page.strips
    assert (strip["steps"][0], strip["steps"][-1]) == (1, 110)
    assert 60 <= len(strip["steps"]) < 110
    assert max(numpy.diff(strip["steps"])) <= 2
    check_facts(page.text, f"{len(strip['steps'])} of 110 steps")


def test_several_runs_are_compared(run: Path, here: Path) -> None:
    other = make_run(here / "runs" / "second", lr=0.01, steps=20)
    lines = map(json.loads, (other / "metrics.jsonl").read_text().splitlines())
    missing = ("loss/smooth", "grad_norm", "lr")
    write_lines(other / "metrics.jsonl", [{k: v for k, v in line.items() if k not in missing} for line in lines])
    (other / "events.jsonl").unlink()
    add_samples(run, [10, 20])
    add_samples(other, [10], [""], weights=["ema"])
    command([str(path) for path in (run, other, run)], standalone_mode=False)  # the same run twice is one
    page = Page.of(here / "report.html")
    check_facts(page.text, "2 runs compared", "first", "second", "optimizer.lr", "0.001", "0.01")
    assert "run.batch_size" not in page.text  # it does not differ
    assert ["machine and versions", "first"] in page.rows
    assert page.strips == [{"panels": ["ema", "model"], "steps": [10, 20]}, {"panels": ["ema"], "steps": [10]}]
    assert len([one for one in page.all("input") if one["type"] == "radio"]) == 2
    # A plot has the same quantity of all runs: here the loss is smoothed by the report.
    raw = [1 / step for step in range(1, 21)]
    smooth = [numpy.mean(raw[max(0, k - 1) : k + 2]) for k in range(20)]
    assert page.curves("Loss").keys() == {"first", "second"}
    assert page.curves("Loss")["second"] == pytest.approx(smooth)
    assert page.curves("Learning rate").keys() == {"first: head", "second: head"}
    assert page.curves("Gradient norm").keys() == {"first"}
    check_facts(page.text, "What the runs have reported", "The run has reported no problem.")


def test_configs_differ_in_types_and_in_ends_of_long_values(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name) for name in "abc"]
    tables: list[dict[str, Any]] = [
        {"number": "1", "flag": True, "text": "x" * 500 + "A", "same": "s", "path": "one"},
        {"number": 1, "flag": "true", "text": "x" * 500 + "B", "same": "s", "empty": ""},
        {"number": 1, "flag": True, "same": "s"},
    ]
    for run, data in zip(runs, tables, strict=True):
        (run / "config.toml").write_text(tomli_w.dumps({"data": data}))
    page = report(*runs, out=tmp_path / "all.html")
    rows = {row[0]: row[1:] for row in page.rows if row[0].startswith("data.")}
    missing = "\N{EN DASH}"
    assert rows.pop("data.text") == [*("..." + "x" * 20 + end for end in ('A"', 'B"')), missing]
    assert rows == {
        "data.number": ['"1"', "1", "1"],
        "data.flag": ["true", '"true"', "true"],
        "data.path": ["one", missing, missing],
        "data.empty": [missing, '""', missing],
    }


def test_runs_of_one_name_are_told_apart(run: Path, tmp_path: Path) -> None:
    other = make_run(tmp_path / "other" / "first")
    check_facts(report(run, other, out=tmp_path / "both.html").text, run, other)


def test_a_long_loss_is_a_line_of_means_in_a_band(run: Path) -> None:
    lines = [
        {"step": k, "time": 1.0 + k, "loss": 3.0 + (-1) ** k * (1 + (k == 2501)), "loss/smooth": 3.0 + (-1) ** k}
        for k in range(1, 5001)
    ]
    write_lines(run / "metrics.jsonl", lines)
    page = report(run)
    low, high = (page.curves("Loss", axis)["as logged"] for axis in ("low", "y"))
    assert (min(low), set(high)) == (1.0, {4.0})
    smooth = page.curves("Loss")["smoothed"]
    assert (smooth[0], smooth[-1]) == (2.0, 4.0)
    assert set(smooth[1:-1]) == {3.0}


def test_nothing_in_a_run_becomes_markup(tmp_path: Path) -> None:
    run = make_run(tmp_path / "<b>&amp;")
    config = {"run": {"name": ATTACK, "steps": 50}, "model": {ATTACK: [ATTACK]}}
    (run / "config.toml").write_text(tomli_w.dumps(config))
    lines = [{"step": k, "time": TIME + k, f"fd/{ATTACK}": 1.0, f"lr/{ATTACK}": k} for k in (1, 2)]
    write_lines(run / "metrics.jsonl", lines)
    events = [logged(1, kind, ATTACK, "error") for kind in ("finding", ATTACK)]
    write_lines(run / "events.jsonl", [*events, logged(0, "start", ATTACK, versions={ATTACK: ATTACK})])
    write_lines(run / "texts.jsonl", [{"step": 0, "time": TIME, "texts": {"model": ATTACK}}])
    (run / "outcome.json").write_text(json.dumps({"reason": ATTACK, "message": ATTACK, "step": 2}))
    panels = [Panel(torch.zeros(1, 1, 8, 8), title=title) for title in (ATTACK, '" onload="alert(3)')]
    sheet(panels, info={"sampler": ATTACK}).with_info(name="samples").save(picture_path(run, "samples", 1))
    for runs in ([run], [run, make_run(tmp_path / "other")]):
        page = report(*runs, out=tmp_path / f"{len(runs)}.html")
        assert len(page.scripts) == 5
        assert "<" not in "".join(page.scripts[:3])
        assert {one.get("type") for one in page.all("script")} == {"application/json", None}
        assert page.strips[0]["panels"] == [ATTACK[:60] + "...", '" onload="alert(3)']
        assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)
        assert page.text.count(ATTACK) >= 5
        policy = next(one["content"] for one in page.all("meta") if one.get("http-equiv") == "Content-Security-Policy")
        check_facts(policy, "default-src 'none'", "img-src data:")
        assert "unsafe-eval" not in str(policy)
        assert "script-src 'unsafe-inline'" not in str(policy)


def test_damaged_and_missing_files(tmp_path: Path) -> None:
    run = tmp_path / "bare"
    run.mkdir()
    (run / "config.toml").write_text("")
    page = report(run)
    check_facts(page.text, "bare", "crashed", "step 0", "without a reason")
    assert "Memory" not in page.text  # it has no values
    assert len(page.scripts) == 4  # without plots there is no Bokeh

    (run / "config.toml").write_text("[run\n")
    values = [1e308, -1e308, None, 0.0, 5e-324]
    lines = [{"step": k, "time": 1e300 * k, "loss": value, "lr": None} for k, value in enumerate(values)]
    lines += [{"step": 10**300, "time": TIME, "loss": 1.0}, {"step": 2, "time": TIME, "loss/snr-zero..one": 1.0}]
    write_lines(run / "metrics.jsonl", lines)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": "x"}\nnot JSON\n')
    odd = {"step": 1, "time": -1e300, "kind": "void", "severity": "ok", "text": "\ud800"}
    write_lines(run / "events.jsonl", [logged(10**300, "finding", ""), odd])
    (run / "outcome.json").write_text("[]")
    bad = {"title": "x", "left": "?", "top": None, "width": 10**9, "height": -1}
    bad |= {"right": 1, "down": 1, "columns": 0, "num": 3}
    huge = {**bad, "left": 0, "top": 0, "height": 10**9, "columns": 3}
    for step, panels in enumerate(([bad, huge], [[]], 5, None)):
        picture = Picture(numpy.zeros((4, 4), numpy.uint8), {"panels": panels, "seed": 10**400, "name": "samples"})
        picture.save(picture_path(run, "samples", step))
    damaged = picture_path(run, "samples", 9)
    damaged.write_bytes(picture_path(run, "samples", 0).read_bytes()[:-30])
    page = report(run)
    check_facts(page.text, "config.toml")
    (strip,) = page.strips
    assert strip["steps"] == [0, 1, 2, 3]
    assert numpy.isnan(page.curves("Loss")["as logged"]).sum() == 1


def test_numbers_that_no_run_reaches(run: Path, hookdiff: Command) -> None:
    steps = (1, 2, 10**300, -(10**308), 10**308)
    names = ("loss", "loss/snr-00:-inf..1.0", "loss/snr-01:1.0..+inf", "memory/peak", "fd/x", "fd/x/num")
    lines = [{"step": step, "time": step, **dict.fromkeys(names, 1e308)} for step in steps * 20]
    write_lines(run / "metrics.jsonl", lines)
    at = [{"step": step, "time": time} for step in steps for time in (10**308, -(10**308), 0)]
    kinds = ("start", "finding", "checkpoint", "resume")
    write_lines(run / "events.jsonl", [{**logged(0, kind, ""), **place} for kind in kinds for place in at])
    (run / "outcome.json").write_text(json.dumps({"step": 10**400}))
    assert hookdiff("report", run)[::2] == (0, "")
    page = Page.of(run / "report.html")
    check_facts(page.text, "1e+308", "2/50")
    assert page.curves("Loss", "x")["as logged"] == [1, 2]


@pytest.mark.skipif(sys.platform != "linux", reason="other systems refuse such names")
def test_unusual_names_of_runs(tmp_path: Path, hookdiff: Command) -> None:
    run = make_run(tmp_path / os.fsdecode(b"a\nb\x1b \xff '\"<b>"))
    for text in (output(hookdiff("report", run)), Page.of(run / "report.html").text):
        check_facts(text, r"a\nb\x1b", r"\udcff", "'\"<b>")


@pytest.mark.wide
def test_thousands_of_events_and_steps(run: Path) -> None:
    steps = range(1, 10_001)
    losses = {5000: 77.0, 7001: 1e-9}
    write_lines(run / "metrics.jsonl", [{"step": k, "time": TIME + k, "loss": losses.get(k, 1.0)} for k in steps])
    events = [logged(k, ("checkpoint", "void")[k % 2], f"event {k}") for k in steps]
    events += [logged(k, "finding", f"norm {k} too large", "warning") for k in range(1, 501)]
    write_lines(run / "events.jsonl", events)
    page = report(run)
    check_facts(page.text, "5,000 checkpoints", "5,000 void", "norm 500 too large", "reported 500 times")
    check_facts(page.text, "302 rows are left out")  # of two routines and 500 findings
    assert len(page.rows) < 300
    low, high = (page.curves("Loss", axis)["as logged"] for axis in ("low", "y"))
    assert len(low) <= 2000
    assert (min(low), max(high)) == (1e-9, 77.0)
    assert (run / "report.html").stat().st_size < 3e6


@pytest.mark.wide
def test_what_is_left_out_is_counted(run: Path) -> None:
    line = {"step": 1, "time": TIME, **{f"value{k}": 1.0 for k in range(500)}}
    for kind, num in (("fd", 12), ("lr", 13), ("precision", 14)):
        line |= {f"{kind}/{kind}{k}": 1.0 for k in range(num)}
    write_lines(run / "metrics.jsonl", [line])
    write_lines(run / "events.jsonl", [logged(1, "finding", "x" * k) for k in range(1, 54)])
    for k in range(22):
        Picture(numpy.zeros((4, 4), numpy.uint8), {"name": f"name{k}"}).save(picture_path(run, f"name{k}", 1))
    text = report(run).text
    check_facts(text, "and 3 more", "and 6 more", "and 139 more")  # diagnoses, names of pictures, logged values
    check_facts(text, "4 more feature spaces", "5 more groups", "6 more feature spaces")


def test_the_pace_leaves_out_the_time_between_processes(run: Path) -> None:
    lines = [{"step": k, "time": TIME + k + 86400 * (k > 50), "loss": 1.0} for k in range(1, 101)]
    write_lines(run / "metrics.jsonl", lines)
    resumed = {**logged(50, "resume", "resumed at step 50"), "time": TIME + 86400 + 50}
    write_lines(run / "events.jsonl", [logged(0, "start", "started"), resumed])
    page = report(run)
    check_facts(page.text, "10 img/s", "1:40")
    assert page.curves("Throughput")["mean 10"] == pytest.approx([10.0] * 98)


def test_what_is_refused(run: Path, tmp_path: Path, hookdiff: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    check_refused(hookdiff("report", run, "--out", tmp_path / "a.pdf"), "--out", "a.pdf", ".html")
    check_refused(hookdiff("report", run, "--out", run / "config.toml" / "a.html"), "a.html")
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").mkdir()
    check_refused(hookdiff("report", run), "metrics.jsonl")
    monkeypatch.setitem(sys.modules, "bokeh", None)
    check_refused(hookdiff("report", run), "bokeh", "pip install 'hookdiff[report]'")


@given(st.integers(1, 300), st.integers(1, 100))
def test_chosen_steps_are_even(num: int, most: int) -> None:
    chosen = evenly(range(num), most)
    assert chosen[-1] == num - 1
    assert len(chosen) == len(set(chosen)) == min(num, most)
    if len(chosen) > 1:
        assert chosen[0] == 0
        gaps = numpy.diff(chosen)
        assert gaps.max() - gaps.min() <= 1


# The plugin


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Return a config that waits long for a report, because its process has a low priority."""
    return write_small(tmp_path / "small.toml", run={"log_every": 1}, plugins={"report": {"timeout": 250}})


def test_a_run_ends_with_its_report(small: Path, tmp_path: Path, hookdiff: Command) -> None:
    run = tmp_path / "run"
    check_facts(output(hookdiff("run", small, "--plugins", "report", "--out", run)), "report.html")
    check_facts(Page.of(run / "report.html").text, "done", "step 6/6", "started", "stop")


FAILING = """
import os
from hookdiff import hookimpl

class Failing:
    @hookimpl
    def before_step(self, loop):
        if loop.progress.step == 3:
            raise ArithmeticError("out of numbers")

class Loud:
    @hookimpl
    def on_start(self, loop):  # a report then writes much more to its stderr than a pipe holds
        os.environ["PYTHONVERBOSE"] = "1"

class InTheWay:
    @hookimpl
    def on_ready(self, loop):
        (loop.run_dir / "report.html").mkdir()
"""


@pytest.mark.wide
def test_a_run_that_fails_has_a_report_too(small: Path, tmp_path: Path, start: Any) -> None:
    (tmp_path / "failing.py").write_text(FAILING)
    run = tmp_path / "run"
    process = start(tmp_path, "run", small, "--plugins", "report,failing:Failing", "--out", run)
    assert finish(process)[0] == 1
    check_facts(Page.of(run / "report.html").text, "crashed", "step 3/6", "ArithmeticError: out of numbers")


@pytest.mark.wide
def test_a_report_during_the_run_and_after_a_signal(small: Path, tmp_path: Path, start: Any) -> None:
    (tmp_path / "failing.py").write_text(FAILING)
    run = tmp_path / "run"
    settings = ("--set", "run.steps=100000", "--set", "plugins.report.every=30")
    process = start(tmp_path, "run", small, "--plugins", "report,failing:Loud", *settings, "--out", run)
    wait_for(run / "report.html", process)
    check_facts(Page.of(run / "report.html").text, "running", "100,000")
    process.send_signal(signal.SIGTERM)
    assert finish(process)[0] == 143
    check_facts(Page.of(run / "report.html").text, "stopped")


@pytest.mark.wide
def test_a_report_that_fails_or_is_late_is_one_warning(
    small: Path, tmp_path: Path, hookdiff: Command, user_module: Any, caplog: pytest.LogCaptureFixture
) -> None:
    user_module("failing", FAILING)
    words = ("--plugins", "report,failing:InTheWay", "--set", "plugins.report.every=1")
    assert hookdiff("run", small, *words, "--out", tmp_path / "run")[0] == 0
    (warning,) = [text for text in warnings(caplog) if "report" in text]
    check_facts(warning, tmp_path / "run" / "report.html")
    caplog.clear()
    words = ("--plugins", "report", "--set", "plugins.report.timeout=0.001")
    assert hookdiff("run", small, *words, "--out", tmp_path / "late")[0] == 0
    (warning,) = [text for text in warnings(caplog) if "report" in text]
    check_facts(warning, "report.html", "plugins.report.timeout = 0.001 s")
