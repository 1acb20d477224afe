"""Test how parts are written in a config, set on the command line, recorded and refused, and how users add parts."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli
import tomli_w
import torch
from attrs import asdict

from hookdiff import Batch, ConfigError, SampleRequest, build_loop, load_config
from hookdiff.diffusion.clipping import DynamicThreshold
from hookdiff.diffusion.diffusion import Diffusion
from hookdiff.diffusion.prediction import EDMPrediction
from hookdiff.diffusion.process import EDM, VP, DDPMProcess, Flow
from hookdiff.diffusion.sampling import Sampling
from hookdiff.diffusion.schedules import Cosine, Linear
from hookdiff.diffusion.solvers import DDIM, DDPM, Heun
from hookdiff.diffusion.spacing import Shifted
from hookdiff.diffusion.times import LogitNormal, LogNormal
from hookdiff.diffusion.weighting import P2, EDMWeighting, MinSNR
from tests.conftest import SMALL, check_facts, finish, output, records, refused, wide
from tests.diffusion.conftest import generators, pointwise, seeded

Load = Callable[..., Any]
Tables = dict[str, dict[str, Any]]


# With the options in STRANGERS, each of these parts equals one of hookdiff's.
MINE = """
import math
import torch
from attrs import define
from hookdiff.diffusion import *

@define(frozen=True)
class MyProcess(Process):
    shift: float = 1.0
    default_prediction = "flow_prediction"
    default_times = {"use": "logit_normal", "stratified": True}
    ratio_range = (0.0, math.inf)

    def from_fraction(self, fraction):
        time = fraction.clamp(2.0**-25, 1 - 2.0**-24)
        return self.shift * time / (1 + (self.shift - 1) * time)

    def from_log_ratio(self, log_ratio):
        return self.from_fraction(log_ratio.sigmoid())

    def rates(self, times, ndim):
        sigma = times.reshape(-1, *[1] * (ndim - 1))
        return 1 - sigma, sigma, 2 * ((1 - sigma) / sigma).log()

    def network_time(self, times):
        return times * 1000

    def at(self, ratio):
        time = ratio / (1 + ratio)
        return Point(1 - time, time, time * 1000)

    def trailing(self, steps):
        fractions = [1 - i / steps for i in range(steps)]
        times = [self.shift * t / (1 + (self.shift - 1) * t) for t in fractions]
        return [Point(1 - t, t, t * 1000) for t in times]

@define(frozen=True)
class MySchedule(Schedule):
    end: float = 0.9

    def betas(self, timesteps):
        return torch.linspace(1e-4, self.end, timesteps, dtype=torch.float64)

@define(frozen=True)
class MyPrediction(Prediction):
    scale: float = 2.0

    def target(self, x0, noise, alpha, sigma):
        return self.scale * (alpha * noise - sigma * x0)

    def x0_and_noise(self, output, x_t, alpha, sigma):
        v = output / self.scale
        return alpha * x_t - sigma * v, sigma * x_t + alpha * v

    def error_ratio(self, alpha, sigma):
        return (self.scale * (alpha * alpha + sigma * sigma)) ** 2

@define(frozen=True)
class MyWeighting(Weighting):
    gamma: float = 50.0

    def weights(self, prediction, alpha, sigma):
        return (alpha**2).minimum(self.gamma * sigma**2) / prediction.error_ratio(alpha, sigma)

@define(frozen=True)
class MyTimes(Times):
    power: float = 3.0

    def at(self, process, fraction):
        return process.from_fraction(fraction**self.power)

@define(frozen=True)
class MyLoss(Loss):
    power: float = 4.0

    def __call__(self, output, target):
        return (output - target).abs() ** self.power

@define(frozen=True)
class MySampler(Solver):
    noise: float = 0.5

    def step(self, chain, x, now, after):
        x0, noise = chain.predict(x, now)
        return after.alpha * x0 + self.noise * after.sigma * noise

@define(frozen=True)
class MySpacing(Spacing):
    finer: int = 2

    def points(self, process, steps):
        return process.trailing(steps * self.finer)[-steps:]

@define(frozen=True)
class MyClipping(Clipping):
    bound: float = 0.2

    def clip(self, images):
        return images.clamp(-self.bound, self.bound)

@define(frozen=True)
class MyGuidance(Guidance):
    scale: float = 5.0

    def output(self, ask, x, at, given):
        plain = ask(x, ask.without(given))
        return plain + self.scale * (ask(x, given) - plain)
"""

# The key, the stranger's class, the options that make it equal to a part of hookdiff, and that part.
STRANGERS = [
    ("diffusion.process", "MyProcess", {"shift": 2.0}, {"use": "flow", "shift": 2.0}),
    ("diffusion.process.schedule", "MySchedule", {"end": 0.5}, {"use": "linear", "beta_end": 0.5}),
    ("diffusion.prediction", "MyPrediction", {"scale": 1.0}, "v_prediction"),
    ("diffusion.weighting", "MyWeighting", {"gamma": 2.0}, {"use": "min_snr", "gamma": 2.0}),
    ("diffusion.times", "MyTimes", {"power": 1.0}, "uniform"),
    ("diffusion.loss", "MyLoss", {"power": 2.0}, "mse"),
    ("sampling.sampler", "MySampler", {"noise": 1.0}, "euler"),
    ("sampling.spacing", "MySpacing", {"finer": 1}, "trailing"),
    ("sampling.clipping", "MyClipping", {"bound": 1.0}, "clamp"),
    ("sampling.guidance", "MyGuidance", {"scale": 2.0}, {"use": "cfg", "scale": 2.0}),
]


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write mine.py into `tmp_path`, a folder that is not on sys.path."""
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    monkeypatch.setitem(sys.modules, "mine", None)  # so that monkeypatch removes it at the end
    del sys.modules["mine"]
    return tmp_path


def with_part(key: str, value: Any) -> Tables:
    """Return the tables of a config with a class-conditional network, in which `key` has this value."""
    tables: Tables = {
        "model": {**SMALL["model"], "num_classes": 10},
        "diffusion": {"conditional": True, "process": {"use": "vp", "schedule": {"use": "cosine"}, "timesteps": 20}},
        "optimizer": {"lr": 0.01},  # so that three steps show what an option does
        "sampling": {"steps": 3, "spacing": "trailing"},
    }
    *path, last = key.split(".")
    table: dict[str, Any] = tables
    for name in path:
        table = table[name]
    table[last] = value
    return tables


def of_parts(config: Any, folder: Path) -> torch.Tensor:
    """Record the config, and return losses and pixels of the parts themselves, without a run."""
    folder.mkdir()
    (folder / "config.toml").write_text(tomli_w.dumps(config.resolved()))
    diffusion, labels = config.diffusion.build(), torch.arange(16) % 10
    batch = diffusion.draw(Batch(torch.rand(16, 1, 8, 8, generator=seeded()) * 2 - 1, labels), seeded(1))
    made = (pointwise, diffusion, (1, 4, 4), generators(0, 1, 2), "cpu")
    images = config.sampling.build().sample(*made, labels=labels[:3])
    return torch.cat([diffusion(pointwise, batch).loss[None], images.flatten()])


def of_run(config: Any, folder: Path) -> torch.Tensor:
    """Train, sample, and return the losses and the pixels of the samples."""
    loop = build_loop(config, folder)
    loop.run()
    with loop:
        images = loop.sample(SampleRequest(3)).images
    return torch.cat([torch.tensor([line["loss"] for line in records(folder) if "loss" in line]), images.flatten()])


def at(table: dict[str, Any], key: str) -> Any:
    for name in key.split("."):
        table = table[name]
    return table


@pytest.mark.parametrize(
    ("numbers_of", "key", "name", "options", "same"),
    [
        *(pytest.param(of_parts, *row, id=row[0]) for row in STRANGERS[::2]),
        *(pytest.param(of_parts, *row, id=row[0], marks=pytest.mark.wide) for row in STRANGERS[1::2]),
        *(pytest.param(of_run, *row, id=f"run with {row[0]}", marks=pytest.mark.wide) for row in STRANGERS),
    ],
)
def test_a_strangers_part_loads_from_a_module_beside_the_config(
    mine: Path, load_small: Load, numbers_of: Any, key: str, name: str, options: dict[str, Any], same: Any
) -> None:
    written = {"use": f"mine:{name}", **options}
    run = {"steps": 3, "log_every": 1}
    config = load_small(run=run, **with_part(key, written))
    assert at(config.resolved(), key) == written | ({"stratified": False} if name == "MyTimes" else {})
    numbers = numbers_of(config, mine / "stranger")
    expected = numbers_of(load_small(run=run, **with_part(key, same)), mine / "ours")
    torch.testing.assert_close(numbers, expected, rtol=1e-4, atol=1e-4)
    default = numbers_of(load_small(run=run, **with_part(key, f"mine:{name}")), mine / "default")
    assert (default - numbers).abs().max() > 1e-3  # the option has an effect
    own = mine / "stranger" / "config.toml"
    assert at(tomli.loads(own.read_text()), key) == at(config.resolved(), key)
    assert load_config(own, trust=True).resolved() == tomli.loads(own.read_text())


@pytest.mark.wide
def test_all_of_a_strangers_parts_work_in_one_run(
    mine: Path, monkeypatch: pytest.MonkeyPatch, write_config: Load, hookdiff: Load, start: Load
) -> None:
    """mine.py is found from any working directory, also by a process that resumes from the run's config.toml."""
    strangers = {key: {"use": f"mine:{name}", **options} for key, name, options, _ in STRANGERS[1:]}
    tables: Tables = {"model": {**SMALL["model"], "num_classes": 10}, "diffusion": {}, "sampling": {"steps": 3}}
    for key, part in strangers.items():
        table, _, name = key.partition(".")
        if key != "diffusion.process.schedule":
            tables[table][name] = part
    tables["diffusion"]["process"] = {"use": "vp", "schedule": strangers["diffusion.process.schedule"], "timesteps": 20}
    path = write_config("strange.toml", run={"steps": 3, "plugins": ["checkpoint"]}, **tables)
    elsewhere = mine / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert hookdiff("run", path)[0] == 0
    own = elsewhere / "runs" / "strange" / "config.toml"
    first = tomli.loads(own.read_text())
    for key, part in strangers.items():
        assert at(first, key).items() >= part.items()
    output(finish(start(elsewhere, "run", own, "--resume", "--trust", "--set", "run.steps=5", PYTHONPATH="")))
    again = tomli.loads(own.read_text())
    assert (first["run"].pop("steps"), again["run"].pop("steps")) == (3, 5)
    assert again == first
    assert hookdiff("sample", own.parent, "--num", 2, "--trust")[0] == 0


def test_a_part_loads_from_an_entry_point(install: Load, load_small: Load, mine: Path) -> None:
    install("hookdiff-mine", {"weighting.mine": "hd_parts:MyWeighting"}, group="hookdiff.parts", hd_parts=MINE)
    config = load_small("diffusion.weighting.gamma=3", diffusion={"weighting": "mine"})
    assert config.resolved()["diffusion"]["weighting"] == {"use": "mine", "gamma": 3.0}
    with refused(ConfigError, "diffusion.weighting", "'mime'", "'mine'"):
        load_small(diffusion={"weighting": "mime"})


PLAIN = """
from hookdiff.diffusion.losses import Loss

class Keeps(Loss):
    def __init__(self, power: float = 2.0) -> None:
        self.power = power

    def __call__(self, output, target):
        return (output - target).abs() ** self.power

class Loses(Keeps):
    def __init__(self, exponent: float = 2.0) -> None:
        super().__init__(exponent)

class NoOptions(Keeps):
    def __init__(self) -> None:
        super().__init__(3.0)
"""


def test_a_part_that_is_no_attrs_class_must_keep_its_options(install: Load, load_small: Load) -> None:
    install("plain", hd_plain=PLAIN)
    config = load_small(diffusion={"loss": {"use": "hd_plain:Keeps", "power": 3.0}})
    assert config.diffusion.build().loss.power == 3.0
    assert config.resolved()["diffusion"]["loss"] == {"use": "hd_plain:Keeps", "power": 3.0}
    recorded = load_small(diffusion={"loss": "hd_plain:NoOptions"}).resolved()
    assert recorded["diffusion"]["loss"] == {"use": "hd_plain:NoOptions"}
    with refused(ConfigError, "diffusion.loss.power", "number", "'x'"):
        load_small(diffusion={"loss": {"use": "hd_plain:Keeps", "power": "x"}})
    with refused(ConfigError, "diffusion.loss", "Loses", "'exponent'", "attrs"):
        load_small(diffusion={"loss": "hd_plain:Loses"})


# Spelling


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, Diffusion()),
        ({"process": {"use": "flow", "shift": 3}}, Diffusion(Flow(3.0))),
        (
            {"process": {"use": "vp", "schedule": {"use": "cosine", "max_beta": 0.99}, "timesteps": 50}},
            Diffusion(VP(Cosine(max_beta=0.99), 50)),
        ),
        ({"process": "edm"}, Diffusion(EDM(), EDMPrediction(0.5), times=LogNormal(-1.2, 1.2, stratified=True))),
        (
            {"process": "edm", "prediction": {"use": "edm", "sigma_data": 0.2}, "weighting": "edm"},
            Diffusion(EDM(), EDMPrediction(0.2), EDMWeighting(0.2)),
        ),
        (
            {"loss": "l1", "label_dropout": 0.2, "data_mean": [0.1, 0.2]},
            Diffusion(loss="l1", label_dropout=0.2, data_mean=(0.1, 0.2)),
        ),
        *wide(
            ({"process": "flow"}, Diffusion("flow")),
            ({"process": {"shift": 2}}, Diffusion(Flow(2.0))),
            ({"process": {"use": "vp", "timesteps": 500}}, Diffusion(VP(timesteps=500))),
            ({"process": {"use": "vp", "schedule": "linear"}}, Diffusion(VP("linear"))),
            ({"weighting": {"use": "min_snr", "gamma": 3}}, Diffusion(weighting=MinSNR(3.0))),
            (
                {"times": {"use": "logit_normal", "std": 2, "stratified": True}},
                Diffusion(times=LogitNormal(-0.5, 2.0, stratified=True)),
            ),
        ),
    ],
)
def test_spellings(load_small: Load, given: dict[str, Any], expected: Diffusion) -> None:
    assert parts_of(load_small(diffusion=given).diffusion.build()) == parts_of(expected)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, Sampling()),
        ({"sampler": {"use": "heun", "churn": 40, "churn_max": 50.0}}, Sampling(Heun(40.0, 0.0, 50.0))),
        ({"guidance": {"scale": 4, "interval": [0.2, 5]}}, Sampling(guidance={"scale": 4.0, "interval": (0.2, 5.0)})),
        *wide(
            ({"sampler": "ddpm"}, Sampling(DDPM())),
            ({"spacing": {"use": "shifted", "shift": 3}}, Sampling(spacing=Shifted(3.0))),
            ({"clipping": {"use": "dynamic", "ratio": 0.9}}, Sampling(clipping=DynamicThreshold(0.9))),
        ),
    ],
)
def test_spellings_of_sampling(load_small: Load, given: dict[str, Any], expected: Sampling) -> None:
    built = load_small(sampling=given).sampling.build()
    for option in ("sampler", "steps", "spacing", "clipping", "guidance", "batch_size"):
        assert getattr(built, option) == getattr(expected, option)


def parts_of(diffusion: Diffusion) -> list[Any]:
    options = ("process", "prediction", "weighting", "times", "loss", "label_dropout", "data_mean", "data_std")
    return [getattr(diffusion, option) for option in options]


VP_20 = {"use": "vp", "schedule": "cosine", "timesteps": 20}
ZERO_SNR = {"use": "vp", "rescale_betas_zero_snr": True}


@pytest.mark.parametrize(
    ("table", "settings", "expected"),
    [
        # an option turns a bare name into a table
        ({"process": "flow"}, ["process.shift=3"], {"process": {"use": "flow", "shift": 3.0}}),
        ({"process": VP_20}, ["process.schedule.offset=0.01"], {"process": VP(Cosine(offset=0.01), 20)}),
        ({}, ["process.shift=2"], {"process": Flow(2.0)}),
        # a new name drops the options of the old one
        ({"process": VP_20}, ["process=edm"], {"process": EDM()}),
        # the same name keeps the options
        ({"process": VP_20}, ["process.use=vp"], {"process": VP("cosine", 20)}),
        # a new name is set before its options, whatever their order
        (
            {"process": VP_20},
            ["process.timesteps=400", "process.schedule.beta_end=0.03", "process.schedule.use=linear"],
            {"process": VP(Linear(beta_end=0.03), 400)},
        ),
        # a whole table
        ({"process": VP_20}, ["process={use = 'flow', shift = 3}"], {"process": Flow(3.0)}),
        *wide(
            (
                {"process": "ddpm"},
                ["process.schedule.use=linear", "process.schedule.beta_end=0.03"],
                {"process": DDPMProcess(schedule=Linear(beta_end=0.03))},
            ),
            ({}, ["weighting=min_snr", "weighting.gamma=2"], {"weighting": MinSNR(2.0)}),
            ({"process": VP_20}, ["process.use=edm"], {"process": EDM()}),
            (
                {"process": VP_20},
                ["process.schedule.use=linear", "process.timesteps=500"],
                {"process": VP("linear", 500)},
            ),
            (
                {"process": VP_20},
                ["process.schedule=sigmoid", "process.timesteps=500"],
                {"process": VP("sigmoid", 500)},
            ),
            ({"process": VP_20}, ["process.shift=3", "process.use=flow"], {"process": Flow(3.0)}),
            ({}, ["weighting={use='p2',k=2}"], {"weighting": P2(2.0)}),
            ({}, ["loss.use='l1'"], {"loss": Diffusion(loss="l1").loss}),
        ),
    ],
)
def test_parts_on_the_command_line(
    load_small: Load, table: dict[str, Any], settings: list[str], expected: dict[str, Any]
) -> None:
    built = load_small(*(f"diffusion.{setting}" for setting in settings), diffusion=table).diffusion.build()
    assert parts_of(built) == parts_of(Diffusion(**expected))


def test_parts_of_sampling_on_the_command_line(load_small: Load) -> None:
    config = load_small("sampling.sampler.eta=0.5", "sampling.guidance.scale=3", sampling={"sampler": "ddim"})
    assert (config.sampling.build().sampler, config.sampling.build().guidance.scale) == (DDIM(0.5), 3)
    other = load_small("sampling.sampler=euler", sampling={"sampler": {"use": "ddim", "eta": 0.5}})
    assert other.sampling.build().sampler.use == "euler"


# Records


RUNS = [
    ({}, {}),
    ({"process": "edm", "weighting": "edm", "loss": "huber"}, {"sampler": {"use": "heun", "churn": 2.0}}),
    ({"process": {"use": "flow", "shift_side": 16}}, {}),
    *wide(
        ({"process": "flow", "times": "logit_normal"}, {"spacing": {"use": "shifted", "shift": 2.0}}),
        (
            {"process": VP_20, "prediction": "v_prediction", "weighting": "p2"},
            {"sampler": "ddpm", "clipping": "dynamic"},
        ),
        ({"process": VP_20, "prediction": {"use": "edm", "sigma_data": 1.0}, "data_std": 0.5}, {"spacing": "leading"}),
    ),
]


@pytest.mark.parametrize(("diffusion", "sampling"), RUNS)
def test_a_config_is_recorded_with_all_options_and_the_record_loads(
    tmp_path: Path, load_small: Load, diffusion: dict[str, Any], sampling: dict[str, Any]
) -> None:
    config = load_small(diffusion=diffusion, sampling={"steps": 3, **sampling})
    recorded = config.resolved()
    for table, kinds in (
        ("diffusion", ("process", "prediction", "weighting", "times", "loss")),
        ("sampling", ("sampler", "spacing", "clipping", "guidance")),
    ):
        for kind in kinds:
            part = recorded[table][kind]
            built = getattr(config.diffusion.build(), kind, None) or getattr(
                config.sampling.build().fit(config.diffusion.build()), kind
            )
            assert part["use"] == built.use
            options = asdict(built, recurse=False, filter=lambda _, value: value is not None)
            assert set(part) - {"use"} == set(options)
    path = tmp_path / "again.toml"
    path.write_text(tomli_w.dumps(recorded))
    assert load_config(path).resolved() == recorded


def test_defaults_that_follow_from_the_process_are_recorded(load_small: Load) -> None:
    recorded = load_small(diffusion={"process": {"use": "edm", "sigma_max": 50.0}}, sampling={}).resolved()
    diffusion, sampling = recorded["diffusion"], recorded["sampling"]
    assert diffusion["process"] == {"use": "edm", "sigma_min": 0.002, "sigma_max": 50.0, "time_scale": 1000.0}
    assert diffusion["prediction"] == {"use": "edm", "sigma_data": 0.5}
    assert diffusion["times"] == {"use": "log_normal", "mean": -1.2, "std": 1.2, "stratified": True}
    assert (sampling["sampler"]["use"], sampling["clipping"]) == ("heun", {"use": "none"})
    assert sampling["spacing"] == {"use": "karras", "rho": 7.0}


# Refusals


@pytest.mark.parametrize(
    ("tables", "key", "facts"),
    [
        (
            {"diffusion": {"process": {"timesteps": 50}}},
            "diffusion.process.timesteps",
            ["use = 'vp' or use = 'ddpm'", "shift"],
        ),
        (
            {"diffusion": {"process": {"use": "vp", "schedule": {"use": "cosine", "beta_end": 0.1}}}},
            "diffusion.process.schedule.beta_end",
            ["offset", "max_beta"],
        ),
        ({"diffusion": {"process": {"use": "edm", "sigma_min": 90}}}, "diffusion.process", ["'sigma_min'", 90, 80]),
        (
            {"diffusion": {"weighting": "hookdiff.diffusion:Euler"}},
            "diffusion.weighting",
            ["hookdiff.diffusion:Euler", "weighting"],
        ),
        ({"diffusion": {"loss": "hd_nowhere:Loss"}}, "diffusion.loss", ["hd_nowhere"]),
        ({"diffusion": {"prediction": "epsilon"}}, "diffusion.prediction", ["'epsilon'", "'ddpm'"]),
        (
            {"diffusion": {"process": ZERO_SNR, "prediction": "sample", "times": "log_normal"}},
            "diffusion.times",
            ["'log_normal'", "'uniform'"],
        ),
        *wide(
            ({"diffusion": {"process": {"use": "ddpm", "timesteps": 100}}}, "diffusion.process", ["'timesteps'", 100]),
            ({"diffusion": {"prediction": {"sigma_data": 1.0}}}, "diffusion.prediction", ["`use`", "epsilon", "edm"]),
            (
                {"diffusion": {"weighting": "hookdiff.diffusion:X0Weighting"}},
                "diffusion.weighting",
                ["X0Weighting", "on_x0"],
            ),
            ({"sampling": {"sampler": {"use": "ddim", "churn": 2.0}}}, "sampling.sampler.churn", ["eta"]),
        ),
    ],
)
def test_a_part_that_does_not_fit_is_one_problem_with_its_key(
    load_small: Load, tables: Tables, key: str, facts: list[Any]
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_small(**tables)
    _, line = str(caught.value).splitlines()
    assert line.startswith(f"  {key}: ")
    check_facts(line, *facts)


def test_parts_that_contradict_each_other_are_refused(load_small: Load, tmp_path: Path) -> None:
    with refused(ConfigError, "diffusion", "'prediction'", "sigma_data", 0.5, "data_std"):
        build_loop(load_small(diffusion={"process": "edm", "data_std": 0.3}), tmp_path / "run")
