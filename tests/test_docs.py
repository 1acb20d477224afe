"""README and docs/: their code runs, and their tables are those of the source."""

import inspect
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli
import tomli_w

import hookdiff_clip
import hookdiff_ema
import hookdiff_lr
from hookdiff import Feed
from hookdiff.builtin.start import Start
from hookdiff.choices import Choice
from hookdiff.cli import COMMANDS, main
from hookdiff.data import Store, Transforms
from hookdiff.diffusion import (
    Diffusion,
    Sampling,
)
from hookdiff.experiment.config import MODELS, OPTIMIZERS, SOURCES, RunConfig, load_config
from hookdiff.experiment.discovery import import_object, installed
from hookdiff.experiment.optimizers import Groups, muon
from hookdiff.experiment.structure import described, parameters, resolved
from hookdiff.hookspecs import HOOK_NAMES, Hooks
from hookdiff.models import DiT, UNet
from hookdiff.models.init import Initialisation

ROOT = Path(__file__).parents[1]
PAGES = ["README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))]
PARTS: dict[str, list[type[Choice]]] = {
    "plugins.clip": [hookdiff_clip.Rule],
    "plugins.ema": [hookdiff_ema.Warmup],
    "plugins.lr": [hookdiff_lr.LRSchedule],
}
KINDS: dict[str, type[Choice]] = {f"{table}: {kind.kind}": kind for table, kinds in PARTS.items() for kind in kinds}
OURS = [n for n, (entry, *_) in installed().items() if entry.dist and entry.dist.name == "hookdiff"]
SHORT = [
    *("--set", "run.steps=4", "--set", "run.batch_size=16", "--set", "run.log_every=2", "--set", "sampling.steps=2"),
    *("--set", "plugins.fid.num_samples=16", "--set", "plugins.lr.warmup=2", "--set", "run.micro_batch=8"),
]


def blocks(page: str, language: str) -> list[str]:
    """Return the fenced blocks of `page` in `language`."""
    return re.findall(rf"^```{language}\n(.*?)^```$", (ROOT / page).read_text("utf-8"), re.M | re.S)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout as a reader has it, with the run that the tutorial begins with, in short."""
    folder = tmp_path_factory.mktemp("checkout")
    (folder / "examples").symlink_to(ROOT / "examples")
    first = shlex.split(blocks("docs/tutorial.md", "sh")[0])[1:]
    command = [sys.executable, "-c", "from hookdiff.cli import main; main()", *first, *SHORT]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "runs/basic/metrics.jsonl" in done.stdout
    return folder


def test_all_code_is_in_a_language_that_is_tested() -> None:
    languages = {fence for page in PAGES for fence in re.findall(r"^```(\w*)$", (ROOT / page).read_text("utf-8"), re.M)}
    assert languages == {"", "python", "sh", "toml"}


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")])
def test_python_runs(page: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The blocks of a page are one program, read from top to bottom; the run that it looks at is the short one.
    monkeypatch.chdir(folder)
    for line in "".join(blocks(page, "sh")).splitlines():
        if line.startswith("hookdiff export"):  # what it writes is loaded
            monkeypatch.setattr(sys, "argv", [*shlex.split(line), "--overwrite"])
            with pytest.raises(SystemExit, match=r"^0$"):
                main()
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks(page, "python"):
        exec(compile(block, page, "exec"), names)


def commands() -> Iterator[Any]:
    for page in PAGES:
        for block in blocks(page, "sh"):
            for line in block.splitlines():
                yield pytest.param(line, id=f"{page}: {line}")


@pytest.mark.parametrize("line", list(commands()))
def test_commands_run(
    line: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program, command, *rest = shlex.split(line)
    assert (program, command in {*COMMANDS, *installed("hookdiff.commands")}) == ("hookdiff", True)
    if command == "run":
        resumes = "--resume" in rest
        rest += SHORT if resumes else [*SHORT, "--out", str(tmp_path / "run")]
    if command == "resume":
        rest += ["--steps", "6"]
    if command == "export":
        rest.append("--overwrite")  # of a test before
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", [program, command, *rest])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 0
    assert capsys.readouterr().out


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_batch_scripts_are_bash() -> None:
    scripts = re.findall(
        r"^```\n(#!/bin/bash\n.*?)^```$", (ROOT / "docs" / "how-to.md").read_text("utf-8"), re.M | re.S
    )
    assert scripts
    for script in scripts:
        done = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True)
        assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "toml")])
def test_toml_is_understood(page: str, tmp_path: Path) -> None:
    for block in blocks(page, "toml"):
        table = tomli.loads(block)
        if "project" in table:
            assert list(table["project"]["entry-points"]) == ["hookdiff.plugins"]
            continue
        path = tmp_path / "config.toml"
        path.write_text(tomli_w.dumps(table))
        load_config(path)


def together(*kinds: Any) -> Any:
    """Return a function that takes the keys of all of `kinds`; a mapping is keys as they are."""
    keys = {
        key: value for kind in kinds for key, value in (kind if isinstance(kind, dict) else parameters(kind)).items()
    }
    only = inspect.Parameter.KEYWORD_ONLY
    keys = {key: value.replace(annotation=type(value.default), kind=only) for key, value in keys.items()}
    shared: Any = type("Shared", (), {})
    shared.__signature__ = inspect.Signature([*keys.values()])
    return shared


def shared_data_keys() -> Any:
    """Return a function that takes the keys of [data] that are no source's own."""
    feed = parameters(Feed)
    source = inspect.Parameter("source", inspect.Parameter.KEYWORD_ONLY)
    return together({"source": source}, Transforms, Store, {key: feed[key] for key in described(Feed)})


def tables() -> dict[str, Any]:
    """Return what each section of docs/config.md is about."""
    core = {
        "run": RunConfig,
        "data": shared_data_keys(),
        "model": together(Start, Initialisation),
        "diffusion": Diffusion,
        "sampling": Sampling,
    }
    core |= {'model: use = "unet"': UNet, 'model: use = "dit"': DiT}
    core |= {"optimizer": Groups, 'optimizer: use = "muon"': muon}
    ours = {name: path for name, path in SOURCES.items() if path.startswith("hookdiff.")}
    core |= {f'data: source = "{name}"': import_object(path, name) for name, path in ours.items()}
    return {**core, **{f"plugins.{name}": installed()[name][0].load() for name in OURS}}


def sections() -> dict[str, str]:
    """Return the text under each heading; those of the third level are named after their table too."""
    found, table = {}, ""
    _, *parts = re.split(r"^##(#?) (.+)$", (ROOT / "docs" / "config.md").read_text("utf-8"), flags=re.M)
    for inner, title, text in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
        table = table if inner else title.strip("[]")
        found[f"{table}: {title}" if inner else table] = text
    return found


def test_the_config_reference_has_every_table() -> None:
    assert sections().keys() - KINDS.keys() == tables().keys() | {'model: use = "diffusers:UNet2DModel"'}
    assert all(f'model: use = "{name}"' in sections() for name in MODELS)
    assert all(f'"{name}"' in sections()["optimizer"] for name in OPTIMIZERS)


@pytest.mark.parametrize("name", tables())
def test_the_config_reference_has_every_key_with_its_default(name: str) -> None:
    target = tables()[name]
    keys, _, _ = sections()[name].partition("| use |")  # a table of parts comes after it
    rows = re.findall(r"^\| `(\w+)` \|(.*?)\| .+ \|$", keys, re.M)
    said = {key: default.strip() for key, default in rows}
    assert list(said) == list(parameters(target))
    for key, default in said.items():
        if default not in ("from the data", "the file's name"):
            assert default == default_of(target, key), key


def default_of(target: Any, key: str) -> str:
    """Return the default of `key` as the tables say it."""
    known = resolved(target, {})
    if key not in known:
        return ""
    value = known[key]["use"] if isinstance(known[key], dict) else known[key]
    said = re.sub(r"\s+", " ", tomli_w.dumps({"x": value}, multiline_strings=False)[4:].strip())
    return f"`{said.replace('[ ', '[').replace(', ]', ']')}`"


def section_of(name: str) -> str:
    """Return the text of a kind of parts: under a heading of its own, or below the keys of its table."""
    if name in sections():
        return sections()[name]
    table, _, kind = name.partition(": ")
    return sections()[table].partition(f"\n`{kind}` is one of these")[2].partition(" is one of these")[0]


@pytest.mark.parametrize("name", KINDS)
def test_the_config_reference_has_every_part_with_its_options(name: str) -> None:
    rows = re.findall(r"^\| (.*?)\| (.*?)\| (.*?)\| .+ \|$", section_of(name), re.M)
    said = [tuple(cell.strip() for cell in row) for row in rows if row[0].strip() not in ("use", "---")]
    expected = []
    for use, part in KINDS[name].known.items():
        expected += [(f"`{use}`", "", ""), *(("", f"`{key}`", default_of(part, key)) for key in parameters(part))]
    assert said == expected


@pytest.mark.parametrize("page", ["docs/hooks.md"])
def test_the_hook_reference_has_every_hook_with_its_arguments_and_kind(page: str) -> None:
    found = re.findall(r"^### (\w+)\((.*)\)\n\n(Moment|Seam): ", (ROOT / page).read_text("utf-8"), re.M)
    said = {name: (arguments, kind) for name, arguments, kind in found}
    assert said.keys() == set(HOOK_NAMES)
    for name in HOOK_NAMES:
        spec = getattr(Hooks, name)
        _, *arguments = inspect.signature(spec).parameters
        kind = "Seam" if spec.hookdiff_spec["firstresult"] else "Moment"
        assert said[name] == (", ".join(arguments), kind)


def test_the_readme_names_every_plugin_and_every_hook() -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    rows = re.findall(r"^\| (`.+`) \| .+ \|$", readme, re.M)
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert sorted(named) == sorted([*OURS, *HOOK_NAMES])


@pytest.mark.skipif(not (ROOT / "hookdiff").is_dir(), reason="needs the sources, which the pages link to")
def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for link in re.findall(r"\]\(([^)#]+)\)", (ROOT / page).read_text("utf-8")):
            assert link.startswith("https://") or ((ROOT / page).parent / link).exists(), f"{page}: {link}"


def test_the_lines_beside_make_are_those_of_the_makefile() -> None:
    rules = (ROOT / "Makefile").read_text("utf-8")
    (command,) = blocks("README.md", "sh")
    assert command.strip() in rules
    assert "pip install -e ." in rules
