"""The plugin `autoguidance`: its guide, the images, what it leaves alone, resumed runs, ranks, the command line."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from attrs import define, evolve, field
from hypothesis import given, strategies as st
from PIL import Image
from torch import Tensor, nn

from hookdiff import ConfigError, Loop, LoopConfig, SampleRequest, build_loop, hookimpl, load_run
from hookdiff.authors.generation import Generated
from hookdiff.data import digits
from hookdiff.diffusion import ClassifierFree, Diffusion, Point, Sampling
from hookdiff.log.picture import read_info
from hookdiff.testing import assert_same, weights
from hookdiff.testing.toy import toy_loop
from hookdiff_autoguidance import Autoguidance, AwayFrom, landmark
from hookdiff_ema import EMA
from tests.conftest import Restores, Succeed, check_facts, ran, refused, saved, toy_run, two_ranks

SAMPLING = Sampling(steps=4)


class Tiny(nn.Module):
    """A layer that knows the time, and keeps count of its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(2, 1, 3, padding=1)
        self.calls = 0

    def forward(self, x: Tensor, times: Tensor) -> Tensor:
        self.calls += 1
        time = (times / 1000).view(-1, 1, 1, 1).expand_as(x)
        shown: Tensor = self.layer(torch.cat([x, time.to(x)], 1))
        return shown


@define(eq=False)
class Averages:
    """Keeps the average as it is after each update."""

    ema: EMA
    after: dict[int, dict[str, Tensor]] = field(factory=dict)

    @hookimpl(trylast=True)
    def after_optimizer_step(self, loop: Loop) -> None:
        self.after[loop.progress.step] = {name: value.clone() for name, value in self.ema.shadow.items()}


def make_loop(plugins: dict[str, object], **config: Any) -> Loop:
    torch.manual_seed(0)
    model = Tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = {"batch_size": 32, **({} if "epochs" in config else {"steps": 10}), **config}
    return Loop(model, optimizer, Diffusion(), digits(), LoopConfig(**config), plugins, sampler=SAMPLING)


def trained(options: Mapping[str, Any] = MappingProxyType({}), **config: Any) -> tuple[Loop, Averages]:
    """Return the loop after ten steps with these options of the plugin, and the averages on the way."""
    ema = EMA(std=0.1)
    averages = Averages(ema)
    autoguidance = Autoguidance(**{"interval": (0.0, math.inf), **options})
    loop = ran(make_loop({"autoguidance": autoguidance, "ema": ema, "averages": averages}, **config))
    return loop, averages


def images(loop: Loop, **options: Any) -> Tensor:
    return loop.sample(SampleRequest(4, raw=True, **options)).images


def by_hand(loop: Loop, own: dict[str, Tensor], guide: dict[str, Tensor], scale: float) -> Tensor:
    """Return the images of the weights `own`, guided by those of `guide`: with networks of their own."""
    first, second = Tiny(), Tiny()
    first.load_state_dict(own)
    second.load_state_dict(guide)

    def net(x: Tensor, times: Tensor) -> Any:
        return second(x, times) + scale * (first(x, times) - second(x, times))

    return SAMPLING.sample(net, loop.objective, loop.feed.shape, SampleRequest(4).generators(), "cpu")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "config", "at", "scale"),
    [
        ({}, {}, 3, 1.5),
        ({"at": 0.55, "scale": 3.0}, {}, 5, 3.0),
        ({}, {"epochs": 2, "batch_size": 300}, 3, 1.5),  # five batches in an epoch
    ],
)
def test_images_move_away_from_those_of_the_average_at_a_share_of_the_run(
    options: Any, config: Any, at: int, scale: float
) -> None:
    loop, averages = trained(options, **config)
    expected = by_hand(loop, averages.after[10], averages.after[at], scale)
    torch.testing.assert_close(images(loop), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(images(loop, weights="ema"), expected, rtol=1e-5, atol=1e-5)


def test_it_is_the_sum_of_the_paper() -> None:
    def ask(x: Tensor, given: object, net: Any = None) -> Tensor:
        return torch.full_like(x, 5.0 if net else 2.0)

    x, guide = torch.zeros(1, 1, 2, 2), nn.Identity()
    for scale, expected in ((1.0, 2.0), (1.5, 0.5), (2.0, -1.0)):
        away = AwayFrom(guide, scale, (0.5, 2.0))
        assert torch.equal(away.output(ask, x, Point(0.5, 0.5, 1), {}), torch.full_like(x, expected))
        for outside in (Point(0.9, 0.1, 1), Point(0.1, 0.9, 1)):
            assert torch.equal(away.output(ask, x, outside, {}), torch.full_like(x, 2.0))


def test_the_guide_is_called_only_in_its_interval() -> None:
    # Four steps of a flow, at three times the noise of training: sigma / alpha is infinite, 9, 3 and 1.
    for interval, calls in (((0.0, math.inf), 8), ((0.5, 4.0), 6), ((2.0, 4.0), 5), ((0.0, 0.1), 4)):
        loop, _ = trained({"interval": interval})
        model: Any = loop.model
        model.calls = 0
        images(loop)
        assert model.calls == calls


@pytest.mark.parametrize(
    "leave",
    [
        {"scale": 1.0},
        {"weights": "model"},
        {"guidance": ClassifierFree(2.0)},
        {"plugins": ()},
        {"steps": 2},  # no guide yet
    ],
    ids=str,
)
def test_what_it_leaves_alone(leave: dict[str, Any]) -> None:
    def made(is_guided: bool) -> Tensor:
        ema = {name: EMA(std=0.1) for name in leave.get("plugins", ("ema",))}
        plugins = {"autoguidance": Autoguidance(scale=leave.get("scale", 1.5))} if is_guided else {}
        sampler = evolve(SAMPLING, guidance=leave.get("guidance", ClassifierFree()))
        with make_loop({**ema, **plugins}) as loop, loop.using(sampler=sampler):
            for _ in zip(range(leave.get("steps", 10)), loop.steps(), strict=False):
                pass
            return images(loop, weights=leave.get("weights"))

    assert torch.equal(made(True), made(False))


def test_metrics_say_which_images_are_guided() -> None:
    loop, _ = trained()
    said = [Generated(loop, None, 0, weights).used() for weights in (None, "model")]
    assert said == ["ema with autoguidance", "model"]


def test_a_sampler_of_another_kind_is_left_alone() -> None:
    loop, plain = toy_run({"ema": EMA(), "autoguidance": Autoguidance()}), toy_run({"ema": EMA()})
    assert torch.equal(images(loop), images(plain))


def test_a_run_without_an_average_says_that_it_has_no_guide(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "hookdiff")
    toy_loop({"autoguidance": Autoguidance()}, steps=1).run()
    check_facts(caplog.text, "autoguidance", "no average")


def test_the_model_holds_its_own_weights_after_sampling() -> None:
    loop, _ = trained()
    before = weights(loop)
    images(loop)
    assert_same(weights(loop), before)
    assert all(parameter.requires_grad for parameter in loop.model.parameters())


@given(st.integers(0, 3000), st.floats(0.05, 0.94), st.integers(1, 3000) | st.none())
def test_the_guide_is_never_older_than_its_share(step: int, share: float, end: int | None) -> None:
    if end is not None:
        step = min(step, end)
    taken = landmark(step, share, end)
    assert 0 <= taken <= step
    assert taken >= landmark(max(0, step - 1), share, end)
    assert taken + 1 >= int(step * share) - 1  # rounded down twice
    if step == end:
        assert taken in (int(end * share), int(end * share * (1 + 1e-12)))


@pytest.mark.parametrize(("end", "taken"), [(1000, [27, 90, 300]), (100, [2, 9, 30]), (None, [1, 3, 11, 37, 123, 411])])
def test_the_steps_at_which_a_guide_is_taken(end: int | None, taken: list[int]) -> None:
    landmarks = dict.fromkeys(landmark(step, 0.3, end) for step in range(1, 1001))
    assert [step for step in landmarks if step][-len(taken) :] == taken


def test_a_longer_run_takes_a_new_guide_at_once() -> None:
    loop, averages = trained()
    ema = EMA(std=0.1)
    plugins = {"ema": ema, "autoguidance": Autoguidance(), "kept": Restores(saved(loop))}
    with make_loop(plugins, steps=20) as longer:
        next(longer.steps())
        state = saved(longer)["plugins"]["autoguidance"]
    assert state["step"] == 10
    assert_same(state["weights"], averages.after[10])


@pytest.mark.usefixtures("here")
def test_pictures_say_that_they_are_guided(succeed: Succeed, write_config: Callable[..., Path]) -> None:
    write_config(run={"steps": 10, "plugins": ["ema", "autoguidance", "checkpoint", "samples"]})
    succeed("run", "small.toml")
    succeed("sample", "runs/small", "--num", 2)
    succeed("sample", "runs/small", "--num", 2, "--weights", "model", "--seed", 1)
    info = []
    for name in ("step-*.png", "seed-0.png", "seed-1.png"):
        with Image.open(next(Path("runs/small/samples").glob(name))) as picture:
            info.append(read_info(picture))
    for guided in info[:2]:
        assert guided["guidance"] == "autoguidance"
        assert guided["options"]["guidance"] == {"scale": 1.5, "interval": [0, 2.5]}
    assert (info[2]["guidance"], info[2]["guidance_scale"]) == ("cfg", 1)
    export = "export", "runs/small", "weights.safetensors"
    check_facts(succeed(*export), "autoguidance")  # which other programs do not have
    assert "autoguidance" not in succeed(*export, "--weights", "model", "--overwrite")


@pytest.mark.slow  # torch compiles for half a minute
def test_a_compiled_guide_makes_the_same_images(load_small: Callable[..., Any], tmp_path: Path) -> None:
    config = load_small("run.steps=10", plugins=["ema", "autoguidance", "checkpoint"])
    build_loop(config, tmp_path / "run").run()
    with load_run(tmp_path / "run") as run:
        expected = run.sample(4)
        for _ in range(2):  # the second time with other tensors, for which nothing is compiled again
            torch.testing.assert_close(run.sample(4, compile=True), expected, rtol=1e-4, atol=1e-4)


def test_its_name_in_place_of_a_guidance_is_explained(load_small: Callable[..., Any]) -> None:
    with refused(ConfigError, "sampling.guidance", "--plugins autoguidance"):
        load_small("sampling.guidance=autoguidance")


@pytest.mark.parametrize(("name", "shape"), [("layer.wait", (1, 2, 3, 3)), ("layer.bias", (2,))])
def test_the_guide_of_another_model_is_refused(name: str, shape: tuple[int, ...]) -> None:
    with refused(ValueError, "guide", name):
        Autoguidance().check_state(Tiny(), {"step": 3, "weights": {name: torch.zeros(shape)}})


def test_a_run_is_sampled_with_its_guide(load_small: Callable[..., Any], tmp_path: Path) -> None:
    config = load_small("run.steps=10", plugins=["ema", "autoguidance", "checkpoint"])
    expected = images(ran(build_loop(config, tmp_path / "run")))
    with load_run(tmp_path / "run") as run, load_run(tmp_path / "run", ["plugins.autoguidance.scale=1"]) as unguided:
        torch.testing.assert_close(run.sample(4), expected, rtol=0, atol=1e-6)
        assert (unguided.sample(4) - expected).abs().max() > 1e-3
        assert torch.equal(unguided.sample(4, weights="model"), run.sample(4, weights="model"))


RANKS = """
import torch
from hookdiff.testing.toy import toy_loop
from hookdiff.loop.saved import state_of
from hookdiff_autoguidance import Autoguidance
from hookdiff_ddp import DDP
from hookdiff_ema import EMA
from hookdiff_fsdp import FSDP
from tests.on_ranks import Net

result = {}
for name, plugin in (("ddp", DDP()), ("fsdp", FSDP())):
    torch.manual_seed(0)
    loop = toy_loop({"ranks": plugin, "ema": EMA(), "autoguidance": (guided := Autoguidance())}, model=Net(0.0))
    loop.run()
    state = state_of(guided)
    result[name] = state["step"], sorted(state["weights"]) == sorted(n for n, _ in loop.model.named_parameters())
"""


def test_ranks_with_whole_weights_have_a_guide_and_those_with_parts_have_none(tmp_path: Path) -> None:
    assert two_ranks(RANKS, tmp_path) == [{"ddp": (6, True), "fsdp": (6, False)}] * 2
