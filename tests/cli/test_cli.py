import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time

import numpy
import pytest
import tomli
from PIL import Image
from safetensors.torch import load_file

from hookdiff.cli import COMMANDS
from hookdiff.experiment.config import load_config
from hookdiff.hookspecs import HOOK_NAMES
from hookdiff.testing import assert_same, toy_loop

USER = """
import os
import signal
from hookdiff import hookimpl

class NaN:
    "Makes the third loss a NaN."

    @hookimpl(wrapper=True)
    def compute_loss(self, loop):
        from attrs import evolve
        output = yield
        return evolve(output, loss=output.loss * float("nan")) if loop.progress.position == 2 else output

class Ages:
    "Lets a minute go by in the third step."

    @hookimpl
    def after_backward(self, loop):
        loop.began -= 60 * (loop.progress.step == 2)

class Late:
    "Gets a signal when the run is already done."

    @hookimpl
    def on_stop(self):
        os.kill(os.getpid(), signal.SIGINT)

class Bug:
    "Is wrong."

    @hookimpl
    def on_start(self):
        raise KeyError("a bug of its own")
"""


@pytest.fixture
def folder(tmp_path, monkeypatch, write_config):
    """Go to a folder with a config and a module of the user's."""
    write_config(run={"log_every": 2, "plugins": ["ema", "lr", "checkpoint"]}, plugins={"lr": {"total": 6}})
    (tmp_path / "hd_cli_user.py").write_text(USER)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def start(folder, *words, python=()):
    """Start the command line as a process of its own."""
    code = ["-c", "from hookdiff.cli import main; main()", *map(str, words)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (folder, *sys.path))), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, *python, *code],
        cwd=folder,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def finish(process):
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def records(run):
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if key != "time"} for line in lines]


def checkpoints(run):
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def saved(run, file="model"):
    return load_file(run / "checkpoints" / checkpoints(run)[-1] / f"{file}.safetensors")


def test_help_lists_the_commands(hookdiff, folder):
    code, out, _ = hookdiff("--help")
    assert code == 0
    assert all(re.search(rf"^  {command} ", out, re.MULTILINE) for command in COMMANDS)
    assert "75" in out


def test_help_tells_what_commands_of_plugins_do(hookdiff, folder):
    info = folder / "others-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: others\nVersion: 1.0\n")
    lines = [
        "[hookdiff.commands]",
        "silent = hd_others:main",
        "broken = hd_others.broken:main",
        "zap = hd_others.zap:main",
    ]
    (info / "entry_points.txt").write_text("\n".join(lines))
    (folder / "hd_others").mkdir()
    (folder / "hd_others" / "__init__.py").write_text("1 / 0")
    (folder / "hd_others" / "broken.py").write_text("def (")
    (folder / "hd_others" / "zap.py").write_text('"""`hookdiff zap`: zap a run."""')
    code, out, _ = hookdiff("--help")
    assert code == 0
    assert re.search(r"^  replay +Run the step that stopped", out, re.MULTILINE)
    assert re.search(r"^  zap +Zap a run\.$", out, re.MULTILINE)
    assert re.search(r"^  silent +\(from others\)$", out, re.MULTILINE)
    assert re.search(r"^  broken +\(from others\)$", out, re.MULTILINE)


@pytest.mark.parametrize("words", [["--help"], ["run", "--help"], ["hooks"], ["--version"]])
def test_help_imports_neither_torch_nor_plugins(folder, words):
    code, out, times = finish(start(folder, *words, python=["-X", "importtime"]))
    imported = {line.rpartition("|")[2].strip() for line in times.splitlines()}
    assert code == 0
    assert out
    assert "hookdiff.cli" in imported
    assert not {name for name in imported if name.split(".")[0] in ("torch", "numpy") or name.startswith("hookdiff_")}


def test_plugins_lists_all_with_their_first_line(hookdiff, folder):
    code, out, _ = hookdiff("plugins")
    rows = {line.split()[0]: line for line in out.splitlines()}
    assert code == 0
    assert {"amp", "checkpoint", "clip", "ema", "fid", "lr", "samples"} <= rows.keys()
    assert re.fullmatch(r"ema +Keeps moving averages .* \(hookdiff \S+\)", rows["ema"])


def test_one_broken_plugin_does_not_hide_the_others(hookdiff, folder):
    info = folder / "broken-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[hookdiff.plugins]\nabroken = hd_cli_broken:X\n")
    (folder / "hd_cli_broken.py").write_text("1 / 0\n")
    code, out, _ = hookdiff("plugins")
    assert code == 0
    assert re.search(r"^abroken +cannot be used: division by zero  \(broken 1\.0\)$", out, re.MULTILINE)
    assert re.search(r"^ema ", out, re.MULTILINE)


def test_order_prints_who_is_called_when(hookdiff, folder):
    code, out, _ = hookdiff("plugins", "--order", "small.toml", "--plugins", "clip,samples")
    rows = dict(line.split(maxsplit=1) for line in out.splitlines())
    assert code == 0
    assert list(rows) == list(HOOK_NAMES)
    assert rows["after_optimizer_step"] == "ema (first) > lr > checkpoint > samples > ema (last)"
    assert rows["between_steps"] == "checkpoint (last)"
    assert rows["sample"] == "ema (around)"
    assert rows["after_backward"] == "clip (last)"
    assert rows["on_nan"] == "checkpoint (first)"


def test_hooks_prints_the_contract(hookdiff, folder):
    code, out, _ = hookdiff("hooks")
    assert code == 0
    assert [line.split("(")[0] for line in out.splitlines() if re.match(r"\w+\(", line)] == list(HOOK_NAMES)
    code, out, _ = hookdiff("hooks", "backward")
    assert out.startswith("backward(loop: Loop, loss: Tensor) -> bool\n    Seam: ")


def test_check_prints_toml_that_loads_to_the_same(hookdiff, folder):
    code, out, _ = hookdiff("check", "small.toml", "--plugins", "clip,no:lr", "--set", "run.name=x")
    assert code == 0
    (folder / "again.toml").write_text(out)
    assert load_config(folder / "again.toml").resolved() == tomli.loads(out)
    assert tomli.loads(out)["run"]["plugins"] == ["ema", "checkpoint", "clip"]
    assert hookdiff("check", "again.toml")[1] == out
    assert sorted(path.name for path in folder.glob("run*")) == []


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("run", "Missing argument 'CONFIG'"),
        ("run nowhere.toml", "hookdiff: nowhere.toml: no such file"),
        ("run smal.toml", "hookdiff: smal.toml: no such file; did you mean 'small.toml'?"),
        ("run .", "hookdiff: .: cannot be read: Is a directory"),
        ("run small.toml --set run.step=3", "  run.step: unknown key; did you mean 'steps'?"),
        ("run small.toml --set run.device=nowhere", "  run.device: 'nowhere' cannot be used here: "),
        ("run small.toml --plugins emma", "did you mean 'ema'?"),
        ("run small.toml --resume --overwrite", "hookdiff: --resume and --overwrite exclude each other"),
        ("run small.toml --resume --fresh emma", "hookdiff: --fresh emma: no plugin of this run; did you mean 'ema'?"),
        ("run small.toml --out . --overwrite", "hookdiff: . is no run directory"),
        ("run small.toml --out small.toml/x", "hookdiff: small.toml/x: cannot be written: Not a directory"),
        ("run small.toml --set run.batch_size=2000", "hookdiff: the data has 1797 samples, batch_size is 2000: lower"),
        ("run small.toml --set plugins.lr.warmup=6", "hookdiff: plugins.lr.warmup: 6 steps, but with"),
        ("check small.toml --set model.image_size=7", "small.toml: 1 problem\n  model: image_size=7 does not fit"),
        ("check small.toml --set sampling.steps=21", "  sampling: sampling.steps = 21 is more than"),
        ("check small.toml --set nonsense", "  --set nonsense: expected table.key=value"),
        ("hooks after_backwards", "hookdiff: there is no hook 'after_backwards'; did you mean 'after_backward'?"),
        ("plugins --order nowhere.toml", "hookdiff: nowhere.toml: no such file"),
        ("sample .", "hookdiff: . is no run directory: it has no config.toml"),
        ("sample . --num 0", "Invalid value for '--num'"),
        ("runn", "No such command 'runn'"),
        ("run small.toml --nonsense", "No such option '--nonsense'"),
    ],
)
def test_a_mistake_of_the_user_is_one_message_and_exit_code_2(hookdiff, folder, words, expected):
    before = sorted(folder.iterdir())
    code, out, err = hookdiff(*words.split())
    assert (code, out) == (2, "")
    assert expected in err
    assert [path for path in sorted(folder.iterdir()) if path.name != "__pycache__"] == before


def test_a_run_goes_on_exactly_where_it_was(hookdiff, folder, caplog):
    assert hookdiff("run", "small.toml", "--out", "whole")[0] == 0
    code, out, _ = hookdiff("run", "small.toml", "--out", "cut", "--set", "run.steps=3")
    assert code == 0
    assert out.startswith("small: done after 3 steps, 0 epochs, in 0:")
    assert len(records(folder / "cut")) == 1
    code, _, err = hookdiff("run", "small.toml", "--out", "cut")
    assert code == 2
    assert "cut exists; go on with --resume, start over with --overwrite" in err
    assert hookdiff("run", "small.toml", "--out", "cut", "--resume")[0] == 0
    assert "resuming from cut/checkpoints/step-00000003" in caplog.text
    assert records(folder / "cut") == records(folder / "whole")
    assert [record["step"] for record in records(folder / "cut")] == [2, 4, 6]
    for file in ("model", "ema", "optimizers"):
        assert_same(saved(folder / "cut", file), saved(folder / "whole", file))
    assert checkpoints(folder / "cut") == ["step-00000003", "step-00000006"]

    code, _, _ = hookdiff("run", "small.toml", "--out", "cut", "--overwrite", "--set", "run.seed=1")
    assert code == 0
    assert checkpoints(folder / "cut") == ["step-00000006"]
    assert records(folder / "cut") != records(folder / "whole")


def test_resume_starts_where_there_is_nothing_to_go_on_from(hookdiff, folder):
    assert hookdiff("run", "small.toml", "--resume", "--set", "run.steps=1")[0] == 0
    assert checkpoints(folder / "runs" / "small") == ["step-00000001"]


def test_a_plugin_that_is_new_on_resume_needs_fresh(hookdiff, folder):
    assert hookdiff("run", "small.toml", "--plugins", "no:ema", "--set", "run.steps=1")[0] == 0
    code, _, err = hookdiff("run", "small.toml", "--resume")
    assert code == 2
    assert "no state of the plugin 'ema', which keeps one; to start it fresh" in err
    assert "add --fresh ema (in a script" in err
    assert hookdiff("run", "small.toml", "--resume", "--fresh", "ema")[0] == 0


def test_all_plugins_that_are_new_on_resume_are_told_at_once(hookdiff, folder):
    assert hookdiff("run", "small.toml", "--plugins", "no:ema", "--set", "run.steps=1")[0] == 0
    again = ("run", "small.toml", "--resume", "--plugins", "loss,gradients", "--set", "run.steps=2")
    code, _, err = hookdiff(*again, "--fresh", "loss")
    assert code == 2
    assert "no state of the plugins 'ema', 'gradients', which keep one; to start them fresh" in err
    typed = re.search(r"add (.*) \(in a script: Loop\(\.\.\., fresh=\['loss', 'ema', 'gradients'\]\)\)", err)[1].split()
    assert hookdiff(*again, "--fresh", "loss", *typed)[0] == 0


def test_samples_come_from_a_checkpoint(hookdiff, folder):
    assert hookdiff("run", "small.toml", "--out", "run", "--set", "run.steps=2", "--set", "optimizer.lr=0.1")[0] == 0
    before = sorted(path for path in (folder / "run").rglob("*") if path.is_file())

    def sample(*words):
        code, out, _ = hookdiff("sample", "run", "--num", 3, "--out", "x.png", *words)
        assert code == 0
        return (folder / "x.png").read_bytes(), out

    averaged, out = sample()
    assert out == "x.png: 3 images from the ema weights of step 2\n"
    assert averaged.startswith(b"\x89PNG")
    assert sample()[0] == averaged
    assert sample("--weights", "ema")[0] == averaged
    own, out = sample("--weights", "model")
    assert out == "x.png: 3 images from the model weights of step 2\n"
    assert own != averaged
    assert sample("--seed", 1)[0] != averaged
    assert sample("--steps", 3)[0] != averaged
    assert sample("--sampler", "ddpm")[0] != averaged
    assert sorted(path for path in (folder / "run").rglob("*") if path.is_file()) == before

    newest = "run/checkpoints/step-00000002"
    from_file, out = sample("--weights", f"{newest}/ema.safetensors")
    assert from_file == averaged
    assert out == f"x.png: 3 images from the weights in {newest}/ema.safetensors\n"

    assert hookdiff("resume", "run", "--steps", 3)[0] == 0
    assert sample()[0] != averaged
    code, out, _ = hookdiff("sample", newest, "--num", 3)
    assert code == 0
    assert out.endswith("run/samples/seed-0.png: 3 images from the ema weights of step 2\n")
    assert (folder / "run/samples/seed-0.png").read_bytes() == averaged

    for words, expected in (
        (
            ["--weights", "emma"],
            "--weights: no weights of this run are named 'emma'; did you mean 'ema'?; known: ema, ema/decay=0.999, "
            "model, or a file that ends in .safetensors",
        ),
        (["--weights", "no.safetensors"], "--weights: no.safetensors: no such file"),
        (["--weights", f"{newest}/optimizers.safetensors"], "optimizers.safetensors is of another model: "),
        (["--steps", 21], "sampling.steps = 21 is more than diffusion.timesteps = 20"),
        (["--steps", 0], "sampling.steps: must be >= 1: 0"),
        (
            ["--sampler", "dim"],
            "sampling.sampler: must be one of ddim, ddpm, euler, heun, dpmpp_2m, not 'dim'; did you mean",
        ),
        (["--out", "small.toml/x.png"], "small.toml/x.png: cannot be written: "),
        (["--out", "run"], "run: cannot be written: "),
    ):
        code, _, err = hookdiff("sample", "run", "--num", 1, *words)
        assert code == 2
        assert expected in err
    assert hookdiff("sample", "run", "--num", 1, "--seed", 7)[1].startswith("run/samples/seed-7.png: 1 images")


def test_samples_of_classes_with_guidance(hookdiff, folder):
    conditional = ("--set", "model.num_classes=10", "--set", "optimizer.lr=0.1", "--set", "run.steps=3")
    assert hookdiff("run", "small.toml", "--out", "run", *conditional)[0] == 0
    assert tomli.loads((folder / "run" / "config.toml").read_text())["diffusion"]["conditional"] is True

    def sample(*words):
        code, _, err = hookdiff("sample", "run", "--num", 20, "--out", "x.png", *words)
        assert code == 0, err
        return (folder / "x.png").read_bytes()

    each = sample()  # the classes in turn
    assert sample("--labels", "0,1,2,3,4,5,6,7,8,9") == each
    assert sample("--labels", "3") != each
    assert sample("--labels", "-1") != each
    assert sample("--guidance-scale", 1) == each
    assert sample("--guidance-scale", 3) != each
    assert sample("--guidance-scale", 0) == sample("--labels", "-1")
    for words, expected in (
        (["--labels", "10"], "expected 20 labels from 0 to 9, or -1 for none"),
        (["--labels", "one"], "--labels one: expected whole numbers with commas between"),
        (["--guidance-scale", -1], "sampling.guidance_scale: must be >= 0: -1.0"),
    ):
        code, _, err = hookdiff("sample", "run", "--num", 20, *words)
        assert code == 2
        assert expected in err


def test_samples_from_a_picture(hookdiff, folder):
    assert hookdiff("run", "small.toml", "--out", "run", "--set", "run.steps=2")[0] == 0
    Image.new("RGB", (30, 20), (250, 250, 250)).save(folder / "white.jpg")

    def sample(*words):
        code, _, err = hookdiff("sample", "run", "--num", 4, "--steps", 20, "--out", "x.png", *words)
        assert code == 0, err
        return numpy.asarray(Image.open(folder / "x.png").convert("L"), dtype=float).mean()

    # One step of twenty leaves the picture nearly as it is; all of them leave little.
    assert sample("--image", "white.jpg", "--strength", 0.05) > sample("--image", "white.jpg", "--strength", 1) > 0
    code, _, err = hookdiff("sample", "run", "--image", "small.toml")
    assert code == 2
    assert "small.toml: cannot be read as a picture: " in err
    code, _, err = hookdiff("sample", "run", "--labels", "1", "--num", 1)
    assert code == 2
    assert "labels were given, but the network was trained without" in err


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (["sampling.guidance_scale=2"], "'guidance_scale' needs a network that was trained with labels"),
        (["diffusion.conditional=true"], "diffusion.conditional: unet takes no labels; set model.num_classes"),
        (["diffusion.data_mean=0.1, 0.2"], "diffusion: data_mean has 2 numbers for images of 1 channels"),
        (["diffusion.schedule=flow", "diffusion.timesteps=1000", "sampling.spacing=karras"], "'spacing' 'karras' does"),
        (
            ["model.num_classes=10", "diffusion.label_dropout=0", "sampling.guidance_scale=2"],
            "'guidance_scale' needs diffusion.label_dropout above 0",
        ),
        (["diffusion.rescale_betas_zero_snr=true"], "'prediction_type' cannot be 'epsilon': at the end with rescale"),
    ],
)
def test_what_does_not_fit_together_is_told_before_training(hookdiff, folder, settings, expected):
    code, out, err = hookdiff("run", "small.toml", *(word for each in settings for word in ("--set", each)))
    assert code == 2
    assert out == ""
    assert expected in err
    assert not (folder / "runs").exists()


def test_there_is_nothing_to_sample_without_a_checkpoint(hookdiff, folder):
    assert hookdiff("run", "small.toml", "--out", "run", "--plugins", "no:checkpoint", "--set", "run.steps=1")[0] == 0
    code, _, err = hookdiff("sample", "run")
    assert code == 2
    assert "hookdiff: run: none of the run's plugins reads checkpoints" in err
    code, _, err = hookdiff("run", "small.toml", "--out", "run", "--plugins", "no:checkpoint", "--resume")
    assert code == 2
    assert "hookdiff: run: none of the run's plugins reads checkpoints" in err


def test_a_nan_exits_3_and_keeps_the_weights_before_it(hookdiff, folder):
    code, out, _ = hookdiff("run", "small.toml", "--out", "run", "--plugins", "hd_cli_user:NaN")
    assert code == 3
    assert out.startswith("small: stopped: not finite after 2 steps")
    assert checkpoints(folder / "run") == ["step-00000002"]
    assert all(value.isfinite().all() for value in saved(folder / "run").values())


def test_a_resume_meets_the_nan_again_unless_it_skips_the_batch(hookdiff, folder, caplog):
    again = ("run", "small.toml", "--out", "run", "--plugins", "hd_cli_user:NaN")
    assert hookdiff(*again)[0] == 3
    assert hookdiff(*again, "--resume")[0] == 3
    assert hookdiff(*again, "--resume", "--skip-batches", "1", "--lr", "1e-5")[0] == 0
    assert "skipped batch 2" in caplog.messages
    manifest = json.loads((folder / "run" / "checkpoints" / "step-00000006" / "manifest.json").read_text())
    assert manifest["parts"]["progress"]["values"] == {"step": 6, "position": 7, "epoch": 0, "samples": 7 * 16}
    assert tomli.loads((folder / "run" / "config.toml").read_text())["optimizer"]["lr"] == 1e-5


def test_a_wrong_rate_is_told_as_the_key_it_stands_for(hookdiff, folder):
    code, _, err = hookdiff("run", "small.toml", "--lr", "fast")
    assert code == 2
    assert "optimizer.lr: " in err


def test_a_run_that_is_out_of_time_exits_75_and_can_go_on(hookdiff, folder):
    limit = "--plugins", "hd_cli_user:Ages", "--set", "run.max_time=1 min"
    code, out, _ = hookdiff("run", "small.toml", "--out", "run", *limit)
    assert code == 75
    assert out.startswith("small: out of time after 3 steps")
    assert out.endswith("\nto go on: hookdiff resume run\n")
    assert checkpoints(folder / "run") == ["step-00000003"]
    assert hookdiff("run", "small.toml", "--out", "run", "--resume")[0] == 0


def test_a_run_that_had_no_time_for_a_step_exits_75_and_is_begun_again(hookdiff, folder, caplog):
    assert hookdiff("run", "small.toml", "--out", "run", "--set", "run.max_time=0.000001 s")[0] == 75
    assert hookdiff("run", "small.toml", "--out", "run", "--resume")[0] == 0
    assert "run has no checkpoint to go on from: the run starts anew" in caplog.messages


def test_a_signal_after_the_end_does_not_make_a_run_that_is_done_a_stopped_one(hookdiff, folder):
    assert hookdiff("run", "small.toml", "--plugins", "hd_cli_user:Late", "--set", "run.steps=1")[0] == 0


def test_a_bug_in_a_plugin_has_its_traceback(folder):
    code, _, err = finish(start(folder, "run", "small.toml", "--plugins", "hd_cli_user:Bug"))
    assert code == 1
    assert "Traceback" in err
    assert err.endswith("KeyError: 'a bug of its own'\n")
    assert not (folder / "runs").exists()


def wait_for(condition, process):
    deadline = time.monotonic() + 60
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_run_after_the_step_with_a_checkpoint(folder, number, code):
    run = folder / "run"
    process = start(folder, "run", "small.toml", "--out", run, "--set", "run.steps=1000000", "--set", "run.log_every=1")
    wait_for(lambda: (run / "metrics.jsonl").exists(), process)
    process.send_signal(number)
    returned, out, err = finish(process)
    assert returned == code
    assert "stopping after this step; once more leaves at once" in err
    assert "Traceback" not in err
    (name,) = checkpoints(run)
    step = int(name.removeprefix("step-"))
    assert step == records(run)[-1]["step"]
    assert out.startswith(f"small: stopped by a signal after {step} steps")


SLOW = """
    import time
    from hookdiff import hookimpl

    class Slow:
        @hookimpl
        def after_backward(self):
            print("in a long step", flush=True)
            time.sleep(60)
"""


def test_a_second_signal_leaves_at_once(folder):
    (folder / "hd_slow.py").write_text(textwrap.dedent(SLOW))
    process = start(folder, "run", "small.toml", "--plugins", "hd_slow:Slow")
    assert process.stdout.readline() == "in a long step\n"
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    assert process.stderr.readline() == "stopping after this step; once more leaves at once\n"
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert finish(process)[0] == -signal.SIGINT  # which shells tell as 130
    assert time.monotonic() - began < 30


def test_the_last_table_says_what_was_made_and_how_evaluations_went(tmp_path):
    from hookdiff.cli.summary import summary

    lines = [{"step": n, "time": 0.0, "loss": 1 / n} for n in range(1, 19)]
    for line in lines[2::3]:
        line |= {"fd/x": 8.0 - line["step"], "odd/inner": 1.0}
    lines[8]["fd/x"] = None
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "config.toml").touch()
    (tmp_path / "samples").mkdir()
    for name in ("step-00000001.png", "step-00000010.png"):
        (tmp_path / "samples" / name).touch()
    (tmp_path / "empty").mkdir()
    loop = toy_loop(run_dir=tmp_path)
    loop.log({"odd/inner": 1.0}, detail=True)
    assert summary(loop, "time", "it", 125.4) == (
        "it: out of time after 0 steps, 0 epochs, in 2:05\n"
        f"  {tmp_path}/config.toml    every key; running it again gives the same run\n"
        f"  {tmp_path}/empty          empty\n"
        f"  {tmp_path}/metrics.jsonl  18 lines; loss 0.0556; fd/x ... 2, nan, -4, -7, -10\n"
        f"  {tmp_path}/samples        2, newest step-00000010.png"
    )
