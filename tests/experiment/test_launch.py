"""The command under torchrun: how ranks begin, stop, fail, and go on; real processes, killed for real."""

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterable
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch

from hookdiff_checkpoint import read_checkpoint
from tests.conftest import FORKS, Torchrun, check_facts, mostly_wide, output, records, wait_until, wide, write_small

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="torch was built without gloo")

# Runs the command; each rank may have words of its own.
SCRIPT = """
import multiprocessing, os, signal, sys
from hookdiff.cli import main
from hookdiff.machine import joining
if multiprocessing.parent_process():  # torchrun has forked this rank, and waits for what it returns
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # which was that of torchrun
    joining.leave = sys.exit
own = os.environ.get(f"WORDS_{os.environ['RANK']}", "").split()
sys.argv = ["hookdiff", *sys.argv[1:], *own]
try:
    main()
except SystemExit as end:
    if end.code:
        raise
"""

# Writes down its process, and waits once at a step, so that it can be killed there.
SLOW = """
import os, time
from pathlib import Path
from hookdiff import hookimpl

class Slow:
    @hookimpl
    def after_optimizer_step(self, loop):
        if loop.progress.step == int(os.environ.get("WAIT_AT", "0")):
            place = Path(os.environ["PLACE"])
            pids = place / f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}-{loop.rank}"
            pids.write_text(str(os.getpid()))
            while loop.rank == 1 and pids.name == "0-1":
                time.sleep(0.01)
"""

# Writes down the process of torchrun, once training is under way.
PIDS = """
import os
from pathlib import Path
from hookdiff import hookimpl

class Pids:
    @hookimpl
    def after_optimizer_step(self, loop):
        if loop.progress.step == 5 and loop.is_main:
            (Path(os.environ["PLACE"]) / "torchrun").write_text(str(os.getppid()))
"""

# Runs the command with a short limit for a step; the second rank does not come to the fifth one.
HANGS = """
import sys, time
from datetime import timedelta
from hookdiff import hookimpl
from hookdiff.machine import joining
from hookdiff.cli import main

class Hangs:
    @hookimpl
    def before_step(self, loop):
        while (loop.progress.step, loop.rank) == (5, 1) and not loop.plugins["signals"].caught:
            time.sleep(0.1)

joining.TIMEOUT = timedelta(seconds=3)
sys.modules["hangs"] = sys.modules["__main__"]
main()
"""


@pytest.fixture
def command(torchrun: Torchrun, tmp_path: Path) -> Callable[..., tuple[int, str, str]]:
    """Return a function that runs the command on `num` ranks, which torchrun forks by default."""
    (tmp_path / "command.py").write_text(SCRIPT)

    def call(num: int, *words: object, options: Iterable[str] = FORKS, **environment: Any) -> tuple[int, str, str]:
        return torchrun(num, tmp_path / "command.py", *words, options=options, **environment)

    return call


def outcome(run: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((run / "outcome.json").read_text())
    return result


def weights(run: Path, step: int) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = read_checkpoint(run / "checkpoints" / f"step-{step:08d}")["model"]
    return dict(found)


def check_one_message(result: tuple[int, str, str], *facts: object) -> None:
    """Assert that the ranks have failed with one message, which has these facts."""
    code, _, err = result
    assert code
    assert err.count("hookdiff: ") == 1, err
    check_facts(err, *facts)


@pytest.mark.wide
def test_without_a_plugin_for_ranks_torchrun_is_refused(command: Any, tmp_path: Path) -> None:
    check_one_message(command(2, "run", write_small(tmp_path / "small.toml")), "2", "--plugins ddp", "fsdp")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("words", "own", "fact"),
    mostly_wide(
        1,
        [
            ("", "--set run.stepz=3", "run.stepz"),  # the second rank alone meets it
            ("--set run.stepz=3", "", "run.stepz"),  # all ranks
            ("--out /proc/nowhere", "", "/proc/nowhere"),  # the first rank alone
            ("--bogus", "", "--bogus"),
        ],
    ),
)
def test_a_mistake_of_one_rank_is_the_only_message(
    command: Any, tmp_path: Path, words: str, own: str, fact: str
) -> None:
    config = write_small(tmp_path / "small.toml")
    code, _, err = command(2, "run", config, "--plugins", "ddp", *words.split(), WORDS_1=own)
    assert code
    assert err.count(fact) == 1, err
    assert "waited" not in err
    assert "Traceback (most recent call last):\n  File" not in err.partition("torch/distributed")[0]


def test_all_ranks_need_the_same_config(command: Any, tmp_path: Path) -> None:
    config = write_small(tmp_path / "small.toml")
    result = command(2, "run", config, "--plugins", "ddp", WORDS_1="--set data.held_out=3 --set run.batch_size=8")
    check_one_message(result, "run.batch_size", 16, 8, "rank 1")
    assert not (tmp_path / "runs").exists()


@pytest.mark.wide
def test_all_ranks_need_the_same_data(torchrun: Torchrun, pictures: Path) -> None:
    script = SCRIPT.replace("main()", "os.chdir(f'{os.getcwd()}/{os.environ[\"RANK\"]}')\n    main()")
    (pictures / "command.py").write_text(script)
    for rank in "01":
        shutil.copytree(pictures / "pictures", pictures / rank / "pictures")
    (pictures / "1" / "pictures" / "ant" / "00.png").rename(pictures / "1" / "pictures" / "ant" / "new.png")
    words = ("run", pictures / "config.toml", "--plugins", "ddp")
    result = torchrun(2, pictures / "command.py", *words, options=FORKS)
    check_one_message(result, "the same data", "pictures/ant/00.png", "rank 0", "rank 1")


@pytest.mark.slow
def test_the_first_rank_decides_about_the_run_directory(command: Any, tmp_path: Path) -> None:
    config = write_small(tmp_path / "small.toml", run={"plugins": ["ddp", "checkpoint"]})
    output(command(2, "run", config))
    run = tmp_path / "runs" / "small"
    before = sorted((path, path.stat().st_mtime_ns) for path in run.rglob("*"))
    check_one_message(command(2, "run", config), "--resume", "--overwrite")
    assert sorted((path, path.stat().st_mtime_ns) for path in run.rglob("*")) == before
    output(command(2, "run", config, "--overwrite"))


@pytest.mark.wide
@pytest.mark.parametrize("plugin", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_a_killed_rank_ends_the_run_and_torchrun_resumes_it_exactly(
    command: Any, tmp_path: Path, user_module: Callable[[str, str], None], plugin: str
) -> None:
    user_module("slow", SLOW)
    run = {"steps": 12, "log_every": 1, "plugins": [plugin, "checkpoint", "ema", "clip", "lr", "slow:Slow"]}
    config = write_small(tmp_path / "small.toml", run=run, plugins={"checkpoint": {"every": 3}})
    output(command(2, "run", config, "--out", tmp_path / "whole", PLACE=str(tmp_path)))

    def kill() -> None:
        wait_until(lambda: (tmp_path / "0-1").exists() and (tmp_path / "0-1").read_text())
        wait_until((tmp_path / "broken" / "checkpoints" / "step-00000006" / "manifest.json").exists)
        os.kill(int((tmp_path / "0-1").read_text()), signal.SIGKILL)

    killer = Thread(target=kill)
    killer.start()
    words = ("run", config, "--out", tmp_path / "broken")
    code, _, err = command(2, *words, options=[*FORKS, "--max-restarts=1"], PLACE=str(tmp_path), WAIT_AT="8")
    killer.join()
    assert code == 0, err
    assert "resuming from" in err
    assert outcome(tmp_path / "broken")["reason"] == "done"
    whole, broken = (weights(tmp_path / name, 12) for name in ("whole", "broken"))
    assert all(torch.equal(whole[name], broken[name]) for name in whole)
    assert records(tmp_path / "whole") == records(tmp_path / "broken")


@pytest.mark.slow
def test_an_end_that_is_no_failure_is_not_trained_again(command: Any, tmp_path: Path) -> None:
    run = {"steps": 10_000_000, "max_time": "2 s", "plugins": ["ddp", "checkpoint"]}
    config = write_small(tmp_path / "small.toml", run=run)
    code, _, err = command(2, "run", config, options=[*FORKS, "--max-restarts=2"])
    assert code
    assert outcome(tmp_path / "runs" / "small")["reason"] == "time"
    assert err.count("starts anew") + err.count("resuming from") == 0


@pytest.mark.wide
@pytest.mark.parametrize("to_all", [False, True])
def test_a_signal_saves_the_run_on_all_ranks(
    command: Any, tmp_path: Path, user_module: Callable[[str, str], None], to_all: bool
) -> None:
    user_module("pids", PIDS)
    run = {"steps": 10_000_000, "plugins": ["ddp", "checkpoint", "pids:Pids"]}
    config = write_small(tmp_path / "small.toml", run=run)

    def stop() -> None:
        wait_until(lambda: (tmp_path / "torchrun").exists() and (tmp_path / "torchrun").read_text())
        pid = int((tmp_path / "torchrun").read_text())
        if to_all:
            os.killpg(pid, signal.SIGINT)  # as a terminal does for Ctrl-C
        else:
            os.kill(pid, signal.SIGTERM)

    stopper = Thread(target=stop)
    stopper.start()
    code, _, err = command(2, "run", config, options=(), PLACE=str(tmp_path))
    stopper.join()
    assert code
    ended = outcome(tmp_path / "runs" / "small")
    assert ended["reason"] == "signal", err
    weights(tmp_path / "runs" / "small", ended["step"])


@pytest.mark.wide
def test_a_rank_that_hangs_is_named_with_the_place(torchrun: Torchrun, tmp_path: Path) -> None:
    (tmp_path / "hangs.py").write_text(HANGS)
    config = write_small(tmp_path / "small.toml", run={"plugins": ["ddp", "hangs:Hangs"]})
    code, _, err = torchrun(2, tmp_path / "hangs.py", "run", config, options=FORKS)
    assert code
    check_facts(err, "rank 0", "rank 1 did not come", "backward", "3000ms")
    assert outcome(tmp_path / "runs" / "small")["reason"] == "error"


# Ends a rank in the fourth step as its variable says, and writes down that it has begun to.
FAILS = """
import os, signal, sys, time
from hookdiff import UserError, hookimpl
from hookdiff.machine import gathered_or_raised

class Fails:
    @hookimpl
    def before_step(self, loop):
        how = os.environ.get(f"HOW_{loop.rank}", "")
        if loop.progress.step < 3:
            return
        if "late" in how:
            time.sleep(1)
        if "kill" in how:
            os.kill(os.getpid(), signal.SIGKILL)
        if "exit" in how:
            sys.exit(5)
        if "raise" in how:
            raise RuntimeError(f"gone {loop.rank}")
        if os.environ.get("TOGETHER"):
            gathered_or_raised(self.refuse if "refuse" in how else int)

    def refuse(self):
        raise UserError("refused here")

    @hookimpl
    def on_stop(self, loop):
        if "end" in os.environ.get(f"HOW_{loop.rank}", ""):
            raise RuntimeError(f"at the end {loop.rank}")
        if os.environ.get("TOGETHER") and loop.end.reason == "done":
            gathered_or_raised(int)
"""


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (("", "raise"), "rank 1: RuntimeError: gone 1"),
        pytest.param(("raise", ""), "rank 0: RuntimeError: gone 0", marks=pytest.mark.slow),
        *wide((("late raise", "raise"), "rank 1: RuntimeError: gone 1")),
        pytest.param(("raise", "late raise"), "rank 0: RuntimeError: gone 0", marks=pytest.mark.slow),
        *wide((("", "refuse"), "rank 1: UserError: refused here")),
        pytest.param(("", "exit"), "rank 1: SystemExit: 5", marks=pytest.mark.slow),
        pytest.param(("", "end"), "rank 1: RuntimeError: at the end 1", marks=pytest.mark.slow),
        *wide((("", "kill"), "nothing was heard of rank 1")),
        pytest.param(("", "", "raise"), "rank 2: RuntimeError: gone 2", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_outcome_names_the_first_error_and_its_rank(
    command: Any, tmp_path: Path, user_module: Callable[[str, str], None], how: tuple[str, ...], message: str
) -> None:
    user_module("fails", FAILS)
    config = write_small(tmp_path / "small.toml", run={"plugins": ["ddp", "fails:Fails"]})
    variables = {f"HOW_{rank}": text for rank, text in enumerate(how)}
    code, _, err = command(len(how), "run", config, TOGETHER="1" * bool({"refuse", "end"} & {*how}), **variables)
    assert code
    ended = outcome(tmp_path / "runs" / "small")
    assert (ended["reason"], ended["step"]) == ("error", 6 if "end" in how else 3), err
    if "kill" in how:
        assert ended["message"].startswith("rank 0: RuntimeError: "), ended
        assert ended["message"].endswith(message)
    else:
        assert ended["message"] == message
