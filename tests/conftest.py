import importlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from hypothesis import settings

settings.register_profile("ci", max_examples=25, deadline=None, derandomize=True)
settings.register_profile("deep", max_examples=1000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # so a script starts what it puts in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The nets of the tests are tiny: a second thread costs more than it brings.
torch.set_num_threads(1)

SMALL: dict[str, Any] = {
    "run": {"steps": 6, "batch_size": 16, "device": "cpu"},
    "data": {"source": "digits"},
    "model": {"use": "unet", "channels": 8, "num_res_blocks": 1, "head_dim": 8},
    "diffusion": {"timesteps": 20},
    "sampling": {"steps": 2},
}


def check_facts(text: object, *facts: object) -> None:
    """Assert that every fact (a file, a key, a number, a name) is in the text; sentences may be worded in any way."""
    for fact in map(str, facts):
        # As a word of its own: 5 is not in 50, 5.1 or 0.5.
        found = re.search(rf"(?<!\d\.)(?:\b|(?=\W)){re.escape(fact)}(?:\b|(?<=\W))(?!\.\d)", str(text))
        assert found, f"{fact} is not in: {text}"


def refused(error: type[BaseException], *facts: object) -> Any:
    """Return the context that expects an error of this type, with all these facts in its message."""

    def check(caught: BaseException) -> bool:
        check_facts(caught, *facts)
        return True

    return pytest.raises(error, check=check)


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Return a function that starts the command line in `folder`, as a process and a group of its own.

    The modules in the folder can be imported. What still runs at the end of the test is killed.
    """
    started = []

    def call(folder: Path, *words: object, python: Iterable[str] = ()) -> subprocess.Popen[str]:
        paths = os.pathsep.join(map(str, (folder, *sys.path)))
        process = subprocess.Popen(
            [sys.executable, *python, "-c", "from hookdiff.cli import main; main()", *map(str, words)],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield call
    for process in started:
        if process.poll() is None:
            process.kill()
            process.communicate()


PATIENCE = 300  # seconds that a process may take, on a machine that is busy


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Wait for the process; return its exit code, stdout and stderr."""
    out, err = process.communicate(timeout=PATIENCE)
    return process.returncode, out, err


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    """Wait until the process has made a file."""
    deadline = time.monotonic() + PATIENCE
    while not path.exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def records(run: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl without their times."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [{key: value for key, value in line.items() if key != "time"} for line in lines]


def write_small(path: Path, **tables: Any) -> Path:
    """Write the config of a small net, and return its path.

    Tables take the place of its own; those of [run] are added to its own.
    """
    path.write_text(tomli_w.dumps({**SMALL, **tables, "run": {**SMALL["run"], **tables.get("run", {})}}))
    return path


@pytest.fixture
def write_config(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes a config as `write_small` does, into a file of `tmp_path`."""
    return lambda name="small.toml", **tables: write_small(tmp_path / name, **tables)


@pytest.fixture
def load_small(write_config: Callable[..., Path]) -> Callable[..., Any]:
    """Return a function that loads what `write_config` writes, with settings as `--set` takes them, and plugins."""
    from hookdiff import load_config

    def load(*settings: str, plugins: Iterable[str] = (), **tables: Any) -> Any:
        return load_config(write_config(**tables), plugins, settings)

    return load


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Return a function that writes a module into `tmp_path`, from where it can be imported."""

    def write(name: str, source: str) -> None:
        (tmp_path / f"{name}.py").write_text(source)
        monkeypatch.syspath_prepend(tmp_path)

    return write


@pytest.fixture
def hookdiff(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Return a function that runs the command line in this process: its exit code, stdout and stderr."""
    from hookdiff.cli import main

    def call(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["hookdiff", *map(str, words)])
        with pytest.raises(SystemExit) as caught:
            main()
        out, err = capfd.readouterr()
        assert "Traceback" not in err
        return int(caught.value.code or 0), out, err

    return call


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Return a function that installs a distribution: its metadata, its entry points, its modules."""
    before = set(sys.modules)

    def made(
        name: str,
        entries: dict[str, str] | None = None,
        group: str = "hookdiff.plugins",
        where: str = "site",
        **modules: str,
    ) -> None:
        site = tmp_path / where
        info = site / f"{name.replace('-', '_')}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        lines = [f"[{group}]", *(f"{entry} = {value}" for entry, value in (entries or {}).items())]
        (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
        for module, source in modules.items():
            path = site.joinpath(*module.split(".")).with_suffix(".py")
            path.parent.mkdir(exist_ok=True)
            path.write_text(source)
        if str(site) not in sys.path:
            monkeypatch.syspath_prepend(site)
        importlib.invalidate_caches()

    yield made
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", None)):
            del sys.modules[name]


@pytest.fixture
def mount() -> Iterator[Callable[..., None]]:
    """Return a function that mounts, given the words of that command; what it mounted goes with the test."""
    places = []

    def call(*words: object) -> None:
        try:
            done = subprocess.run(["mount", *map(str, words)], check=False, capture_output=True, text=True)
        except FileNotFoundError:
            pytest.skip("there is no mount here")
        if done.returncode:
            pytest.skip(f"mounting is not allowed here: {done.stderr.strip()}")
        if "remount" not in str(words):
            places.append(str(words[-1]))

    yield call
    for place in reversed(places):
        subprocess.run(["umount", "--lazy", place], check=True)


@pytest.fixture
def small_disk(mount: Callable[..., None]) -> Callable[[Path], Path]:
    """Return a function that makes a folder which is a disk of its own, of 4 MB."""

    def make(place: Path) -> Path:
        place.mkdir(parents=True)
        mount("-t", "tmpfs", "-o", "size=4m", "tmpfs", place)
        return place

    return make


@pytest.fixture
def disk(tmp_path: Path, small_disk: Callable[[Path], Path]) -> Path:
    """A disk of its own, of 4 MB."""
    return small_disk(tmp_path / "disk")
