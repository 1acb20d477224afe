"""`hookdiff resume`: the same run, a longer one, or a branch; and the end of a run with workers."""

import os
import signal
import time

import pytest
import tomli
from safetensors.torch import load_file

from hookdiff import build_loop, load_config
from hookdiff.testing.compare import assert_same
from tests.conftest import check_facts, check_refused, contents, finish, output, records, wait_for, wide, write_small

USER = """
import os
import random
import time
from pathlib import Path

import numpy
import torch
from hookdiff import hookimpl

class Samples(torch.utils.data.Dataset):
    "Slow samples with random noise from Python, numpy and torch."

    def __len__(self):
        return 100

    def __getitem__(self, index):
        time.sleep(0.002)
        noise = torch.rand(1, 8, 8) + random.random() + numpy.random.rand()
        return (noise / 3).clamp(0, 1), index % 3

class Usr1:
    "Receives SIGUSR1 in the third step."

    @hookimpl
    def after_backward(self, loop):
        import os, signal
        if loop.progress.step == 2:
            os.kill(os.getpid(), signal.SIGUSR1)

class SlowSave:
    "Saves between steps, until a signal comes if one is to; one file marks the beginning, another the end."

    @hookimpl
    def between_steps(self, loop):
        if loop.progress.step == 3:
            Path("saving").touch()
            while "UNTIL_A_SIGNAL" in os.environ and not loop.plugins["signals"].caught:
                time.sleep(0.01)
            Path("saved").touch()

class SlowBuild:
    "Is built for an hour."

    def __init__(self):
        Path("building").touch()
        for _ in range(36_000):  # a signal just before a long sleep would not end it
            time.sleep(0.1)

    @hookimpl
    def on_start(self):
        pass
"""


@pytest.fixture
def folder(tmp_path, monkeypatch, write_config, user_module):
    user_module("hd_resume", USER)
    monkeypatch.chdir(tmp_path)
    write_config(run={"plugins": ["ema", "checkpoint"], "log_every": 2})
    return tmp_path


def tensors(run):
    newest = max((run / "checkpoints").glob("step-*"))
    return {f"{path.name}: {k}": v for path in newest.glob("*.safetensors") for k, v in load_file(path).items()}


def assert_equal_runs(one, other):
    assert_same(tensors(one), tensors(other))
    assert records(one) == records(other)


def test_a_run_continues_with_its_own_config(hookdiff, folder):
    changed = "--set", "optimizer.lr=0.01"
    assert hookdiff("run", "small.toml", "--out", "whole", *changed)[0] == 0
    assert hookdiff("run", "small.toml", "--out", "cut", "--set", "run.steps=3", *changed)[0] == 0
    (folder / "small.toml").unlink()
    assert hookdiff("resume", "cut", "--steps", 5)[0] == 0
    code, out, err = hookdiff("resume", "cut", "--steps", 6)
    assert code == 0
    check_facts(out.splitlines()[0], "small", 6, 0)
    assert "run.steps" not in out + err  # changes go to the log, which this test does not capture
    assert_equal_runs(folder / "whole", folder / "cut")
    assert tomli.loads((folder / "cut" / "config.toml").read_text())["run"]["steps"] == 6


def test_golden_messages_of_a_run_that_is_already_done(hookdiff, folder, caplog):
    assert hookdiff("run", "small.toml", "--steps", 2)[0] == 0
    before = contents(folder / "runs" / "small")
    line = "runs/small is already done, with 2 of 2 steps; to train longer: hookdiff resume runs/small --steps N"
    assert hookdiff("resume", "runs/small")[:2] == (0, f"{line}\n")
    assert hookdiff("run", "small.toml", "--resume", "--steps", 2)[:2] == (0, f"{line}\n")
    assert hookdiff("resume", "runs/small", "--out", "b")[:2] == (0, f"{line} --out b\n")
    assert not (folder / "b").exists()
    assert contents(folder / "runs" / "small") == before
    caplog.clear()
    assert hookdiff("resume", "runs/small", "--epochs", 1, "--set", "run.batch_size=900")[0] == 0
    changes = "run.epochs (not set) -> 1, run.batch_size 16 -> 900, run.steps 2 -> (not set)"
    assert caplog.messages[0] == f"changed since the checkpoint: {changes}"
    check_facts(hookdiff("resume", "runs/small")[1], "1 of 1 epochs", "hookdiff resume runs/small --epochs N")


@pytest.mark.parametrize("words", ["resume runs/small --steps 2", "run small.toml --resume --steps 2"])
def test_a_run_that_is_longer_than_its_new_length_says_so_and_stays(hookdiff, folder, words):
    assert hookdiff("run", "small.toml", "--set", "run.steps=5")[0] == 0
    before = contents(folder / "runs" / "small")
    out = output(hookdiff(*words.split()))
    check_facts(out, "runs/small", "5 steps", "--steps 2", "whole run", "hookdiff resume runs/small --steps N")
    assert "of 2" not in out
    assert contents(folder / "runs" / "small") == before


@pytest.mark.parametrize("of", ["run", *wide("run/checkpoints/step-00000004")])
def test_a_branch_continues_elsewhere_and_leaves_its_source_unchanged(hookdiff, folder, of):
    assert hookdiff("run", "small.toml", "--out", "whole")[0] == 0
    every = "--set", "plugins.checkpoint.every=2"
    assert hookdiff("run", "small.toml", "--out", "run", "--set", "run.steps=5", *every)[0] == 0
    before = contents(folder / "run")
    assert hookdiff("resume", of, "--out", "branch", "--steps", 6)[0] == 0
    assert contents(folder / "run") == before
    assert_equal_runs(folder / "whole", folder / "branch")
    # The branch is a run of its own: it continues with other plugins, and has a branch itself.
    assert hookdiff("resume", "branch", "--steps", 7, "--plugins", "no:ema")[0] == 0
    assert hookdiff("resume", "branch", "--steps", 8, "--plugins", "ema", "--fresh", "ema", "--out", "twig")[0] == 0
    assert [record["step"] for record in records(folder / "twig")] == [2, 4, 6, 8]
    assert contents(folder / "run") == before


@pytest.mark.parametrize(
    ("words", "facts"),
    [
        ("resume", ("'RUN'",)),
        ("resume runn", ("runn", "'run'")),
        ("resume .", ("config.toml",)),
        ("resume run/checkpoints/step-00000001", ("step-00000001", "run", "--out")),
        ("resume run/checkpoints/step-00000001 --out run", ("--out run",)),
        ("resume run --out other", ("--out other", "hookdiff resume other")),
        ("resume run --steps 2 --epochs 3", ("--steps", "--epochs")),
        ("resume run --steps 0", ("'--steps'",)),
        ("resume run --fresh emma", ("--fresh emma", "'ema'")),
        ("resume run --steps 2 --plugins clip", ("'clip'", "--fresh clip")),
        ("resume run --steps 2 --fresh fid", ("--fresh fid", "ema", "checkpoint")),
        ("resume run --steps 2 --set model.use=dit", ("model.use", "'unet'", "'dit'")),
        ("resume run --steps 2 --set model.depth=3", ("model.depth",)),
        ("resume run --steps 2 --out run/config.toml/x", ("run/config.toml/x",)),
        ("resume bare", ("bare", "hookdiff run bare/config.toml --out bare --resume")),
        ("resume bare --out new", ("bare", "hookdiff run bare/config.toml --out new")),
        ("resume run/checkpoints", ("run/checkpoints", "config.toml")),
        (
            "resume torn/checkpoints/step-00000001 --out x",
            ("torn/checkpoints/step-00000001", "manifest", "torn --out x"),
        ),
    ],
)
def test_a_wrong_input_is_one_message_and_changes_nothing(hookdiff, made, monkeypatch, words, facts):
    monkeypatch.chdir(made)
    before = {path: data for path, data in contents(made).items() if path.suffix != ".pyc"}
    check_refused(hookdiff(*words.split()), *facts)
    assert {p: data for p, data in contents(made).items() if p.suffix != ".pyc"} == before


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Return a folder with a run of one step, a foreign folder, and runs without a checkpoint and with a torn one."""
    folder = tmp_path_factory.mktemp("made")
    config = load_config(write_small(folder / "small.toml", run={"steps": 1, "plugins": ["ema", "checkpoint"]}))
    build_loop(config, folder / "run").run()
    (folder / "other").mkdir()
    (folder / "other" / "thesis.tex").touch()
    (folder / "torn" / "checkpoints" / "step-00000001").mkdir(parents=True)
    (folder / "bare").mkdir()
    for name in ("bare", "torn"):
        (folder / name / "config.toml").write_bytes((folder / "run" / "config.toml").read_bytes())
    return folder


def test_usr1_saves_and_exits_75(hookdiff, folder):
    code, out, _ = hookdiff("run", "small.toml", "--out", "run", "--usr1", "--plugins", "hd_resume:Usr1")
    assert code == 75
    first, *_, last = out.splitlines()
    check_facts(first, "small", 3)
    check_facts(last, "hookdiff resume run")
    assert [path.name for path in (folder / "run" / "checkpoints").iterdir()] == ["step-00000003"]
    assert hookdiff("resume", "run", "--usr1", "--trust", "--set", "run.max_time=0.000001 s")[0] == 75
    assert hookdiff("resume", "run", "--usr1", "--trust", "--set", "run.max_time=0")[0] == 0
    assert [record["step"] for record in records(folder / "run")] == [2, 4, 6]


@pytest.mark.wide
@pytest.mark.skipif(os.name == "nt", reason="Windows has no process groups")
@pytest.mark.parametrize(
    ("number", "code", "moment"), [(signal.SIGINT, 130, "run/metrics.jsonl"), (signal.SIGTERM, 143, "saving")]
)
def test_a_signal_to_the_process_group_lets_the_run_close_its_workers(
    hookdiff, folder, write_config, start, number, code, moment
):
    data = {"source": "hd_resume:Samples", "workers": 2, "held_out": 10}
    run = {"plugins": ["ema", "checkpoint", "hd_resume:SlowSave"], "log_every": 1}
    path = write_config(run=run, data=data)
    process = start(folder, "run", path, "--out", "run", "--set", "run.steps=100000", UNTIL_A_SIGNAL="1")
    wait_for(folder / moment, process)
    os.killpg(process.pid, number)
    returned, out, err = finish(process)
    assert (returned, len(err.splitlines())) == (code, 2)  # what was chosen for the machine, and the stop
    step = records(folder / "run")[-1]["step"]
    check_facts(out.splitlines()[0], "small", step)
    assert (folder / "saving").exists() == (folder / "saved").exists()
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)  # no worker is left
    assert hookdiff("resume", "run", "--steps", step + 4, "--set", "data.workers=0", "--trust")[0] == 0
    assert hookdiff("run", path, "--out", "whole", "--set", f"run.steps={step + 4}")[0] == 0
    assert_equal_runs(folder / "whole", folder / "run")


@pytest.mark.wide
@pytest.mark.skipif(os.name == "nt", reason="Windows has no such signals")
def test_a_signal_before_the_run_ends_the_process_and_leaves_no_files(folder, start):
    process = start(folder, "run", "small.toml", "--out", "run", "--plugins", "hd_resume:SlowBuild")
    wait_for(folder / "building", process)
    time.sleep(0.5)  # until it sleeps: Python drops an interrupt that comes during the clean-up of an object
    process.send_signal(signal.SIGINT)
    returned, out, err = finish(process)
    assert (returned, out, err.strip()) == (130, "", "")
    assert not (folder / "run").exists()
