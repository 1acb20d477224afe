import json
import os
import re
import signal

import pytest
import tomli
from safetensors.torch import load_file

from hookdiff.testing.compare import assert_same
from tests.conftest import check_facts, check_refused, finish, output, records


def checkpoints(run):
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def saved(run, file="model"):
    return load_file(run / "checkpoints" / checkpoints(run)[-1] / f"{file}.safetensors")


def test_a_resumed_run_equals_an_uninterrupted_one(hookdiff, folder, caplog):
    assert hookdiff("run", "small.toml", "--out", "whole")[0] == 0
    out = output(hookdiff("run", "small.toml", "--out", "cut", "--set", "run.steps=3"))
    check_facts(out.splitlines()[0], "small", 3, 0)
    assert [record["step"] for record in records(folder / "cut")] == [2, 3]
    check_refused(hookdiff("run", "small.toml", "--out", "cut"), "cut", "--resume", "--overwrite")
    assert hookdiff("run", "small.toml", "--out", "cut", "--resume")[0] == 0
    assert "cut/checkpoints/step-00000003" in caplog.text
    assert records(folder / "cut") == records(folder / "whole")
    assert [record["step"] for record in records(folder / "cut")] == [2, 4, 6]
    for file in ("model", "ema", "optimizers"):
        assert_same(saved(folder / "cut", file), saved(folder / "whole", file))
    assert checkpoints(folder / "cut") == ["step-00000003", "step-00000006"]

    output(hookdiff("run", "small.toml", "--out", "cut", "--overwrite", "--set", "run.seed=1"))
    assert checkpoints(folder / "cut") == ["step-00000006"]
    assert records(folder / "cut") != records(folder / "whole")


def test_resume_without_an_earlier_run_starts_one(hookdiff, folder):
    assert hookdiff("run", "small.toml", "--resume", "--set", "run.steps=1")[0] == 0
    assert checkpoints(folder / "runs" / "small") == ["step-00000001"]


def test_golden_message_of_the_new_plugins_of_a_resumed_run(hookdiff, folder):
    assert hookdiff("run", "small.toml", "--plugins", "no:ema", "--set", "run.steps=1")[0] == 0
    again = ("run", "small.toml", "--resume", "--plugins", "loss,gradients", "--set", "run.steps=2")
    code, _, err = hookdiff(*again, "--fresh", "loss")
    assert code == 2
    assert "no state of the plugins 'ema', 'gradients', which keep one; to start them fresh" in err
    typed = re.search(r"add (.*) \(in a script: Loop\(\.\.\., fresh=\['loss', 'ema', 'gradients'\]\)\)", err)[1].split()
    assert hookdiff(*again, "--fresh", "loss", *typed)[0] == 0


@pytest.mark.parametrize(
    ("settings", "facts"),
    [
        (["sampling.guidance.scale=2"], ("guidance", "labels")),
        (["diffusion.conditional=true", "model.num_classes=0"], ("diffusion.conditional", "unet", "model.num_classes")),
        (["diffusion.data_mean=0.1, 0.2"], ("diffusion", "data_mean", 2, 1)),
        (
            ["diffusion.process.use=ddpm", "diffusion.process.rescale_betas_zero_snr=true"],
            ("'prediction'", "'epsilon'"),
        ),
    ],
)
def test_parts_that_do_not_fit_together_are_refused_before_training(hookdiff, folder, settings, facts):
    words = (word for each in settings for word in ("--set", each))
    check_refused(hookdiff("run", "small.toml", *words), *facts)
    assert not (folder / "runs").exists()


def test_a_resumed_run_with_another_process_is_refused_in_one_message(hookdiff, folder):
    assert hookdiff("run", "small.toml", "--set", "run.steps=1", "--set", "diffusion.process=flow")[0] == 0
    changed = ("--set", "diffusion.process=ddpm")
    for words in (("run", "small.toml", "--resume", *changed), ("resume", "runs/small", *changed)):
        refusal = hookdiff(*words)
        check_refused(refusal, "cannot change", "diffusion.process", "flow", "ddpm")
        assert "spacing" not in refusal[2]


def test_a_run_that_saves_no_weights_says_so_first(hookdiff, folder, caplog):
    for plugins, is_warned in (("no:checkpoint", True), ("checkpoint", False)):
        caplog.clear()
        assert hookdiff("run", "small.toml", "--plugins", plugins, "--set", "run.steps=1", "--overwrite")[0] == 0
        assert ("--plugins checkpoint" in caplog.text) == is_warned


def test_a_nan_exits_3_and_a_resumed_run_has_it_again_unless_it_skips_the_batch(hookdiff, folder):
    again = ("run", "small.toml", "--out", "run", "--plugins", "hd_cli_user:NaN")
    code, out, _ = hookdiff(*again)
    assert code == 3
    check_facts(out.splitlines()[0], "small", 2)
    check_facts(out.splitlines()[-1], "--resume", "--skip-batches 1", "--lr X")
    assert checkpoints(folder / "run") == ["step-00000002"]
    assert all(value.isfinite().all() for value in saved(folder / "run").values())
    assert hookdiff(*again, "--resume")[0] == 3
    assert hookdiff(*again, "--resume", "--skip-batches", "1", "--lr", "1e-5")[0] == 0
    manifest = json.loads((folder / "run" / "checkpoints" / "step-00000006" / "manifest.json").read_text())
    assert manifest["parts"]["progress"]["values"] == {"step": 6, "position": 7, "epoch": 0, "samples": 7 * 16}
    assert tomli.loads((folder / "run" / "config.toml").read_text())["optimizer"]["lr"] == 1e-5


def test_a_run_without_time_for_a_step_exits_75_and_starts_anew(hookdiff, folder):
    assert hookdiff("run", "small.toml", "--out", "run", "--set", "run.max_time=0.000001 s")[0] == 75
    assert hookdiff("run", "small.toml", "--out", "run", "--resume")[0] == 0
    assert [record["step"] for record in records(folder / "run")] == [2, 4, 6]


def test_a_signal_after_the_last_step_leaves_the_exit_code_0(hookdiff, folder):
    assert hookdiff("run", "small.toml", "--plugins", "hd_cli_user:Late", "--set", "run.steps=1")[0] == 0


def test_sigterm_exits_143(hookdiff, folder):
    assert hookdiff("run", "small.toml", "--plugins", "hd_cli_user:Terminated")[0] == 143


SLOW = """
import time
from hookdiff import hookimpl

class Slow:
    @hookimpl
    def after_backward(self):
        print("in a long step", flush=True)
        for _ in range(36_000):  # a signal just before a long sleep would not end it
            time.sleep(0.1)
"""


@pytest.mark.wide
def test_golden_message_of_a_signal_and_the_end_at_the_second(folder, start):
    (folder / "hd_slow.py").write_text(SLOW)
    process = start(folder, "run", "small.toml", "--plugins", "hd_slow:Slow")
    assert process.stdout.readline() == "in a long step\n"
    process.send_signal(signal.SIGINT)
    assert process.stderr.readline().startswith("chosen for this cpu: ")
    assert process.stderr.readline() == "stopping after this step; a second signal ends the process at once\n"
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert finish(process)[0] == -signal.SIGINT  # shells report this as 130


GARBAGE = """
import gc
from hookdiff import hookimpl

class Looks:
    @hookimpl
    def before_step(self, loop):
        loop.log({"objects": len(gc.get_objects()), "threshold": gc.get_threshold()[0], "on": gc.isenabled()})
"""


@pytest.mark.wide
def test_a_training_looks_for_garbage_as_usual_but_not_among_imported_modules(folder, start):
    (folder / "hd_looks.py").write_text(GARBAGE)
    process = start(folder, "run", "small.toml", "--plugins", "hd_looks:Looks", "--out", "run", fresh=True)
    assert finish(process)[0] == 0
    line = records(folder / "run")[0]
    assert line["threshold"] <= 2_000  # the usual one; this process may have another by now
    assert line["on"]
    # `gc.get_objects` leaves the frozen ones out; with them there are 340,000.
    assert line["objects"] < 200_000


def test_a_config_whose_name_is_no_utf8_needs_a_name_for_its_run(hookdiff, folder):
    name = os.fsdecode(b"caf\xe9.toml")
    (folder / "small.toml").rename(folder / name)
    check_refused(hookdiff("run", name), "config.toml", r'name = "caf\udce9"')
    assert not (folder / "runs").exists()
    assert hookdiff("run", name, "--set", "run.name=cafe", "--set", "run.steps=1")[0] == 0
    assert checkpoints(folder / "runs" / "cafe") == ["step-00000001"]
