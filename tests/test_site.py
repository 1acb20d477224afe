"""The site of docs/: it is built without a warning, its links lead somewhere, and nothing comes from elsewhere."""

import functools
import importlib
import inspect
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

import pytest

from hookdiff import Loop
from tests.conftest import serving

pytest.importorskip("furo", reason="needs the packages of the extra docs")
pytestmark = pytest.mark.wide  # the site is built once for all

ROOT = Path(__file__).parents[1]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DASH = "\N{EN DASH}"
QUESTIONS = {  # what people type, and the page that answers it
    "how many steps": "how-many-steps",
    "how long": "how-many-steps",
    "fine-tune": "start-from-weights",
    "finetune": "start-from-weights",
    "change the loss": "use-your-own-loss",
    "custom loss": "use-your-own-loss",
    "FID-50k": "measure-fid",
    "W&B": "use-a-tracker",
    "another machine": "resume-a-run",
    "video": "use-your-own-data",
    "LoRA": "train-an-adapter",
    "kohya": "from-other-trainers",
    "resume": "resume-a-run",
    "out of memory": "train-with-less-memory",
    "gradient accumulation": "train-with-less-memory",
    "16-bit grayscale images": "train-on-a-folder",
    "labels in csv": "train-on-a-folder",
    "several image folders": "train-on-a-folder",
    "samples all black": "what-is-wrong",
    "slurm preemption": "stop-a-run",
    "load ema weights": "export-weights",
    "loss is nan": "find-a-nan",
    "inpainting": "make-images",
    "validation loss": "watch-the-loss",
    "choose batch size": "choose-an-optimizer",
    "cosine noise schedule": "choose-a-process",
    "fewer sampling steps": "choose-a-process",
    "num_workers slow data loading": "train-on-a-folder",
    "early stopping": "questions",
    "mixed precision": "questions",
    "aspect ratio": "questions",
    "save best checkpoint": "questions",
    "hyperparameter sweep": "questions",
    "overfit single batch": "questions",
    "gpu utilization low": "questions",
    "dreambooth": "questions",
    "slurm preemption on an unheard-of cluster": "stop-a-run",  # no page has all words
}


def build(docs: Path, out: Path) -> "subprocess.CompletedProcess[str]":
    """Build the site of the folder `docs` as `make docs` does."""
    (options,) = re.findall(r"python -m sphinx (.+) docs build/docs", (ROOT / "Makefile").read_text("utf-8"))
    command = [sys.executable, "-m", "sphinx", *shlex.split(options), docs, out]
    return subprocess.run(command, capture_output=True, text=True)


class Page(HTMLParser):
    """What a page links to, what a browser loads for it, and the names of its places."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.places: set[str] = set()
        self.text = ""
        self.feed(path.read_text("utf-8"))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        for name, value in attributes:
            if name in ("href", "src"):
                (self.links if tag == "a" else self.loaded).append(value or "")
            elif name == "id":
                self.places.add(value or "")

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site")
    done = build(ROOT / "docs", out)
    assert (done.returncode, done.stderr) == (0, "")
    return out


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {path: Page(path) for path in site.rglob("*.html")}


def test_every_page_is_made_and_every_link_leads_to_a_place(site: Path, pages: dict[Path, Page]) -> None:
    sources = {path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")}
    assert sources <= {path.relative_to(site) for path in pages}
    lost = []
    for path, page in pages.items():
        for link in [*page.links, *page.loaded]:
            parts = urlsplit(link)
            if parts.scheme:
                continue
            target = path.parent.joinpath(unquote(parts.path)).resolve() if parts.path else path
            place = unquote(parts.fragment)
            if not target.is_file() or (place and target in pages and place not in pages[target].places):
                lost.append(f"{path.relative_to(site)}: {link}")
    assert not lost


def test_pages_load_nothing_from_elsewhere(site: Path, pages: dict[Path, Page]) -> None:
    styles = [path.read_text("utf-8") for path in site.rglob("*.css")]
    assert styles
    loaded = [link for page in pages.values() for link in page.loaded]
    loaded += [link for style in styles for link in re.findall(r"(?:url\(|@import)[\s'\"]*([^\s'\")]+)", style)]
    assert [link for link in loaded if urlsplit(link).netloc] == []


def test_every_public_name_is_on_the_page_of_its_module(site: Path, pages: dict[Path, Page]) -> None:
    modules = ["hookdiff", *(f"hookdiff.{stub.parent.name}" for stub in (ROOT / "hookdiff").glob("*/__init__.pyi"))]
    for module in modules:
        page = pages[site / "modules" / f"{module}.html"]
        shown = {*page.places, *(link.rpartition("#")[2] for link in page.links)}
        for name in importlib.import_module(module).__all__:
            assert shown & {f"{module}.{name}", f"hookdiff.{name}"}, f"{module}.{name}"


def test_the_navigation_has_the_headings_of_the_tasks_and_the_modules_once(site: Path) -> None:
    headings = re.findall(r"^## (.+)$", (ROOT / "docs" / "how-to" / "README.md").read_text("utf-8"), re.M)
    for name in ("index.html", "how-to/README.html", "how-to/resume-a-run.html"):
        _, tree = (site / name).read_text("utf-8").split('<div class="sidebar-tree">')
        tree = tree.partition("</aside>")[0]
        assert re.findall(r'<li class="group"><span [^>]+>(.+?)</span>', tree) == headings
        assert len(re.findall(r">\s*Modules\s*<", tree)) == 1


def test_the_reference_has_arguments_help_and_comments(site: Path, pages: dict[Path, Page]) -> None:
    text = pages[site / "modules" / "hookdiff.html"].text
    signature, _, described = text.partition("hookdiff.Loop(")[2].partition("[source]")
    for name in inspect.signature(Loop).parameters:
        assert re.search(rf"\b{name}:", signature)
        assert f"{name} {DASH} " in described.partition("hookdiff.LoopConfig(")[0]
    assert f"batch_size {DASH} samples of an update, over all micro-batches and ranks (at least 1)" in text
    assert f"inputs {DASH} n c h w, float32 in [-1, 1]" in text


@pytest.mark.slow
def test_a_broken_link_fails(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    broken = ["nowhere.md", "../reference/config.md#nowhere", "#nowhere", "nowhere.toml"]
    with (tmp_path / "docs" / "tutorial" / "README.md").open("a") as page:
        page.writelines(f"\n[here]({link})\n" for link in broken)
    done = build(tmp_path / "docs", tmp_path / "site")
    assert done.returncode != 0
    assert len(re.findall(r"tutorial/README\.md:\d+: WARNING: .*nowhere", done.stderr)) == len(broken)


# The names in tables that are broken inside.
BROKEN = """[...document.querySelectorAll("table code .pre")].filter((name) => name.getClientRects().length > 1)
    .map((name) => name.textContent)"""
SHOWN = '[...document.querySelectorAll("#search-results .kind-text")].every((one) => one.querySelector(".context"))'


@pytest.fixture
def address(site: Path) -> Iterator[str]:
    handler = functools.partial(SimpleHTTPRequestHandler, directory=str(site))
    with serving(handler) as served:
        yield f"http://{served}/"


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1440])
def test_in_a_browser_pages_fit_and_are_found(site: Path, address: str, width: int, scheme: str) -> None:
    from playwright.sync_api import sync_playwright

    requests, errors = [], []
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        page.on("request", lambda request: requests.append(request.url))
        page.on("pageerror", lambda error: errors.append(str(error)))
        for path in site.rglob("*.html"):
            name = path.relative_to(site).as_posix()
            if not name.startswith("_modules/"):
                page.goto(address + name)
                assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), name
                assert page.evaluate(BROKEN) == [], name
        red = int(re.findall(r"\d+", page.evaluate("getComputedStyle(document.body).backgroundColor"))[0])
        assert (red < 64) == (scheme == "dark")
        page.goto(address + "search.html?q=resume")
        page.locator("#search-results").get_by_role("link", name="Resume a run", exact=True).click()
        assert page.locator("h1").inner_text().startswith("Resume a run")
        excerpts = []
        for start in (address, f"{site.as_uri()}/"):  # the search has the same excerpts where pages are files
            page.goto(f"{start}search.html?q=resume")
            page.get_by_text("Search finished").wait_for()
            page.wait_for_function(SHOWN)
            excerpts.append(page.locator("#search-results").inner_text())
        assert excerpts[0] == excerpts[1]
        for words, answer in QUESTIONS.items():
            page.goto(f"{address}search.html?q={quote(words)}")
            page.locator("#search-results .search-summary", has_text="found").wait_for()
            links = page.locator("#search-results li > a")
            first = links.evaluate_all("links => links.slice(0, 3).map(link => link.pathname)")
            assert f"/how-to/{answer}.html" in first, words
        browser.close()
    assert errors == []
    assert [url for url in requests if not url.startswith((address, site.as_uri(), "data:"))] == []
