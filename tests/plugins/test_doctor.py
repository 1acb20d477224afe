"""`hookdiff doctor` on small nets: the first line names what is broken, and what is well is not blamed."""

import hashlib
import json
import math
import os
import subprocess
import sys
import time
from itertools import accumulate, pairwise

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from hookdiff import build_loop, load_config
from hookdiff.diffusion import Diffusion
from hookdiff.models import UNet
from hookdiff.testing import toy_loop
from hookdiff_debug import checks
from hookdiff_debug.checks import Finding, cause
from hookdiff_debug.doctor import examine
from hookdiff_debug.measure import Inputs, Layer, Level, Outputs, measure_inputs, measure_levels
from hookdiff_debug.trial import Clock, Trial, train
from hookdiff_lr import LR

CONFIG = """
[run]
steps = 1500
batch_size = 32
device = "cpu"
plugins = ["lr", "clip", "ema"]
[data]
source = "digits"
[model]
use = "unet"
channels = 8
num_res_blocks = 1
head_dim = 8
[diffusion]
schedule = "cosine"
[sampling]
steps = 4
[optimizer]
lr = 2e-3
[plugins.lr]
warmup = 5
"""
USER = """
import torch
from attrs import define
from torch import nn
from hookdiff import hookimpl
from hookdiff.data import digits
from hookdiff.models import UNet


def bytes_as_floats():
    return digits().images.float()


def one_nan():
    images = digits().images.float() / 127.5 - 1
    images[700, 0, 3, 3] = torch.nan
    return images


def constant():
    return (torch.rand(200, 1, 1, 1) * 2 - 1).repeat(1, 1, 8, 8)


def faint():
    return constant() / 50


@define(eq=False)
class Starts:
    @hookimpl
    def on_start(self, loop):
        pass


class Dead(nn.Module):
    def __init__(self, in_channels):
        super().__init__()
        self.unet = UNet(in_channels=in_channels, image_size=8, channels=8, num_res_blocks=1, head_dim=8)
        self.side, self.out = nn.Conv2d(in_channels, 8, 3, padding=1), nn.Conv2d(8, in_channels, 3, padding=1)
        nn.init.constant_(self.side.bias, -100.0)

    def forward(self, x, t):
        return self.unet(x, t) + self.out(self.side(x).relu())


class Blind(nn.Module):
    def __init__(self, in_channels):
        super().__init__()
        self.image = nn.Parameter(torch.zeros(1, in_channels, 8, 8))
        self.time = nn.Linear(1, 64)

    def forward(self, x, t):
        return (self.image + self.time(t[:, None] / 1000).view(-1, 1, 8, 8)).expand_as(x)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "small.toml").write_text(CONFIG)
    (tmp_path / "hd_doctor_user.py").write_text(USER)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def doctor(folder, hookdiff):
    """Return a function that runs the command in this process: its exit code, stdout and stderr."""
    return lambda *words: hookdiff("doctor", *words)


def settings(**tables):
    return [word for key, value in tables.items() for word in ("--set", f"{key.replace('__', '.')}={value}")]


@pytest.mark.parametrize(
    ("table", "first"),
    [
        ({"data__source": "hd_doctor_user:bytes_as_floats"}, "inputs: values from 0 to 255, as of [0, 255]"),
        ({"data__source": "hd_doctor_user:constant"}, "inputs: every image is constant"),
        # A process that is right for images of the usual scale
        *(
            ({"data__source": f"hd_doctor_user:{source}", "diffusion__schedule": "linear"}, "inputs: ")
            for source in ("bytes_as_floats", "faint")
        ),
        # 100 times too high, at once and after a warm-up that is longer than the trial
        ({"optimizer__lr": 0.2}, "learning rate: too high: lr 0.2 took the loss from"),
        ({"optimizer__lr": 0.2, "plugins__lr__warmup": 300}, "learning rate: too high: lr 0."),
        ({"diffusion__schedule": "linear", "diffusion__timesteps": 20}, "schedule: signal to noise from"),
    ],
    ids=str,
)
def test_the_first_line_names_the_cause(table, first, doctor):
    code, out, err = doctor("small.toml", "--steps", 16, *settings(**table))
    assert (code, err) == (1, "")
    assert out.startswith(f"broken: {first}")
    assert only(first.partition(":")[0], out)


def only(name, out):
    """Whether all else is OK or refers to the cause; how long a step takes is the machine's."""
    rows = out.splitlines()[2:]
    told = [(row, way_out.strip()) for row, way_out in pairwise(rows) if row.startswith(("look ", "broken "))]
    others = [(row, way_out) for row, way_out in told if name not in row and " time  " not in row]
    return len(told) > len(others) and all(
        way_out == f"it may follow from {name}: mend that first" for _, way_out in others
    )


@pytest.mark.parametrize(
    ("model", "first"),
    [
        ("Dead", "gradients: no gradient reaches 1 of 44 layers (side): it is exactly zero"),
        ("Blind", "response: the same for every image"),
    ],
)
def test_a_network_that_is_broken_is_named(model, first, doctor, folder):
    text = CONFIG.replace("channels = 8\nnum_res_blocks = 1\nhead_dim = 8\n", "")
    (folder / "own.toml").write_text(text.replace('use = "unet"', f'use = "hd_doctor_user:{model}"'))
    code, out, _ = doctor("own.toml", "--steps", 16)
    assert out.startswith(f"broken: {first}")
    assert code == 1
    assert only(first.partition(":")[0], out)


def test_what_comes_after_the_cause_refers_to_it():
    findings = [Finding(level, level, "", "as it is") for level in ("look", "broken", "OK", "look", "broken")]
    refers = "it may follow from broken: mend that first"
    told = checks.following(findings, findings[1])
    assert [finding.advice for finding in told] == ["as it is", "as it is", "as it is", refers, refers]
    assert [finding.level for finding in told] == [finding.level for finding in findings]
    first = Finding("broken", "inputs", "")
    told = checks.following(findings, first)
    assert {finding.advice for finding in told if finding.level != "OK"} == {
        "it may follow from inputs: mend that first"
    }
    assert checks.following(findings, None) == findings


@pytest.mark.parametrize("warmup", [5, 300])
def test_the_length_of_the_trial_is_told(warmup, doctor):
    code, out, _ = doctor("small.toml", "--steps", 12, "--json", *settings(plugins__lr__warmup=warmup))
    found = json.loads(out)
    (line,) = [finding for finding in found["findings"] if finding["name"] == "trial"]
    assert (code, found["steps_asked"], len(found["losses"])) == (0, 12, found["steps_made"])
    more = found["steps_made"] - 12
    assert (more > 25) == (warmup == 300)
    assert line["seen"].startswith(
        f"{12 + more} updates: 12, and {more} more through the warm-up" if more else "12 updates"
    )


@pytest.mark.parametrize(
    ("made", "tried", "outcome", "why"),
    [
        (12, 12, "updated", "half a minute was over"),
        (3, 4, "stopped", "a step that is not finite stopped it"),
        (2, 200, "void", "198 of 200 steps made none"),
    ],
)
def test_why_a_trial_is_short_is_told(made, tried, outcome, why):
    short = trial([1.0] * tried, outcome=outcome)
    short.asked, short.rates = 20, [1e-3] * made
    assert checks.check_trial(short).seen == f"{made} of 20 updates: {why}"


def test_plugins_that_have_no_part_in_the_trial_are_named(doctor):
    given = ["--plugins", "debug,samples,hd_doctor_user:Starts"]
    code, out, _ = doctor("small.toml", "--steps", 4, *given)
    line = (
        "left out       samples, starts: no part in what a step computes, or in sampling; debug: these are its checks"
    )
    assert code == 0
    assert [row for row in out.splitlines() if "left out" in row] == [f"OK      {line}"]
    _, out, _ = doctor("small.toml", "--steps", 4)
    assert "left out" not in out


HEALTHY = {
    "unet, epsilon": {},
    "unet, v, with classes and bf16": {
        "diffusion__prediction_type": "v_prediction",
        "model__num_classes": 10,
        "run__micro_batch": 16,
    },
    "unet, edm": {"diffusion__schedule": "edm", "diffusion__sigma_data": 0.75, "sampling__clip_sample": "false"},
    "dit, flow": {"diffusion__schedule": "flow"},
}


@pytest.mark.parametrize(
    "device",
    ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))],
)
def test_the_estimate_of_memory_lies_near_what_a_step_took(device, folder):
    given = [f"run.device={device}", "model.channels=32", 'run.micro_batch="auto"']
    report = examine(load_config(folder / "small.toml", settings=given), None, 4, folder / "trial", None)
    measured = report.trial.peak_memory
    (line,) = [finding for finding in report.findings if finding.name == "memory"]
    how = "counted" if device == "cpu" else "measured"
    assert line.seen.endswith(f" estimated, {measured / 2**20:.0f} {how}")
    assert int(line.seen.split()[0]) == pytest.approx(measured / 2**20, rel=0.15)


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events:UserWarning")  # torch 2.11 tells it of any
def test_what_is_counted_is_what_the_allocator_was_asked_for():
    """Without a GPU: the count of a step beside that of torch's profiler."""
    loop, twin = (toy_loop(batch_size=40, steps=9) for _ in range(2))
    with loop:
        counted = train(loop, 4).peak_memory
    with twin:
        steps = iter(twin.steps())
        next(steps)
        twin.model.zero_grad()
        batch = next(twin.feed.batches(0))
        with torch.profiler.profile(profile_memory=True) as profile:
            twin.run_step(batch)
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    asked = list(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))
    weights = [*twin.model.parameters(), batch.inputs]
    weights += [value for entry in twin.optimizers[0].state.values() for value in entry.values()]
    before = sum(tensor.untyped_storage().nbytes() for tensor in weights)
    assert counted == pytest.approx(before + max(asked), rel=0.03)


def test_micro_batch_auto_is_found_before_the_trial(folder, monkeypatch):
    """Where the whole batch does not fit, so that a trial with it would end in an error."""
    seen, forward = [], UNet.forward

    def short_of_memory(self, x, *args):
        seen.append(len(x))
        if self.training and len(x) > 8:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(self, x, *args)

    config = load_config(folder / "small.toml", settings=['run.micro_batch="auto"'])
    monkeypatch.setattr(UNet, "forward", short_of_memory)
    report = examine(config, None, 4, folder / "trial", None)
    assert report.trial.outcome == "updated"
    assert seen[:4] == [2, 32, 16, 8]


def test_the_trial_begins_with_the_weights_that_the_config_starts_from(folder):
    config = load_config(folder / "small.toml", settings=["run.steps=150"])
    loop = build_loop(config, folder / "first")
    loop.run()
    save_file({name: t.contiguous() for name, t in loop.model.state_dict().items()}, folder / "given.safetensors")
    started = load_config(folder / "small.toml", settings=["model.start_from=given.safetensors"])
    trials = [examine(each, None, 4, folder / f"trial{i}", None).trial for i, each in enumerate((config, started))]
    assert trials[1].losses[0] < 0.7 * trials[0].losses[0]


@pytest.mark.parametrize("name", HEALTHY)
def test_nothing_is_wrong_with_a_healthy_config(name, doctor, folder):
    if name.startswith("dit"):
        own = 'use = "dit"\nhidden_size = 32\ndepth = 2\nnum_heads = 4'
        text = CONFIG.replace('use = "unet"\nchannels = 8\nnum_res_blocks = 1\nhead_dim = 8', own)
        (folder / "small.toml").write_text(text)
    more = ["--plugins", "amp,progress"] if "bf16" in name else []
    code, out, err = doctor("small.toml", "--steps", 24, *settings(**HEALTHY[name]), *more)
    first, *rest = out.splitlines()
    assert first == "nothing is broken", out
    assert (code, err) == (0, "")
    assert any(line.startswith("OK      ema") for line in rest)
    with Image.open("small-doctor.png") as picture:
        assert picture.width > picture.height  # 9 columns of 8 rows


def test_a_run_is_looked_at_and_never_touched(doctor, hookdiff, folder):
    run = folder / "run"
    assert hookdiff("run", "small.toml", "--out", run, "--plugins", "checkpoint", *settings(run__steps=12))[0] == 0

    def digests():
        return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in run.rglob("*") if path.is_file()}

    before = digests()
    code, out, _ = doctor(run, "--steps", 8, "--json", "--out", folder / "strip.png")
    found = json.loads(out)
    assert (code, found["cause"], found["step"]) == (0, None, 12)
    assert digests() == before
    assert len(found["losses"]) == 8
    # It goes on from the weights of the run, not from new ones.
    assert found["losses"][0] < 0.97
    assert found["parts"]["defaults.compute_loss"] > 0
    assert sum(found["parts"].values()) == pytest.approx(found["seconds_per_step"], rel=0.05)
    with Image.open(found["strip"]) as picture:
        assert picture.width > picture.height
    assert {"ema", "samples", "error by time"} <= {finding["name"] for finding in found["findings"]}

    one = next((run / "checkpoints").iterdir())
    code, out, _ = doctor(one, "--steps", 8, "--json", "--out", folder / "strip.png")
    assert (code, json.loads(out)["losses"]) == (0, found["losses"])


def test_it_is_a_command_of_its_own_with_its_own_process(folder):
    code = "from hookdiff.cli import main; main()"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (folder, *sys.path))), "OMP_NUM_THREADS": "1"}
    words = ["doctor", "small.toml", "--steps", "6", "--json", *settings(data__source="hd_doctor_user:constant")]
    done = subprocess.run(
        [sys.executable, "-c", code, *words], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.stderr == ""
    assert done.returncode == 1
    assert json.loads(done.stdout)["cause"] == "inputs"
    assert not list(folder.glob("*.png"))  # with --json only where it is asked for


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["smal.toml"], "smal.toml: no such file; did you mean 'small.toml'?"),
        (["."], "is no run directory: it has no config.toml"),
        (["small.toml", "--set", "optimizer.lr=-1"], "optimizer: Invalid learning rate: -1"),
        (["small.toml", "--out", "small.toml/x.png"], "small.toml/x.png: cannot be written: Not a directory"),
        (["small.toml", "--out", "/"], "/: cannot be written: Is a directory"),
    ],
)
def test_wrong_input_is_told_in_one_message(words, message, doctor):
    code, out, err = doctor(*words)
    assert (code, out) == (2, "")
    assert message in err


def test_a_run_without_a_checkpoint_is_told(doctor, folder):
    (folder / "empty").mkdir()
    (folder / "empty" / "config.toml").write_text(CONFIG)
    code, _, err = doctor("empty", "--plugins", "checkpoint")
    assert (code, err) == (2, "hookdiff: empty has no checkpoint\n")
    code, _, err = doctor("empty")
    assert code == 2
    assert err.startswith("hookdiff: empty: none of the run's plugins reads checkpoints")
    assert [path.name for path in (folder / "empty").iterdir()] == ["config.toml"]


# The checks, on numbers.


def trial(losses, changes=(0.01,) * 8, outcome="updated"):
    inputs = measure_inputs(torch.rand(8, 1, 8, 8) * 2 - 1)
    return Trial(len(losses), inputs, list(losses), outcome, [1e-3] * len(losses), list(changes))


@pytest.mark.parametrize(
    ("losses", "trained", "level"),
    [
        ([1 - 0.01 * k for k in range(40)], False, "OK"),
        ([1.0] * 40, False, "look"),
        ([1.0, 3.5, 20.0, 8.0, *[1.0] * 36], False, "broken"),
        ([1 + 0.03 * k for k in range(40)], False, "broken"),  # it rises with the rate that is warmed up
        ([1.0, 2.6, *[1.04] * 38], False, "broken"),  # it came back to where it knew nothing
        ([*[1 - 0.025 * k for k in range(30)], *[0.9] * 10], False, "broken"),  # what was learned is lost again
        ([1.0, 3.5, *[0.3] * 38], False, "look"),  # a spike that is over
        ([1.0, 1.0, math.nan], False, "broken"),
        ([0.1] * 40, True, "OK"),
        ([0.1, 0.09, 0.11, 0.1, *[0.2] * 36], True, "broken"),
        ([1.0, 0.9], False, "OK"),
    ],
)
def test_the_learning_rate_is_judged_by_the_losses(losses, trained, level):
    assert checks.check_learning(trial(losses), trained).level == level


def test_updates_as_large_as_the_weights_are_blamed_for_a_loss_that_does_not_fall():
    assert checks.check_learning(trial([1.0] * 40, changes=[0.2] * 8)).level == "broken"
    assert checks.check_learning(trial([1 - k / 80 for k in range(40)], changes=[0.2] * 8)).level == "look"


def test_a_rate_that_is_warmed_up_slowly_is_not_blamed():
    flat = trial([1.0] * 40)
    flat.rates = [1e-6 * step for step in range(1, 41)]
    assert (checks.check_learning(flat).level, checks.check_learning(trial([1.0] * 40)).level) == ("OK", "look")
    flat.rates = [*flat.rates[:20], *[2e-5] * 20]  # it has been at its whole height for long
    assert checks.check_learning(flat).level == "look"


@pytest.mark.parametrize(
    ("ratios", "trained", "level"),
    [
        ([0.4, 0.2, 0.1], True, "OK"),
        ([1.1, 1.2, 1.0], False, "OK"),
        ([1.1, 1.2, 1.0], True, "broken"),
        ([0.4, 0.7, 0.1], True, "look"),
        ([0.4, math.nan, 0.1], False, "broken"),
    ],
)
def test_errors_by_time_are_judged(ratios, trained, level):
    levels = [Level(10.0 * k, 2 * ratio, 2.0, 1.0) for k, ratio in enumerate(ratios)]
    assert checks.check_levels(levels, trained).level == level


def test_a_loss_that_is_nan_at_once_is_not_the_learning_rates_fault():
    found = checks.check_learning(trial([math.nan]))
    assert (found.level, found.name) == ("broken", "loss")
    later = checks.check_learning(trial([1.0, 1.0], outcome="stopped"))
    assert (later.level, later.name) == ("broken", "learning rate")


def test_a_sample_that_is_not_finite_is_named_and_the_learning_rate_is_not_blamed(doctor):
    # Steps for a whole epoch: it may come with any batch.
    code, out, err = doctor("small.toml", "--steps", 56, *settings(data__source="hd_doctor_user:one_nan"))
    assert (code, err) == (1, "")
    assert out.startswith("broken: inputs: ")
    assert "NaN or infinite, in sample 700" in out.partition("\n")[0]
    assert "as the inputs are not" in out
    assert "too high" not in out


def test_gradients_are_judged():
    layers = {"a": Layer(1.0, 100), "b": Layer(2.0, 100), "c": Layer(1.0, 100)}
    assert checks.check_gradients(layers).level == "OK"
    huge = checks.check_gradients({**layers, "d": Layer(1e6, 100)})
    assert (huge.level, huge.seen) == ("look", "those of d are 7e+05 times the usual ones")
    young = Outputs(0.0, 1e-4, 1e-3, 0.0, 1.0, 1.0, math.nan)
    assert checks.check_gradients({**layers, "d": Layer(1e6, 100)}, outputs=young).level == "OK"
    assert "does not depend on 1 of 4 layers (d)" in checks.check_gradients({**layers, "d": Layer(None, 9)}).seen
    assert checks.check_gradients({**layers, "d": Layer(0.0, 9)}, silent=["d"]).level == "broken"
    assert checks.check_gradients({**layers, "d": Layer(0.0, 9)}).level == "OK"  # for one look only


def test_the_cause_is_the_first_that_is_broken():
    findings = [
        Finding("look", "a", ""),
        Finding("OK", "b", ""),
        Finding("broken", "c", ""),
        Finding("broken", "d", ""),
    ]
    assert cause(findings) is findings[2]
    assert cause(findings[:2]) is None


@pytest.mark.parametrize(
    ("options", "level"),
    [
        ({"schedule": "cosine"}, "OK"),
        ({"schedule": "linear"}, "OK"),
        ({"schedule": "scaled_linear"}, "OK"),
        ({"schedule": "scaled_linear", "timesteps": 500}, "look"),
        ({"schedule": "linear", "timesteps": 100}, "broken"),
        ({"schedule": "linear", "rescale_betas_zero_snr": True, "prediction_type": "v_prediction"}, "OK"),
        ({"schedule": "flow"}, "OK"),
        ({"schedule": "edm"}, "OK"),
        ({"schedule": "edm", "sigma_max": 2.0}, "broken"),
    ],
    ids=str,
)
def test_schedules_are_judged(options, level):
    process = Diffusion(**options).process
    *_, log_snr = process.rates(process.from_fraction(torch.linspace(1e-6, 1 - 1e-6, 101)), 1)
    assert checks.check_schedule(log_snr.tolist(), std=0.75).level == level


@pytest.mark.parametrize(
    ("counts", "unknown", "level"),
    [
        ([10, 12, 9], 0, "OK"),
        (None, 0, "OK"),
        ([10, 0, 9], 0, "look"),
        ([10, 500], 0, "look"),
        ([10, 10], 50, "look"),
        ([10], 0, "look"),
        ([0, 0], 7, "broken"),
    ],
)
def test_labels_are_judged(counts, unknown, level):
    assert checks.check_labels(counts, unknown, conditional=True).level == level
    assert checks.check_labels(counts, unknown, conditional=False).level == "OK"


def test_length_and_time_and_memory_are_judged():
    def length(batch_size, steps, parameters=10_000, images=10_000):
        return checks.check_length(parameters, images, 64, batch_size, steps)

    assert length(64, 10_000).level == "OK"
    assert "small batch" in length(4, 10_000).seen
    assert "quarter of the data" in length(4_000, 10_000).seen
    assert "short" in length(64, 100).seen
    assert "by heart" in length(64, 100_000, parameters=10**6).seen
    assert checks.check_time({"forward": 0.4, "data": 0.6}, 1.0).level == "look"
    assert checks.check_time({"forward": 0.4, "mine": 0.6}, 1.0).advice.startswith("mine takes")
    assert checks.check_time({"forward": 0.4, "backward": 0.6}, 0.5).seen == "500 ms a step: backward 60%, forward 40%"
    assert checks.check_memory(2**30, 2**29, None).seen == "1024 MiB estimated, 512 measured"
    assert checks.check_memory(2**30, 2**31, 2.0**31).level == "look"


def test_averages_and_samples_are_judged():
    own = [Level(0.0, 1.0, 2.0, 1.0)] * 3
    lags = [Level(0.0, 1.5, 2.0, 1.0)] * 3
    assert checks.check_average("ema", lags, own, trained=True).level == "look"
    assert checks.check_average("ema", lags, own, trained=False).level == "OK"
    assert checks.check_average("ema", own, own, trained=True).seen.startswith("ema gives the very errors")
    images = torch.rand(64, 1, 8, 8, generator=torch.Generator().manual_seed(1)) * 2 - 1
    data = measure_inputs(images)

    def samples(made, trained=True):
        return checks.check_samples(made, data, trained)

    assert samples(images[:8]).level == "OK"
    assert samples(images[:8] / 3).level == "look"
    far = samples(images[:8] * 1.9)
    assert far.level == "look"
    assert "far outside the data's; values from -1.87 to 1.9" in far.seen
    assert samples(images[:8] * 1.9, trained=False).level == "OK"
    assert samples(images[:8].where(images[:8] < 0.9, math.nan), trained=False).level == "broken"
    assert samples(images[:1].repeat(8, 1, 1, 1)).seen == "they are all the same image"
    assert samples(torch.zeros(8, 1, 8, 8)).seen == "they are constant"


@pytest.mark.parametrize("options", [{"schedule": "cosine"}, {"schedule": "flow"}, {"schedule": "edm"}], ids=str)
def test_errors_of_the_best_gaussian_prediction_lie_on_the_floor(options):
    std = 0.5
    images = torch.randn(4000, 1, 4, 4, generator=torch.Generator().manual_seed(1)) * std
    diffusion = Diffusion(**options)

    class Best:
        """Knows that pixels are N(0, std²): E[x0 | x_t] = alpha std² x_t / (alpha² std² + sigma²)."""

        def predict(self, net, x_t, told, labels, alpha, sigma):
            variance = alpha**2 * std**2 + sigma**2
            x0, noise = alpha * std**2 / variance * x_t, sigma / variance * x_t
            return diffusion.parametrization.target(x0, noise, alpha, sigma)

        def __getattr__(self, name):
            return getattr(diffusion, name)

    for level in measure_levels(None, Best(), images, None):
        assert level.error == pytest.approx(level.floor, rel=0.05)
        assert level.error <= level.mean_error * 1.02


def test_a_clock_gives_time_to_who_runs():
    clock = Clock(torch.device("cpu"))
    with clock("outer", "hook"):
        time.sleep(0.02)
        with clock("inner", "hook"):
            time.sleep(0.05)
        time.sleep(0.02)
    assert 0.05 <= clock.seconds["inner", "hook"] < 0.2
    assert 0.04 <= clock.seconds["outer", "hook"] < 0.2
    assert sum(clock.seconds.values()) < 0.3


def test_a_trial_hurries_through_a_warm_up_to_the_rate_that_is_configured():
    loop = toy_loop({"lr": LR(schedule="constant", warmup=3000)}, steps=10_000)
    with loop:
        found = train(loop, 20, whole_rate=True)
    assert found.rates[:20] == pytest.approx([0.01 * step / 3000 for step in range(20)])
    assert found.rates == sorted(found.rates)
    assert found.rates[-25:] == pytest.approx([0.01] * 25)
    assert len(found.rates) < 90


def test_a_trial_is_the_run_itself_and_goes_on_over_epochs():
    watched, alone = toy_loop(), toy_loop(steps=12)
    alone.run()
    with watched:
        found = train(watched, 12)  # 5 batches in an epoch
    assert watched.progress == alone.progress
    assert torch.equal(watched.model[0].weight, alone.model[0].weight)
    assert len(found.losses) == len(found.rates) == 12
    assert found.layers.keys() == {"0", "3"}
    assert isinstance(found.inputs, Inputs)
    assert found.seconds > 0
    assert 0 < found.changes[0] < 1
