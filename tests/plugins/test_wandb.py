import importlib
import json
import math
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy
import pytest
from PIL import Image

from hookdiff import Loop, UserError
from hookdiff.log.event import Event
from hookdiff.testing.sink_checks import assert_tracks
from hookdiff_wandb import WandB
from tests.conftest import Restores, RollsBack, acting, check_facts, finish, refused, wait_for, wait_until, warnings
from tests.forked import PATIENCE
from tests.hostile.mutations import in_time
from tests.plugins.test_tensorboard import make_loop

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:google")


@pytest.fixture(autouse=True)
def no_account(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Let W&B find neither a key nor settings, so that it reaches no network."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))


def records(path: Path) -> Iterator[Any]:
    """Yield the records of an offline file: a header of 7 bytes, then LevelDB's log format in blocks of 32 KiB."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, place, whole = path.read_bytes(), 7, b""
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:  # the rest of a block is too short for a header
            place += 32768 - place % 32768
            continue
        length, kind = struct.unpack_from("<HB", data, place + 4)
        if place + 7 + length > len(data):  # it is being written
            return
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # a full record, or the last part of one
            yield Record.FromString(whole)
            whole = b""


def read(file: Path) -> dict[str, Any]:
    """Return what an offline run holds: its facts, and the rows of its history by step."""
    found: dict[str, Any] = {"history": {}, "exit": None, "folder": file.parent / "files"}
    for record in records(file):
        kind = record.WhichOneof("record_type")
        if kind == "run" and "name" not in found:
            found |= {"name": record.run.display_name, "group": record.run.run_group, "project": record.run.project}
            found |= {"tags": list(record.run.tags), "config": {}}
            for update in record.run.config.update:
                found["config"][update.key] = json.loads(update.value_json)
        elif kind == "history":
            row: dict[str, Any] = {}
            for item in record.history.item:
                *outer, last = item.nested_key or [item.key]
                inner = row
                for part in outer:
                    inner = inner.setdefault(part, {})
                inner[last] = json.loads(item.value_json)
            step = record.history.step.num
            assert step not in found["history"]  # no step twice
            found["history"][step] = row
        elif kind == "exit":
            found["exit"] = record.exit.exit_code
    return found


def runs(folder: Path) -> list[dict[str, Any]]:
    """Read the offline runs in a folder, oldest first."""
    files = sorted(folder.glob("wandb/offline-run-*/*.wandb"), key=lambda file: file.stat().st_ctime)
    for file in files:  # W&B's own process writes the end a little later
        wait_until(lambda file=file: any(record.WhichOneof("record_type") == "exit" for record in records(file)))
    return [read(file) for file in files]


def test_events_of_one_step_and_late_ones_are_all_kept_in_a_folder_elsewhere(tmp_path: Path) -> None:
    def find(loop: Loop) -> None:
        if loop.progress.step in (0, 4):
            loop.log.event(Event("finding", f"one at {loop.progress.step}"), 3 * loop.progress.step // 4)
            loop.log.event(Event("finding", f"two at {loop.progress.step}"), loop.progress.step // 2)

    plugins = {"wandb": WandB(dir=str(tmp_path / "elsewhere"), timeout=300)}
    plugins |= {"finds": acting(on_start=find, after_optimizer_step=find)}
    make_loop(plugins, tmp_path / "run", steps=5).run()
    (found,) = runs(tmp_path / "elsewhere")
    assert not (tmp_path / "run" / "wandb").exists()
    rows = {step: row["events/finding"] for step, row in found["history"].items() if "events/finding" in row}
    shown = [(found["folder"] / row["path"]).read_text() for row in rows.values()]
    assert shown == [f"<pre>one at {step}\ntwo at {step}</pre>" for step in (0, 4)]
    assert min(rows) == 0


def test_a_run_can_be_read_back(tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: Any) -> None:
    sink = WandB(project="tests", name="by hand", group="all", tags=("a", "b"), timeout=300)
    make_loop({"wandb": sink}, tmp_path / "run").run()
    assert not warnings(caplog)
    assert capfd.readouterr() == ("", "")
    (found,) = runs(tmp_path / "run")
    assert [found[key] for key in ("name", "project", "group", "tags")] == ["by hand", "tests", "all", ["a", "b"]]
    assert found["config"]["run"]["steps"] == 4
    assert found["config"]["optimizer"] == {"lr": 0.1, "fused": True}
    assert found["exit"] == 0
    history = found["history"]
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = {step: row["loss"] for step, row in history.items() if "loss" in row}
    assert losses == pytest.approx({line["step"]: line["loss"] for line in lines})
    assert math.isnan(history[2]["fd/digits"])
    assert history[4]["fd/digits"] == 0.25
    assert history[1]["_timestamp"] == pytest.approx(lines[0]["time"], abs=0.1)
    assert history[2]["samples"]["format"] == "png"
    with Image.open(found["folder"] / history[2]["samples"]["path"]) as image:
        kept = numpy.asarray(Image.open(tmp_path / "run" / "samples" / "step-00000002.png"))
        assert numpy.array_equal(numpy.asarray(image), kept)
    assert sum(history[4]["weights"]["values"]) == 4
    assert history[4]["weights"]["bins"][-1] == 1.0
    prompt = (found["folder"] / history[2]["prompt"]["path"]).read_text()
    assert prompt == "<pre># &lt;b&gt;cat&lt;/b&gt; 2\n* 100 % *furry*</pre>"
    assert (found["folder"] / history[4]["events/stop"]["path"]).read_text() == "<pre>done</pre>"


def numbers(folder: Path) -> dict[tuple[int, str], float]:
    """Return the logged numbers of the newest offline run in a folder."""
    file = max(folder.glob("wandb/offline-run-*/*.wandb"), key=lambda file: file.stat().st_ctime)
    wait_until(lambda: any(record.WhichOneof("record_type") == "exit" for record in records(file)))
    items = [(step, name, one) for step, row in read(file)["history"].items() for name, one in row.items()]
    return {(step, name): one for step, name, one in items if isinstance(one, int | float) and name[0] != "_"}


@pytest.mark.slow
def test_it_has_the_numbers_of_each_run_and_costs_none_when_it_fails() -> None:
    assert_tracks(lambda path: WandB(dir=str(path), mode="offline", timeout=300), numbers)


def test_a_resumed_run_goes_on_in_a_new_run_that_has_the_earlier_steps(tmp_path: Path) -> None:
    state = Restores(at=2)
    make_loop({"wandb": WandB(timeout=300), "state": state}, tmp_path / "run", steps=4).run()
    plugins = {"wandb": WandB(timeout=300), "state": Restores(state.state)}
    make_loop(plugins, tmp_path / "run", steps=5, resume=True).run()
    first, second = runs(tmp_path / "run")
    assert first["name"] == second["name"] == first["group"] == second["group"] == "run"
    assert [step for step, row in first["history"].items() if "loss" in row] == [1, 2, 3, 4]
    assert [step for step, row in second["history"].items() if "loss" in row] == [1, 2, 3, 4, 5]
    assert [step for step, row in second["history"].items() if "samples" in row] == [2, 4]
    assert [second["history"][step]["loss"] for step in (1, 2)] == [first["history"][step]["loss"] for step in (1, 2)]


def test_a_rollback_begins_a_new_run(tmp_path: Path) -> None:
    make_loop({"wandb": WandB(timeout=300), "back": RollsBack(at=1, position=3)}, tmp_path / "run", steps=4).run()
    first, second = runs(tmp_path / "run")
    assert [step for step, row in first["history"].items() if "loss" in row] == [1, 2, 3]
    assert [step for step, row in second["history"].items() if "loss" in row] == [1, 2, 3, 4]
    assert [step for step, row in second["history"].items() if "events/rollback" in row] == [1]
    assert [run["exit"] for run in (first, second)] == [0, 0]


def test_online_without_a_key_is_refused_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = make_loop({"wandb": WandB(mode="online")}, tmp_path / "run")
    with refused(UserError, "plugins.wandb.mode", "wandb login", "WANDB_API_KEY", "offline"):
        loop.run()
    assert loop.progress.step == 0
    monkeypatch.setenv("WANDB_MODE", "online")
    with refused(UserError, "plugins.wandb.mode"):
        make_loop({"wandb": WandB()}, tmp_path / "run").run()
    make_loop({"wandb": WandB(mode="offline", timeout=300)}, tmp_path / "run", steps=1).run()
    assert len(runs(tmp_path / "run")) == 1


@pytest.mark.parametrize("folder", ["wandb", ".wandb"])
def test_settings_that_a_run_brings_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str) -> None:
    """W&B reads them in the working directory, and would send the user's key to the server that they name."""
    run = tmp_path / "run"
    (run / folder).mkdir(parents=True)
    (run / folder / "settings").write_text("[default]\nbase_url = http://127.0.0.1:9\n")
    monkeypatch.chdir(run)
    with refused(UserError, run / folder / "settings"):
        make_loop({"wandb": WandB(mode="offline")}, run).run()


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such files")
@pytest.mark.wide
def test_a_pipe_in_the_repository_around_is_not_waited_for(here: Path) -> None:
    subprocess.run(["git", "init", "-q", here], check=True)
    os.mkfifo(here / ".git" / "commondir")
    importlib.import_module("wandb").teardown()  # it asks git when it is set up
    with in_time():
        make_loop({"wandb": WandB(mode="offline", timeout=300)}, here / "run", steps=1).run()
    assert len(runs(here / "run")) == 1


Process = Callable[..., subprocess.Popen[str]]
ONE_RUN = """
import sys, signal
from pathlib import Path
from hookdiff import builtin_plugins, hookimpl
from hookdiff.log.event import Event
from hookdiff.testing.toy import toy_loop
from hookdiff_wandb import WandB

class Waits:
    @hookimpl
    def after_optimizer_step(self, loop):
        if loop.progress.step == 3:
            Path("three").touch()

run = toy_loop({**builtin_plugins(), "wandb": WandB(**eval(sys.argv[1])), "waits": Waits()}, steps=int(sys.argv[2]),
    run_dir=Path("run"), log_every=1)
print(run.run(), run.progress.step, signal.getsignal(signal.SIGINT) is signal.default_int_handler)
"""


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Process]:
    """Return a function that starts a run in `tmp_path`; the process is killed at the end of the test."""
    started = list[subprocess.Popen[str]]()

    def call(options: Mapping[str, Any], steps: int, **environment: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", ONE_RUN, repr(options), str(steps)]
        variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "", **environment}
        pipe = subprocess.PIPE  # no terminal
        started.append(
            subprocess.Popen(
                command,
                cwd=tmp_path,
                env=variables,
                text=True,
                stdin=pipe,
                stdout=pipe,
                stderr=pipe,
                start_new_session=True,
            )
        )
        return started[-1]

    yield call
    for each in started:
        with each:  # the end of the block closes the pipes
            each.kill()


@pytest.mark.wide
def test_ctrl_c_ends_the_run_after_its_step(tmp_path: Path, process: Process) -> None:
    running = process({"timeout": 300}, 10**9)
    wait_for(tmp_path / "three", running)
    os.killpg(running.pid, signal.SIGINT)  # as a terminal does: also to W&B's own process, which has another group
    code, out, err = finish(running)
    assert (code, out.split()[0], out.split()[2]) == (0, "signal", "True"), err
    assert "Traceback" not in err
    (found,) = runs(tmp_path / "run")
    assert max(found["history"]) == int(out.split()[1])


@pytest.mark.wide
def test_a_frozen_process_of_wandb_does_not_keep_the_run_from_ending(tmp_path: Path, process: Process) -> None:
    running = process({"timeout": 15}, 10**9)
    wait_for(tmp_path / "three", running)

    def children() -> set[int]:
        lists = Path(f"/proc/{running.pid}/task").glob("*/children")
        return {int(number) for file in lists for number in file.read_text().split()}

    wait_until(children)  # the sink opens in the background
    (frozen,) = children()
    os.kill(frozen, signal.SIGSTOP)
    try:
        os.kill(running.pid, signal.SIGINT)
        running.wait(PATIENCE)
    finally:
        os.kill(frozen, signal.SIGKILL)  # it has inherited the pipes, which would not end
        running.kill()
    code, out, err = finish(running)
    assert (code, out.split()[0]) == (0, "signal"), err
    check_facts(err, "WandB", "is switched off", "15 s")
    assert "Traceback" not in err


@pytest.mark.wide
def test_a_server_that_does_not_answer_costs_only_the_sink(tmp_path: Path, process: Process) -> None:
    began = time.monotonic()
    address = {"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_API_KEY": "a" * 40}
    code, out, err = finish(process({"timeout": 2, "mode": "online"}, 5, **address))
    assert (code, out.split()[:2]) == (0, ["done", "5"]), err
    check_facts(err, "WandB", "is switched off", "open")
    assert "Traceback" not in err
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 5
    assert time.monotonic() - began < 200
