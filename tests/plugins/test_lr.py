import itertools
import json
import math

import numpy as np
import pytest
import tomli_w
import torch
from hypothesis import given, settings, strategies as st
from PIL import Image

from hookdiff import PASS, UserError, hookimpl
from hookdiff.testing.toy import toy_loop
from hookdiff_lr import (
    LR,
    ConstantLR,
    CooldownLR,
    CosineLR,
    CosineRestartsLR,
    InverseSqrtLR,
    LinearLR,
    LRSchedule,
    StepLR,
)
from tests.conftest import Logged, acting, check_facts, check_refused, output, refused

TOTAL = 1000
ratios = st.floats(0, 1)
# Each so that a run of 1000 steps can have it with a warm-up of up to 200.
KINDS = {
    "constant": st.just(ConstantLR()),
    "linear": st.builds(LinearLR, min_ratio=ratios),
    "cosine": st.builds(CosineLR, min_ratio=ratios),
    "cosine_restarts": st.builds(CosineRestartsLR, st.integers(1, 400), st.floats(1, 3), min_ratio=ratios),
    "step": st.builds(
        StepLR,
        st.lists(st.floats(0.3, 0.99) | st.integers(200, 1200), min_size=1, max_size=4).map(sorted).map(tuple),
        st.floats(0.01, 1),
    ),
    "inverse_sqrt": st.builds(InverseSqrtLR, st.integers(200, 900)),
    "cooldown": st.builds(
        CooldownLR, st.floats(0.01, 0.7) | st.integers(1, 800), st.sampled_from(["sqrt", "linear"]), min_ratio=ratios
    ),
}


@st.composite
def plugins(draw, names=tuple(KINDS)):
    warmup = draw(st.integers(0, 200))
    return LR(draw(KINDS[draw(st.sampled_from(names))]), warmup, draw(ratios) if warmup else 0.0)


def factors(schedule, steps, length=None, warmup=0):
    """The factor at each of `steps`, in a run of `length` updates."""
    curve = LR(schedule, warmup).curve(length)
    return [curve.factor(step) for step in steps]


def test_known_answers():
    steps, expected = zip((0, 0), (50, 0.5), (100, 1), (550, 0.5), (1000, 0), strict=True)
    assert factors(CosineLR(), steps, 1000, warmup=100) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("images", "rate"), [(5e6, 0.005), (35e6, 0.01), (573.44e6, 0.005)])
def test_known_answers_of_edm2(images, rate):
    # In images: a reference of 70,000 steps of 2048 images, and a warm-up of 10 million images.
    (factor,) = factors(InverseSqrtLR(70_000 * 2048), [int(images)], warmup=10_000_000)
    assert 0.01 * factor == pytest.approx(rate, rel=1e-12)


@pytest.mark.parametrize(("shape", "left"), [("sqrt", 0.5), ("linear", 0.75)])
def test_the_cooldown_is_that_of_its_paper(shape, left):
    by_share, by_steps = (factors(CooldownLR(length, shape), range(1001), 1000) for length in (0.2, 200))
    assert by_share[:801] == [1] * 801
    assert by_share[850] == pytest.approx(left)  # a quarter of it is over
    assert by_steps == by_share


def follow(scheduler, steps):
    """The factors of a scheduler of torch, which starts from a rate of 1."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs, seen = scheduler(optimizer), []
    for _ in range(steps):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        theirs.step()
    return seen


def test_restarts_are_those_of_torch():
    theirs = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts
    expected = follow(lambda optimizer: theirs(optimizer, T_0=7, T_mult=2, eta_min=0.1), 60)
    assert factors(CosineRestartsLR(7, 2.0, min_ratio=0.1), range(60)) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("milestones", [(0.5, 8.0), (5.0, 8.0), (0.8, 5.0)])
def test_steps_are_those_of_torch(milestones):
    expected = follow(lambda optimizer: torch.optim.lr_scheduler.MultiStepLR(optimizer, [5, 8], gamma=0.3), 10)
    assert factors(StepLR(milestones, gamma=0.3), range(10), 10) == pytest.approx(expected, rel=1e-9)


@given(plugin=plugins(), step=st.integers(0, 3000))
def test_it_stays_within_its_bounds(plugin, step):
    factor = plugin.curve(TOTAL).factor(step)
    assert 0 <= factor <= 1
    if step >= plugin.warmup and hasattr(plugin.schedule, "min_ratio"):
        assert factor >= plugin.schedule.min_ratio - 1e-12


@given(plugin=plugins())
def test_the_warm_up_only_rises_and_ends_at_the_whole_rate(plugin):
    curve = plugin.curve(TOTAL)
    rise = [curve.factor(step) for step in range(plugin.warmup + 1)]
    assert rise == sorted(rise)
    assert rise[-1] == pytest.approx(1, abs=1e-12)
    if plugin.warmup:
        assert rise[0] == plugin.start_factor


@given(plugin=plugins(("constant", "linear", "cosine", "inverse_sqrt", "cooldown")))
def test_it_has_no_jumps_where_it_claims_none(plugin):
    curve, schedule, rest = plugin.curve(TOTAL), plugin.schedule, TOTAL - plugin.warmup
    steepest = {ConstantLR: 0, LinearLR: 1 / rest, CosineLR: 2 / rest}.get(type(schedule))
    if isinstance(schedule, InverseSqrtLR):
        steepest = 1 / schedule.reference
    if isinstance(schedule, CooldownLR):
        length = schedule.length * TOTAL if schedule.length < 1 else schedule.length
        steepest = 1 / math.sqrt(length) if schedule.shape == "sqrt" else 1 / length
    steepest = max(min(1, steepest), 1 / max(1, plugin.warmup)) + 1e-9
    seen = [curve.factor(step) for step in range(1200)]
    assert max(abs(a - b) for a, b in itertools.pairwise(seen)) <= steepest


@given(plugin=plugins(("linear", "cosine", "inverse_sqrt", "cooldown", "step")))
def test_after_the_warm_up_it_never_rises(plugin):
    curve = plugin.curve(TOTAL)
    seen = [curve.factor(step) for step in range(plugin.warmup, 1300)]
    assert all(b <= a + 1e-12 for a, b in itertools.pairwise(seen))


@given(plugin=plugins(("constant", "linear", "cosine", "cooldown")), past=st.integers(0, 1000))
def test_it_ends_where_it_should(plugin, past):
    end = getattr(plugin.schedule, "min_ratio", 1.0)
    assert plugin.curve(TOTAL).factor(TOTAL + past) == pytest.approx(end, abs=1e-12)


@given(warmup=st.integers(0, 50), period=st.integers(1, 100), min_ratio=ratios, cycle=st.integers(0, 5))
def test_restarts_come_back(warmup, period, min_ratio, cycle):
    begin, length = warmup + period * (2**cycle - 1), period * 2**cycle
    steps = [warmup + cycle * period + step for step in range(period)]
    same = factors(CosineRestartsLR(period, min_ratio=min_ratio), range(warmup + period), warmup=warmup)[warmup:]
    assert same[0] == 1
    assert factors(CosineRestartsLR(period, min_ratio=min_ratio), steps, warmup=warmup) == same
    doubling, places = CosineRestartsLR(period, 2.0, min_ratio=min_ratio), [begin, begin + length // 2]
    restart, middle = factors(doubling, places, warmup=warmup)
    assert restart == 1
    assert middle == pytest.approx(same[period // 2], abs=2 / period)


@settings(max_examples=5)
@given(plugin=plugins(), batch_size=st.sampled_from([4, 8, 40]), micro_batch=st.sampled_from([None, 3]))
def test_the_batch_size_does_not_change_the_schedule(plugin, batch_size, micro_batch):
    curve = plugin.curve(TOTAL)
    plugin.total = TOTAL if plugin.schedule.needs_end else None
    seen = rates(plugin, batch_size=batch_size, micro_batch=micro_batch, steps=5)
    assert seen == [[0.01 * curve.factor(step)] for step in range(5)]


def rates(plugin, others=None, **options):
    """The rates of all groups at each step of a run."""
    seen = []

    def look(loop):
        seen.append([group["lr"] for optimizer in loop.optimizers for group in optimizer.param_groups])

    toy_loop({"lr": plugin, "look": acting(after_optimizer_step=look), **(others or {})}, **options).run()
    return seen


def two_groups(model):
    groups = [{"params": model[0].parameters(), "lr": 0.5}, {"params": model[3].parameters(), "lr": 0.1}]
    return torch.optim.SGD(groups)


def test_every_group_keeps_its_own_rate():
    assert rates(LR("linear", warmup=0), optimizers=two_groups, steps=4)[2] == pytest.approx([0.25, 0.05])


def test_each_distinct_rate_is_logged_once():
    def optimizers(model):
        first, *rest = model.parameters()
        named = [{"params": rest[:1], "lr": 0.1, "name": "small"}, {"params": rest[1:], "lr": 0.1, "name": "same"}]
        return [torch.optim.SGD([first], lr=0.5), torch.optim.SGD(named)]

    toy_loop({"lr": LR("linear", warmup=0), "logged": (logged := Logged())}, optimizers=optimizers, steps=5).run()
    rates = {name: value for name, value in logged.values[5].items() if name.startswith("lr")}
    assert rates == pytest.approx({"lr": 0.1, "lr/small": 0.02})


def test_a_rate_in_a_tensor_is_changed_in_place():
    rate = torch.tensor(0.01)
    seen = rates(LR("linear", warmup=0), optimizers=lambda m: torch.optim.SGD(m.parameters(), lr=rate))
    assert seen[-1][0] is seen[0][0]
    assert float(seen[-1][0]) == pytest.approx(0.01 / 20)


def test_a_skipped_step_does_not_advance_the_schedule():
    holds = acting(optimizer_step=lambda loop: False if loop.progress.position in (3, 4) else PASS)
    assert rates(LR()) == rates(LR(), {"holds": holds})


@pytest.mark.parametrize(("steps", "last"), [({}, 0.001), ({"steps": 100}, 0.001), ({"steps": 4}, 0.0025)])
def test_epochs_are_counted_in_steps_and_of_both_the_first_to_end_counts(steps, last):
    assert rates(LR("linear", warmup=0), epochs=2, **steps)[-1] == [pytest.approx(last)]


class Mine(LRSchedule):
    """A user-defined schedule, with the full rate at every other step."""

    def factor(self, step, warmup, total):
        return (step - warmup) % 2


def test_a_schedule_may_be_user_defined():
    seen = rates(LR(Mine(), warmup=2), steps=6)
    assert [rate for (rate,) in seen] == pytest.approx([0, 0.005, 0, 0.01, 0, 0.01])


def test_a_plugin_can_run_again_for_longer():
    plugin = LR("linear", warmup=0)
    assert rates(plugin, steps=4) == rates(plugin, steps=8)[::2]


@pytest.mark.parametrize(
    ("plugin", "cut"),
    [
        (LR("cosine", warmup=20), 19),
        (LR("linear", warmup=300, start_factor=0.5), 19),
        (LR(CooldownLR(), warmup=17), 16),
        (LR(CooldownLR(30), warmup=3, start_factor=0.1), 0),
        (LR(StepLR((0.25,)), warmup=6), 5),
        (LR(StepLR((8.0, 12.0)), warmup=9), 8),
        (LR(InverseSqrtLR(5), warmup=6), 5),
    ],
)
def test_a_warm_up_is_cut_where_the_rate_falls(plugin, cut, caplog):
    expected = LR(plugin.schedule, cut, plugin.start_factor if cut else 0).curve(20)
    assert rates(plugin, micro_batch=3) == [[0.01 * expected.factor(step)] for step in range(20)]
    check_facts(caplog.messages[-1], f"{plugin.warmup} steps", f"cut to {cut}")


def test_a_cooldown_that_is_longer_than_the_run_is_cut_to_it(caplog):
    seen = rates(LR(CooldownLR(90, "linear"), warmup=0))
    assert [rate for (rate,) in seen] == pytest.approx([0.01 * (1 - step / 20) for step in range(20)])
    (message,) = caplog.messages
    assert "'cooldown' is longer than 20 steps" in message


@pytest.mark.parametrize(
    ("plugin", "late"),
    [
        (LR(StepLR((5.0, 20.0, 90.0)), warmup=0), ["drop 2 (step 20)", "drop 3 (step 90)"]),
        (LR(StepLR((0.5, 2.0)), warmup=0, total=100), ["drop 2 (step 50)"]),
        (LR("constant", warmup=30), ["end of the warm-up (step 30)"]),
        (LR("cooldown", total=100), ["the cooldown begins (step 80)"]),
        (LR(StepLR((0.95,))), []),
        (LR(CosineRestartsLR(20)), []),
        *((LR(kind, warmup=fits), []) for kind, fits in (("cosine", 19), (CooldownLR(), 16), (StepLR((0.25,)), 5))),
    ],
)
def test_events_that_the_run_never_reaches_are_reported_and_a_warm_up_that_fits_is_not(plugin, late, caplog):
    toy_loop({"lr": plugin}).run()
    reported = [message.partition(": ")[2].partition(": ")[2].split(", ") for message in caplog.messages]
    assert reported == ([late] if late else [])


def test_a_fall_needs_an_end():
    with pytest.raises(UserError, match=r"plugins\.lr\.total"):
        LR("linear", warmup=0).curve(None)
    assert LR("linear", warmup=0, total=10).curve(None).factor(10) == 0
    assert LR(CosineRestartsLR(3), warmup=0).curve(None).factor(3) == 1
    assert LR(StepLR((3.0,)), warmup=0).curve(None).factor(3) == 0.1


@pytest.mark.parametrize(
    ("options", "name"),
    [({"schedule": InverseSqrtLR(5), "total": 9}, "total"), ({"warmup": 0, "start_factor": 0.5}, "start_factor")],
)
def test_an_option_that_another_makes_useless_is_refused_by_name(options, name):
    with pytest.raises(ValueError, match=rf"\b{name}\b"):
        LR(**options)


CONFIG = {
    "run": {"steps": 400, "batch_size": 64, "device": "cpu", "plugins": ["lr"]},
    "data": {"source": "digits"},
    "model": {"use": "unet", "channels": 8, "num_res_blocks": 1, "head_dim": 8},
    "optimizer": {"lr": 0.5},
    "plugins": {"lr": {"schedule": "cosine", "warmup": 0}},
}


@pytest.fixture
def command(here, hookdiff):
    """Return a function that writes tables to `mine.toml` and runs a command in its folder."""

    def called(*words, **tables):
        (here / "mine.toml").write_text(tomli_w.dumps({**CONFIG, **tables}))
        return hookdiff(*words)

    return called


STRANGER = """
from attrs import define
from hookdiff_lr import LRSchedule

@define(frozen=True)
class Stairs(LRSchedule):
    every: int = 100

    def factor(self, step, warmup, total):
        return 1 / (1 + (step - warmup) // self.every)

    def first_fall(self, total):
        return 350

    def landmarks(self, warmup, total):
        yield "the first stair", warmup + self.every
        yield "the tenth stair", warmup + 10 * self.every
"""


def test_a_schedule_of_a_module_beside_the_config(command, tmp_path):
    (tmp_path / "lr_of_a_stranger.py").write_text(STRANGER)
    lr = {"schedule": {"use": "lr_of_a_stranger:Stairs", "every": 50}, "warmup": 360}
    drawn = json.loads(output(command("lr", "mine.toml", "--json", plugins={"lr": lr})))
    assert drawn["schedule"] == "lr_of_a_stranger:Stairs"
    rates = {point["what"]: (point["step"], point["lr"]) for point in drawn["points"]}
    assert rates["end of the warm-up"] == (350, 0.5)
    assert rates["half"] == (200, pytest.approx(0.5 * 200 / 350))
    assert rates["last step"] == (399, 0.5)
    cut, late = drawn["remarks"]
    assert "360 steps is cut to 350" in cut
    assert "the first stair (step 400), the tenth stair (step 850)" in late
    lr["schedule"]["every"] = "x"
    assert "plugins.lr.schedule.every: " in command("lr", "mine.toml", plugins={"lr": lr})[2]


def test_the_command_draws_and_lists(command, tmp_path):
    out = output(command("lr", "mine.toml", "--set", "plugins.lr.warmup=40"))
    head, columns, *rows, path = out.splitlines()
    assert head == "mine: cosine after 40 steps of warm-up, 400 steps"
    assert columns.split() == ["step", "lr"]
    steps = (0, 40, 100, 200, 300, 399)
    expected = [0.5 * factor for factor in factors(CosineLR(), steps, 400, warmup=40)]
    assert [int(row.split()[0]) for row in rows] == list(steps)
    assert [float(row.split()[-1]) for row in rows] == pytest.approx(expected, rel=1e-3, abs=1e-12)
    assert path.strip() == "mine-lr.png"
    assert not (tmp_path / "runs").exists()


def test_the_command_reports_what_does_not_fit(command):
    drops = {"lr": {"schedule": {"use": "step", "milestones": [200, 60000]}, "warmup": 0}}
    assert "drop 2 (step 60,000)" in command("lr", "mine.toml", plugins=drops)[1].splitlines()[-2]
    (remark,) = json.loads(command("lr", "mine.toml", "--json", plugins=drops)[1])["remarks"]
    assert "drop 2 (step 60,000)" in remark
    out = output(command("lr", "mine.toml", "--set", "plugins.lr.warmup=1000"))
    assert out.startswith("mine: cosine after 399 steps of warm-up")
    assert "1,000 steps is cut to 399" in out


def test_a_restart_after_the_last_step_is_not_shown(command, tmp_path):
    restarts = {"lr": {"schedule": {"use": "cosine_restarts", "period": 100}, "warmup": 0}}
    out = output(command("lr", "mine.toml", plugins=restarts))
    *_, step, _, _, rate = out.splitlines()[-2].split()
    (factor,) = factors(CosineLR(), [99], 100)
    assert (int(step), float(rate)) == (399, pytest.approx(0.5 * factor, rel=1e-3))
    with Image.open(tmp_path / "mine-lr.png") as picture:
        pixels = torch.from_numpy(np.array(picture.convert("RGB"))).int()
    right = (pixels[36:, -40:, 2] - pixels[36:, -40:, 0] > 60).nonzero()[:, 0]
    assert right.min() > 100  # where the axes end, the curve is low


def test_the_picture_has_the_curve_where_it_belongs(command, tmp_path):
    output(command("lr", "mine.toml", "--set", "plugins.lr.schedule=linear", "--out", "sub/line.png"))
    with Image.open(tmp_path / "sub" / "line.png") as picture:
        pixels = torch.from_numpy(np.array(picture.convert("RGB"))).int()
    curve = (pixels[36:, :, 2] - pixels[36:, :, 0] > 60).nonzero().float()
    down, right = curve[:, 0], curve[:, 1]
    assert torch.corrcoef(torch.stack((right, down)))[0, 1] > 0.999  # one straight line, falling


def test_a_run_in_epochs_is_counted_in_the_data(command):
    run = {"epochs": 2, "batch_size": 100, "device": "cpu", "plugins": ["lr", "checkpoint"]}
    out = output(command("lr", "mine.toml", run=run))
    assert out.splitlines()[0] == "mine: cosine, 34 steps"  # 17 whole batches of 1797 digits


def test_without_the_plugin_it_is_constant(command):
    out = output(command("lr", "mine.toml", "--plugins", "no:lr", "--json"))
    assert [point["lr"] for point in json.loads(out)["points"]] == [0.5] * 5
    assert command("lr", "mine.toml", "--plugins", "no:lr")[1].startswith("mine: constant, ")


@pytest.mark.wide
def test_each_optimizer_has_a_panel(command, tmp_path):
    muon = {"use": "muon", "lr": 0.02, "adamw_lr": 0.001, "adamw": ["conv*"]}
    drawn = json.loads(output(command("lr", "mine.toml", "--json", optimizer=muon)))
    assert drawn["rates"] == {"lr": 0.02, "lr/adamw": 0.001}
    half = drawn["points"][2]
    assert (half["what"], half["step"]) == ("half", 200)
    assert (half["lr"], half["lr/adamw"]) == pytest.approx((0.01, 5e-4))
    with Image.open(drawn["picture"]) as picture:
        assert picture.height == 600


def test_the_table_lists_the_events_of_the_schedule(command):
    for schedule, row in (
        ({"use": "cosine_restarts", "period": 100, "mult": 2.0}, ["300", "restart", "2", "0.5"]),
        ({"use": "step", "milestones": [0.5, 350]}, ["350", "drop", "2", "0.005"]),
        ({"use": "cooldown"}, ["320", "the", "cooldown", "begins", "0.5"]),
    ):
        out = command("lr", "mine.toml", plugins={"lr": {"schedule": schedule, "warmup": 0}})[1]
        assert row in [line.split() for line in out.splitlines()]


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["--set", "plugins.lr.schedule.period=4"], "plugins.lr.schedule.period: "),
        (["--out", "no.format"], "no.format: "),
        (["--out", "mine.toml/x.png"], "mine.toml/x.png: "),
        (["--set", "optimizer.lr=-1"], "optimizer: "),
    ],
)
def test_each_mistake_gives_one_message(command, arguments, names):
    check_refused(command("lr", "mine.toml", *arguments), names)


class Critic:
    """Trains a module of its own."""

    def __init__(self):
        self.net = torch.nn.Linear(1, 1)
        self.rates = []

    @hookimpl
    def prepare_model(self, loop):
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.5)
        loop.adopt(self, self.net, self.optimizer)

    @hookimpl
    def after_optimizer_step(self):
        self.rates.append(self.optimizer.param_groups[0]["lr"])


@pytest.mark.parametrize(("names", "rates"), [((), [0.5] * 4), (("critic",), [0.5, 0.375, 0.25, 0.125])])
def test_an_optimizer_of_a_plugin_follows_the_schedule_only_if_it_is_named(names, rates):
    critic = Critic()
    toy_loop({"critic": critic, "lr": LR(LinearLR(), warmup=0, adopted=names)}, steps=4).run()
    assert critic.rates == pytest.approx(rates)


def test_a_plugin_without_an_optimizer_of_its_own_cannot_be_named():
    with refused(UserError, "'critc'", "'critic'"):
        toy_loop({"critic": Critic(), "lr": LR(adopted=("critc",))}).run()
