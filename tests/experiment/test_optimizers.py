"""The optimizers of [optimizer]: every parameter in one group, every class of torch, and the kernels."""

import inspect
import math
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from hypothesis import given, strategies as st
from torch import Tensor, nn

from hookdiff import ConfigError, Loop, build_loop, load_config
from hookdiff.experiment import Part, try_config
from hookdiff.experiment.optimizers import OPTIMIZERS, Groups, build_optimizers, groups, weights_of, without_decay
from hookdiff.loop.state import as_tuple
from hookdiff.testing import CountTransfers, assert_same, toy_loop, toy_model, weights
from hookdiff_muon import muon
from tests.conftest import ran, refused, wide


def built(model: nn.Module, kind: Any = torch.optim.AdamW, no_decay: Any = ("auto",), **arguments: Any) -> Any:
    shared = {Groups: {"no_decay": tuple(no_decay)}}
    return as_tuple(build_optimizers(Part("optimizer", "mine", kind, arguments, "use", shared), model))


class Parts(nn.Module):
    """A model with every kind of weight."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(5, 4)
        self.norm = nn.LayerNorm((2, 3))  # its weight has two dimensions
        self.body = nn.Sequential(nn.Conv2d(2, 3, 3), nn.GroupNorm(1, 3), nn.Linear(3, 4))
        self.scale = nn.Parameter(torch.ones(()))
        self.position = nn.Parameter(torch.zeros(1, 6, 4))
        self.out = nn.Linear(4, 5, bias=False)
        self.out.weight = self.token.weight  # one shared weight
        self.fixed = nn.Linear(2, 2).requires_grad_(False)


def test_each_weight_has_its_role() -> None:
    names = {
        "embedding": ["token.weight"],
        "kernel": ["body.0.weight"],
        "matrix": ["body.2.weight", "fixed.weight"],
        "norm": ["norm.weight", "norm.bias", "body.1.weight", "body.1.bias"],
        "other": ["position"],
        "vector": ["scale", "body.0.bias", "body.2.bias", "fixed.bias"],
    }
    roles = {name: role for role, held in names.items() for name in held}
    assert {weight.name: weight.role for weight in weights_of(Parts())} == roles


def decayed(model: nn.Module, *patterns: str) -> list[str]:
    return [weight.name for weight in without_decay(weights_of(model), patterns) if weight.decays]


def test_weight_decay_is_for_matrices_and_kernels() -> None:
    assert decayed(Parts(), "auto") == ["position", "body.0.weight", "body.2.weight", "fixed.weight"]
    assert decayed(Parts(), "auto", "pos*") == ["body.0.weight", "body.2.weight", "fixed.weight"]
    assert decayed(Parts(), "body.*", "scale", "fixed.*") == ["position", "token.weight", "norm.weight", "norm.bias"]
    assert len(decayed(Parts())) == 13


def test_weights_with_and_without_decay_are_in_two_groups() -> None:
    model = Parts()
    (optimizer,) = built(model, weight_decay=0.1)
    first, second = optimizer.param_groups
    assert (first["name"], first["weight_decay"]) == ("decay", 0.1)
    assert (second["name"], second["weight_decay"]) == ("no_decay", 0.0)
    decayed = (model.position, model.body[0].weight, model.body[2].weight, model.fixed.weight)
    assert {id(p) for p in first["params"]} == {*map(id, decayed)}


@pytest.mark.parametrize(("kind", "arguments"), [(torch.optim.AdamW, {"weight_decay": 0.0}), (torch.optim.SGD, {})])
def test_without_weight_decay_there_is_one_group(kind: Any, arguments: Any) -> None:
    (optimizer,) = built(Parts(), kind, **arguments)
    assert [len(group["params"]) for group in optimizer.param_groups] == [13]


def layers(draw: Any, depth: int) -> Any:
    """Return a random module of layers and containers, with some weights shared or fixed."""
    kinds = ["linear", "conv", "norm", "embedding", "bare", "none"] + (["all", "shared"] if depth else [])
    kind = draw(st.sampled_from(kinds))
    size = draw(st.integers(1, 3))
    made: Any = nn.Identity()
    if kind == "linear":
        made = nn.Linear(size, 2, bias=draw(st.booleans()))
    elif kind == "conv":
        made = draw(st.sampled_from([nn.Conv1d, nn.ConvTranspose2d]))(size, 2, 1)
    elif kind == "norm":
        made = draw(st.sampled_from([nn.LayerNorm, nn.RMSNorm, nn.BatchNorm1d]))(size)
    elif kind == "embedding":
        made = nn.Embedding(size, 2)
    elif kind == "bare":
        made = nn.ParameterList([torch.zeros([2] * (size - 1))])
    elif kind == "all":
        made = nn.ModuleList(layers(draw, depth - 1) for _ in range(size))
    elif kind == "shared":
        inner = layers(draw, depth - 1)
        made = nn.ModuleDict({"a": inner, "b": inner})
    if draw(st.integers(0, 4)) == 0:
        made.requires_grad_(False)
    return made


models = st.composite(layers)(3)


@given(
    model=models, kind=st.sampled_from([torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad, muon]), data=st.data()
)
def test_every_weight_is_in_one_group_also_a_frozen_one(model: nn.Module, kind: Any, data: Any) -> None:
    wanted = list(model.parameters())
    names = [weight.name for weight in weights_of(model)]
    assert [id(weight.parameter) for weight in weights_of(model)] == [id(p) for p in wanted]
    patterns = data.draw(st.lists(st.sampled_from(["auto", *names]), max_size=3))
    if not any(parameter.requires_grad for parameter in wanted):
        with refused(ConfigError, "optimizer"):
            built(model, kind, patterns)
        return
    held = [
        p for optimizer in built(model, kind, patterns) for group in optimizer.param_groups for p in group["params"]
    ]
    assert sorted(map(id, held)) == sorted(map(id, wanted))


def test_muon_takes_matrices_and_kernels_and_adamw_the_rest() -> None:
    first, second = built(Parts(), muon, lr=0.02, adamw_lr=1e-3, weight_decay=0.3)
    model_names = {id(weight.parameter): weight.name for weight in weights_of(Parts())}
    assert len(model_names) == 13
    assert (type(first).__name__, type(second).__name__) == ("Muon", "AdamW")
    shown = [
        (group["name"], group["lr"], group["weight_decay"], sorted(tuple(p.shape) for p in group["params"]))
        for optimizer in (first, second)
        for group in optimizer.param_groups
    ]
    assert shown == [
        ("muon", 0.02, 0.3, [(2, 2), (3, 2, 3, 3), (4, 3)]),
        ("adamw", 1e-3, 0.3, [(1, 6, 4)]),
        ("adamw", 1e-3, 0.0, [(), (2,), (2, 3), (2, 3), (3,), (3,), (3,), (4,), (5, 4)]),
    ]
    assert second.param_groups[0]["fused"]


def test_muon_leaves_weights_to_adamw_on_request() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    first, second = built(model, muon, adamw=("0.*",))
    assert first.param_groups[0]["params"] == [model[1].weight]
    assert len([p for group in second.param_groups for p in group["params"]]) == 3


def test_muon_leaves_a_model_without_matrices_to_adamw() -> None:
    (only,) = built(nn.LayerNorm(6), muon, lr=0.5)
    assert (type(only).__name__, only.param_groups[0]["lr"]) == ("AdamW", 0.5)


@pytest.mark.parametrize(
    ("kind", "arguments", "expected"),
    [
        (torch.optim.AdamW, {}, True),
        (torch.optim.AdamW, {"fused": False}, False),
        (torch.optim.AdamW, {"foreach": True}, None),
        (torch.optim.SGD, {"lr": 0.1}, True),
        (torch.optim.Adagrad, {}, True),
        (torch.optim.Adadelta, {}, None),
    ],
)
def test_optimizers_are_fused_unless_another_kernel_is_set(kind: Any, arguments: Any, expected: Any) -> None:
    (optimizer,) = built(nn.Linear(1, 1), kind, **arguments)
    assert optimizer.param_groups[0].get("fused") == expected


@pytest.mark.cuda
def test_a_kernel_that_the_gpu_lacks_is_not_used() -> None:
    for name in OPTIMIZERS:
        optimizers = built(nn.Linear(3, 3, device="cuda"), *chosen(name))
        for optimizer in optimizers:
            for parameter in (p for group in optimizer.param_groups for p in group["params"]):
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()


def test_a_weight_without_a_fused_kernel_gets_an_unfused_optimizer() -> None:
    model = nn.Linear(2, 2, dtype=torch.complex64)
    (optimizer,) = built(model, torch.optim.AdamW)
    assert not optimizer.param_groups[0]["fused"]


@pytest.mark.parametrize("name", ["adamw", "adam", "sgd", "adagrad"])
def test_fused_optimizers_transfer_nothing(name: str) -> None:
    model = toy_model()
    (optimizer,) = built(model, *chosen(name))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    with CountTransfers() as transfers:
        optimizer.step()
    assert transfers.count == 0


@pytest.mark.parametrize(
    ("arguments", "facts"),
    [
        ({"lr": -1.0}, (-1.0,)),
        ({"capturable": True, "fused": False}, ("capturable",)),
        ({"differentiable": True}, ()),
        ({"fused": True, "foreach": True}, ("fused", "foreach")),
    ],
)
def test_an_optimizer_that_could_not_make_a_step_is_refused_before_training(arguments: Any, facts: Any) -> None:
    with refused(ConfigError, "optimizer", *facts):
        built(toy_model(), torch.optim.AdamW, **arguments)


def test_a_model_without_a_weight_to_train_is_refused() -> None:
    with refused(ConfigError, "optimizer", "weight", "gradient"):
        built(toy_model().requires_grad_(False))


def test_a_function_gets_the_weights_and_makes_any_optimizer() -> None:
    def mine(params: Any, lr: float = 0.1, weight_decay: float = 0.2) -> Any:
        return torch.optim.SGD(groups(params), lr=lr, weight_decay=weight_decay)

    (optimizer,) = built(nn.Linear(2, 2), mine)
    decays = {group["name"]: group["weight_decay"] for group in optimizer.param_groups}
    assert decays == {"decay": 0.2, "no_decay": 0.0}


CONFIG: dict[str, Any] = {
    "run": {"steps": 6, "batch_size": 8, "device": "cpu", "log_every": 2, "plugins": ["checkpoint", "lr"]},
    "data": {"source": "digits"},
    "model": {"use": "dit", "hidden_size": 8, "depth": 1, "num_heads": 2},
    "sampling": {"steps": 2},
    "plugins": {"checkpoint": {"every": 3}, "lr": {"warmup": 2}},
}


def chosen(name: str) -> tuple[Any]:
    module, _, kind = OPTIMIZERS[name].partition(":")
    return (getattr(__import__(module, fromlist=[kind]), kind),)


def load(folder: Path, *settings: str, **optimizer: Any) -> Any:
    path = folder / "small.toml"
    path.write_text(tomli_w.dumps({**CONFIG, "optimizer": optimizer}))
    return load_config(path, settings=settings)


def test_every_optimizer_of_torch_is_listed_except_lbfgs_sparseadam_and_muon() -> None:
    kinds = {name.lower() for name, kind in vars(torch.optim).items() if inspect.isclass(kind)}
    assert kinds - {"optimizer", "muon"} == {*OPTIMIZERS, "lbfgs", "sparseadam"}


@pytest.mark.parametrize("name", ["muon", "adamw", *wide(*(name for name in OPTIMIZERS if name != "adamw"))])
def test_every_optimizer_trains(name: str, tmp_path: Path) -> None:
    config = load(tmp_path, use=name, lr=1e-3)
    try_config(config)
    loop = build_loop(config, tmp_path / "run")
    before, after = weights(loop), weights(ran(loop))
    assert all(math.isfinite(value.sum()) for value in after.values())
    assert sum(not torch.equal(before[key], after[key]) for key in before) > len(before) / 2


@pytest.mark.parametrize(("name", "reason"), [("LBFGS", "closure"), ("SparseAdam", "dense")])
def test_optimizers_that_cannot_train_here_are_refused_with_the_reason(tmp_path: Path, name: str, reason: str) -> None:
    with refused(ConfigError, "optimizer", reason):
        try_config(load(tmp_path, use=f"torch.optim:{name}"))
    with refused(ConfigError, "optimizer.use", repr(name.lower())):
        load(tmp_path, use=name.lower())


def test_a_probe_refuses_patterns_that_name_no_weight(tmp_path: Path) -> None:
    with refused(ConfigError, "optimizer.no_decay", "'patch_inn.weight'", "'patch_in.weight'"):
        try_config(load(tmp_path, no_decay=["auto", "patch_inn.weight"]))
    try_config(load(tmp_path, no_decay=["auto", "patch_in.weight"]))
    with refused(ConfigError, "optimizer.adamw", "'patch_inn.*'"):
        try_config(load(tmp_path, use="muon", adamw=["patch_inn.*"]))
    try_config(load(tmp_path, use="muon", adamw=["patch_in.*"]))


@pytest.mark.parametrize("use", ["adamw", "muon"])
def test_rates_multiply_the_learning_rate_of_the_weights_that_match(tmp_path: Path, use: str) -> None:
    rates = {"blocks.*": 0.5, "*in.*": 0.0}  # the first pattern that matches counts
    with build_loop(load(tmp_path, use=use, lr=2**-8, rates=rates), tmp_path / "run") as loop:
        before, names = weights(loop), dict(loop.model.named_parameters())
        groups = [group for optimizer in loop.optimizers for group in optimizer.param_groups]
        found = {parameter: group["lr"] for group in groups for parameter in group["params"]}
        slow = {name for name in names if name.startswith("blocks.")}
        expected = {name: 2**-9 if name in slow else 0.0 if "in." in name else 2**-8 for name in names}
        assert {name: found[parameter] for name, parameter in names.items()} == expected
        for _ in loop.steps():  # in the first ones the weights before a layer of zeros get no gradient
            pass
        still = [name for name, value in weights(loop).items() if torch.equal(value, before[name])]
    assert slow.isdisjoint(still)
    assert {"patch_in.weight", "patch_in.bias"} <= {*still}
    with refused(ConfigError, "optimizer.rates", "'patch_inn.*'", "'patch_in."):
        try_config(load(tmp_path, rates={"patch_inn.*": 0.1}))
    with refused(ConfigError, "optimizer.rates", "-1.0"):
        load(tmp_path, rates={"blocks.*": -1.0})


@pytest.mark.cuda
def test_a_probe_tries_the_optimizer_on_the_device_of_the_run(tmp_path: Path) -> None:
    config = load(tmp_path, "run.device=cuda", use="radam", capturable=True)
    try_config(config)
    assert build_loop(config, tmp_path / "run").run() == "done"


def test_the_written_config_has_all_keys_and_is_read_as_the_same(tmp_path: Path) -> None:
    config = load(tmp_path, use="muon", adamw_lr=1e-4)
    table = config.resolved()["optimizer"]
    assert (table["use"], table["no_decay"], table["ns_steps"], table["adamw_lr"]) == ("muon", ["auto"], 5, 1e-4)
    again = load(tmp_path, **table)
    assert again.resolved() == config.resolved()


def state_of(loop: Loop) -> dict[str, Tensor]:
    states = loop.state_dict()["optimizers"]
    return {f"{i}/{n}/{k}": v for i, part in states.items() for n, s in part["weights"].items() for k, v in s.items()}


def test_groups_may_change_on_resume_because_state_goes_by_name(tmp_path: Path) -> None:
    build_loop(load(tmp_path), tmp_path / "run").run()
    with build_loop(load(tmp_path), tmp_path / "run", resume=True) as same:
        expected = {name: value.clone() for name, value in state_of(same).items()}
    with build_loop(load(tmp_path, no_decay=["blocks.0.qkv.*"]), tmp_path / "run", resume=True) as other:
        sizes = [[len(group["params"]) for group in loop.optimizers[0].param_groups] for loop in (same, other)]
        assert sizes[0] != sizes[1]
        assert_same(state_of(other), expected)


def test_weight_decay_changes_only_the_weights_that_decay() -> None:
    def run(**arguments: Any) -> dict[str, Tensor]:
        optimizers = lambda model: built(model, torch.optim.AdamW, lr=0.01, **arguments)  # noqa: E731
        return weights(ran(toy_loop(optimizers=optimizers, steps=1, model=toy_model(seed=2))))

    plain, with_decay = run(weight_decay=0.0), run(weight_decay=0.5)
    start = toy_model(seed=2).state_dict()
    for name, value in plain.items():
        expected = value if name.endswith("bias") else value - 0.01 * 0.5 * start[name]
        torch.testing.assert_close(with_decay[name], expected)
