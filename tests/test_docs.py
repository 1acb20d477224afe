"""README and docs/: their code runs, and they name every hook, plugin and command."""

import inspect
import io
import os
import pydoc
import re
import shlex
import shutil
import signal
import subprocess
import sys
import venv
from collections.abc import Iterator
from contextlib import redirect_stdout
from functools import reduce
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import tomli
import tomli_w
from click import Context
from diffusers import UNet2DModel

import hookdiff
from hookdiff import Hooks, Loop, load_config
from hookdiff.cli import COMMANDS, group, main
from hookdiff.loop.contract_checks import ELSEWHERE
from hookdiff.loop.hookspecs import HOOK_NAMES, HOOKS
from hookdiff.options.default_names import DEFAULT_PLUGINS
from hookdiff.options.imports import import_object, installed
from hookdiff.run_dir import History
from hookdiff.testing.toy import toy_loop
from tests.conftest import wide
from tests.forked import python

ROOT = Path(__file__).parents[1]
PAGES = ["README.md", *(path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "docs").rglob("*.md")))]
OURS = [n for n, (entry, *_) in installed().items() if entry.dist and entry.dist.name == "hookdiff"]
SHORT = [
    *("--steps", "4", "--set", "run.batch_size=16", "--set", "run.log_every=2", "--set", "sampling.steps=2"),
    *("--set", "plugins.fid.num_samples=16", "--set", "plugins.lr.warmup=2", "--set", "run.micro_batch=8"),
    *("--set", "plugins.diversity.num_samples=20"),
]


CONTENTS = (ROOT / "docs" / "contents.md").read_text("utf-8")
TUTORIAL = [f"docs/{path}" for path in re.findall(r"^\* \[.+\]\((tutorial/\S+)\)", CONTENTS, re.M)]  # in order
# A walk makes a package: its blocks are commands, files, and tables of the package's config.
FILES = re.compile(r"Put this into `(\S+)`:\n\n```python\n(.*?)^```$", re.M | re.S)
WALKS = [page for page in PAGES if FILES.search((ROOT / page).read_text("utf-8")) and page not in TUTORIAL]
TEXTBOOK = "docs/how-to/from-a-textbook-loop.md"  # its blocks of TOML are parts of the last one
TRAINERS = "docs/how-to/from-other-trainers.md"


def blocks(page: str, language: str) -> list[str]:
    """Return the fenced blocks of `page` in `language`, apart from files."""
    text = FILES.sub("", (ROOT / page).read_text("utf-8"))
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.M | re.S)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the examples and a short version of the first run in the tutorial."""
    folder = tmp_path_factory.mktemp("checkout")
    (folder / "examples").symlink_to(ROOT / "examples")
    first = shlex.split(blocks(TUTORIAL[0], "sh")[0])[1:]
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as printed:
        patch.chdir(folder)
        patch.setattr(sys, "argv", ["hookdiff", *first, *SHORT])
        with pytest.raises(SystemExit, match=r"^0$"):
            main()
    assert "runs/basic/metrics.jsonl" in printed.getvalue()
    return folder


def test_all_code_is_in_a_language_that_is_tested() -> None:
    languages = {fence for page in PAGES for fence in re.findall(r"^```(\w*)$", (ROOT / page).read_text("utf-8"), re.M)}
    assert languages == {"", "python", "sh", "toml"}


LONG = {"docs/how-to/train-on-several-devices.md", "docs/reference/plugins.md", TEXTBOOK}  # their code trains


@pytest.mark.parametrize(
    "page", [page for page in PAGES if blocks(page, "python") and page not in LONG] + wide(*sorted(LONG))
)
def test_the_python_code_runs(page: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The blocks of a page are one program; it reads the short run in `folder`.
    monkeypatch.chdir(folder)
    for line in "".join(blocks(page, "sh")).splitlines():
        if line.startswith("hookdiff export"):  # the program loads the exported file
            monkeypatch.setattr(sys, "argv", [*shlex.split(line), "--overwrite"])
            with pytest.raises(SystemExit, match=r"^0$"):
                main()
    exec(compile("".join(blocks(page, "python")), page, "exec"), {"__name__": "__main__"})


CHEAP = {"data", "export", "lr", "new-plugin", "plugins", "runs", "sample", "watch"}
# What makes the other commands short.
BRIEF = {"resume": ["--steps", "6"], "fid": ["--num", "16"], "doctor": ["--set", "run.batch_size=16"]}


def commands() -> Iterator[Any]:
    for page in PAGES:
        for block in blocks(page, "sh") if page not in (*WALKS, *TUTORIAL) else ():
            for line in block.splitlines():
                is_cheap = shlex.split(line)[1] in CHEAP
                yield pytest.param(line, id=f"{page}: {line}", marks=[] if is_cheap else pytest.mark.wide)


@pytest.mark.parametrize("line", list(commands()))
def test_the_commands_run(
    line: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program, command, *rest = shlex.split(line)
    assert (program, command in {*COMMANDS, *installed("hookdiff.commands")}) == ("hookdiff", True)
    if command == "run":
        resumes = "--resume" in rest
        rest += SHORT if resumes else [*SHORT, "--out", str(tmp_path / "run")]
    rest += BRIEF.get(command, ())
    if command == "export":
        rest.append("--overwrite")  # an earlier test may have written the same file
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", [program, command, *rest])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 0
    assert capsys.readouterr().out


def carry_out(line: str, folder: Path, stops: bool) -> tuple[int, str]:
    """Run a command, and interrupt its training if it `stops`; return the exit code and what is printed."""
    program, *rest = shlex.split(line)
    programs = {"hookdiff": [sys.executable, "-m", "hookdiff"], "python": [sys.executable]}
    command, printed = [*programs.get(program, [program]), *rest], ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder) as process:
        assert process.stdout is not None
        for part in process.stdout:
            printed += part
            if stops and part.startswith("step "):
                process.send_signal(signal.SIGINT)
                stops = False
    return process.returncode, printed


MAIN = "from hookdiff.cli import main; main()"


def carry_out_forked(line: str, folder: Path) -> tuple[int, str]:
    """Run a command in a process that has imported torch; return the exit code and what is printed."""
    program, *rest = shlex.split(line)
    code = {"hookdiff": MAIN, "python": "import runpy, sys; runpy.run_path(sys.argv[1], run_name='__main__')"}
    if program not in code:
        return carry_out(line, folder, stops=False)
    returned, out, err = python(code[program], *rest, folder=folder)
    return returned, out + err


def pattern(text: str) -> str:
    """Return `text` without what differs between machines: numbers, times and the width of columns."""
    return re.sub(r"\d[\d.,:]*(?: s\b| min\b)?", "#", " ".join(text.split()))


@pytest.mark.parametrize(
    "short",
    [pytest.param(SHORT, id="short", marks=pytest.mark.wide), pytest.param([], id="whole", marks=pytest.mark.slow)],
)
def test_the_tutorial_can_be_walked(short: list[str], tmp_path: Path) -> None:
    # From page to page in one folder, as a reader does. Only a whole walk, of ten minutes, prints what the pages show.
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    block = re.compile(r"(?:Put this into `(\S+)`:\n\n)?^```(\w*)\n(.*?)^```$(?=\n*(.{,20}))", re.M | re.S)
    seen = ""
    for page in TUTORIAL:
        shown: list[str] = []
        for path, language, text, after in block.findall((ROOT / page).read_text("utf-8")):
            if path:
                (tmp_path / path).write_text(text)
            elif language:
                command = text.split()[1]
                add = {"run": shlex.join(short), "resume": "--steps 6" * bool(short)}.get(command, "")
                stops = after.startswith("Press Ctrl-C") and not short
                line = f"{text.strip()} {add}"
                code, printed = carry_out_forked(line, tmp_path) if short else carry_out(line, tmp_path, stops)
                seen += printed
                assert code == (130 if stops else 2 if after.startswith("```\nhookdiff: ") else 0), printed
            else:
                shown += re.split(r"\n|\.\.\.", text)
        seen += "".join(config.read_text("utf-8") for config in tmp_path.glob("*.toml"))
        for line in shown if not short else ():
            # Only a terminal has bars.
            assert pattern(line) in pattern(seen) or re.search("[\u2581-\u2588\u2501]", line), line


def test_each_page_of_the_tutorial_leads_to_the_next() -> None:
    for page, following in pairwise(TUTORIAL):
        *_, last = re.findall(r"\]\((.+?)\)", (ROOT / page).read_text("utf-8"))
        assert Path(page).parent / last == Path(following)


def write_files(page: str, project: Path) -> None:
    """Write the files of a walk to its package, and the tables of its config."""
    for path, text in FILES.findall((ROOT / page).read_text("utf-8")):
        (project / path).write_text(text)
    config = tomli.loads((project / "example.toml").read_text())
    for block in blocks(page, "toml"):
        for name, table in tomli.loads(block).items():
            config[name] |= table
    (project / "example.toml").write_text(tomli_w.dumps(config))


@pytest.mark.wide
@pytest.mark.parametrize("page", WALKS)
def test_the_package_of_a_walk_passes_its_tests(page: str, tmp_path: Path) -> None:
    command = shlex.split(blocks(page, "sh")[0].splitlines()[0])[1:]
    folder = tmp_path / "package"
    code, _, err = python(MAIN, *command[:2], folder, *command[2:])
    assert code == 0, err
    write_files(page, folder)
    tests = "import sys, pytest; sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider']))"
    code, out, _ = python(tests, folder=folder, PYTHONPATH=str(folder))
    assert code == 0, out


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize("page", WALKS)
def test_a_walk_succeeds_in_a_fresh_environment(page: str, tmp_path: Path) -> None:
    venv.create(tmp_path / "env", with_pip=False)
    (site,) = (tmp_path / "env").rglob("site-packages")
    # Without the folders of Python itself: pip hides from an isolated build what a .pth file names.
    own = subprocess.run([sys.executable, "-ISc", "import sys; print(sys.path)"], capture_output=True, text=True)
    (site / "others.pth").write_text("\n".join(path for path in sys.path if path and repr(path) not in own.stdout))
    first, *others = blocks(page, "sh")
    write = f"from tests.test_docs import write_files, Path; write_files({page!r}, Path())"
    programs = [f'{name}() {{ python -m {name} "$@"; }}' for name in ("pip", "pytest", "mypy", "hookdiff")]
    files = shlex.join(["env", f"PYTHONPATH={ROOT}", sys.executable, "-c", write])
    script = "\n".join(["set -ex", *programs, first, files, *others])
    around = {**os.environ, "PATH": f"{tmp_path / 'env' / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=around, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len([*tmp_path.glob("*/dist/*.whl")]) == 1


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_the_batch_scripts_are_valid_bash() -> None:
    page = (ROOT / "docs" / "how-to" / "stop-a-run.md").read_text("utf-8")
    scripts = re.findall(r"^```\n(#!/bin/bash\n.*?)^```$", page, re.M | re.S)
    assert scripts
    for script in scripts:
        done = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True)
        assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("page", [page for page in PAGES if page not in (*WALKS, TEXTBOOK) and blocks(page, "toml")])
def test_the_toml_is_valid(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for block in blocks(page, "toml"):
        table = tomli.loads(block)
        if "project" in table:
            (group,) = table["project"]["entry-points"]
            assert group in ("hookdiff.plugins", "hookdiff.parts")
            continue
        if table["model"]["use"] == "pretrained":
            UNet2DModel().save_config(table["model"]["path"])
        path = tmp_path / "own.toml"  # a config.toml may be a stranger's
        path.write_text(tomli_w.dumps(table))
        load_config(path)


def merged(first: Any, second: Any) -> Any:
    """Return two configs as one: tables have the keys of both, and lists the items."""
    if isinstance(first, dict):
        return first | {key: merged(first[key], value) if key in first else value for key, value in second.items()}
    return first + second


@pytest.mark.wide
def test_the_parts_beside_the_textbook_loop_are_one_config_and_it_runs(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    *parts, whole = blocks(TEXTBOOK, "toml")
    assert max(len(part.splitlines()) for part in parts) <= 3
    config = reduce(merged, map(tomli.loads, parts), {"run": {"plugins": [*DEFAULT_PLUGINS]}})
    assert config == tomli.loads(whole)
    named = set(re.findall(r"`(\w+)`", (ROOT / TEXTBOOK).read_text("utf-8")))
    assert named & {*OURS} == {*config["run"]["plugins"]}
    (here / "mine.toml").write_text(whole)
    often = [f"--set=plugins.{key}" for key in ("samples.every=2", "checkpoint.every=2", "diversity.num_samples=20")]
    monkeypatch.setattr(sys, "argv", ["hookdiff", "run", "mine.toml", *SHORT, *often])
    with pytest.raises(SystemExit, match=r"^0$"):
        main()
    run = History.of(here / "runs" / "mine")
    logged = {"lr", "clip/share", "ema/decay", "debug/by_image", "gradients/update_ratio", "fd/digits"}
    assert logged | {"diversity/digits/memorised"} <= run.series.keys()
    made = ("samples/training.gif", "checkpoints/step-00000004", "diversity/step-00000004.png", "tensorboard")
    assert all((here / "runs" / "mine" / name).exists() for name in made)


@pytest.fixture(scope="module")
def keys() -> set[str]:
    """Return all keys in docs/reference/config.md, such as "plugins.ema.decay"."""
    _, *parts = re.split(r"^## \[(\S+)\]$", (ROOT / "docs" / "reference" / "config.md").read_text("utf-8"), flags=re.M)
    tables = zip(parts[::2], parts[1::2], strict=True)
    found = {f"{table}.{key}" for table, text in tables for key in re.findall(r"^\| `(\w+)` \|", text, re.M)}
    return found | {"model.use", "optimizer.use"}


def check_name(name: str, keys: set[str], tmp_path: Path) -> None:
    """Assert that what a page names exists: a hook, plugin, key, command with options, or something of the Loop."""
    program, *rest = shlex.split(name)
    if program == "hookdiff":
        command = group.get_command(Context(group), rest[0])
        assert command, name
        assert {*rest[1:]} <= {option for one in command.params for option in one.opts}, name
    elif " = " in name:
        config = {"run": {"steps": 1}, "data": {"source": "digits"}, "model": {"use": "unet"}}
        (tmp_path / "config.toml").write_text(tomli_w.dumps(merged(config, tomli.loads(name))))
        load_config(tmp_path / "config.toml")
    elif name.startswith("loop."):
        attrgetter(name.removeprefix("loop."))(toy_loop())
    elif ":" in name:
        import_object(name, "a test")
    else:
        assert name in keys | {*HOOK_NAMES, *OURS, *hookdiff.__all__}, name


def rows(page: str) -> list[tuple[list[str], list[str]]]:
    """Return what the two columns of each table name."""
    cells = re.findall(r"^\| (.+) \| (.+) \|$", (ROOT / page).read_text("utf-8"), re.M)
    return [(re.findall("`([^`]+)`", theirs), re.findall("`([^`]+)`", ours)) for theirs, ours in cells]


@pytest.mark.parametrize(("theirs", "ours"), [pytest.param(*row, id=" ".join(row[0])) for row in rows(TRAINERS)])
def test_what_replaces_a_name_of_another_trainer_exists(
    theirs: list[str], ours: list[str], keys: set[str], tmp_path: Path
) -> None:
    for name in ours:
        check_name(name, keys, tmp_path)
    # The message about a hook of another trainer has the same answer.
    answers = {ELSEWHERE[name.lower()].partition(".")[0] for name in theirs if name.lower() in ELSEWHERE}
    assert answers <= {*ours}


@pytest.mark.parametrize("page", [TEXTBOOK, TRAINERS])
def test_the_keys_in_the_text_exist(page: str, keys: set[str]) -> None:
    tables = {key.partition(".")[0] for key in keys}
    for name in re.findall(r"`(\w+)((?:\.\w+)+)`", (ROOT / page).read_text("utf-8")):
        assert name[0] not in tables or "".join(name) in keys


def test_what_a_page_names_by_its_module_exists() -> None:
    for page in PAGES:
        for name in re.findall(r"\bhookdiff(?:\.\w+)+:\w+", (ROOT / page).read_text("utf-8")):
            import_object(name, page)


def test_the_hook_reference_has_every_hook_with_its_arguments_and_kind() -> None:
    page = (ROOT / "docs" / "reference" / "hooks.md").read_text("utf-8")
    found = re.findall(r"^### (\w+)\((.*)\)\n\n(Moment|Seam|Question): ", page, re.M)
    said = {name: (arguments, kind) for name, arguments, kind in found}
    assert said.keys() == set(HOOK_NAMES)
    for name in HOOK_NAMES:
        _, *arguments = inspect.signature(getattr(Hooks, name)).parameters
        assert said[name] == (", ".join(arguments), HOOKS[name].kind.capitalize())


def sections(page: str) -> dict[str, str]:
    """Return the text of each section `### name` or `### name(arguments)`; `### a, b` is a section of both."""
    _, *parts = re.split(r"^### (.+)\n", (ROOT / page).read_text("utf-8"), flags=re.M)
    found = {}
    for heading, text in zip(parts[::2], parts[1::2], strict=True):
        names = [heading] if "(" in heading else heading.split(", ")
        found |= {name: text.partition("\n## ")[0] for name in names}
    return found


def test_the_page_of_the_loop_has_every_attribute_and_method_with_a_short_example() -> None:
    loop = toy_loop()
    methods = [name for name, member in vars(Loop).items() if inspect.isfunction(member)]
    public = {name for name in (*vars(loop), *methods) if not name.startswith("_")}
    page = sections("docs/reference/loop.md")
    assert {heading.partition("(")[0] for heading in page} == public
    for heading, text in page.items():
        name, _, arguments = heading.partition("(")
        own = re.findall(r"(\w+)(?:=[^,)]+)?[,)]", arguments)
        callables = (*methods, "adopt", "agree", "log", "reduce", "stop", "weights")
        assert own == (list(inspect.signature(getattr(loop, name)).parameters) if name in callables else []), name
        assert re.search(r"\b(changed|called|used) by\b", text, re.I), f"{name}: who may change or call it"
        (block,) = re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)
        assert 1 <= len(block.splitlines()) <= 5, name


def test_help_shows_the_public_names_and_all_of_the_loop() -> None:
    assert set(hookdiff.__all__) <= set(dir(hookdiff))
    assert "docs/reference/loop.md" in pydoc.render_doc(Loop, renderer=pydoc.plaintext)
    assert all(inspect.getdoc(getattr(Loop, name)) for name in vars(Loop) if not name.startswith("_"))


@pytest.mark.parametrize(
    ("page", "names"), [("README.md", OURS), ("docs/reference/hooks.md", HOOK_NAMES)], ids=["plugins", "hooks"]
)
def test_a_table_has_every_plugin_and_every_hook(page: str, names: list[str]) -> None:
    rows = re.findall(r"^\| (`.+`) \| .+ \|$", (ROOT / page).read_text("utf-8"), re.M)
    assert sorted(name for row in rows for name in re.findall(r"`(\w+)`", row)) == sorted(names)


def anchors(page: Path) -> list[str]:
    """Return the names by which links reach the headings of `page`."""
    text = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.M | re.S)
    return [re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in re.findall(r"^#+ (.+)$", text, re.M)]


@pytest.mark.skipif(not (ROOT / "hookdiff").is_dir(), reason="needs the sources, which the pages link to")
@pytest.mark.parametrize(
    "page", [*PAGES, "benchmarks/README.md", "benchmarks/tried.md", "CHANGELOG.md", "CONTRIBUTING.md"]
)
def test_linked_files_and_headings_exist(page: str) -> None:
    for link in re.findall(r"\]\(([^)]+)\)", (ROOT / page).read_text("utf-8")):
        if not link.startswith("https://"):
            file, _, heading = link.partition("#")
            target = (ROOT / page).parent / file if file else ROOT / page
            assert target.exists(), link
            assert not heading or heading in anchors(target), link


@pytest.mark.parametrize("folder", ["tutorial", "how-to", "reference", "explanation"])
def test_an_index_lists_every_page_once(folder: str) -> None:
    index = ROOT / "docs" / "how-to" / "README.md" if folder == "how-to" else ROOT / "docs" / "contents.md"
    links = re.findall(r"^\* \[.+?\]\((\S+?)\)", index.read_text("utf-8"), re.M)
    listed = [path for link in links if (path := index.parent / link).parent.name == folder]
    own = [index] if folder == "how-to" else []
    assert sorted(listed + own) == sorted((ROOT / "docs" / folder).glob("*.md"))


def test_the_commands_of_the_readme_are_in_the_makefile() -> None:
    rules = (ROOT / "Makefile").read_text("utf-8")
    (command,) = blocks("README.md", "sh")
    assert command.strip() in rules
    assert "pip install -e ." in rules


def test_the_list_of_a_step_has_its_hooks_in_their_order() -> None:
    page = (ROOT / "docs" / "explanation" / "one-step.md").read_text("utf-8").partition("## From top to bottom")[2]
    listed = re.findall(r"^ *(\w+)  ", page.split("```")[1], re.M)
    step = HOOK_NAMES[HOOK_NAMES.index("make_batch") : HOOK_NAMES.index("between_steps") + 1]
    assert listed == [name for name in step if name != "on_epoch_end"]


def sentences(page: str) -> Iterator[str]:
    """Yield the words of each sentence, item and cell of at least 8 words that `page` has beside code and headings."""
    text = (ROOT / page).read_text("utf-8")
    text = re.sub(r"<!-- (?!end -->).*?<!-- end -->|^```.*?^```$|^(#| {4})[^\n]*", "\n\n", text, flags=re.M | re.S)
    text = re.sub(r"\]\([^)]*\)", "]", text)  # where links lead
    for part in re.split(r"\n\s*\n|^\s*(?:[*-]|\d+\.) |\||(?<=[.:;?!])\s", text, flags=re.M):
        if len(words := re.findall(r"\w+", part.lower())) >= 8:
            yield " ".join(words)


def test_no_sentence_stands_twice() -> None:
    places: dict[str, list[str]] = {}
    for page in PAGES:
        for sentence in sentences(page):
            places.setdefault(sentence, []).append(page)
    assert len(places) > 1000
    assert {sentence: pages for sentence, pages in places.items() if len(pages) > 1} == {}
