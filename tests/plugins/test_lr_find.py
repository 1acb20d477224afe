"""The range test: `hookdiff lr CONFIG --find`."""

import json
import math
import statistics
from pathlib import Path

import pytest
import torch
from PIL import Image

from hookdiff import UserError, build_loop, load_config
from hookdiff.testing.toy import toy_loop
from hookdiff_lr.find import find, growing
from tests.conftest import acting, check_facts, check_refused, contents, output, records, refused, wide
from tests.plugins.test_lr import two_groups

RATES = growing(1e-5, 10, 200)
CURVATURES = torch.tensor([4.0, 0.5, 0.05])


class Bowl(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.place = torch.nn.Parameter(torch.full((3,), 3.0))

    def forward(self, inputs):
        return self.place - inputs


def quadratic(momentum, noise, steps=10_000, rate=0.1, below=0.0):
    """A loop on a quadratic with known curvatures and noisy gradients; its loss is shifted by `below`."""
    torch.manual_seed(0)
    return toy_loop(
        model=Bowl(),
        optimizers=lambda model: torch.optim.SGD(model.parameters(), lr=rate, momentum=momentum),
        objective=lambda net, batch: 0.5 * (CURVATURES * net(batch.inputs).square()).sum(1).mean() - below,
        data=noise * torch.randn(400, 3),
        batch_size=16,
        steps=steps,
    )


@pytest.mark.parametrize(
    ("momentum", "noise", "below"), [(0.0, 1.0, 0.0), (0.9, 0.1, 20.0), *wide((0.0, 0.1, 20.0), (0.9, 1.0, 0.0))]
)
def test_the_loss_of_a_quadratic_rises_from_its_largest_stable_rate(momentum, noise, below):
    stable = 2 * (1 + momentum) / CURVATURES.max().item()
    with quadratic(momentum, noise, below=below) as loop:
        test = find(loop, RATES)
    assert test.has_diverged
    assert 0.6 < test.rises / stable < 1.5
    assert test.falls < test.lowest < test.rises < test.rates[-1] < 2.5 * stable
    for rate, converges in ((test.suggested, True), (1.1 * stable, False)):
        with quadratic(momentum, noise, 300, rate) as loop:
            losses = [step.loss for step in loop.steps()]
        assert (losses[-1] < losses[0] / 2) is converges


@pytest.mark.parametrize("tail", [*wide(0.0, 1.0), 2.0])
def test_no_rate_is_suggested_where_the_loss_varies_by_chance(tail):
    """`tail` is the deviation of the logarithm of the samples' weights: the largest has losses far above the mean."""
    rates = growing(1e-9, 1e-7, 80)
    for seed in range(8):
        torch.manual_seed(seed)

        def weighted(net, batch):
            return ((CURVATURES * net(batch.inputs).square()).sum(1) * (tail * torch.randn(16)).exp()).mean()

        sgd = lambda model: torch.optim.SGD(model.parameters(), lr=0.1)  # noqa: E731
        options = {"model": Bowl(), "optimizers": sgd, "data": torch.randn(400, 3), "batch_size": 16, "steps": 1000}
        with toy_loop(objective=weighted, **options) as loop:
            test = find(loop, rates)
        assert (test.falls, test.suggested) == (None, None), seed
        check_facts(list(test.remarks(rates)), "no rate is suggested", f"{test.deviation:.3g}", "--steps 320")


def test_all_rates_keep_their_ratio_and_rise_step_by_step():
    seen, rates = [], growing(1e-6, 1e-4, 50)
    look = acting(before_step=lambda loop: seen.append([group["lr"] for group in loop.optimizers[0].param_groups]))
    with toy_loop({"look": look}, optimizers=two_groups, steps=1000) as loop:
        test = find(loop, rates)
    assert [first for first, _ in seen] == pytest.approx([*rates, rates[-1]])  # one more step has the last loss
    assert [second / first for first, second in seen] == pytest.approx([0.2] * 51)
    assert (test.has_diverged, test.rises, test.suggested) == (False, None, None)
    check_facts(list(test.remarks(rates)), "does not rise up to the rate 0.0001", "--rates 1e-06 0.01")


def test_the_loss_after_a_rate_is_that_of_the_next_step():
    losses = []
    look = acting(after_optimizer_step=lambda loop: losses.append(loop.gradients.loss))
    with toy_loop({"look": look}, steps=1000) as loop:
        test = find(loop, growing(1e-4, 1e-2, 40))
    assert test.losses == losses[1:]


def test_what_would_spoil_the_test_is_refused():
    def fixed(loop):
        loop.optimizers[0].param_groups[0]["lr"] = 0.5

    nothing = lambda net, batch: net(batch.inputs).mean() * math.nan  # noqa: E731
    for options, facts in (
        ({"plugins": {"other": acting(before_step=fixed)}}, ("another plugin", "0.5", "1e-05")),
        ({"objective": nothing}, ("nan at the rate 1e-05", "hookdiff doctor")),
        ({"optimizers": lambda model: torch.optim.SGD(model.parameters(), lr=0.0)}, ("the rate 0", "above 0")),
    ):
        with refused(UserError, *facts), toy_loop(steps=1000, **options) as loop:
            find(loop, RATES)


MUON = {"use": "muon", "lr": 0.02, "adamw_lr": 0.001, "adamw": ["conv*"]}


def test_the_command_suggests_a_rate_for_each_optimizer(write_config, here, hookdiff):
    config = write_config(optimizer=MUON, run={"steps": 3, "batch_size": 64, "plugins": ["lr", "progress", "nan"]})
    words = ("--find", "--steps", 80, "--rates", "1e-4", 100, "-o", "sub/find.png")
    head, columns, *rows, suggested, _, path = output(hookdiff("lr", config.name, *words)).splitlines()
    check_facts(head, "small", "of 80 rates", "from 0.0001")
    assert columns.split() == ["lr", "lr/adamw", "loss"]
    rates = {row.partition("the loss ")[2]: [float(each) for each in row.split()[:3]] for row in rows}
    assert list(rates) == ["falls from here on", "is lowest", "rises from here on"]
    assert all(adamw == pytest.approx(0.05 * lr, rel=0.01) for lr, adamw, _ in rates.values())
    rises = rates["rises from here on"][0]
    assert rates["falls from here on"][0] < rates["is lowest"][0] < rises
    tenth = float(f"{0.1 * rises:.2g}")
    check_facts(suggested, f"lr = {tenth:g}", f"lr/adamw = {0.05 * tenth:.3g}")
    assert path.strip() == "sub/find.png"
    with Image.open(here / "sub" / "find.png") as picture:
        assert picture.size == (900, 600)
    assert {path.name for path in contents(here)} == {"small.toml", "find.png"}


@pytest.mark.wide
def test_a_run_is_tried_from_its_weights_and_stays_as_it_is(write_config, here, succeed):
    config = write_config(run={"steps": 60, "plugins": ["lr", "checkpoint", "ema"]}, optimizer={"lr": 0.003})
    succeed("run", config.name)
    before = contents(here)
    words = ("--find", "--json", "--steps", 40, "--rates", "1e-7", "1e-6")
    fresh, trained = (json.loads(succeed("lr", path, *words)) for path in (config.name, "runs/small"))
    after = contents(here)
    assert after.pop(Path(fresh["picture"])).startswith(b"\x89PNG")
    assert (after, trained["picture"], trained["suggested"]) == (before, "small-lr-find.png", None)
    assert [len(trained[name]) for name in ("rates", "losses", "smooth")] == [40] * 3
    *_, last = (line["loss"] for line in records(here / "runs/small") if "loss" in line)
    assert statistics.median(trained["losses"]) == pytest.approx(last, rel=0.3)
    assert statistics.median(trained["losses"]) < 0.8 * statistics.median(fresh["losses"])


@pytest.mark.parametrize(
    ("words", "facts"),
    [
        (["--steps", 50], ["--steps", "--find"]),
        (["--find", "--rates", 1, 0.1], ["--rates", "1 0.1"]),
        (["--find", "--rates", 1, "nan"], ["--rates", "1 nan"]),
        (["--find", "-o", "x.format"], ["x.format", "x.png"]),
        (["--find", "--set", "optimizer.lr=0"], ["the rate 0"]),
    ],
)
def test_each_mistake_gives_one_message(words, facts, write_config, hookdiff):
    check_refused(hookdiff("lr", write_config(), *words), *facts)


RUN = {"batch_size": 64, "plugins": ["clip"]}


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [{"use": "muon"}, {"use": "adamw"}, {"use": "torch.optim:SGD", "momentum": 0.9}])
def test_the_suggestion_is_as_good_as_the_best_of_a_sweep(optimizer, write_config, tmp_path, succeed):
    """Of five rates a factor of 10 apart; the losses are means over steps 200 to 300 of digits."""
    config = write_config(diffusion={}, optimizer={**optimizer, "lr": 1e-3}, run=RUN)
    suggested = json.loads(succeed("lr", config, "--find", "--json", "-o", tmp_path / "find.png"))["suggested"]

    def final(rate):
        changes = [f"optimizer.lr={rate}", "run.steps=300"]
        with build_loop(load_config(config, settings=changes), tmp_path / f"{rate}", hooks=("after_backward",)) as loop:
            return statistics.fmean([step.loss for step in loop.steps()][200:])

    sweep = {rate: final(rate) for rate in (1e-4, 1e-3, 1e-2, 1e-1, 1.0)}
    assert final(suggested["lr"]) < 1.05 * min(sweep.values()), (suggested, sweep)
