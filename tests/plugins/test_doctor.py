"""`hookdiff doctor` on small nets: the first line names the cause, and nothing else is blamed."""

import json
import math
from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import given, strategies as st
from PIL import Image
from safetensors.torch import save_file

from hookdiff import Finding, build_loop, load_config
from hookdiff.diffusion import EDM, VP, Diffusion, Flow, Linear, LogitNormal, UniformTimes
from hookdiff.terminal import byte_size
from hookdiff.testing import assert_same, toy_loop, weights
from hookdiff_debug import checks
from hookdiff_debug.checks import cause
from hookdiff_debug.doctor import as_text, examine
from hookdiff_debug.measure import (
    LEVELS,
    Drawn,
    Layer,
    Level,
    Outputs,
    draw_levels,
    measure_inputs,
    measure_levels,
    measure_times,
)
from hookdiff_debug.trial import Trial, run_trial
from hookdiff_lr import LR
from hookdiff_memory.estimate import estimate_memory
from hookdiff_networks import UNet
from tests.conftest import acting, check_facts, check_refused, locked, toy_run, wide, write_small
from tests.hostile.mutations import listing
from tests.sam import SAM, Uncertainty

TABLES = {
    "run": {"steps": 1500, "batch_size": 32, "plugins": ["lr", "clip", "ema"]},
    "model": {"use": "unet", "channels": 8, "num_res_blocks": 1, "head_dim": 8},
    "diffusion": {"process": {"use": "vp", "schedule": "cosine"}},
    "sampling": {"steps": 4},
    "optimizer": {"lr": 2e-3},
    "plugins": {"lr": {"warmup": 5}},
}
USER = """
import torch
from attrs import define
from torch import nn
from hookdiff import hookimpl
from hookdiff.data import digits
from hookdiff_networks import UNet


def bytes_as_floats() -> torch.Tensor:
    return digits().images.float()


def one_nan() -> torch.Tensor:
    images = digits().images[:320].float() / 127.5 - 1
    images[300, 0, 3, 3] = torch.nan
    return images


def constant() -> torch.Tensor:
    return (torch.rand(200, 1, 1, 1) * 2 - 1).repeat(1, 1, 8, 8)


def faint() -> torch.Tensor:
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
def folder(tmp_path, monkeypatch, write_config, user_module):
    write_config(**TABLES)
    user_module("hd_doctor_user", USER)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def doctor(folder, hookdiff):
    """Return a function that runs the command in this process: its exit code, stdout and stderr."""
    return lambda *words: hookdiff("doctor", *words)


def settings(**tables):
    return [word for key, value in tables.items() for word in ("--set", f"{key.replace('__', '.')}={value}")]


def diagnosis(doctor, *words):
    """Return exit code, cause and findings by name, as the command prints them with --json."""
    code, out, err = doctor(*words, "--json")
    assert err == ""
    found = json.loads(out)
    return code, found["cause"], {finding["name"]: finding for finding in found["findings"]}


LINEAR = {"diffusion__process__schedule": "linear"}


@pytest.mark.parametrize(
    ("table", "name", "numbers"),
    [
        ({"data__source": "hd_doctor_user:bytes_as_floats"}, "inputs", "0 to 255"),
        # A process that is right for images of the usual scale
        ({"data__source": "hd_doctor_user:faint", **LINEAR}, "inputs", ""),
        # Far too high, at once and after a warm-up that is longer than the trial
        ({"optimizer__lr": 0.2}, "learning rate", "optimizer.lr = 0.02, then 0.002"),
        *wide(({"optimizer__lr": 1.0, "plugins__lr__warmup": 300}, "learning rate", "optimizer.lr = 0.1, then 0.01")),
        ({"diffusion__process": '{ use = "edm", sigma_max = 2.0 }'}, "schedule", "12.3%"),
    ],
    ids=str,
)
def test_the_cause_is_named(table, name, numbers, doctor, folder):
    code, cause, findings = diagnosis(doctor, "small.toml", "--steps", 16, *settings(**table))
    assert (code, cause) == (1, name)
    assert numbers in " ".join(findings[name].values())
    assert not list(folder.glob("*.png"))  # with --json only where it is asked for
    assert_only(name, findings)


def assert_only(name, findings):
    """Assert that all else is ok or refers to the cause; the time of a step depends on the machine."""
    for other, finding in findings.items():
        if other not in (name, "time") and finding["severity"] != "ok":
            assert f"mend {name} first" in finding["remedy"]


@pytest.mark.parametrize(
    ("model", "name", "numbers"), [("Dead", "gradients", "1 of 44: side"), ("Blind", "response", "0% with the image")]
)
def test_a_network_that_is_broken_is_named(model, name, numbers, doctor, write_config):
    config = write_config(**{**TABLES, "model": {"use": f"hd_doctor_user:{model}"}})
    code, cause, findings = diagnosis(doctor, config, "--steps", 16)
    assert (code, cause) == (1, name)
    assert numbers in findings[name]["why"]
    assert_only(name, findings)


def test_the_cause_is_printed_first():
    findings = {
        "inputs": Finding("ok", "values from -1 to 1"),
        "loss": Finding("error", "the loss is not finite", "at step 3", "another loss"),
        "output": Finding("warning", "the output explodes"),
    }
    assert as_text(findings).splitlines() == [
        "error: the loss is not finite",
        "  at step 3",
        "  try another loss",
        "",
        "ok       inputs         values from -1 to 1",
        "error    loss           the loss is not finite",
        "                        at step 3",
        "                        try another loss",
        "warning  output         the output explodes",
    ]
    del findings["loss"]
    assert as_text(findings).splitlines()[0] == "no errors, 1 warning"


def test_findings_after_the_cause_refer_to_it():
    severities = {"a": "warning", "b": "error", "c": "ok", "d": "warning", "e": "error"}
    findings = {name: Finding(severity, name, "", "as it is") for name, severity in severities.items()}

    def referring(cause):
        found = checks.following(findings, cause)
        assert {name: finding.severity for name, finding in found.items()} == severities
        return [name for name, finding in found.items() if finding.remedy != "as it is" and cause in finding.remedy]

    assert referring("b") == ["d", "e"]
    assert referring("inputs") == ["a", "b", "d", "e"]  # one that comes before all of them
    assert checks.following(findings, None) == findings


@pytest.mark.parametrize("warmup", [5, *wide(300)])
def test_the_length_of_the_trial_is_reported(warmup, doctor):
    code, out, _ = doctor(
        "small.toml", "--steps", 12, "--json", *settings(plugins__lr__warmup=warmup, run__batch_size=8)
    )
    found = json.loads(out)
    (trial,) = [finding for finding in found["findings"] if finding["name"] == "trial"]
    assert "left out" not in [finding["name"] for finding in found["findings"]]
    assert (code, found["steps_asked"], len(found["losses"])) == (0, 12, found["steps_made"])
    more = found["steps_made"] - 12
    assert (more > 25) == (warmup == 300)
    assert trial["what"].startswith(f"{12 + more} updates: 12, and {more} more" if more else "12 updates")


@pytest.mark.parametrize(
    ("made", "tried", "outcome", "why"),
    [
        (12, 12, "updated", "the time limit is half a minute"),
        (3, 4, "stopped", "a step that is not finite stopped it"),
        (2, 200, "void", "198 of 200 steps made none"),
    ],
)
def test_the_reason_of_a_short_trial_is_reported(made, tried, outcome, why):
    short = trial([1.0] * tried, outcome=outcome)
    short.asked, short.rates = 20, [1e-3] * made
    assert checks.check_trial(short) == Finding("ok", f"{made} of 20 updates: {why}")


def test_plugins_that_have_no_part_in_the_trial_are_named(doctor):
    given = ["--plugins", "debug,samples,hd_doctor_user:Starts"]
    code, _, findings = diagnosis(doctor, "small.toml", "--steps", 4, *given)
    assert code == 0
    assert findings["left out"]["severity"] == "ok"
    assert findings["left out"]["what"].startswith("samples, starts: ")
    assert "; debug: " in findings["left out"]["what"]


HEALTHY = {
    "unet, epsilon": {},
    "unet, v, with classes and bf16": {
        "diffusion__prediction": "v_prediction",
        "model__num_classes": 10,
        "run__micro_batch": 16,
    },
    "unet, edm": {"diffusion__process": "edm", "diffusion__prediction": '{ use = "edm", sigma_data = 0.75 }'},
    "dit, flow": {"diffusion__process": "flow"},
}
CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("device", [*wide("cpu"), pytest.param("cuda", marks=CUDA)])
def test_the_peak_of_a_step_lies_near_the_estimate(device, folder):
    given = [f"run.device={device}", "model.channels=32", 'run.micro_batch="auto"']
    config = load_config(folder / "small.toml", settings=given)
    report = examine(config, None, 4, folder / "trial", None)
    measured = report.trial.peak_memory
    check_facts(report.findings["memory"].what, byte_size(measured))
    assert measured == pytest.approx(estimate_memory(config).peak, rel=0.15)


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events:UserWarning")  # torch 2.11 warns always
def test_the_counted_memory_is_what_the_allocator_gave():
    """Without a GPU: the bytes of a step beside those of torch's profiler."""
    loop, twin = (toy_loop(batch_size=40, steps=9) for _ in range(2))
    with loop:
        counted = run_trial(loop, 4).peak_memory
    with twin:
        steps = iter(twin.steps())
        next(steps)
        twin.model.zero_grad()
        batch = next(twin.feed.batches(0))
        with torch.profiler.profile(profile_memory=True, acc_events=True) as profile:
            twin.run_step(batch)
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    asked = list(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))
    weights = [*twin.model.parameters(), batch.inputs]
    weights += [value for entry in twin.optimizers[0].state.values() for value in entry.values()]
    before = sum(tensor.untyped_storage().nbytes() for tensor in weights)
    assert counted == pytest.approx(before + max(asked), rel=0.03)


@pytest.mark.wide
def test_micro_batch_auto_is_found_before_the_trial(folder, monkeypatch):
    """The whole batch does not fit, so a trial with it would end in an error."""
    seen, forward = [], UNet.forward

    def short_of_memory(self, x, *args):
        seen.append(len(x))
        if self.training and len(x) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(self, x, *args)

    config = load_config(folder / "small.toml", settings=["run.batch_size=16", 'run.micro_batch="auto"'])
    monkeypatch.setattr(UNet, "forward", short_of_memory)
    report = examine(config, None, 4, folder / "trial", None)
    assert report.trial.outcome == "updated"
    assert seen[:4] == [2, 16, 8, 4]


def test_the_trial_begins_with_the_weights_that_the_config_starts_from(folder):
    loop = build_loop(load_config(folder / "small.toml"), folder / "first")
    loop.model.conv_out.bias.data.fill_(100.0)
    save_file({name: t.contiguous() for name, t in loop.model.state_dict().items()}, folder / "given.safetensors")
    started = load_config(folder / "small.toml", settings=["model.start_from=given.safetensors"])
    assert examine(started, None, 4, folder / "trial", None).trial.losses[0] > 1000


@pytest.mark.parametrize("name", ["dit, flow", *wide(*(name for name in HEALTHY if "unet" in name))])
def test_nothing_is_wrong_with_a_healthy_config(name, doctor, write_config):
    if name.startswith("dit"):
        write_config(**{**TABLES, "model": {"use": "dit", "hidden_size": 32, "depth": 2, "num_heads": 4}})
    more = ["--plugins", "amp,progress"] if "bf16" in name else []
    code, out, err = doctor("small.toml", "--steps", 12, "--out", "strip.png", *settings(**HEALTHY[name]), *more)
    first, *rest = out.splitlines()
    assert first == "no errors, 0 warnings", out
    assert (code, err) == (0, "")
    assert any(line.startswith("ok       ema") for line in rest)
    with Image.open("strip.png") as picture:
        assert picture.width > picture.height  # 9 columns of 8 rows


def test_a_run_directory_is_read_and_never_changed(doctor, succeed, folder):
    run = folder / "run"
    words = ("--plugins", "checkpoint,debug", *settings(run__steps=12))
    succeed("run", "small.toml", "--out", run, *words)
    before = listing(run)
    code, out, _ = doctor(run, "--steps", 4, "--json", "--out", folder / "strip.png")
    found = json.loads(out)
    assert (code, found["cause"], found["step"]) == (0, None, 12)
    assert listing(run) == before
    assert len(found["losses"]) == 4
    # It goes on from the weights of the run, not from new ones.
    assert found["losses"][0] < 0.97
    assert found["parts"]["defaults.compute_loss"] > 0
    assert sum(found["parts"].values()) == pytest.approx(found["seconds_per_step"], rel=0.05)
    with Image.open(found["strip"]) as picture:
        assert picture.width > picture.height
    names = {finding["name"] for finding in found["findings"]}
    assert {"ema", "samples", "error by time", "memory"} <= names
    assert not any(name.startswith("logged") for name in names)  # such as that the state of debug is not used

    one = next((run / "checkpoints").iterdir())
    code, out, _ = doctor(one, "--steps", 4, "--json", "--out", folder / "strip.png", "--overwrite")
    assert (code, json.loads(out)["losses"]) == (0, found["losses"])


@pytest.mark.parametrize("out", ["small.toml/x.png", "/"])
def test_a_picture_that_cannot_be_written_is_refused_in_one_message(out, doctor):
    check_refused(doctor("small.toml", "--out", out), out)


def test_a_run_without_a_checkpoint_is_refused(doctor, folder):
    (folder / "empty").mkdir()
    write_small(folder / "empty" / "config.toml", **TABLES)
    saving = ("empty", "--plugins", "checkpoint")
    due = "the first was due at step 1,000, or at the end of the run\n"
    check_refused(doctor(*saving), f"hookdiff: empty has no checkpoint: {due}")
    with locked(folder / "empty"):
        check_refused(doctor(*saving, "--set", "plugins.checkpoint.every=15 min"), "no checkpoint yet", "after 15 min")
    (folder / "empty" / ".lock").unlink()
    check_refused(doctor("empty"), "hookdiff: empty: none of the run's plugins reads checkpoints")
    assert [path.name for path in (folder / "empty").iterdir()] == ["config.toml"]


# The checks, on numbers.


def trial(losses, changes=(0.01,) * 8, outcome="updated"):
    inputs = measure_inputs(torch.rand(8, 1, 8, 8) * 2 - 1)
    return Trial(len(losses), inputs, list(losses), outcome, [1e-3] * len(losses), list(changes))


@pytest.mark.parametrize(
    ("losses", "trained", "severity"),
    [
        ([1 - 0.01 * k for k in range(40)], False, "ok"),
        ([1.0] * 40, False, "warning"),
        ([1.0, 3.5, 20.0, 8.0, *[1.0] * 36], False, "error"),
        ([1 + 0.03 * k for k in range(40)], False, "error"),  # it rises with the rate that is warmed up
        ([1.0, 2.6, *[1.04] * 38], False, "error"),  # it came back to where it knew nothing
        ([*[1 - 0.025 * k for k in range(30)], *[0.9] * 10], False, "error"),  # what was learned is lost again
        ([1.0, 3.5, *[0.3] * 38], False, "warning"),  # a spike that is over
        ([1.0, 1.0, math.nan], False, "error"),
        ([0.1] * 40, True, "ok"),
        ([0.1, 0.09, 0.11, 0.1, *[0.2] * 36], True, "error"),
        ([1.0, 0.9], False, "ok"),
    ],
)
def test_the_learning_rate_is_judged_by_the_losses(losses, trained, severity):
    assert checks.check_learning(trial(losses), trained).severity == severity


def test_updates_as_large_as_the_weights_are_blamed_for_a_loss_that_does_not_fall():
    assert checks.check_learning(trial([1.0] * 40, changes=[0.2] * 8)).severity == "error"
    assert checks.check_learning(trial([1 - k / 80 for k in range(40)], changes=[0.2] * 8)).severity == "warning"


@given(st.lists(st.floats(0.1, 10), min_size=10, max_size=40))
def test_a_rate_of_zero_is_named_whatever_the_losses(losses):
    still = trial(losses, changes=[0.0] * 8)
    still.rates = [0.0] * len(losses)
    assert checks.check_learning(still).what == "the learning rate is 0"
    found = checks.check_learning(still, resumed=True)
    assert (found.severity, "ended" in found.what) == ("ok", True)


def test_a_slow_warm_up_is_not_blamed():
    flat = trial([1.0] * 40)
    assert checks.check_learning(flat).severity == "warning"
    flat.rates = [1e-6 * step for step in range(1, 41)]
    assert checks.check_learning(flat).severity == "ok"
    flat.rates = [*flat.rates[:20], *[2e-5] * 20]  # it has been at its whole height for long
    assert checks.check_learning(flat).severity == "warning"


@pytest.mark.parametrize(
    ("ratios", "trained", "severity"),
    [
        ([0.4, 0.2, 0.1], True, "ok"),
        ([1.1, 1.2, 1.0], False, "ok"),
        ([1.1, 1.2, 1.0], True, "error"),
        ([0.4, 0.7, 0.1], True, "warning"),
        ([0.4, math.nan, 0.1], False, "error"),
    ],
)
def test_errors_by_time_are_judged(ratios, trained, severity):
    levels = [Level(f"t {k}", 2 * ratio, 2.0, 1.0) for k, ratio in enumerate(ratios)]
    drawn = [Drawn(level.name, 0.0, 0.1) for level in levels]
    assert checks.check_levels(levels, drawn, trained).severity == severity


def test_a_nan_in_the_first_loss_is_not_blamed_on_the_learning_rate():
    for losses, outcome, expected in (
        ([math.nan], "updated", ("error", "ok")),
        ([1.0, 1.0], "stopped", ("ok", "error")),
    ):
        found = trial(losses, outcome=outcome)
        assert (checks.check_loss(found).severity, checks.check_learning(found).severity) == expected


def test_a_sample_that_is_not_finite_is_named_and_the_learning_rate_is_not_blamed(doctor):
    # Steps for a whole epoch: it may come with any batch.
    given = settings(data__source="hd_doctor_user:one_nan")
    code, cause, findings = diagnosis(doctor, "small.toml", "--steps", 10, *given)
    assert (code, cause) == (1, "inputs")
    assert findings["inputs"]["why"].endswith(", in sample 300")
    assert (findings["loss"]["severity"], findings["learning rate"]["severity"]) == ("error", "ok")


def test_gradients_are_judged():
    layers = {"a": Layer(1.0, 100), "b": Layer(2.0, 100), "c": Layer(1.0, 100)}
    assert checks.check_gradients(layers).severity == "ok"
    huge = checks.check_gradients({**layers, "d": Layer(1e6, 100)})
    assert huge.severity == "warning"
    assert "of d are 7e+05 times" in huge.what
    young = Outputs(0.0, 1e-4, 1e-3, 0.0, 1.0, 1.0, math.nan)
    assert checks.check_gradients({**layers, "d": Layer(1e6, 100)}, outputs=young).severity == "ok"
    assert "1 of 4 layers: d" in checks.check_gradients({**layers, "d": Layer(None, 9)}).what
    assert checks.check_gradients({**layers, "d": Layer(0.0, 9)}, silent=["d"]).severity == "error"
    assert checks.check_gradients({**layers, "d": Layer(0.0, 9)}).severity == "ok"  # for one look only


def test_the_cause_is_the_first_error():
    severities = {"a": "warning", "b": "ok", "c": "error", "d": "error"}
    findings = {name: Finding(severity, "") for name, severity in severities.items()}
    assert cause(findings) == "c"
    assert cause({name: findings[name] for name in "ab"}) is None


@pytest.mark.parametrize(
    ("process", "severity"),
    [
        (VP(schedule="cosine"), "ok"),
        (VP(), "ok"),
        (VP(schedule="scaled_linear"), "ok"),
        (VP(schedule="scaled_linear", timesteps=600), "warning"),
        (VP(schedule=Linear(beta_start=0.04, beta_end=0.05)), "warning"),
        (VP(rescale_betas_zero_snr=True), "ok"),
        (Flow(), "ok"),
        (EDM(), "ok"),
        (EDM(sigma_max=2.0), "error"),
    ],
)
def test_schedules_are_judged(process, severity):
    *_, log_snr = process.rates(process.from_fraction(torch.linspace(1e-6, 1 - 1e-6, 101)), 1)
    assert checks.check_schedule(log_snr.tolist(), std=0.75).severity == severity


def test_a_process_that_goes_back_and_forth_is_an_error():
    assert checks.check_schedule([9.0, -3.0, 1.0, -9.0], std=1.0).severity == "error"


@pytest.mark.parametrize(
    ("process", "times", "severity", "never"),
    [
        (Flow(), None, "ok", []),
        (VP(), None, "ok", []),
        (VP(timesteps=20, schedule=Linear(beta_start=0.1, beta_end=0.5)), None, "ok", []),
        # Karras et al. 2022 draw neither of the ends, where there is little to learn.
        (EDM(), None, "ok", ["sigma 0.0025", "sigma 65"]),
        (Flow(), LogitNormal(mean=0.0, std=0.1), "warning", ["sigma 0.1", "sigma 0.25", "sigma 0.7", "sigma 0.85"]),
        (VP(), LogitNormal(mean=-2.0, std=0.3), "warning", ["t 400", "t 550", "t 700", "t 850"]),
    ],
    ids=str,
)
def test_levels_that_are_never_drawn_are_named(process, times, severity, never):
    found = measure_times(Diffusion(process, times=times or process.default_times), (1, 8, 8))
    finding = checks.check_times(found, std=0.75)
    assert finding.severity == severity
    named = finding.what if severity == "warning" else finding.what.partition("; never ")[2]
    assert all(name in named for name in never)
    assert never or not named
    # What is not trained is not blamed on the training.
    levels = [Level(one.name, 0.1 if one.share else 5.0, 2.0, 1.0) for one in found]
    assert checks.check_levels(levels, found, trained=True).severity == "ok"


@pytest.mark.parametrize("process", [Flow(), VP(timesteps=4, schedule="cosine"), VP(), EDM()], ids=str)
def test_the_shares_of_the_draws_are_those_of_the_distribution(process):
    found = measure_times(Diffusion(process, times=UniformTimes(stratified=True)), (1, 8, 8))
    borders = [0, *((low + high) / 2 for low, high in pairwise(LEVELS)), 1]
    if process.use != "vp" or process.timesteps == 1000:
        assert [one.share for one in found] == pytest.approx([b - a for a, b in pairwise(borders)], abs=0.003)
    assert all(one.share for one in found)


def test_noise_levels_are_those_of_the_shape():
    sided, plain = Diffusion(Flow(1.5, shift_side=4)), Diffusion(Flow(3.0))
    images = torch.rand(4, 1, 4, 16, generator=torch.Generator().manual_seed(1))

    def net(x, times):
        return x * times.view(-1, 1, 1, 1) / 1000

    assert measure_times(sided, (1, 4, 16)) == measure_times(plain, (1, 4, 16)) != measure_times(sided, (1, 4, 4))
    assert measure_levels(net, sided, images, {}) == measure_levels(net, plain, images, {})
    first, second = (draw_levels(net, each, images, {}, "", lambda values: values) for each in (sided, plain))
    assert (first.column_names, torch.equal(first.images, second.images)) == (second.column_names, True)


@pytest.mark.parametrize(
    ("counts", "unknown", "severity"),
    [
        ([10, 12, 9], 0, "ok"),
        (None, 0, "ok"),
        ([10, 0, 9], 0, "warning"),
        ([10, 500], 0, "warning"),
        ([10, 10], 50, "warning"),
        ([10], 0, "warning"),
        ([0, 0], 7, "error"),
    ],
)
def test_labels_are_judged(counts, unknown, severity):
    assert checks.check_labels(counts, unknown, conditional=True).severity == severity
    assert checks.check_labels(counts, unknown, conditional=False).severity == "ok"


def test_length_and_time_and_memory_are_judged():
    def length(batch_size, steps, parameters=10_000, images=10_000):
        return checks.check_length(parameters, images, 64, batch_size, steps)

    assert length(64, 10_000).severity == "ok"
    warnings = [length(4, 10_000), length(4_000, 10_000), length(64, 100), length(64, 100_000, parameters=10**6)]
    assert [found.severity for found in warnings] == ["warning"] * 4
    assert len({found.what for found in warnings}) == 4
    assert "640 epochs of 10,000 images" in warnings[3].why
    assert checks.check_time({"backward": 0.4, "data": 0.6}, 1.0).severity == "warning"
    assert checks.check_time({"backward": 0.4, "mine": 0.6}, 1.0).what.startswith("mine ")
    healthy = checks.check_time({"forward and loss": 0.4, "backward": 0.6}, 0.5)
    assert healthy == Finding("ok", "500 ms a step: backward 60%, forward and loss 40%")
    assert checks.check_memory(2**29, None) == Finding("ok", "512 MiB at the peak of a step")
    assert checks.check_memory(2**29, 2**31) == Finding("ok", "512 MiB at the peak of a step, of 2.0 GiB")
    assert checks.check_memory(2**31, 2**31).severity == "warning"


def test_averages_and_samples_are_judged():
    own = [Level("t 0", 1.0, 2.0, 1.0)] * 3
    lags = [Level("t 0", 1.5, 2.0, 1.0)] * 3
    assert checks.check_average("ema", lags, own, trained=True).severity == "warning"
    assert checks.check_average("ema", lags, own, trained=False).severity == "ok"
    assert checks.check_average("ema", own, own, trained=True).severity == "warning"
    images = torch.rand(64, 1, 8, 8, generator=torch.Generator().manual_seed(1)) * 2 - 1
    data = measure_inputs(images)

    def samples(made, trained=True):
        return checks.check_samples(made, data, trained)

    assert samples(images[:8]).severity == "ok"
    assert samples(images[:8] / 3).severity == "warning"
    far = samples(images[:8] * 1.9)
    assert far.severity == "warning"
    assert "values from -1.87 to 1.9," in far.why
    assert samples(images[:8] * 1.9, trained=False).severity == "ok"
    assert samples(images[:8].where(images[:8] < 0.9, math.nan), trained=False).severity == "error"
    for blank in (images[:1].repeat(8, 1, 1, 1), torch.zeros(8, 1, 8, 8)):
        assert (samples(blank).severity, samples(blank, trained=False).severity) == ("error", "warning")


@pytest.mark.parametrize("process", [VP(schedule="cosine"), Flow(), EDM()], ids=["cosine", "flow", "edm"])
def test_errors_of_the_best_gaussian_prediction_lie_on_the_floor(process):
    std = 0.5
    images = torch.randn(4000, 1, 4, 4, generator=torch.Generator().manual_seed(1)) * std
    diffusion = Diffusion(process)

    class Best:
        """Knows that pixels are N(0, std²): E[x0 | x_t] = alpha std² x_t / (alpha² std² + sigma²)."""

        def predict(self, net, x_t, time, labels, alpha, sigma):
            variance = alpha**2 * std**2 + sigma**2
            x0, noise = alpha * std**2 / variance * x_t, sigma / variance * x_t
            return diffusion.prediction.target(x0, noise, alpha, sigma)

        def __getattr__(self, name):
            return getattr(diffusion, name)

    for level in measure_levels(None, Best(), images, {}):
        assert level.error == pytest.approx(level.floor, rel=0.05)
        assert level.error <= level.mean_error * 1.02


def test_a_trial_skips_through_a_warm_up_to_the_configured_rate():
    with toy_loop({"lr": LR("constant", warmup=3000)}, steps=10_000) as loop:
        found = run_trial(loop, 20, whole_rate=True)
    assert found.rates[:20] == pytest.approx([0.01 * step / 3000 for step in range(20)])
    assert found.rates == sorted(found.rates)
    assert found.rates[-25:] == pytest.approx([0.01] * 25)
    assert len(found.rates) < 90


def test_a_trial_makes_the_steps_of_the_run_over_several_epochs():
    watched, alone = toy_loop(), toy_run(steps=12)
    with watched:
        found = run_trial(watched, 12)  # 5 batches in an epoch
    assert watched.progress == alone.progress
    assert torch.equal(watched.model[0].weight, alone.model[0].weight)
    assert len(found.losses) == len(found.rates) == 12
    assert found.layers.keys() == {"0", "3"}
    assert found.inputs.num == 8
    assert found.seconds > 0
    assert 0 < found.changes[0] < 1


def test_a_trial_of_two_passes_moves_the_weights_as_a_run_does():
    # It draws other samples in each epoch.
    weighs = acting(before_epoch=lambda loop: loop.feed.weigh(torch.arange(40.0) + 40 * loop.progress.epoch))

    def plugins():
        torch.manual_seed(0)
        return {"sam": SAM(rho=0.5), "weight": Uncertainty(), "weighs": weighs}

    tried, plain = toy_loop(plugins()), toy_run(plugins(), steps=12)
    with tried:
        found = run_trial(tried, 12)
    assert len(found.rates) == 12
    assert_same(weights(tried), weights(plain))
    assert_same({"": tried.plugins["weight"].net.weight}, {"": plain.plugins["weight"].net.weight})


@pytest.mark.wide
def test_the_plugins_of_a_pass_take_part(doctor, folder, succeed):
    names = ["--plugins", "checkpoint,tests.sam:SAM,tests.sam:Uncertainty"]
    succeed("run", "small.toml", "--out", "run", "--set", "run.steps=4", *names)
    before = listing(folder / "run")
    code, _, findings = diagnosis(doctor, "run", "--steps", 4, "--trust")
    assert code == 0, findings
    assert "sam" not in findings["left out"]["what"].split(":")[0].split(", ")
    assert "uncertainty" not in findings["left out"]["what"]
    assert listing(folder / "run") == before
