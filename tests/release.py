"""A release: checks version and changelog, builds wheel and sdist, looks into them, and tests the wheel.

`make release VERSION=X` runs it in a clean clone. At the end it prints the two commands that publish, which a person
gives.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Sequence
from datetime import date
from pathlib import Path

ROOT = Path(__file__).parents[1]
METADATA = ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE")


class Refusal(Exception):
    """A reason not to release, in one message."""


def git(root: Path, *words: str) -> str:
    """Return what git prints about `root`; raises Refusal outside of a clone."""
    done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True)
    if done.returncode:
        raise Refusal(f"git {words[0]}: {done.stderr.strip()}")
    return done.stdout


def files(root: Path, *folders: str) -> set[str]:
    """Return the files that git has in `folders`, by default in all."""
    return set(git(root, "ls-files", "-z", *folders).split("\0")) - {""}


def call(failure: str, *words: object, cwd: Path) -> None:
    """Run a program; raises Refusal with `failure` if it fails. No PYTHONPATH may lead it to other packages."""
    around = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    if subprocess.run([*map(str, words)], cwd=cwd, env=around).returncode:
        raise Refusal(failure)


def environment(folder: Path, *packages: object) -> Path:
    """Make an environment with `packages`, which may be options of pip too, and return its Python."""
    call(f"{folder}: no environment was made", sys.executable, "-m", "venv", folder, cwd=ROOT)
    python = folder / "bin" / "python"
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages]
    call(f"pip cannot install {' '.join(map(str, packages))}", *install, cwd=folder)
    return python


def check_sources(root: Path, version: str) -> None:
    """Raise Refusal unless pyproject.toml and CHANGELOG.md are those of `version`, today, and all is committed."""
    declared = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["project"]["version"]
    if version != declared:
        raise Refusal(f"VERSION is {version or 'missing'}, and pyproject.toml has {declared}")
    if changed := git(root, "status", "--porcelain").splitlines():
        raise Refusal(f"the tree has changes that are not committed: {', '.join(line[3:] for line in changed)}")
    sections = re.findall(r"^## (.*)$", (root / "CHANGELOG.md").read_text("utf-8"), re.M)
    if "Unreleased" in sections:
        raise Refusal(f"CHANGELOG.md has a section Unreleased: move its lines to {version}")
    wanted, top = f"{version} - {date.today()}", sections[0] if sections else "no section"
    if top != wanted:
        raise Refusal(f"CHANGELOG.md begins with {top!r}, where a release today begins with {wanted!r}")


def build(root: Path, python: Path, *options: str) -> tuple[Path, Path]:
    """Return the wheel and the sdist that `python` makes in dist/, the wheel from what is in the sdist."""
    shutil.rmtree(root / "dist", ignore_errors=True)
    call("the build failed", python, "-m", "build", *options, cwd=root)
    ((wheel,), (sdist,)) = ([*(root / "dist").glob(kind)] for kind in ("*.whl", "*.tar.gz"))
    return wheel, sdist


def check_contents(root: Path, wheel: Path, sdist: Path) -> None:
    """Raise Refusal if the wheel is not hookdiff/, plugins/ and metadata, or the sdist not all the files of git."""
    info = f"{'-'.join(wheel.name.split('-')[:2])}.dist-info"
    packages = {name.removeprefix("plugins/") for name in files(root, "hookdiff", "plugins")}
    with zipfile.ZipFile(wheel) as archive:
        _compare(wheel, packages | {f"{info}/{name}" for name in METADATA}, set(archive.namelist()))
    with tarfile.open(sdist) as archive:
        _compare(sdist, files(root) | {"PKG-INFO"}, {name.partition("/")[2] for name in archive.getnames()})


def _compare(archive: Path, wanted: set[str], found: set[str]) -> None:
    for what, names in {"lacks": wanted - found, "should not have": found - wanted}.items():
        if names:
            raise Refusal(f"{archive.name} {what} {', '.join(sorted(names))}")


def try_wheel(root: Path, wheel: Path, folder: Path, lend: bool) -> None:
    """Raise Refusal if tests/test_installed.py fails in a fresh environment, where the sources cannot be imported.

    It has what the wheel requires and no extras, or with `lend` the packages of this Python.
    """
    python = environment(folder / "fresh", *(["--no-deps", wheel] if lend else [wheel, "mypy", "pytest"]))
    if lend:  # only now, so that pip does not see them
        (site,) = (folder / "fresh").rglob("site-packages")
        (site / "lent.pth").write_text("\n".join(path for path in sys.path if path.endswith("-packages")))
    shutil.copy(root / "tests" / "test_installed.py", folder)
    options = ["-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", "."]
    call("the tests of the wheel failed", python, "-m", "pytest", *options, "test_installed.py", cwd=folder)


def release(root: Path, version: str, lend: bool, folder: Path) -> None:
    """Raise Refusal for the first thing that is wrong; `folder` is for the environments."""
    check_sources(root, version)
    python = Path(sys.executable) if lend else environment(folder / "tools", "build", "twine")
    wheel, sdist = build(root, python, *(["--no-isolation"] if lend else []))
    check_contents(root, wheel, sdist)
    call("twine refuses the archives", python, "-m", "twine", "check", "--strict", wheel, sdist, cwd=root)
    try_wheel(root, wheel, folder, lend)
    commit = git(root, "rev-parse", "HEAD").strip()
    print(f"\nhookdiff {version} is ready. These two commands tag and upload it:\n")
    print(f"git tag -a v{version} -m 'hookdiff {version}' {commit} && git push origin v{version}")
    print(f"twine upload dist/{wheel.name} dist/{sdist.name}")


def main(words: Sequence[str], root: Path = ROOT) -> int:
    """Return 0, or 2 after one message."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("version", help="the version to release, as in pyproject.toml")
    parser.add_argument("--lend", action="store_true", help="use the packages of this Python, and download nothing")
    given = parser.parse_args(words)
    try:
        with tempfile.TemporaryDirectory() as folder:
            release(root, given.version, given.lend, Path(folder))
    except Refusal as refusal:
        print(f"release: {refusal}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
