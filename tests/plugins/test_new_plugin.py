"""`hookdiff new-plugin`: its templates work as they are, and so do the packages that are made of them."""

import os
import re
import sys
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli

from hookdiff import UserError
from hookdiff.experiment.config import SOURCES
from hookdiff.experiment.optimizers import OPTIMIZERS
from hookdiff.options import Choice, import_object
from hookdiff.options.help import markdown
from hookdiff_lr import LRSchedule
from hookdiff_new_plugin.kinds import KINDS, write
from hookdiff_new_plugin.names import check_name
from tests.conftest import Command, Succeed, check_facts, check_refused, contents, output, records, refused
from tests.forked import python, run_python

ROOT = Path(__file__).parents[2]
OLD = ("example_plugin", "example-plugin", "ExamplePlugin")


def test_the_docs_list_the_kinds() -> None:
    page = (ROOT / "docs" / "reference" / "plugins.md").read_text("utf-8")
    section = page.partition("## Start from a template")[2].partition("\n## ")[0]
    assert sorted(re.findall(r"^\| `(\w+)` \|", section, re.M)) == sorted(KINDS)
    assert next(iter(KINDS)) == "plugin"


@pytest.mark.wide
def test_the_tests_of_the_templates_pass_as_they_are() -> None:
    files = [file for template in KINDS.values() for file in template.glob("tests/test_*.py")]
    assert len(files) == len(KINDS)
    run_python("-m", "pytest", "-q", "-p", "no:cacheprovider", *files, folder=Path(), paths=tuple(KINDS.values()))


@pytest.mark.parametrize("kind", KINDS)
def test_a_package_is_small_and_its_readme_has_keys(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "package"
    write(kind, f"mine_{kind}", package)
    assert not re.search(rf"<\w+>|example_{kind}", "".join(map(bytes.decode, contents(package).values())))
    ((_, entries),) = tomli.loads((package / "pyproject.toml").read_text())["project"]["entry-points"].items()
    ((_, path),) = entries.items()
    monkeypatch.syspath_prepend(package)
    table = markdown(import_object(path, "the template"), frozenset({"params"}))
    assert f"\n\n{table}\n" in (package / "README.md").read_text()
    assert tomli.loads((package / "example.toml").read_text())["diffusion"]["conditional"] is False
    (module,) = package.glob("hookdiff_*/*.py")
    assert len(module.read_text().splitlines()) <= 60


# Names


def test_a_wrong_name_is_refused_with_a_good_one_and_torch_is_not_imported(tmp_path: Path, install: Any) -> None:
    install("wanted", {"wanted": "hd_wanted:X"}, hd_wanted="")
    install("hookdiff-named", hookdiff_other="")
    good = {
        "grad-norm": "grad_norm",
        "GradNorm": "grad_norm",
        "2nd": "my_2nd",
        "größe": "groe",
        "": "plugin",
        "hookdiff-dimmer": "dimmer",
        "hookdiff_hookdiff_dimmer": "dimmer",
        "class": "my_class",
        "None": "my_none",  # a clipping is named so
        "json": "my_json",
        "ema": "my_ema",
        "heun": "my_heun",
        "adamw": "my_adamw",
        "unet": "my_unet",
        "numpy": "my_numpy",
        "networks": "my_networks",  # the package hookdiff_networks
        "wanted": "my_wanted",
        "loop": "my_loop",  # the package imports a class Loop
        "value_error": "my_value_error",
        "other": "my_other",
        "named": "my_named",
    }
    code = f"""
import sys
from hookdiff import UserError
from hookdiff.cli import group
for name in {[*good]}:
    try:
        group.main(["new-plugin", name], standalone_mode=False)
    except UserError as error:
        print(error)
print("torch" in sys.modules)
"""
    *messages, is_imported = output(python(code, folder=tmp_path, fresh=True)).splitlines()
    assert is_imported == "False"
    for (name, better), message in zip(good.items(), messages, strict=True):
        assert message.startswith(repr(name))
        assert message.endswith(f"did you mean {better!r}?"), message


def all_kinds(kind: type[Choice] = Choice) -> Iterator[type[Choice]]:
    for subclass in kind.__subclasses__():
        yield subclass
        yield from all_kinds(subclass)


@pytest.mark.wide
def test_the_name_of_any_part_is_taken() -> None:
    ours = [kind for kind in all_kinds() if kind.__module__.startswith("hookdiff")]
    assert LRSchedule in ours
    known = {name for kind in ours for name in kind.known} | {*OPTIMIZERS, *SOURCES}
    for name in known:
        with refused(UserError, name):
            check_name(name)


def test_what_exists_is_kept_and_a_kind_without_a_template_is_refused(hookdiff: Command, here: Path) -> None:
    (here / "a file").write_text("kept")
    (here / "hookdiff-dimmer").mkdir()
    (here / "link").symlink_to("nowhere")
    before = contents(here)
    check_refused(hookdiff("new-plugin", "dimmer"), "hookdiff-dimmer", "exists", "DIR")
    for name in ("a file", "link", "."):
        check_refused(hookdiff("new-plugin", "dimmer", name), name, "exists")
    check_refused(hookdiff("new-plugin", "dimmer", "a file/in it"), "a file")
    check_refused(hookdiff("new-plugin", "other", "--kind", "weighting"), "weighting", *KINDS)
    assert contents(here) == before


# Packages


@pytest.mark.wide
def test_a_new_package_is_installed_listed_tested_and_acts_in_its_run(
    hookdiff: Command, succeed: Succeed, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project, site = here / "hookdiff-path-length", here / "site"
    check_facts(succeed("new-plugin", "path_length"), project.name, "pytest")
    files = contents(project)
    for path, content in files.items():
        assert not any(old in f"{path}\n{content.decode()}" for old in OLD), path
    assert {Path(".github/workflows/test.yml"), Path("hookdiff_path_length/py.typed")} < files.keys()

    options = "--quiet", "--no-deps", "--no-build-isolation", "--target", site
    run_python("-m", "pip", "install", *options, project, folder=here)
    monkeypatch.syspath_prepend(site)
    rows = {line.split()[0]: line for line in succeed("plugins").splitlines() if line.startswith("  ")}
    check_facts(rows["path_length"], "hookdiff-path-length 0.1.0")
    assert succeed("plugins", "path_length", "--markdown") in files[Path("README.md")].decode()
    run_python("-m", "pytest", "-q", "-p", "no:cacheprovider", folder=project, paths=(site,))
    code, _, logged = hookdiff("run", project / "example.toml", "--out", here / "run")
    assert (code, "classes" in logged) == (0, False)  # it does not warn of classes that the network does not get
    assert all("path_length" in line for line in records(here / "run"))


@pytest.mark.slow
def test_packages_of_all_kinds_work_in_one_fresh_environment(tmp_path: Path) -> None:
    projects = {kind: tmp_path / f"hookdiff-{kind.replace('_', '-')}-of-mine" for kind in KINDS}
    for kind, project in projects.items():
        run_python("-m", "hookdiff", "new-plugin", f"{kind}_of_mine", project, "--kind", kind, folder=tmp_path)
    wheels = tmp_path / "wheels"
    run_python(
        "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", wheels, *projects.values(), folder=tmp_path
    )
    venv.create(tmp_path / "env", with_pip=False)
    fresh = tmp_path / "env" / ("Scripts" if os.name == "nt" else "bin") / "python"
    (site,) = (tmp_path / "env").rglob("site-packages")
    (site / "others.pth").write_text("\n".join(path for path in sys.path if path))
    run_python("-m", "pip", "--python", fresh, "install", "--no-deps", *wheels.iterdir(), folder=tmp_path)

    sources = [path for project in projects.values() for path in (project / "tests", *project.glob("hookdiff_*"))]
    tests = [project / "tests" for project in projects.values()]
    run_python("-m", "mypy", "--strict", *sources, folder=tmp_path, interpreter=fresh)
    run_python("-m", "pytest", "-q", *tests, folder=tmp_path, interpreter=fresh)
    resume = ("-m", "hookdiff", "selftest", "resume", "example.toml", "--steps", 20)
    for project in projects.values():
        run_python(*resume, folder=project, interpreter=fresh)
