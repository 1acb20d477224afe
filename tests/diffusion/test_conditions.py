"""What the network gets of the samples by keyword, in training, in sampling, and in a run of the command line."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hookdiff import Batch, ConfigError, InMemory, Loop, LoopConfig, SampleRequest, build_loop, load_config
from hookdiff.diffusion import ClassifierFree, Diffusion, Sampling
from hookdiff.testing import assert_same
from tests.conftest import SMALL, Command, Succeed, ran, refused
from tests.diffusion.conftest import brightness, generators, seeded

CAPTIONS = torch.arange(1, 13).float().reshape(12, 1) / 12


class Net(nn.Module):
    """Predicts an image that has the caption in every pixel, and keeps what it was given."""

    num_classes = 0

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.calls: list[dict[str, Any]] = []

    def forward(self, x: Tensor, timesteps: Tensor, labels: Tensor | None = None, **given: Tensor) -> Tensor:
        self.calls.append({"labels": labels, **given})
        return self.scale * given["caption"].view(-1, 1, 1, 1).expand_as(x) if given else self.scale * x


def loop(net: nn.Module, **options: Any) -> Loop:
    masks = torch.rand(12, 1, 4, 4) > 0.5
    data = InMemory(torch.zeros(12, 1, 4, 4), torch.arange(12) % 4, conditions={"caption": CAPTIONS, "mask": masks})
    objective = Diffusion(prediction="sample", **{"conditions": "caption", **options})
    optimizer, config = torch.optim.SGD(net.parameters(), lr=0), LoopConfig(steps=3, batch_size=4)
    return Loop(net, optimizer, objective, data, config, sampler=Sampling(steps=2, clipping="none"))


def of(num: int) -> Batch:
    images, labels = torch.rand(num, 3, 4, 4, generator=seeded(1)), torch.arange(num) % 10
    conditions = {
        "caption": torch.rand(num, 7, 2) + 1,
        "number": torch.arange(num) + 1,
        "mask": torch.ones(num, 3).bool(),
    }
    return Batch(images, labels, conditions=conditions)


def test_the_network_gets_only_the_named_conditions_by_keyword() -> None:
    net = Net()
    running = ran(loop(net, label_dropout=0.0))
    assert [call.keys() for call in net.calls] == [{"labels", "caption"}] * 3
    order = running.feed.order(0)
    assert torch.equal(torch.cat([call["caption"] for call in net.calls]), CAPTIONS[order])


def test_without_conditions_the_draws_are_the_same_to_the_bit() -> None:
    batch = of(64)
    plain = Batch(batch.inputs, batch.labels)
    for conditional in (None, True):
        one, other = (Diffusion(conditional=conditional).draw(each, seeded()) for each in (plain, batch))
        assert one.draws.keys() == other.draws.keys() == {"noise", "timesteps"} | ({"labels"} if conditional else set())
        assert all(torch.equal(one.draws[name], other.draws[name]) for name in one.draws)
        assert other.conditions == batch.conditions
    named = Diffusion(conditional=True, conditions=("caption",)).draw(batch, seeded()).draws
    assert all(torch.equal(named[name], other.draws[name]) for name in other.draws)


@pytest.mark.parametrize("conditional", [True, False])
def test_a_sample_loses_its_label_and_all_its_conditions_together(conditional: bool) -> None:
    batch, names = of(2000), ("caption", "number", "mask")
    drawn = Diffusion(conditional=conditional, conditions=names, label_dropout=0.25).draw(batch, seeded())
    dropped = drawn.draws["number"] == 0
    assert float(dropped.double().mean()) == pytest.approx(0.25, abs=0.03)
    for name in names:
        was, now = batch.conditions[name], drawn.draws[name]
        assert now.dtype == was.dtype
        assert torch.equal(now[~dropped], was[~dropped])
        assert not now[dropped].any()
        assert torch.equal(drawn.conditions[name], was)  # as the loss gets them
    if conditional:
        assert torch.equal(drawn.draws["labels"] == -1, dropped)
    parts = drawn.split(7)
    assert torch.equal(torch.cat([part.draws["caption"] for part in parts]), drawn.draws["caption"])


def test_shares_of_a_table_are_drawn_each_on_their_own() -> None:
    batch, shares = of(20_000), {"labels": 0.3, "caption": 0.2, "all": 0.1}
    options: dict[str, Any] = {"conditional": True, "conditions": ("caption", "number"), "label_dropout": shares}
    drawn = Diffusion(**options).draw(batch, seeded()).draws
    no_label, no_caption, nothing = drawn["labels"] == -1, drawn["caption"][:, 0, 0] == 0, drawn["number"] == 0
    dropped = (nothing, no_label, no_caption, no_label & no_caption)
    expected = [0.1, 1 - 0.9 * 0.7, 1 - 0.9 * 0.8, 0.1 + 0.9 * 0.3 * 0.2]  # the number alone is never dropped
    assert [float(gone.double().mean()) for gone in dropped] == pytest.approx(expected, abs=0.01)
    assert not (nothing & ~(no_label & no_caption)).any()
    both = (Diffusion(**options | {"label_dropout": share}).draw(batch, seeded()) for share in ({"all": 0.1}, 0.1))
    assert_same(*(drawn.draws for drawn in both))
    with refused(ValueError, "'label_dropout'", "'captoin'", "'caption'"):
        Diffusion(conditions="caption", label_dropout={"captoin": 0.1})
    with refused(ValueError, "'label_dropout'", "1.5"):
        Diffusion(conditions="caption", label_dropout={"caption": 1.5})


def test_the_parts_of_a_text_are_dropped_with_it() -> None:
    given = {name: torch.ones(2000, 3) for name in ("text", "text_mask", "text_pooled", "texture")}
    batch = Batch(torch.zeros(2000, 1, 4, 4), conditions=given)
    shares = {"text": 0.3, "text_pooled": 0.5, "texture": 0.0}
    drawn = Diffusion(conditions=tuple(given), label_dropout=shares).draw(batch, seeded()).draws
    gone = {name: drawn[name][:, 0] == 0 for name in given}
    assert torch.equal(gone["text"], gone["text_mask"])
    means = [float(gone[name].double().mean()) for name in ("text", "text_pooled")]
    assert means == pytest.approx([0.3, 0.5], abs=0.04)
    assert not gone["texture"].any()


@pytest.mark.parametrize(
    ("shares", "fits"),
    [
        (0.1, True),
        (0.0, False),
        ({"all": 0.0}, False),
        ({"all": 0.1}, True),
        ({"labels": 0.1}, False),
        ({"text": 0.1}, False),
        ({"labels": 0.1, "text_mask": 0.1}, False),
        ({"labels": 0.1, "text": 0.1}, True),
    ],
)
def test_guidance_needs_a_network_that_was_trained_without_each_condition(shares: Any, fits: bool) -> None:
    diffusion = Diffusion(conditional=True, conditions=("text", "text_mask"), label_dropout=shares)
    if fits:
        ClassifierFree(scale=2.0).check(diffusion)
        return
    with refused(ValueError, "'guidance'", "diffusion.label_dropout"):
        ClassifierFree(scale=2.0).check(diffusion)


def test_the_network_gets_conditions_by_its_own_keywords() -> None:
    def net(x: Tensor, times: Tensor, **given: Any) -> Tensor:
        calls.append(given)
        return x

    calls: list[dict[str, Any]] = []
    table = {"encoder_hidden_states": "caption", "added.text": "caption", "added.ids": "number"}
    diffusion, batch = Diffusion(conditions=table, label_dropout=0.0, prediction="sample"), of(4)
    diffusion(net, diffusion.draw(batch, seeded()))
    (given,) = calls
    assert torch.equal(given["encoder_hidden_states"], batch.conditions["caption"])
    assert torch.equal(given["added"]["ids"], batch.conditions["number"])
    assert (given["added"].keys(), diffusion.condition_names) == ({"text", "ids"}, ("caption", "number"))


def test_nothing_is_what_the_feed_says_or_zeros() -> None:
    empty, batch = torch.full((7, 2), -3.0), of(2000)
    diffusion = Diffusion(conditions=("caption", "number"), label_dropout=0.25).bind({"caption": empty})
    drawn = diffusion.draw(batch, seeded()).draws
    dropped = drawn["number"] == 0
    assert 0.2 < dropped.double().mean() < 0.3
    assert torch.equal(drawn["caption"][dropped], empty.expand(int(dropped.sum()), 7, 2))
    assert torch.equal(drawn["caption"][~dropped], batch.conditions["caption"][~dropped])

    net = Net()
    guided = Sampling(steps=1, guidance=ClassifierFree(scale=2.0), clipping="none")
    own = Diffusion(prediction="sample", conditions=("caption",), conditional=False).bind({"caption": torch.ones(1)})
    given = {"conditions": {"caption": torch.full((2, 1), 3.0)}, "device": torch.device("cpu")}
    made = guided.sample(net, own, (1, 4, 4), generators(0, 1), **given)
    assert brightness(made) == pytest.approx([5.0, 5.0])  # 1 + 2 (3 - 1)


def test_a_condition_may_stay_as_it_is() -> None:
    batch = of(200)
    options: Any = {"conditions": ("caption", "number")}
    diffusion = Diffusion(**options, label_dropout=0.5).bind({"number": None})
    drawn = diffusion.draw(batch, seeded()).draws
    assert 0 < (drawn["caption"] == 0).all((1, 2)).sum() < 200
    assert torch.equal(drawn["number"], batch.conditions["number"])
    with refused(ValueError, "'label_dropout'", "'number'"):
        Diffusion(**options, label_dropout={"number": 0.0, "all": 0.1}).bind({"number": None})


def test_missing_conditions_are_refused_by_name() -> None:
    with refused(ValueError, "'depth'", "'caption'", "'mask'"):
        Diffusion(conditions=("caption", "depth")).draw(of(2), seeded())
    with refused(ValueError, "'caption'", "none"):
        Diffusion(conditions="caption").draw(Batch(torch.zeros(2, 1, 2, 2)), seeded())
    with refused(ValueError, "'conditions'", "'noise'"):
        Diffusion(conditions=("noise",))


@pytest.mark.parametrize(("scale", "expected"), [(1.0, [0.2, 0.4]), (0.0, [0.0, 0.0]), (3.0, [0.6, 1.2])])
@pytest.mark.parametrize("conditional", [True, False])
def test_guidance_compares_with_no_label_and_zero_conditions(
    scale: float, expected: list[float], conditional: bool
) -> None:
    net, diffusion = Net(), Diffusion(prediction="sample", conditional=conditional, conditions=("caption", "mask"))
    given = {"caption": torch.tensor([[0.2], [0.4]]), "mask": torch.ones(2, 3).bool()}
    sampling = Sampling(steps=1, clipping="none", guidance=ClassifierFree(scale))
    labels = torch.tensor([5, 6])
    made = sampling.sample(net, diffusion, (1, 2, 2), generators(0, 1), "cpu", labels=labels, conditions=given)
    assert brightness(made) == pytest.approx(expected)
    (call,) = net.calls
    if scale == 1:
        assert torch.equal(call["mask"], given["mask"])
    else:
        assert call["mask"].tolist() == [[True] * 3] * 2 + [[False] * 3] * 2
        assert call["caption"].tolist() == [*given["caption"].tolist(), [0], [0]]
        assert (call["labels"].tolist() == [5, 6, -1, -1]) if conditional else call["labels"] is None


def test_sampling_slices_its_conditions_and_refuses_others() -> None:
    net, diffusion = Net(), Diffusion(prediction="sample", conditions="caption")

    def sample(**conditions: Tensor) -> Tensor:
        sampling = Sampling(steps=2, clipping="none", batch_size=5)
        return sampling.sample(net, diffusion, (1, 2, 2), generators(*range(12)), "cpu", conditions=conditions)

    assert brightness(sample(caption=CAPTIONS)) == pytest.approx(CAPTIONS.flatten().tolist())
    assert [len(call["caption"]) for call in net.calls] == [5, 5, 5, 5, 2, 2]
    for conditions, facts in (
        ({}, ["'caption'", "none"]),
        ({"captoin": CAPTIONS}, ["'captoin'", "'caption'"]),
        ({"caption": CAPTIONS, "mask": CAPTIONS}, ["'mask'", "'caption'"]),
        ({"caption": CAPTIONS[:3]}, ["'caption'", "(3, 1)", 12]),
    ):
        with refused(ValueError, *facts):
            sample(**conditions)


def test_a_loop_samples_with_given_conditions_or_those_of_training_samples() -> None:
    with loop(Net()) as running:
        own = torch.tensor([[0.9], [0.1], [0.5]])
        made = running.sample(SampleRequest(3, conditions={"caption": own})).images
        assert brightness(made) == pytest.approx([0.9, 0.1, 0.5])
        taken = CAPTIONS.flatten().tolist()
        assert brightness(running.sample(SampleRequest(3, start=10)).images) == pytest.approx([*taken[10:], taken[0]])
        evaluated = brightness(running.sample(SampleRequest(40, stream="evaluate")).images)
        later = brightness(running.sample(SampleRequest(10, start=30, stream="evaluate")).images)
        assert evaluated[30:] == later
        assert len({round(12 * value) for value in evaluated}) > 6
    with refused(ValueError, "'caption'", "(3, 1)", 2):
        SampleRequest(2, conditions={"caption": own})
    with loop(Net(), conditions=()) as running, refused(ValueError, "'caption'", "none"):
        running.sample(SampleRequest(3, conditions={"caption": own}))


def test_a_request_for_conditions_that_the_data_lacks_is_refused_by_name() -> None:
    with loop(Net(), conditions=("caption", "text")) as running, refused(ValueError, "'text'", "'caption'", "'mask'"):
        running.sample(SampleRequest(2))


def test_default_labels_belong_to_the_samples_with_the_conditions() -> None:
    net = Net()
    net.num_classes = 4
    with loop(net, conditional=True) as running:
        running.sample(SampleRequest(7, stream="evaluate"))
    (first, *_) = net.calls
    assert (first["labels"] == (first["caption"].flatten() * 12 - 1).round().long() % 4).all()


USER = """
import torch
from attrs import define
from hookdiff import InMemory, hookimpl
from torch import nn

class Pairs:
    def __len__(self):
        return 40

    def __getitem__(self, index):
        image = torch.full((1, 8, 8), index / 40)
        return {"image": image, "mask": image > 0.5, "caption": torch.full((3,), index / 40)}

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3, padding=1)
        self.norm = nn.Linear(3, 4)
        self.last = nn.Conv2d(4, 1, 3, padding=1)

    def forward(self, x, timesteps, mask, caption):
        hidden = self.first(torch.cat([x, mask.to(x)], 1)) + self.norm(caption)[..., None, None]
        return self.last(torch.nn.functional.silu(hidden))
"""


@pytest.fixture
def tables(user_module: Callable[[str, str], None]) -> dict[str, Any]:
    user_module("hd_pairs", USER)
    return {
        **SMALL,
        "data": {"source": "hd_pairs:Pairs", "flip": True},
        "model": {"use": "hd_pairs:Net"},
        "diffusion": {**SMALL["diffusion"], "conditions": ["mask", "caption"]},
    }


@pytest.mark.wide
def test_runs_of_a_config_get_conditions_and_sample_with_them(
    tables: dict[str, Any], write_config: Callable[..., Path], hookdiff: Command, succeed: Succeed, here: Path
) -> None:
    plugins = ["samples", "checkpoint", "loss", "nan", "debug", "memory", "spectral"]
    tables["data"]["held_out"] = 8
    tables["run"] = {"steps": 6, "batch_size": 16, "plugins": plugins, "micro_batch": 5, "log_every": 2}
    config = write_config(**tables, plugins={"samples": {"every": 3, "num": 4}})
    succeed("run", config, "--out", here / "run")
    assert len(list((here / "run" / "samples").glob("step-*.png"))) == 2
    assert "5 images" in succeed("sample", here / "run", "--num", 5, "--guidance-scale", 2, "--trust")
    before = sorted(here.iterdir())
    for command in ("memory", "doctor", "data"):
        code, out, err = hookdiff(command, config, *(["--steps", 4] if command == "doctor" else []))
        assert code in ((0, 1) if command == "doctor" else (0,)), err
        assert out
    assert sorted(here.iterdir()) == before


@pytest.mark.parametrize(
    ("names", "facts"),
    [
        (["mask", "text"], ["diffusion.conditions", "'text'", "'mask'", "'caption'"]),
        (["mask"], ["model", "hd_pairs:Net", "'caption'"]),
        ([], ["model", "hd_pairs:Net"]),
    ],
)
def test_conditions_that_do_not_fit_data_and_network_are_refused_before_training(
    tables: dict[str, Any], write_config: Callable[..., Path], tmp_path: Path, names: list[str], facts: list[str]
) -> None:
    tables["diffusion"]["conditions"] = names
    with refused(ConfigError, *facts):
        build_loop(load_config(write_config(**tables)), tmp_path / "run")
