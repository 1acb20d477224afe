"""The completion of a shell, asked for as the scripts of click do."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from hookdiff.disk.paths import user_cache
from tests.conftest import IMPORTS, imported, output

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


@pytest.fixture
def hookdiff_as(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return a function that runs the script `hookdiff`, in a folder of its own, with variables of a shell."""
    script = tmp_path / "bin" / "hookdiff"  # click takes the name of its variable from that of the script
    script.parent.mkdir()
    script.write_text(f"#!{sys.executable}\nfrom hookdiff.cli import main\nmain()\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(script.parent), prepend=os.pathsep)
    monkeypatch.chdir(tmp_path)

    def call(*words: str, python: tuple[str, ...] = (), **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **variables}
        line = [sys.executable, *python, str(script), *words]
        return subprocess.run(line, env=environment, capture_output=True, text=True)

    return call


@pytest.fixture
def tab(hookdiff_as: Callable[..., subprocess.CompletedProcess[str]]) -> Callable[..., str]:
    """Return a function that types words and presses TAB: the answer to the shell."""

    def call(words: str, shell: str = "bash") -> str:
        typed = ["hookdiff", *words.split(" ")]
        done = hookdiff_as(
            python=IMPORTS,
            _HOOKDIFF_COMPLETE=f"{shell}_complete",
            COMP_WORDS="\n".join(typed),
            COMP_CWORD=typed[-1] if shell == "fish" else str(len(typed) - 1),
        )
        heavy = {name for name in imported(done.stderr) if name.split(".")[0] in ("torch", "numpy", "cattrs")}
        plugins = {name for name in imported(done.stderr) if name.startswith("hookdiff_")}
        command = {f"hookdiff_{package}{module}" for package in ("mirror", "samples") for module in ("", ".cli")}
        assert not heavy | (plugins - command if " " in words else plugins)
        return " ".join(output((done.returncode, done.stdout, done.stderr)).split())

    return call


@pytest.fixture(scope="module")
def table() -> None:
    """Write the table, by the command that prints the script."""
    code = "import sys; sys.argv[0] = 'hookdiff'; from hookdiff.cli import main; main()"
    variables = {**os.environ, "_HOOKDIFF_COMPLETE": "zsh_source"}
    done = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True)
    assert "compdef _hookdiff_completion hookdiff" in output((done.returncode, done.stdout, done.stderr))


@pytest.mark.usefixtures("table")
@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ("", "plain,run plain,resume plain,"),
        ("sam", "plain,sample"),
        ("--vers", "plain,--version"),
        ("run --skip", "plain,--skip-batches"),
        ("run mi", "file,mi"),
        ("run x --plugins em", "plain,ema"),
        ("run x --plugins fid,em", "plain,fid,ema"),
        ("run x --plugins ema,em", ""),
        ("run x --plugins no : em", "plain,ema"),
        ("run x --plugins no :", "plain,"),
        ("run x --set run.batch_s", "plain,run.batch_size="),
        ("run x --set run.batch_size =", ""),
        ("run x --set plugins.ema.snapshot_d", "plain,plugins.ema.snapshot_dtype=float32 plain,"),
        ("check x --set model.use =", "plain,dit plain,unet"),
        ("check x --set sampling.sampler = he", "plain,heun"),
        ("resume x --set sampling.sampler.var", "plain,sampling.sampler.variance=fixed_small plain,"),
        ("resume x --set data.drop_last = f", "plain,false"),
        ("resume x --set nothing.of.this = f", ""),
        ("sample x --sampler dd", "plain,ddim plain,ddpm"),
        ("sample x --sampler = dd", "plain,ddim plain,ddpm"),
        ("mirror x --to t", "plain,tensorboard"),
    ],
)
def test_a_tab_answers_without_torch_and_plugins(tab, words, answer):
    completions = tab(words)
    assert completions.startswith(answer) if answer.endswith(",") else completions == answer


@pytest.mark.usefixtures("table")
@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_end_no_word_at_an_equals_sign(tab, shell):
    completions = tab("run x --set sampling.sampler=he", shell), tab("run x --plugins no:em", shell)
    whole = "sampling.sampler=heun", "no:ema"
    assert completions == tuple(f"plain {value} _" if shell == "zsh" else f"plain,{value}" for value in whole)


def test_the_table_is_of_what_is_installed(tab, hookdiff_as, install, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    asked = "mirror x --to pa", "run x --set plugins.paper.l", "run x --plugins pap"
    unknown, known = ("", "", ""), ("", "", "plain,paper")
    full = "plain,paper", "plain,plugins.paper.lined=true plain,plugins.paper.lined=false", "plain,paper"
    assert tuple(map(tab, asked)) == unknown
    for words, change in ((["schema"], None), (["plugins", "paper"], "paper"), (["schema"], "torn")):
        if change == "paper":
            install("hd-paper", {"paper": "hd_paper:Paper"}, hd_paper=SINK)
        if change == "torn":
            (place,) = user_cache().glob("completion-*.json")
            place.write_text(place.read_text("utf-8")[:100])
        assert tuple(map(tab, asked)) == (known if change else unknown)
        done = hookdiff_as(*words)
        assert not done.returncode, done.stderr
        assert tuple(map(tab, asked)) == (full if change else unknown)


def test_a_cache_that_cannot_be_written_stops_no_command(hookdiff_as, tmp_path):
    (tmp_path / "file").touch()
    done = hookdiff_as("plugins", "ema", XDG_CACHE_HOME=str(tmp_path / "file"))
    assert not done.returncode
    assert not done.stderr


@pytest.mark.usefixtures("table", "hookdiff_as")
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
