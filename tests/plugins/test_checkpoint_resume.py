"""Exact resume, bit for bit: a run that is stopped and resumed from files equals one that was never stopped."""

import random

import numpy as np
import pytest
import torch
from torch import nn, optim

from hookdiff import InMemory, UserError
from hookdiff.builtin.logged import Metrics
from hookdiff.disk.tree import flatten
from hookdiff.images import feed_of
from hookdiff.testing import assert_same, toy_model
from hookdiff_amp import AMP
from hookdiff_checkpoint import Checkpoint
from hookdiff_clip import Adaptive, Clip, Percentile
from hookdiff_ema import EMA
from hookdiff_lr import LR
from tests.conftest import acting, records, refused, toy_run, wide

STEPS = 12


def train(run_dir, steps=STEPS, resume=False, plugins=None, **options):
    run_dir.mkdir(exist_ok=True)
    used = {"metrics": Metrics(), **(plugins or {}), "checkpoint": Checkpoint(every=5)}
    return toy_run(used, run_dir=run_dir, resume=resume, steps=steps, **{"log_every": 1, **options})


def outcome(loop):
    """The whole state of a run, and every line that it logged."""
    tensors, tree = flatten(loop.state_dict())
    del tree["plugins"]["metrics"]  # a length in bytes, of lines with the time of day
    return {name: tensor.clone() for name, tensor in tensors.items()}, tree, records(loop.run_dir)


def assert_same_runs(one, other):
    (tensors, *rest), (other_tensors, *other_rest) = outcome(one), outcome(other)
    assert_same(tensors, other_tensors)
    assert rest == other_rest


def in_parts(run_dir, make, cuts):
    """Train with the keywords that `make()` returns, stopped after each of `cuts`; return the last loop."""
    for index, steps in enumerate((*cuts, STEPS)):
        loop = train(run_dir, steps, resume=index > 0, **make())
    return loop


def muon_with_adamw(parameters, lr):
    matrices, others = [], []
    for parameter in parameters:
        (matrices if parameter.dim() == 2 else others).append(parameter)
    return [optim.Muon(matrices, lr=lr), optim.AdamW(others, lr=lr, fused=True)]


OPTIMIZERS = {
    "SGD": (optim.SGD, {}),
    "SGD momentum": (optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "SGD fused": (optim.SGD, {"momentum": 0.9, "fused": True}),
    "Adam": (optim.Adam, {}),
    "Adam amsgrad": (optim.Adam, {"amsgrad": True}),
    "Adam fused": (optim.Adam, {"amsgrad": True, "fused": True}),
    "AdamW": (optim.AdamW, {}),
    "AdamW fused": (optim.AdamW, {"fused": True}),
    "AdamW foreach": (optim.AdamW, {"foreach": True}),
    "NAdam": (optim.NAdam, {}),
    "RAdam": (optim.RAdam, {}),
    "Adagrad": (optim.Adagrad, {"lr_decay": 0.1}),
    "Adagrad fused": (optim.Adagrad, {"fused": True}),
    "Adafactor": (optim.Adafactor, {}),
    "RMSprop": (optim.RMSprop, {"centered": True, "momentum": 0.9}),
    "ASGD": (optim.ASGD, {"t0": 3}),
    "Rprop": (optim.Rprop, {}),
    "Adamax": (optim.Adamax, {}),
    "Adadelta": (optim.Adadelta, {}),
    "Muon, AdamW for the rest": (muon_with_adamw, {}),
}


STRONGEST = ("SGD momentum", "AdamW fused", "Adafactor", "Muon, AdamW for the rest")


@pytest.mark.parametrize("name", [*STRONGEST, *wide(*sorted(OPTIMIZERS.keys() - STRONGEST))])
def test_each_optimizer_goes_on_where_it_was(name, tmp_path):
    kind, options = OPTIMIZERS[name]
    optimizers = {"optimizers": lambda model: kind(model.parameters(), lr=0.01, **options)}
    parts, whole = in_parts(tmp_path / "parts", lambda: optimizers, (7,)), train(tmp_path / "whole", **optimizers)
    assert_same_runs(parts, whole)


class Odd(optim.SGD):
    """Keeps `held` for each parameter."""

    def __init__(self, parameters, held):
        super().__init__(parameters, lr=0.01)
        self.held = held

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["odd"] = self.held


@pytest.mark.parametrize(("held", "kind"), [(set(), "set"), (torch.zeros(1, dtype=torch.complex128), "complex128")])
@pytest.mark.parametrize("void", [False, True])
def test_an_optimizer_that_cannot_be_stored_is_refused_after_its_first_step(held, kind, void, tmp_path):
    seen = []
    look = acting(before_step=lambda loop: seen.append(loop.progress.step))
    plugins = {"look": look, **({"amp": AMP("fp16", init_scale=2.0**24)} if void else {})}
    with refused(UserError, "optimizers/0/weights/0.weight/odd", kind):
        train(tmp_path, plugins=plugins, optimizers=lambda model: Odd(model.parameters(), held))
    assert set(seen) == {0}
    assert (len(seen) > 1) == void
    assert not list((tmp_path / "checkpoints").iterdir())


def test_optimizer_state_that_belongs_to_no_parameter_is_refused(tmp_path):
    class Strange(optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            self.state["all"]["count"] = 1

    with refused(UserError, "Strange", "all"):
        train(tmp_path, optimizers=lambda model: Strange(model.parameters(), lr=0.01))

    mine = nn.Parameter(torch.ones(2))

    def also_mine(model):
        return optim.SGD([*model.parameters(), mine], lr=0.01, momentum=0.9)

    def pull():
        mine.grad = torch.ones(2)

    with refused(UserError, "SGD"):
        train(tmp_path / "other", plugins={"pull": acting(after_backward=pull)}, optimizers=also_mine)


class Augmented:
    """20 samples that each of the three generators changes."""

    def __init__(self):
        self.values = torch.linspace(-1, 1, 320).reshape(20, 1, 4, 4)
        self.labels = torch.arange(20) % 3

    def __len__(self):
        return 20

    def __getitem__(self, index):
        noise = random.gauss(0, 0.1) + torch.randn(1, 4, 4) * 0.1 + torch.from_numpy(np.random.randn(1, 4, 4)).float()
        return (self.values[index] + noise).clamp(-1, 1), index % 3


def convolutional():
    """A net with dropout and batch norm, the same each time."""
    before = torch.get_rng_state()
    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Dropout(0.3), nn.Conv2d(4, 1, 1))
    torch.set_rng_state(before)
    return model


def images(workers=0, **options):
    return {"model": convolutional(), "data": feed_of(Augmented(), workers=workers, **options), "batch_size": 6}


def everything():
    return {
        "lr": LR("cosine", warmup=3, total=20),
        "ema": EMA(decay=0.9),
        "amp": AMP("fp16", init_scale=2.0**22, growth_interval=3),
        "clip": Clip(Adaptive(warmup=2, factor=0.9)),
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Samples that python, numpy and torch change, dropout, batch norm, overflows, a schedule, EMA, clipping."""
    loop = train(tmp_path_factory.mktemp("whole") / "run", plugins=everything(), **images())
    assert loop.plugins["amp"].state_dict()["num_void"] > 0
    return loop


@pytest.mark.parametrize("cuts", [[5], [2, 3, 9], *wide([1], [3], [6], [11], list(range(1, STEPS)))])
def test_a_run_may_be_stopped_anywhere_and_more_than_once(cuts, whole, tmp_path):
    assert_same_runs(in_parts(tmp_path, lambda: {"plugins": everything(), **images()}, cuts), whole)


@pytest.mark.parametrize("workers", [*wide(((2, 0),)), (0, 2)])
def test_the_number_of_workers_may_change(workers, whole, tmp_path):
    for steps, count in zip((7, STEPS), workers, strict=True):
        again = train(tmp_path, steps, resume=steps != 7, plugins=everything(), **images(count))
    assert_same_runs(again, whole)


def test_a_crash_loses_only_the_steps_after_the_last_save(whole, tmp_path):
    def crash(loop):
        if loop.progress.step == 8:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, plugins={**everything(), "crash": acting(before_step=crash)}, **images())
    again = train(tmp_path, resume=True, plugins=everything(), **images())
    assert again.first_step == 5
    assert_same_runs(again, whole)


@pytest.mark.parametrize(
    "make",
    [
        lambda: images(drop_last=False),
        lambda: {"plugins": everything(), **images(), "micro_batch": 4, "log_every": 5},
        *wide(
            lambda: images(balanced=True),
            lambda: images(held_out=4),
            lambda: {"data": InMemory(torch.linspace(-1, 1, 320).reshape(20, 1, 4, 4)), "model": convolutional()},
            lambda: {"plugins": {"amp": AMP("bf16"), "ema": EMA(decay=[0.9], std=[0.1])}},
            lambda: {"plugins": {"clip": Clip(Percentile(warmup=2, window=5))}, "model": toy_model(dropout=0.5)},
        ),
    ],
    ids=["last batch", "micro-batches and means", "balanced", "held out", "in memory", "bf16", "percentile"],
)
def test_other_configs_resume_exactly(make, tmp_path):
    assert_same_runs(in_parts(tmp_path / "parts", make, (3, 8)), train(tmp_path / "whole", **make()))
