"""The completion of a shell, asked for as the scripts of click do."""

import json
import os
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from hookdiff.cli.completion import write_table
from tests.conftest import output

SINK = """
from attrs import define
from hookdiff import Sink, hookimpl

@define(eq=False)
class Paper(Sink):
    "Tracks on paper."
    lined: bool = True

    @hookimpl
    def on_start(self):
        pass
"""


# Answers lines of words that end in TAB; after each, a line has the modules that are imported by then.
TABS = """
import json, os, sys
from hookdiff.cli import main
for line in sys.stdin:
    shell, words = json.loads(line)
    typed = ["hookdiff", *words.split(" ")]
    place = typed[-1] if shell == "fish" else str(len(typed) - 1)
    os.environ |= {"_HOOKDIFF_COMPLETE": f"{shell}_complete", "COMP_WORDS": "\\n".join(typed), "COMP_CWORD": place}
    sys.argv = ["hookdiff"]
    try:
        main()
    except SystemExit:
        print(json.dumps([*sys.modules]), flush=True)
"""
COMMANDS = {f"hookdiff_{package}{module}" for package in ("mirror", "samples") for module in ("", ".cli")}


def tabs(*asked: str, shell: str = "bash") -> list[str]:
    """Type each of these lines and press TAB, in one new process: the answers to the shell."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    lines = "".join(f"{json.dumps([shell, words])}\n" for words in asked)
    done = subprocess.run([sys.executable, "-c", TABS], input=lines, env=environment, capture_output=True, text=True)
    assert done.stderr == ""
    answers, answer = [], list[str]()
    for line in done.stdout.splitlines():
        if not line.startswith("["):
            answer += line.split()
            continue
        words = asked[len(answers)]
        heavy = {name for name in json.loads(line) if name.split(".")[0] in ("torch", "numpy", "cattrs")}
        plugins = {name for name in json.loads(line) if name.startswith("hookdiff_")}
        assert not heavy | (plugins - COMMANDS if " " in words else plugins), words
        answers.append(" ".join(answer))
        answer = []
    assert len(answers) == len(asked)
    return answers


@pytest.fixture(scope="module")
def table() -> None:
    write_table()


ANSWERS = {
    "": "plain,run plain,resume plain,",
    "sam": "plain,sample",
    "--vers": "plain,--version",
    "run --skip": "plain,--skip-batches",
    "run mi": "file,mi",
    "run x --plugins em": "plain,ema",
    "run x --plugins fid,em": "plain,fid,ema",
    "run x --plugins ema,em": "",
    "run x --plugins no : em": "plain,ema",
    "run x --plugins no :": "plain,",
    "run x --set run.batch_s": "plain,run.batch_size=",
    "run x --set run.batch_size =": "",
    "run x --set plugins.ema.snapshot_d": "plain,plugins.ema.snapshot_dtype=float32 plain,",
    "check x --set model.use =": "plain,dit plain,pretrained plain,unet",
    "check x --set sampling.sampler = he": "plain,heun",
    "resume x --set sampling.sampler.var": "plain,sampling.sampler.variance=fixed_small plain,",
    "resume x --set data.drop_last = f": "plain,false",
    "resume x --set nothing.of.this = f": "",
    "sample x --sampler dd": "plain,ddim plain,ddpm",
    "sample x --sampler = dd": "plain,ddim plain,ddpm",
    "mirror x --to t": "plain,tensorboard",
}


@pytest.mark.usefixtures("table")
def test_a_tab_answers_without_torch_and_plugins() -> None:
    for (words, answer), completions in zip(ANSWERS.items(), tabs(*ANSWERS), strict=True):
        assert completions.startswith(answer) if answer.endswith(",") else completions == answer, words


@pytest.mark.usefixtures("table")
@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_end_no_word_at_an_equals_sign(shell: str) -> None:
    completions = tabs("run x --set sampling.sampler=he", "run x --plugins no:em", shell=shell)
    whole = "sampling.sampler=heun", "no:ema"
    assert completions == [f"plain {value} _" if shell == "zsh" else f"plain,{value}" for value in whole]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty folder, in which the table is written."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_the_script_is_printed_and_the_table_written(
    hookdiff: Any, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("_HOOKDIFF_COMPLETE", "zsh_source")
    monkeypatch.setattr(sys.modules["__main__"], "__package__", None)  # as that of a script, which has the name
    assert "compdef _hookdiff_completion hookdiff" in output(hookdiff())
    assert len([*cache.rglob("completion-*.json")]) == 1


def test_the_table_is_of_what_is_installed(hookdiff: Any, cache: Path, install: Any) -> None:
    asked = "mirror x --to pa", "run x --set plugins.paper.l", "run x --plugins pap"
    unknown, known = ["", "", ""], ["", "", "plain,paper"]
    full = ["plain,paper", "plain,plugins.paper.lined=true plain,plugins.paper.lined=false", "plain,paper"]
    assert tabs(*asked) == unknown
    for words, change in ((["schema"], None), (["plugins", "paper"], "paper"), (["schema"], "torn")):
        if change == "paper":
            install("hd-paper", {"paper": "hd_paper:Paper"}, hd_paper=SINK)
        if change == "torn":
            (place,) = cache.rglob("completion-*.json")
            place.write_text(place.read_text("utf-8")[:100])
        assert tabs(*asked) == (known if change else unknown)
        output(hookdiff(*words))
        assert tabs(*asked) == (full if change else unknown)


def test_a_cache_that_cannot_be_written_stops_no_command(hookdiff: Any, cache: Path) -> None:
    cache.touch()
    code, _, err = hookdiff("plugins", "ema")
    assert (code, err) == (0, "")


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the script `hookdiff` on the path: click takes the name of its variable from that of the script."""
    script = tmp_path / "bin" / "hookdiff"
    script.parent.mkdir()
    script.write_text(f"#!{sys.executable}\nfrom hookdiff.cli import main\nmain()\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(script.parent), prepend=os.pathsep)


@pytest.mark.wide
@pytest.mark.usefixtures("table", "script")
@pytest.mark.skipif(os.name == "nt" or not shutil.which("bash"), reason="needs bash")
def test_bash_completes_what_is_typed(tmp_path):
    import pty

    (tmp_path / "rc").write_text('eval "$(_HOOKDIFF_COMPLETE=bash_source hookdiff)"; PS1=ready\n')
    master, slave = pty.openpty()
    line = ["bash", "--noprofile", "--rcfile", "rc", "-i"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TERM": "dumb"}
    bash = subprocess.Popen(
        line, env=environment, stdin=slave, stdout=slave, stderr=slave, start_new_session=True, cwd=tmp_path
    )
    os.close(slave)
    written = b""
    with bash, suppress(OSError):  # the end of a terminal
        while b"ready" not in written:
            written += os.read(master, 1 << 16)
        typed = "hookdiff che", "x --set sampling.sampler=he", "--plugins no:em", "--set=run.attention=k", "--se"
        os.write(master, b"".join(word.encode() + b"\t" for word in typed) + b"\x01echo >line \nexit\n")  # at the start
        while True:
            written += os.read(master, 1 << 16)
    os.close(master)
    whole = "hookdiff check x --set sampling.sampler=heun --plugins no:ema --set=run.attention=kernel --set\n"
    assert (tmp_path / "line").read_text("utf-8") == whole, written
