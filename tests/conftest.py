import ast
import copy
import gc
import importlib
import json
import logging
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import numpy
import pytest
import tomli_w
import torch
from hypothesis import settings
from PIL import Image
from torch import distributed, nn

from hookdiff import PASS, Batch, Loop, hookimpl
from hookdiff.disk import flatten, lock_run_dir, unflatten
from hookdiff.machine.joining import leave
from hookdiff.testing import CountTransfers, toy_loop
from hookdiff.testing.graphs import Graphs
from tests.forked import PATIENCE, begin, command, forked, run_main

pytest_plugins = ["hookdiff.cli.fixtures"]

settings.register_profile("ci", max_examples=25, deadline=None, derandomize=True)
settings.register_profile("deep", max_examples=1000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # shells start background jobs with SIGINT ignored
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Iterator[None]:
    """Escape names of files that are no UTF-8: a worker of pytest-xdist could not send them."""
    report: Any = yield
    escape = lambda text: text.encode("utf-8", "backslashreplace").decode()  # noqa: E731
    report.sections = [(title, escape(text)) for title, text in report.sections]
    if report.longrepr and escape(text := str(report.longrepr)) != text:
        report.longrepr = escape(text)
    return report


def pytest_collection_modifyitems(items: Iterable[pytest.Item]) -> None:
    for item in () if torch.cuda.is_available() else items:
        if item.get_closest_marker("cuda"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    gc.freeze()  # a collection of garbage, which some plugins ask for, would look through all that was imported


# The nets of the tests are so small that a second thread would only slow them down, most of all beside other tests.
os.environ["OMP_NUM_THREADS"] = "1"  # for the processes that they start


def pytest_runtest_setup() -> None:
    torch.set_num_threads(1)  # a test may have run a config with more


SMALL: dict[str, Any] = {
    "run": {"steps": 6, "batch_size": 16, "device": "cpu", "plugins": []},
    "data": {"source": "digits"},
    "model": {"use": "unet", "channels": 8, "num_res_blocks": 1, "head_dim": 8, "num_classes": 0},
    "diffusion": {"process": {"use": "vp", "schedule": "cosine", "timesteps": 20}},
    "sampling": {"steps": 2},
}

PICTURES = """
[run]
steps = 2
batch_size = 8
device = "cpu"
log_every = 1
plugins = []
[data]
source = "folder"
path = "pictures"
image_size = 8
flip = true
held_out = 4
[model]
use = "unet"
channels = 8
num_res_blocks = 1
head_dim = 8
"""


def check_facts(text: object, *facts: object) -> None:
    """Assert that the text has every fact (a file, a key, a number, a name); its other words are free."""
    for fact in map(str, facts):
        # A fact is found only as a whole word: 5 is not in 50, 5.1 or 0.5.
        found = re.search(rf"(?<!\d\.)(?:\b|(?=\W)){re.escape(fact)}(?:\b|(?<=\W))(?!\.\d)", str(text))
        assert found, f"{fact} is not in: {text}"


def check_one(lines: Iterable[object], *facts: object) -> None:
    """Assert that there is one line and no other, and that it has every fact."""
    (line,) = lines
    check_facts(line, *facts)


def refused(error: type[BaseException] | tuple[type[BaseException], ...], *facts: object) -> Any:
    """Return a context that expects an error of this type with all these facts in its message."""

    def check(caught: BaseException) -> bool:
        check_facts(caught, *facts)
        return True

    return pytest.raises(error, check=check)


def wide(*rows: Any) -> list[Any]:
    """Return rows of a table of `parametrize` with the mark wide."""
    return [pytest.param(*(row if isinstance(row, tuple) else (row,)), marks=pytest.mark.wide) for row in rows]


def slow(*rows: Any) -> list[Any]:
    """Return rows of a table of `parametrize` with the mark slow."""
    return [pytest.param(*(row if isinstance(row, tuple) else (row,)), marks=pytest.mark.slow) for row in rows]


def mostly_wide(first: int, rows: Iterable[Any]) -> list[Any]:
    """Return the rows of a table for `parametrize`, with the mark `wide` on all but the `first` ones."""
    cases = list(rows)
    return [*cases[:first], *wide(*cases[first:])]


def check_refused(result: tuple[int, str, str], *facts: object) -> None:
    """Assert that a command has ended with exit code 2 and nothing but a message, which has all these facts."""
    code, out, err = result
    assert (code, out) == (2, ""), err
    assert err.startswith(("hookdiff: ", "Usage: "))
    assert err.count("hookdiff: ") <= 1
    check_facts(err, *facts)


def output(result: tuple[int, str, str]) -> str:
    """Assert that a command has succeeded, and return what it has written to stdout."""
    code, out, err = result
    assert code == 0, err
    return out


def toy_run(plugins: Mapping[str, object] | None = None, **options: Any) -> Loop:
    """Return a toy loop that has run."""
    return ran(toy_loop(plugins, **options))


def added_transfers(plugins: Mapping[str, object], **options: Any) -> int:
    """Return how many more transfers from the device the steps of a toy loop have with the plugins than without."""
    counts = []
    for chosen in ({}, plugins):
        with toy_loop(chosen, **options) as loop, CountTransfers() as transfers:
            for _ in loop.steps():
                pass
        counts.append(transfers.count)
    assert counts[0] > 0
    return counts[1] - counts[0]


def as_list(tensor: torch.Tensor | None) -> Any:
    """Return the numbers of a tensor that may be missing, such as labels."""
    return None if tensor is None else tensor.tolist()


IMPORTS = ("-X", "importtime")  # options of Python, for `imported`


def imported(stderr: str) -> set[str]:
    """Return the modules that a process has imported, which was started with `IMPORTS` and wrote nothing else."""
    names = [line.rpartition("|")[2].strip() for line in stderr.splitlines() if line.startswith("import time: ")]
    assert len(names) == len(stderr.splitlines()), stderr
    return set(names)


@contextmanager
def locked(run: Path) -> Iterator[None]:
    """Hold the lock of a run directory, as a run does that is under way."""
    with ExitStack() as resources:
        lock_run_dir(run, resources)
        yield


@pytest.fixture(scope="session", autouse=True)
def own_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep what hookdiff and its libraries write to the user's home, cache and settings in folders of the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        for name in ("HOME", "XDG_CONFIG_HOME", "APPDATA"):  # of Linux and macOS, of Linux, of Windows
            patch.setenv(name, str(tmp_path_factory.mktemp("home")))
        yield


@pytest.fixture(autouse=True)
def own_path() -> Iterator[None]:
    """Forget the folders of the configs that a test has loaded: each is searched for modules and for plugins."""
    before = [*sys.path]
    yield
    sys.path[:] = before


@pytest.fixture
def another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return a function that gives the process a new home, in which no run is remembered: all are a stranger's."""

    def move() -> None:
        for name in ("HOME", "XDG_CONFIG_HOME", "APPDATA"):
            monkeypatch.setenv(name, tempfile.mkdtemp(dir=tmp_path))

    return move


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to the folder of the test until its end, and return the folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def graphs() -> Iterator[Graphs]:
    """Return a recorder of the graphs of models; garbage collection is off meanwhile."""
    gc.disable()
    yield Graphs()
    gc.enable()


@pytest.fixture
def start() -> Iterator[Callable[..., Any]]:
    """Return a function that starts the command line in `folder`, in a process group of its own.

    The process can import the modules in the folder. It is killed at the end of the test. By default it is forked from
    one that has imported torch. With `fresh`, Python starts anew. This is needed for variables that Python or a
    library reads when it starts, and for tests of imports.
    """
    started: list[Any] = []

    def call(folder: Path, *words: object, fresh: bool = False, python: Iterable[str] = (), **environment: str) -> Any:
        paths = os.pathsep.join(map(str, (folder, *sys.path)))
        variables = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **environment}
        started.append(command(folder, *words, environment=variables, fresh=fresh, python=python))
        return started[-1]

    yield call
    for process in started:
        with process:  # the end of the block closes the pipes
            process.kill()


Command = Callable[..., tuple[int, str, str]]  # returns exit code, stdout and stderr
Succeed = Callable[..., str]  # returns stdout
Torchrun = Command
# Options with which torchrun forks the ranks, so that they need not import torch again.
FORKS = ("--run-path", "--start-method=fork")


@pytest.fixture
def torchrun(tmp_path: Path) -> Torchrun:
    """Return a function that runs a module or script in `num` processes of torchrun: exit code, stdout and stderr."""

    def call(num: int, *words: object, options: Iterable[str] = (), **environment: str) -> tuple[int, str, str]:
        usual = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
        texts = ["--standalone", f"--nproc-per-node={num}", *options, *map(str, words)]
        process = begin(run_main, "torch.distributed.run", texts, folder=tmp_path, environment={**usual, **environment})
        try:
            return finish(process)
        finally:
            with suppress(ProcessLookupError):  # torchrun and its processes, if they hang
                os.killpg(process.pid, signal.SIGKILL)

    return call


def finish(process: Any) -> tuple[int, str, str]:
    """Wait for the process; return its exit code, stdout and stderr."""
    out, err = process.communicate(timeout=PATIENCE)
    return process.returncode, out, err


def wait_until(condition: Callable[[], object]) -> None:
    """Wait until `condition` holds."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def wait_for(path: Path, process: Any) -> None:
    """Wait until the process has made the file `path`; fail if the process ends without it."""
    wait_until(lambda: path.exists() or process.poll() is not None)
    assert path.exists(), process.communicate()


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """Serve on this machine during the `with`; yield the address, such as "127.0.0.1:8000"."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def records(run: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl without their times."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [{key: value for key, value in line.items() if key != "time"} for line in lines]


def contents(folder: Path) -> dict[Path, bytes]:
    """Return the bytes of all files below `folder`, by their paths in it, but for the lock of a run."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]
    return {path.relative_to(folder): path.read_bytes() for path in files}


def write_small(path: Path, **tables: Any) -> Path:
    """Write a config that trains a small net, and return its path.

    Each given table replaces the one in `SMALL`, except [run]: its keys are added to those in `SMALL`.
    """
    path.write_text(tomli_w.dumps({**SMALL, **tables, "run": {**SMALL["run"], **tables.get("run", {})}}))
    return path


@pytest.fixture
def write_config(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that calls `write_small` with a file in `tmp_path`."""
    return lambda name="small.toml", **tables: write_small(tmp_path / name, **tables)


@pytest.fixture
def load_small(write_config: Callable[..., Path]) -> Callable[..., Any]:
    """Return a function that writes a config by `write_config` and loads it; settings are written as for `--set`."""
    from hookdiff import load_config

    def load(*settings: str, plugins: Iterable[str] = (), **tables: Any) -> Any:
        return load_config(write_config(**tables), plugins, settings)

    return load


def pixels(seed: int, side: int = 10) -> Any:
    """Return the random pixels of an RGB picture; each seed gives another picture."""
    return numpy.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=numpy.uint8)


@pytest.fixture
def pictures(here: Path) -> Path:
    """Change to a folder with pictures of two classes and a `config.toml` that trains on them; return the folder."""
    (here / "config.toml").write_text(PICTURES)
    for k in range(24):
        path = here / "pictures" / ("ant", "bee")[k % 4 == 3] / f"{k:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels(k % 20, 10 if k % 20 else 12)).save(path)  # the last four pictures repeat the first four
    return here


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Return a function that writes an importable module into `tmp_path`."""

    def write(name: str, source: str) -> None:
        (tmp_path / f"{name}.py").write_text(source)
        monkeypatch.syspath_prepend(tmp_path)

    return write


@pytest.fixture
def hookdiff(hookdiff_command: Command) -> Command:
    """Return a function that runs the command line in this process and returns its exit code, stdout and stderr."""
    return hookdiff_command


@pytest.fixture
def succeed(hookdiff: Command) -> Succeed:
    """Return a function that runs the command line as `hookdiff` does; it must succeed. It returns its stdout."""
    return lambda *words: output(hookdiff(*words))


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Return a function that installs a distribution with its metadata, entry points and modules."""
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
    """Return a function that runs `mount` with the given arguments; the end of the test unmounts everything."""
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
    """Return a function that makes a folder and mounts a disk of 4 MB on it."""

    def make(place: Path) -> Path:
        place.mkdir(parents=True)
        mount("-t", "tmpfs", "-o", "size=4m", "tmpfs", place)
        return place

    return make


@pytest.fixture
def disk(tmp_path: Path, small_disk: Callable[[Path], Path]) -> Path:
    """Return a folder on which a disk of 4 MB is mounted."""
    return small_disk(tmp_path / "disk")


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make each sync slow."""
    sync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: (time.sleep(0.05), sync(descriptor))[1])


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the messages that were logged as a warning or worse."""
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def fill(disk: Path, room: int = 0) -> None:
    """Fill a mounted disk until only `room` bytes are free."""
    free(disk)
    with (disk / "ballast").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, os.statvfs(disk).f_bavail * 4096 - room)


def free(disk: Path) -> None:
    """Free the space that `fill` has taken."""
    (disk / "ballast").unlink(missing_ok=True)


def read_only(disk: Path) -> None:
    """Make a mounted disk read-only, as soon as no process is writing to it."""
    wait_until(lambda: not subprocess.run(["mount", "-o", "remount,ro", str(disk)], capture_output=True).returncode)


def saved(loop: Loop) -> dict[str, Any]:
    """Return a copy of the state of a run, as a checkpoint would give it back; the copy shares nothing with the run."""
    tensors, tree = flatten(loop.state_dict())
    return unflatten({name: tensor.detach().clone() for name, tensor in tensors.items()}, copy.deepcopy(tree))


class Restores:
    """A plugin that restores the run from `state`, if it has one, and keeps the state after step `at`."""

    def __init__(self, state: Any = None, at: int | None = None) -> None:
        self.state, self.at = state, at

    @hookimpl
    def restore(self) -> Any:
        return PASS if self.state is None else self.state

    @hookimpl(trylast=True)
    def after_optimizer_step(self, loop: Loop) -> None:
        if loop.progress.step == self.at:
            self.state = saved(loop)


def kept(plugins: Mapping[str, object] | None = None, *, at: int, **options: Any) -> Restores:
    """Train until step `at`; return a plugin that restores that run."""
    memory = Restores(at=at)
    toy_loop({**(plugins or {}), "memory": memory}, steps=at, **options).run()
    return memory


def acting(**hooks: Callable[..., Any]) -> object:
    """Return a plugin that calls the given functions as the hooks after which they are named."""
    return type("Acting", (), {name: staticmethod(hookimpl(function)) for name, function in hooks.items()})()


def ran(loop: Loop) -> Loop:
    """Run the loop to its end, and return it."""
    loop.run()
    return loop


def outcomes(loop: Loop) -> list[str]:
    """Run the loop to its end, and return the outcomes of its steps."""
    with loop:
        return [step.outcome for step in loop.steps()]


class Batches:
    """A plugin that keeps the batches of a run."""

    def __init__(self) -> None:
        self.seen: list[Batch] = []

    @hookimpl
    def before_step(self, batch: Batch) -> None:
        self.seen.append(batch)


class RollBackAt:
    """A plugin that makes the loss NaN at `positions`, and asks for a rollback, or for another `verdict`."""

    def __init__(self, *positions: int, verdict: str = "rollback") -> None:
        self.positions, self.verdict = positions, verdict

    @hookimpl(wrapper=True)
    def compute_loss(self, loop: Loop) -> Any:
        output = yield
        output.loss.data.fill_(float("nan") if loop.progress.position in self.positions else output.loss.item())
        return output

    @hookimpl
    def on_nan(self) -> str:
        return self.verdict


class RollsBack(RollBackAt, Restores):
    """A plugin that makes the loss at `position` NaN, and then has the run go back to the state after step `at`."""

    def __init__(self, at: int, position: int) -> None:
        Restores.__init__(self, at=at)
        RollBackAt.__init__(self, position)


class Still:
    """A plugin that lets no weight move."""

    @hookimpl
    def optimizer_step(self) -> bool:
        return True


class Push:
    """Replaces the gradients: at step k, all of them point along one vector and have the norm norms[k]."""

    def __init__(self, norms: list[float]) -> None:
        self.norms = norms

    @hookimpl(tryfirst=True)
    def unscale(self, loop: Loop) -> bool:
        size = math.sqrt(sum(g.numel() for g in loop.gradients.tensors()))
        for gradient in loop.gradients.tensors():
            gradient.fill_(self.norms[loop.progress.position] / size)
        return True


def still(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer that moves nothing, so that gradients depend on the data alone."""
    return torch.optim.SGD(model.parameters(), lr=0.0)


class Logged:
    """A plugin that records the step and the values of each call of `on_log`."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, dict[str, float]]] = []

    @hookimpl
    def on_log(self, step: int, values: Mapping[str, float]) -> None:
        self.calls.append((step, dict(values)))

    def of(self, name: str) -> dict[int, float]:
        """Return the values that were logged under `name`, by step."""
        return {step: values[name] for step, values in self.calls if name in values}

    @property
    def values(self) -> dict[int, dict[str, float]]:
        """All values by step and name."""
        found: dict[int, dict[str, float]] = {}
        for step, values in self.calls:
            found.setdefault(step, {}).update(values)
        return found


@pytest.fixture
def one_process() -> Iterator[None]:
    """Make this process the only one of a group."""
    if not distributed.is_gloo_available():  # as some distributions build it
        pytest.skip("torch was built without gloo")
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.fixture
def second_rank() -> Iterator[None]:
    """Make this process the second of two ranks; collective operations return at once."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    yield
    distributed.destroy_process_group()


class Clock:
    """A plugin that replaces the clock time.monotonic; each step takes ten seconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = float(int(time.monotonic()))
        monkeypatch.setattr("time.monotonic", lambda: self.now)

    @hookimpl
    def before_step(self) -> None:
        self.now += 10


class StopAt:
    """A plugin that ends the run after step `step`; the next run of the same loop continues."""

    def __init__(self, step: int) -> None:
        self.step = step

    @hookimpl
    def after_optimizer_step(self, loop: Loop) -> None:
        if loop.progress.step == self.step:
            loop.stop()


def _rank(rank: int, store: Path, code: str) -> None:
    wait = timedelta(seconds=PATIENCE)
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=wait)
    names: dict[str, Any] = {"__name__": "__main__", "torch": torch, "distributed": distributed, "rank": rank}
    exec(code, names)
    print("RESULT", names["result"])
    distributed.destroy_process_group()
    leave(0)


def two_ranks(code: str, folder: Path) -> list[Any]:
    """Run `code` in two processes that are ranks of one run, and return the values that it gives to `result`."""
    if not torch.distributed.is_gloo_available():  # as some distributions build it
        pytest.skip("torch was built without gloo")
    with forked(folder, 2, _rank, folder / "store", code) as ranks:
        written = [process.finish() for process in ranks]
    assert [returned for returned, *_ in written] == [0, 0], written
    return [ast.literal_eval(out.partition("RESULT ")[2].strip()) for _, out, _ in written]
