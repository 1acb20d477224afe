"""`make release`: each of its refusals in a small project, and a release of a copy of these sources."""

import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import release

from hookdiff_new_plugin import kinds

ROOT = Path(__file__).parents[1]
if not (ROOT / ".git").exists():
    pytest.skip("needs a clone", allow_module_level=True)

PROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "hookdiff"
version = "1.2.3"
requires-python = ">=3.11"
readme = "README.md"
license = "Apache-2.0"
license-files = ["LICENSE"]
[project.entry-points."hookdiff.plugins"]
small = "hookdiff_small:Small"
[tool.hatch.build.targets.wheel]
only-include = ["hookdiff", "plugins"]
sources = ["plugins"]
"""
TODAY = date.today()
TOP = f"## 1.2.3 - {TODAY}\n"
FILES = {
    ".gitignore": "dist/\n",
    "CHANGELOG.md": f"# Changelog\n\n{TOP}\nIt begins.\n\n## 1.2.2 - 2026-01-01\n",
    "LICENSE": "free",
    "README.md": "A small project.",
    "hookdiff/__init__.py": "",
    "hookdiff/py.typed": "",
    "plugins/hookdiff_small/__init__.py": "class Small: ...",
    "pyproject.toml": PROJECT,
    "tests/test_installed.py": "def test_it(): import hookdiff_small",
}
WHEEL, SDIST = "hookdiff-1.2.3-py3-none-any.whl", "hookdiff-1.2.3.tar.gz"


def commit(folder: Path) -> None:
    """Make a repository of a folder."""
    author = ["-c", "user.name=A", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
    for words in (["init", "--quiet"], ["add", "--all"], [*author, "commit", "--quiet", "--message", "All"]):
        subprocess.run(["git", *words], cwd=folder, check=True)


@pytest.fixture(autouse=True)
def one_day(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no midnight pass between two tests."""
    monkeypatch.setattr(release, "date", SimpleNamespace(today=lambda: TODAY))


def write(folder: Path, texts: Mapping[str, str]) -> None:
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def check_unready(
    folder: Path, capfd: pytest.CaptureFixture[str], message: str, changed: Mapping[str, str], version: str = "1.2.3"
) -> None:
    """Assert that a repository whose files are `changed` after the commit is refused before anything is built."""
    write(folder, changed)
    assert release.main([version], folder) == 2
    assert capfd.readouterr().err == f"release: {message}\n"
    assert not (folder / "dist").exists()


@pytest.mark.parametrize(
    ("version", "changed", "message"),
    [
        ("", {}, "VERSION is missing, and pyproject.toml has 1.2.3"),
        ("1.2.4", {}, "VERSION is 1.2.4, and pyproject.toml has 1.2.3"),
        ("1.2.3", {"LICENSE": "mine", "new.py": ""}, "the tree has changes that are not committed: LICENSE, new.py"),
    ],
    ids=["no version", "another version", "a dirty tree"],
)
def test_another_version_or_a_dirty_tree_is_refused(
    version: str, changed: Mapping[str, str], message: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, FILES)
    commit(tmp_path)
    check_unready(tmp_path, capfd, message, changed, version)


BEGINS = f"CHANGELOG.md begins with {{!r}}, where a release today begins with {TOP[3:-1]!r}"


@pytest.mark.parametrize(
    ("changelog", "message"),
    [
        (f"## Unreleased\n\n{TOP}", "CHANGELOG.md has a section Unreleased: move its lines to 1.2.3"),
        ("## 1.2.3 - 2026-01-01\n", BEGINS.format("1.2.3 - 2026-01-01")),
        (f"## 1.2.4 - {TODAY}\n\n{TOP}", BEGINS.format(f"1.2.4 - {TODAY}")),
        ("# Changelog\n", BEGINS.format("no section")),
    ],
    ids=["unreleased changes", "another day", "another version above", "an empty changelog"],
)
def test_a_changelog_that_is_not_ready_is_refused(
    changelog: str, message: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, {**FILES, "CHANGELOG.md": changelog})
    commit(tmp_path)
    check_unready(tmp_path, capfd, message, {})


@pytest.mark.wide
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param(
            {"pyproject.toml": PROJECT + 'exclude = ["*.typed"]\n'},
            f"{WHEEL} lacks hookdiff/py.typed",
            id="a wheel without a file",
        ),
        pytest.param(
            {"pyproject.toml": PROJECT.replace('["LICENSE"]', "[]")},
            f"{WHEEL} lacks hookdiff-1.2.3.dist-info/licenses/LICENSE",
            id="a wheel without the licence",
        ),
        pytest.param(
            {"pyproject.toml": PROJECT.replace('["hookdiff", ', '["hookdiff", "tests", ')},
            f"{WHEEL} should not have tests/test_installed.py",
            id="a wheel with tests",
        ),
        pytest.param(
            {"pyproject.toml": PROJECT + '[tool.hatch.build.targets.sdist]\nexclude = ["tests"]\n'},
            f"{SDIST} lacks tests/test_installed.py",
            id="an sdist without tests",
        ),
        pytest.param(
            {"pyproject.toml": PROJECT.replace("README", "READ")}, "the build failed", id="a project that is not built"
        ),
        pytest.param(
            {"pyproject.toml": PROJECT.replace('readme = "README.md"', "")},
            "twine refuses the archives",
            id="a project without a description",
        ),
        pytest.param(
            {"tests/test_installed.py": "def test_it(): import hookdiff; open(hookdiff.__path__[0] + '/../LICENSE')"},
            "the tests of the wheel failed",
            id="a wheel that needs the sources",
        ),
    ],
)
def test_archives_that_are_not_right_are_refused(
    changes: Mapping[str, str], message: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, {**FILES, **changes})
    commit(tmp_path)
    assert release.main(["1.2.3", "--lend"], tmp_path) == 2
    assert capfd.readouterr().err.splitlines()[-1] == f"release: {message}"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_these_sources_can_be_released(tmp_path: Path) -> None:
    for name in release.git(ROOT, "ls-files", "--cached", "--others", "--exclude-standard").splitlines():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    version, changelog = project()["version"], tmp_path / "CHANGELOG.md"
    top = f"## {version} - {TODAY}"
    changelog.write_text(re.sub(r"^## .*$", top, changelog.read_text("utf-8"), count=1, flags=re.M), "utf-8")
    commit(tmp_path)
    given = [f"VERSION={version}", f"PYTHON={sys.executable}", "LEND=yes"]
    done = subprocess.run(["make", "release", *given], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    archives = f"dist/hookdiff-{version}-py3-none-any.whl dist/hookdiff-{version}.tar.gz"
    commit_id = release.git(tmp_path, "rev-parse", "HEAD").strip()
    assert done.stdout.splitlines()[-2:] == [
        f"git tag -a v{version} -m 'hookdiff {version}' {commit_id} && git push origin v{version}",
        f"twine upload {archives}",
    ]
    assert release.git(tmp_path, "status", "--porcelain") == ""


def project(folder: Path = ROOT) -> dict[str, Any]:
    return tomllib.loads((folder / "pyproject.toml").read_text("utf-8"))["project"]


def test_packages_to_copy_require_the_versions_that_keep_their_word(tmp_path: Path) -> None:
    """docs/reference/versions.md: those from this 0.X up to the next."""
    major, minor, *_ = map(int, project()["version"].split("."))
    for kind in kinds.KINDS:
        kinds.write(kind, "mine", tmp_path / kind)
    for package in (*tmp_path.iterdir(), *ROOT.glob("examples/plugins/*/")):
        (ours,) = (one for one in project(package)["dependencies"] if one.startswith("hookdiff"))
        assert ours == f"hookdiff>={major}.{minor},<{major}.{minor + 1}", package
