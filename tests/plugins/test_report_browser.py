"""A report in a browser without a window: it is used by mouse and keyboard, and nothing leaves the page."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from attrs import define, field
from playwright.sync_api import sync_playwright

from hookdiff_report.cli import command
from tests.plugins.test_report import ATTACK, add_samples, logged, make_run, write_lines

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
NONE = "\u2013"  # a value that is not logged yet

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@define
class Opened:
    """A report in the browser, and what it has done."""

    page: Any
    errors: list[str] = field(factory=list)
    requests: list[str] = field(factory=list)

    @classmethod
    def of(cls, browser: Any, path: Path, **options: Any) -> "Opened":
        opened = cls(browser.new_page(**options))
        page = opened.page
        page.on("console", lambda message: opened.errors.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: opened.errors.append(str(error)))
        page.on("dialog", lambda dialog: opened.errors.append(dialog.message))
        page.on("request", lambda request: opened.requests.append(request.url))
        page.goto(path.as_uri())
        page.wait_for_selector("html[data-ready=yes]", state="attached")
        return opened

    @property
    def left(self) -> list[str]:
        """The requests for anything but the file itself."""
        return [url for url in self.requests[1:] if not url.startswith("data:")]

    def picture(self) -> tuple[str, int]:
        """Return the text of the first picture and its shade in the middle, 0 to 255."""
        shade = self.page.evaluate("""() => {
            const image = document.querySelector(".strip img"), canvas = new OffscreenCanvas(image.naturalWidth, 1);
            const context = canvas.getContext("2d");
            context.drawImage(image, 0, -8);
            return context.getImageData(8, 0, 1, 1).data[0];
        }""")
        return self.page.locator(".strip img").first.get_attribute("alt"), shade


def report(*runs: Path, out: Path) -> Path:
    command([*map(str, runs), "--out", str(out), "--overwrite"], standalone_mode=False)
    return out


@pytest.fixture
def path(tmp_path: Path) -> Path:
    run = make_run(tmp_path / "first")
    add_samples(run, [10, 20, 30], side=64)
    return report(run, out=tmp_path / "report.html")


@pytest.mark.parametrize("width", [1200, 360])
def test_one_slider_moves_all(browser: Any, path: Path, width: int) -> None:
    opened = Opened.of(browser, path, viewport={"width": width, "height": 800})
    page = opened.page
    text, shade = opened.picture()
    assert text == "samples, step 30, ema"
    assert shade < 20
    slider = page.get_by_role("slider", name="step")

    def state() -> tuple[Any, ...]:
        """Return the step of the slider, the picture, the progress, the line in all plots, and the values."""
        lines = page.evaluate("""() => Bokeh.documents.flatMap((one) => one.roots()).flatMap((plot) => plot.center)
            .filter((part) => part.name === "step").map((part) => [part.visible, part.location])""")
        assert len(lines) == 7  # of all plots but the loss by noise level
        ((is_shown, location),) = {tuple(line) for line in lines}
        shown = page.locator("#scrubber output").inner_text(), opened.picture()[0].split(", ")[1]
        names, texts = (page.locator(f"#scrubber {tag}").all_inner_texts() for tag in ("dt", "dd"))
        values = dict(zip(names, texts, strict=True))
        progress = page.locator("progress").evaluate("bar => bar.value")
        assert slider.get_attribute("aria-valuetext") == f"step {shown[0]}"
        return *shown, progress, is_shown and location, values["loss"], values["Fréchet distance (digits)"]

    end = ("40", "step 30", 40, False, "0.05", "2.5")
    assert state() == end
    page.keyboard.press("ArrowLeft")  # from anywhere
    assert state() == ("39", "step 30", 39, 39, "0.05128", "5")
    slider.focus()
    for key, found in {
        "Home": ("1", "step 10", 1, 1, "2", NONE),
        "PageUp": ("5", "step 10", 5, 5, "0.4", NONE),
        "ArrowRight": ("6", "step 10", 6, 6, "0.3333", NONE),
        "End": end,
    }.items():
        page.keyboard.press(key)
        assert state() == found
    box = slider.bounding_box()
    page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    step, picture, *_, distance = state()
    assert (19 <= int(step) <= 22, picture) == (True, f"step {int(step) // 10 * 10}")
    assert distance == (NONE if int(step) < 20 else "5")
    page.get_by_role("radio", name="ema").focus()
    page.keyboard.press("ArrowDown")  # a button keeps its keys
    text, shade = opened.picture()
    assert text == f"samples, {picture}, model"
    assert shade > 235
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert not opened.errors
    assert not opened.left


def test_the_slider_moves_the_pictures_of_all_runs(browser: Any, tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name) for name in "ab"]
    for run, steps in zip(runs, ([10, 20, 30], [15, 25]), strict=True):
        add_samples(run, steps)
    page = Opened.of(browser, report(*runs, out=tmp_path / "both.html")).page
    page.get_by_role("slider").focus()
    shown = {}
    for key in ["End"] + ["ArrowLeft"] * 25:
        page.keyboard.press(key)
        step = page.locator("#scrubber output").inner_text()
        shown[int(step)] = page.locator(".slide output").all_inner_texts()
    expected = {40: (30, 25), 29: (20, 25), 24: (20, 15), 19: (10, 15)}
    assert {step: shown[step] for step in expected} == {k: [f"step {one}" for one in v] for k, v in expected.items()}


def test_no_picture_of_other_weights_or_steps(browser: Any, tmp_path: Path) -> None:
    run, lone = make_run(tmp_path / "first"), make_run(tmp_path / "lone")
    titles = ("model", "odd\rname")
    for step, names in ((10, [""]), (20, titles)):
        add_samples(run, [step], titles=names)
    add_samples(lone, [10], titles=[""], weights=["model"])
    for runs in ([run], [run, lone]):
        page = Opened.of(browser, report(*runs, out=tmp_path / "out.html")).page
        picture, note = page.locator(".strip img"), page.get_by_text("no picture of these weights at this step")
        radios = page.get_by_role("radio")
        assert radios.count() == 2
        radios.nth(1).check()
        assert picture.first.get_attribute("alt").endswith("step 20, odd\rname")
        assert picture.first.is_visible()
        assert not note.first.is_visible()
    assert [picture.nth(1).is_visible(), note.nth(1).is_visible()] == [True, False]  # it has no other weights
    assert picture.nth(1).get_attribute("alt").endswith("step 10, model")

    page = Opened.of(browser, report(run, out=tmp_path / "out.html")).page
    picture, note = page.locator(".strip img"), page.get_by_text("no picture of these weights at this step")
    for place, is_shown in ((1, False), (0, True)):
        page.get_by_role("radio").nth(place).check()
        page.get_by_role("slider").press("Home")
        assert [picture.is_visible(), note.is_visible()] == [is_shown, not is_shown]


def test_the_first_key_leads_to_the_content(browser: Any, path: Path) -> None:
    page = Opened.of(browser, path).page
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"


def test_every_plot_is_drawn(browser: Any, path: Path) -> None:
    opened = Opened.of(browser, path, color_scheme="dark")
    plots = opened.page.get_by_role("img").filter(has=opened.page.locator("canvas"))
    labels = [plots.nth(k).get_attribute("aria-label") for k in range(plots.count())]
    starts = ["Loss by step", "Loss by noise level", "Fréchet distance", "Fidelity and variety", "Learning rate"]
    starts += ["Gradient norm", "Throughput", "Memory"]
    assert [label.startswith(start) for label, start in zip(labels, starts, strict=True)] == [True] * 8
    assert "smoothed: last 0.05" in labels[0]
    background = opened.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert max(map(int, background[4:-1].split(","))) < 60
    box = plots.nth(0).bounding_box()
    value = opened.page.get_by_text("smoothed").nth(1)  # at the pointer; the first is in the legend
    for y in range(int(box["y"]), int(box["y"] + box["height"]), 4):
        opened.page.mouse.move(box["x"] + box["width"] / 2, y)
        opened.page.wait_for_timeout(50)
        if value.is_visible():
            break
    value.wait_for()
    plots.nth(0).hover(position={"x": 200, "y": 20})  # the buttons appear
    with opened.page.expect_download() as download:
        plots.nth(0).get_by_title("Save").click()
    assert download.value.suggested_filename == "loss.png"
    assert not opened.errors
    assert not opened.left


def test_a_phone_shows_one_column(browser: Any, path: Path, tmp_path: Path) -> None:
    phone = {"viewport": {"width": 360, "height": 740}, "is_mobile": True, "has_touch": True}
    opened = Opened.of(browser, path, **phone)
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= 360
    lefts = {round(one.bounding_box()["x"]) for one in opened.page.locator(".plots > figure").all()}
    assert len(lefts) == 1
    hint = "Point at a curve"
    assert not opened.page.get_by_text(hint).is_visible()
    assert Opened.of(browser, path).page.get_by_text(hint).is_visible()
    runs = [tmp_path / "first", make_run(tmp_path / "a-name-of-some-length")]
    opened = Opened.of(browser, report(*runs, out=tmp_path / "both.html"), **phone)
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= 360
    cells = opened.page.locator("header td, header th").all()
    assert min(cell.bounding_box()["width"] for cell in cells) > 40  # not a letter a line
    write_lines(runs[0] / "events.jsonl", [logged(1, "finding", "word " * 200)])
    heads = Opened.of(browser, report(runs[0], out=tmp_path / "out.html")).page.locator(".events th").all()
    assert max(head.bounding_box()["height"] for head in heads) < 40  # one line each


def test_hostile_names_stay_text(browser: Any, tmp_path: Path) -> None:
    run, other = make_run(tmp_path / "<img src=x onerror=alert(1)>"), make_run(tmp_path / "other", steps=20)
    lines = [{"step": k, "time": 1.0 + k, "loss": 1.0, f"fd/{ATTACK}": 1.0, f"lr/{ATTACK}@x": 1.0} for k in (1, 2)]
    write_lines(run / "metrics.jsonl", lines)
    write_lines(run / "events.jsonl", [logged(1, kind, ATTACK, "error") for kind in ("finding", ATTACK)])
    add_samples(run, [1])
    for runs in ([run], [run, other]):
        opened = Opened.of(browser, report(*runs, out=tmp_path / "out.html"))
        for plot in opened.page.locator(".plot").all():  # the values at the pointer have the names of the curves
            plot.scroll_into_view_if_needed()
            box = plot.bounding_box()
            for share in (0.2, 0.5, 0.9):
                opened.page.mouse.move(box["x"] + box["width"] * share, box["y"] + box["height"] / 2)
        assert opened.page.locator("img[onerror]").count() == 0
        assert not opened.errors
        assert not opened.left
