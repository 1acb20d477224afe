import itertools
import json
import math

import numpy as np
import pytest
import tomli_w
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from hookdiff import ConfigError, UserError, hookimpl
from hookdiff.experiment.config import load_config
from hookdiff.experiment.probe import try_config
from hookdiff.testing import toy_loop
from hookdiff_lr import LR
from hookdiff_lr.chart import ticks

TOTAL = 1000
# What each schedule may be given, so that a run of 1000 steps can have it with a warm-up of up to 200.
OWN = {
    "constant": {},
    "linear": {"min_ratio": st.floats(0, 1)},
    "cosine": {"min_ratio": st.floats(0, 1)},
    "cosine_restarts": {"min_ratio": st.floats(0, 1), "period": st.integers(1, 400), "growth": st.floats(1, 3)},
    "step": {
        "at": st.lists(st.floats(0.3, 0.99) | st.integers(200, 1200), min_size=1, max_size=4).map(
            lambda at: tuple(sorted(at, key=lambda each: each * TOTAL if each < 1 else each))
        ),
        "drop": st.floats(0.01, 1),
    },
    "inverse_sqrt": {"reference": st.integers(200, 900)},
    "cooldown": {
        "min_ratio": st.floats(0, 1),
        "cooldown": st.floats(0.01, 0.7) | st.integers(1, 800),
        "fall": st.sampled_from(["sqrt", "linear"]),
    },
}


@st.composite
def schedules(draw, names=tuple(OWN)):
    name = draw(st.sampled_from(names))
    warmup = draw(st.integers(0, 200))
    start = draw(st.floats(0, 1)) if warmup else 0.0
    return LR(name, warmup=warmup, start_factor=start, **{key: draw(kind) for key, kind in OWN[name].items()})


@pytest.mark.parametrize(("step", "factor"), [(0, 0), (50, 0.5), (100, 1), (550, 0.5), (1000, 0)])
def test_known_answers(step, factor):
    assert LR("cosine", warmup=100).factor(step, 1000) == pytest.approx(factor, abs=1e-12)


@pytest.mark.parametrize(("images", "rate"), [(5e6, 0.005), (35e6, 0.01), (573.44e6, 0.005)])
def test_known_answers_of_edm2(images, rate):
    # In units of images: a reference of 70,000 steps of 2048, a ramp of 10 million.
    schedule = LR("inverse_sqrt", warmup=10_000_000, reference=70_000 * 2048)
    assert 0.01 * schedule.factor(int(images)) == pytest.approx(rate, rel=1e-12)


@pytest.mark.parametrize("fall", ["sqrt", "linear"])
def test_the_cooldown_is_that_of_its_paper(fall):
    schedule = LR("cooldown", cooldown=0.2, fall=fall)
    for step in (0, 500, 800):
        assert schedule.factor(step, 1000) == 1
    done = (850 - 800) / 200
    assert schedule.factor(850, 1000) == pytest.approx(1 - math.sqrt(done) if fall == "sqrt" else 1 - done)
    assert LR("cooldown", cooldown=200.0, fall=fall).factor(850, 1000) == schedule.factor(850, 1000)


def test_restarts_are_those_of_torch():
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    theirs = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=7, T_mult=2, eta_min=0.1)
    ours = LR("cosine_restarts", period=7, growth=2.0, min_ratio=0.1)
    for step in range(60):
        assert ours.factor(step) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-9)
        optimizer.step()
        theirs.step()


def test_steps_are_those_of_torch():
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    theirs = torch.optim.lr_scheduler.MultiStepLR(optimizer, [5, 8], gamma=0.3)
    ours = LR("step", at=(0.5, 8.0), drop=0.3)
    for step in range(10):
        assert ours.factor(step, 10) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-9)
        optimizer.step()
        theirs.step()


@given(schedule=schedules(), step=st.integers(0, 3000))
def test_it_stays_within_its_bounds(schedule, step):
    assert 0 <= schedule.factor(step, TOTAL) <= 1
    if step >= schedule.warmup and schedule.schedule not in ("step", "inverse_sqrt"):
        assert schedule.factor(step, TOTAL) >= schedule.min_ratio - 1e-12


@given(schedule=schedules())
def test_the_warm_up_only_rises_and_ends_at_the_whole_rate(schedule):
    rise = [schedule.factor(step, schedule.length(TOTAL)) for step in range(schedule.warmup + 1)]
    assert rise == sorted(rise)
    assert rise[-1] == pytest.approx(1, abs=1e-12)
    if schedule.warmup:
        assert rise[0] == schedule.start_factor


@given(schedule=schedules(("constant", "linear", "cosine", "inverse_sqrt", "cooldown")))
def test_it_has_no_jumps_where_it_claims_none(schedule):
    factors = [schedule.factor(step, TOTAL) for step in range(1200)]
    length = schedule.cooldown * TOTAL if schedule.cooldown < 1 else schedule.cooldown
    steepest = {
        "constant": 0,
        "linear": 1 / (TOTAL - schedule.warmup),
        "cosine": 2 / (TOTAL - schedule.warmup),
        "inverse_sqrt": 1 / (schedule.reference or 1),
        "cooldown": 1 / math.sqrt(length) if schedule.fall == "sqrt" else 1 / length,
    }[schedule.schedule]
    steepest = max(min(1, steepest), 1 / max(1, schedule.warmup)) + 1e-9
    assert max(abs(a - b) for a, b in itertools.pairwise(factors)) <= steepest


@given(schedule=schedules(("linear", "cosine", "inverse_sqrt", "cooldown", "step")))
def test_after_the_warm_up_it_never_rises(schedule):
    factors = [schedule.factor(step, TOTAL) for step in range(schedule.warmup, 1300)]
    assert all(b <= a + 1e-12 for a, b in itertools.pairwise(factors))


@given(schedule=schedules(("constant", "linear", "cosine", "cooldown")), past=st.integers(0, 1000))
def test_it_ends_where_it_should(schedule, past):
    end = 1.0 if schedule.schedule == "constant" else schedule.min_ratio
    assert schedule.factor(TOTAL + past, TOTAL) == pytest.approx(end, abs=1e-12)


@given(warmup=st.integers(0, 50), period=st.integers(1, 100), min_ratio=st.floats(0, 1), cycle=st.integers(0, 5))
def test_restarts_come_back(warmup, period, min_ratio, cycle):
    same = LR("cosine_restarts", warmup=warmup, period=period, min_ratio=min_ratio)
    longer = LR("cosine_restarts", warmup=warmup, period=period, min_ratio=min_ratio, growth=2.0)
    first = [same.factor(warmup + step) for step in range(period)]
    assert first[0] == 1
    assert [same.factor(warmup + cycle * period + step) for step in range(period)] == first
    begin, length = warmup + period * (2**cycle - 1), period * 2**cycle
    assert longer.factor(begin) == 1
    assert longer.factor(begin + length // 2) == pytest.approx(same.factor(warmup + period // 2), abs=2 / period)


@given(schedule=schedules(), batch_size=st.sampled_from([4, 8, 40]), micro_batch=st.sampled_from([None, 3]))
def test_the_batch_does_not_bend_it(schedule, batch_size, micro_batch):
    look = Look()
    options = {"batch_size": batch_size, "micro_batch": micro_batch, "steps": 5}
    schedule.total = TOTAL if schedule.length(TOTAL) else None
    toy_loop({"lr": schedule, "look": look}, **options).run()
    assert look.rates == [[0.01 * schedule.factor(step, TOTAL)] for step in range(5)]


class Look:
    def __init__(self):
        self.rates = []
        self.told = {}

    @hookimpl
    def after_optimizer_step(self, loop):
        self.rates.append([group["lr"] for optimizer in loop.optimizers for group in optimizer.param_groups])

    @hookimpl
    def on_log(self, step, values):
        self.told.setdefault(step, {}).update(values)


@pytest.mark.parametrize("micro_batch", [None, 3])
def test_the_rate_of_a_step_depends_on_the_step_alone(micro_batch):
    look = Look()
    toy_loop({"lr": LR(warmup=4), "look": look}, micro_batch=micro_batch).run()
    assert look.rates == [[0.01 * LR(warmup=4).factor(step, 20)] for step in range(20)]


def two_groups(model):
    groups = [{"params": model[0].parameters(), "lr": 0.5}, {"params": model[3].parameters(), "lr": 0.1}]
    return torch.optim.SGD(groups)


def test_every_group_keeps_its_own_rate():
    look = Look()
    toy_loop({"lr": LR("linear"), "look": look}, optimizers=two_groups, steps=4).run()
    assert look.rates[2] == [pytest.approx(0.25), pytest.approx(0.05)]


def test_each_rate_of_its_own_is_logged_once():
    def optimizers(model):
        first, *rest = model.parameters()
        named = [{"params": rest[:1], "lr": 0.1, "name": "small"}, {"params": rest[1:], "lr": 0.1, "name": "same"}]
        return [torch.optim.SGD([first], lr=0.5), torch.optim.SGD(named)]

    look = Look()
    toy_loop({"lr": LR("linear"), "look": look}, optimizers=optimizers, steps=5).run()
    rates = {name: value for name, value in look.told[5].items() if name.startswith("lr")}
    assert rates == {"lr": pytest.approx(0.1), "lr/small": pytest.approx(0.02)}


def test_a_rate_in_a_tensor_stays_in_it():
    rate = torch.tensor(0.01)
    look = Look()
    loop = toy_loop({"lr": LR("linear"), "look": look}, optimizers=lambda m: torch.optim.SGD(m.parameters(), lr=rate))
    loop.run()
    (group,) = loop.optimizers[0].param_groups
    assert group["lr"] is look.rates[0][0]
    assert float(group["lr"]) == pytest.approx(0.01 / 20)


def test_a_skipped_step_does_not_move_it():
    class Hold:
        @hookimpl
        def optimizer_step(self, loop):
            return False if loop.progress.position in (3, 4) else None

    plain, held = Look(), Look()
    toy_loop({"lr": LR(), "look": plain}).run()
    toy_loop({"lr": LR(), "look": held, "hold": Hold()}).run()
    assert plain.rates == held.rates


def test_epochs_are_counted_in_steps():
    look = Look()
    toy_loop({"lr": LR("linear"), "look": look}, epochs=2).run()
    assert look.rates[-1] == [pytest.approx(0.001)]


@pytest.mark.parametrize(("steps", "last"), [(100, 0.001), (4, 0.0025)])
def test_of_steps_and_epochs_the_first_to_end_counts(steps, last):
    look = Look()
    toy_loop({"lr": LR("linear"), "look": look}, epochs=2, steps=steps).run()
    assert look.rates[-1] == [pytest.approx(last)]


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (LR(warmup=20), r"warmup: 20 steps, .* 'cosine' the rate falls from step 19 on at the latest"),
        (LR("cooldown", warmup=17), r"warmup: 17 steps, .* falls from step 16 on"),
        (LR("step", warmup=6, at=(0.25,)), r"warmup: 6 steps, .* falls from step 5 on"),
        (LR("inverse_sqrt", warmup=6, reference=5), r"warmup: 6 steps, .* falls from step 5 on"),
    ],
)
def test_a_warm_up_that_does_not_fit_is_refused(schedule, message):
    with pytest.raises(UserError, match=r"plugins\.lr\." + message):
        toy_loop({"lr": schedule}).run()


@pytest.mark.parametrize(("steps", "fits"), [(40, 3), (5, 0)])
def test_a_warm_up_that_fits_is_offered(steps, fits):
    with pytest.raises(UserError, match=rf"; try --set plugins\.lr\.warmup={fits}, or a longer run$"):
        LR(warmup=100).length(steps)
    assert LR(warmup=fits).length(steps) == steps


def test_drops_that_do_not_rise_are_refused():
    with pytest.raises(UserError, match=r"plugins\.lr\.at: must rise, and in a run of 20 steps it is \[10, 8\]"):
        toy_loop({"lr": LR("step", at=(0.5, 8.0))}).run()


@pytest.mark.parametrize(
    ("schedule", "late"),
    [
        (LR("step", at=(5.0, 20.0, 90.0)), "drop 2 (step 20), drop 3 (step 90)"),
        (LR("constant", warmup=30), "end of the warm-up (step 30)"),
        (LR("cooldown", total=100), "the cooldown begins (step 80)"),
        (LR("step", at=(0.95,)), None),
        (LR("cosine_restarts", period=20), None),
    ],
)
def test_what_the_run_never_comes_to_is_told(schedule, late, caplog):
    toy_loop({"lr": schedule}).run()
    told = [message for message in caplog.messages if message.startswith("lr: ")]
    assert told == ([f"lr: the run ends at step 20, so these never come: {late}"] if late else [])


def test_a_fall_needs_an_end():
    with pytest.raises(UserError, match=r"plugins\.lr: the run has no end to fall towards; set plugins\.lr\.total"):
        LR().length(None)
    assert LR("cosine_restarts", period=3).length(None) == 0
    assert LR("step", at=(3.0,)).length(None) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "constant", "min_ratio": 0.1}, "min_ratio: not read by the schedule 'constant', but by linear, "),
        ({"schedule": "cosine", "period": 5}, "period: not read by the schedule 'cosine', but by cosine_restarts"),
        ({"schedule": "linear", "fall": "linear"}, "fall: not read by the schedule 'linear', but by cooldown"),
        ({"schedule": "inverse_sqrt", "reference": 5, "total": 9}, "total: not read by the schedule 'inverse_sqrt'"),
        ({"schedule": "step"}, "at: needed by the schedule 'step'"),
        ({"schedule": "cosine_restarts"}, "period: needed by the schedule 'cosine_restarts'"),
        ({"schedule": "inverse_sqrt"}, "reference: needed by the schedule 'inverse_sqrt'"),
        ({"start_factor": 0.5}, "start_factor: 0.5 is where a warm-up starts, and warmup is 0"),
        ({"schedule": "step", "at": (1.5,)}, "at must be whole steps, or a share of the run below 1, got 1.5"),
        ({"schedule": "step", "at": (9.0, 0.5, 8.0)}, "at: must rise, got [9, 8]; in order it is [8, 9]"),
        ({"schedule": "step", "at": (0.0,)}, "'at' must be > 0: 0.0"),
    ],
)
def test_what_a_schedule_does_not_read_is_refused(options, message):
    with pytest.raises(ValueError, match=r".") as caught:
        LR(**options)
    assert str(caught.value).startswith(message)


CONFIG = {
    "run": {"steps": 400, "batch_size": 64, "device": "cpu", "plugins": ["lr"]},
    "data": {"source": "digits"},
    "model": {"use": "unet", "channels": 8, "num_res_blocks": 1, "head_dim": 8},
    "optimizer": {"lr": 0.5},
}


@pytest.fixture
def command(tmp_path, monkeypatch, hookdiff):
    """Return a function that runs a command in a folder with `mine.toml`, whose tables it takes."""
    monkeypatch.chdir(tmp_path)

    def called(*words, **tables):
        (tmp_path / "mine.toml").write_text(tomli_w.dumps({**CONFIG, **tables}))
        return hookdiff(*words)

    return called


def test_the_config_tells_what_is_wrong(command, tmp_path):
    command("lr", "mine.toml")
    config = load_config(tmp_path / "mine.toml", settings=["plugins.lr.schedule=step"])
    with pytest.raises(ConfigError, match=r"\n  plugins\.lr: at: needed by the schedule 'step'$"):
        try_config(config)


def test_the_command_draws_and_tells(command, tmp_path):
    code, out, _ = command("lr", "mine.toml", "--set", "plugins.lr.warmup=40")
    assert code == 0
    head, columns, *rows, path = out.splitlines()
    assert head == "mine: cosine after 40 steps of warm-up, 400 steps"
    assert columns.split() == ["step", "lr"]
    expected = [(step, 0.5 * LR(warmup=40).factor(step, 400)) for step in (0, 40, 100, 200, 300, 399)]
    assert [(int(row.split()[0]), float(row.split()[-1])) for row in rows] == [
        (step, pytest.approx(rate, rel=1e-3, abs=1e-12)) for step, rate in expected
    ]
    assert path.strip() == "mine-lr.png"
    assert not (tmp_path / "runs").exists()


def test_the_command_tells_of_drops_past_the_end(command):
    drops = {"lr": {"schedule": "step", "at": [200, 60000]}}
    late = "lr: the run ends at step 400, so these never come: drop 2 (step 60000)"
    assert command("lr", "mine.toml", plugins=drops)[1].splitlines()[-2] == f"  {late}"
    assert json.loads(command("lr", "mine.toml", "--json", plugins=drops)[1])["unreached"] == late


def test_a_restart_after_the_last_step_is_not_shown(command, tmp_path):
    restarts = {"lr": {"schedule": "cosine_restarts", "period": 100}}
    code, out, _ = command("lr", "mine.toml", plugins=restarts)
    assert code == 0
    *_, step, _, _, rate = out.splitlines()[-2].split()
    assert (int(step), float(rate)) == (399, pytest.approx(0.5 * LR(warmup=0).factor(99, 100), rel=1e-3))
    with Image.open(tmp_path / "mine-lr.png") as picture:
        pixels = torch.from_numpy(np.array(picture.convert("RGB"))).int()
    right = (pixels[36:, -40:, 2] - pixels[36:, -40:, 0] > 60).nonzero()[:, 0]
    assert right.min() > 100  # where the axes end, the curve is low


def test_the_picture_has_the_curve_where_it_belongs(command, tmp_path):
    code, _, _ = command("lr", "mine.toml", "--set", "plugins.lr.schedule=linear", "--out", "sub/line.png")
    assert code == 0
    with Image.open(tmp_path / "sub" / "line.png") as picture:
        pixels = torch.from_numpy(np.array(picture.convert("RGB"))).int()
    curve = (pixels[36:, :, 2] - pixels[36:, :, 0] > 60).nonzero().float()
    down, right = curve[:, 0], curve[:, 1]
    assert torch.corrcoef(torch.stack((right, down)))[0, 1] > 0.999  # one straight line, falling


def test_a_run_in_epochs_is_counted_in_the_data(command):
    run = {"epochs": 2, "batch_size": 100, "device": "cpu", "plugins": ["lr", "checkpoint"]}
    code, out, _ = command("lr", "mine.toml", run=run)
    assert code == 0
    assert out.splitlines()[0] == "mine: cosine, 34 steps"  # 17 whole batches of 1797 digits


def test_without_the_plugin_it_is_constant(command):
    code, out, _ = command("lr", "mine.toml", "--plugins", "no:lr", "--json")
    told = json.loads(out)
    assert code == 0
    assert [point["lr"] for point in told["points"]] == [0.5] * 5
    assert command("lr", "mine.toml", "--plugins", "no:lr")[1].startswith("mine: constant, since the plugin lr is not")


def test_each_optimizer_has_a_panel(command, tmp_path):
    muon = {"use": "muon", "lr": 0.02, "adamw_lr": 0.001, "adamw": ["conv*"]}
    code, out, _ = command("lr", "mine.toml", "--json", optimizer=muon)
    told = json.loads(out)
    assert code == 0
    assert told["rates"] == {"lr": 0.02, "lr/adamw": 0.001}
    assert told["points"][2] == {
        "what": "half",
        "step": 200,
        "lr": pytest.approx(0.01),
        "lr/adamw": pytest.approx(5e-4),
    }
    with Image.open(told["picture"]) as picture:
        assert picture.height == 600


def test_the_table_has_what_happens_on_the_way(command):
    restarts = {"lr": {"schedule": "cosine_restarts", "period": 100, "growth": 2.0}}
    assert "\n        300  restart 2 " in command("lr", "mine.toml", plugins=restarts)[1]
    drops = {"lr": {"schedule": "step", "at": [0.5, 350]}}
    assert "\n        350  drop 2                       0.005\n" in command("lr", "mine.toml", plugins=drops)[1]
    cooldown = {"lr": {"schedule": "cooldown"}}
    assert "\n        320  the cooldown begins " in command("lr", "mine.toml", plugins=cooldown)[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "plugins.lr.warmup=400"], "plugins.lr.warmup: 400 steps, but"),
        (["--set", "plugins.lr.period=4"], "plugins.lr: period: not read by the schedule 'cosine'"),
        (["--out", "no.format"], "no.format: cannot be written: unknown file extension: .format"),
        (["--out", "mine.toml/x.png"], "mine.toml/x.png: cannot be written: "),
        (["--set", "optimizer.lr=-1"], "optimizer: Invalid learning rate"),
    ],
)
def test_mistakes_end_in_one_message(command, arguments, message):
    code, _, err = command("lr", "mine.toml", *arguments)
    assert (code, err.startswith(f"hookdiff: {message}"), err.count("\n")) == (2, True, 1), err


@given(highest=st.floats(1e-12, 1e12), most=st.integers(1, 10))
def test_ticks_are_round_and_few(highest, most):
    marks = ticks(highest, most)
    assert marks[0] == 0
    assert len(marks) <= most + 1
    assert marks[-1] >= highest * (1 - 1e-6)
    digits = {f"{(marks[1]):.3e}".partition("e")[0]}
    assert digits <= {"1.000", "2.000", "2.500", "5.000"}
