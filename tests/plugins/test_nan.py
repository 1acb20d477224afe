import json
import math
import re

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from hookdiff import Feed, LossOutput, hookimpl
from hookdiff.builtin.logged import Metrics
from hookdiff.testing import ToyObjective, assert_same, on_ranks, toy_loop, toy_model, weights
from hookdiff.testing.rank_checks import Averaging
from hookdiff_amp import AMP
from hookdiff_checkpoint import Checkpoint
from hookdiff_nan import NaN
from tests.conftest import acting, check_facts, outcomes, toy_run, two_ranks
from tests.sam import SAM, Uncertainty

BAD = 3  # the batch with the NaN


class Plant:
    """Spoils something before the step of the batch `BAD`."""

    def __init__(self, spoil):
        self.spoil = spoil

    @hookimpl
    def before_step(self, loop, batch):
        if loop.progress.position == BAD:
            self.spoil(loop, batch)


@torch.no_grad()
def spoil_weight(loop, batch):
    loop.model[3].weight[1, 2] = math.inf


def spoil_data(loop, batch):
    batch.inputs[5] = math.nan


def spoil_draw(loop, batch):
    batch.draws["noise"][2, 0] = math.inf


class Spoilt(ToyObjective):
    """Makes the loss of the draw number `BAD` not finite."""

    drawn = -1

    def draw(self, batch, generator):
        self.drawn += 1
        return super().draw(batch, generator)

    def __call__(self, net, batch):
        output = super().__call__(net, batch)
        return self.spoilt(net, output) if self.drawn == BAD else output

    def spoilt(self, net, output):
        return LossOutput(output.loss - math.inf, output.per_sample)


class SpoiltGradient(Spoilt):
    def spoilt(self, net, output):
        weight = net[0].weight
        return LossOutput(output.loss + (weight - weight).sqrt().sum() * 0, output.per_sample)


class GivesNaN(Spoilt):
    """Makes inputs for the network that are not finite."""

    def __call__(self, net, batch):
        if self.drawn == BAD:
            return LossOutput(net(batch.inputs / 0).square().mean())
        return super().__call__(net, batch)


class Odd(nn.Module):
    """Returns its input until it is broken, and then `function` of it."""

    def __init__(self, function):
        super().__init__()
        self.function, self.broken = function, False

    def forward(self, x):
        return self.function(x) if self.broken else x


BREAKS = Plant(lambda loop, batch: setattr(loop.model[1], "broken", True))


def model_with(function):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), Odd(function), nn.Linear(8, 4))


def made_nan(x):
    return x * (-1 - x.detach().square()).sqrt()


def derived_nan(x):
    return x + 0 * (x - x).sqrt()


def too_large(x):
    return (x * 1e6).to(x.dtype) / 1e6


class TooSteep(torch.autograd.Function):
    """The identity, whose derivative is 1e6."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return (gradient * 1e6).to(gradient.dtype) / 1e6


def data():
    return torch.linspace(-1, 1, 160).reshape(40, 4).clone()


HALF = {"plant": BREAKS, "amp": AMP("fp16", init_scale=1)}
CASES = {  # the cause, plugins, options, facts
    "weight": ("weight", {"plant": Plant(spoil_weight)}, {}, ["3.weight"]),
    "data": ("data", {"plant": Plant(spoil_data)}, {}, ["inputs", "sample"]),
    "draw": ("draw", {"plant": Plant(spoil_draw)}, {}, ["noise"]),
    "loss": ("loss", {}, {"objective": Spoilt}, ["loss"]),
    "objective": ("loss", {}, {"objective": GivesNaN}, ["objective"]),
    "forward": ("forward", {"plant": BREAKS}, {"function": made_nan}, ["1 (Odd)", "NaN"]),
    "backward": ("backward", {"plant": BREAKS}, {"function": derived_nan}, ["1 (Odd)"]),
    "parameter": ("backward", {}, {"objective": SpoiltGradient}, ["0.weight"]),
    "overflow": ("overflow", HALF, {"function": too_large}, ["float16", "1 (Odd)", "autocast"]),
    "overflow backwards": ("overflow", HALF, {"function": TooSteep.apply}, ["float16", "backward", "autocast"]),
    "forward under amp": ("forward", HALF, {"function": made_nan}, ["1 (Odd)", "NaN"]),
}


@pytest.mark.parametrize("micro_batch", [None, 3])
@pytest.mark.parametrize("case", CASES)
def test_each_cause_is_found(case, micro_batch, tmp_path, caplog):
    cause, plugins, options, facts = CASES[case]
    options = dict(options)
    if function := options.pop("function", None):
        options["model"] = model_with(function)
    if objective := options.pop("objective", None):
        options["objective"] = objective()
    nan = NaN()
    loop = toy_loop({"nan": nan, **plugins}, run_dir=tmp_path, data=data(), micro_batch=micro_batch, **options)
    assert loop.run() == "on_nan"
    assert loop.progress.position == BAD
    assert nan.diagnosis.cause == cause
    check_facts(nan.diagnosis.text, *facts)
    assert str(nan.diagnosis) in caplog.text
    (folder,) = (tmp_path / "nan").iterdir()
    assert folder.name == f"step-{loop.progress.step:08d}-position-{BAD:08d}"
    report = json.loads((folder / "report.json").read_text())
    assert (report["cause"], report["position"]) == (cause, BAD)
    assert report["module"] == ("1" if "1 (Odd)" in facts else None)
    assert report["parameter"] == {"weight": "3.weight", "parameter": "0.weight"}.get(case)


def test_a_gradient_between_modules_is_placed_after_the_innermost(tmp_path):
    class Between(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
            self.broken = False

        def forward(self, x):
            x = self.block(x)
            return derived_nan(x) if self.broken else x

    plant = Plant(lambda loop, batch: setattr(loop.model, "broken", True))
    toy_loop({"nan": (nan := NaN()), "plant": plant}, model=Between(), run_dir=tmp_path).run()
    assert nan.diagnosis.cause == "backward"
    check_facts(nan.diagnosis.text, "after block.1 (Linear)")


@pytest.mark.parametrize(("spoil", "row"), [(spoil_data, 5), (spoil_draw, 2)])
def test_only_the_bad_samples_are_named_even_where_they_spoil_the_others(spoil, row, tmp_path, caplog):
    class Named:
        """Data whose samples have files."""

        def __len__(self):
            return 40

        def __getitem__(self, index):
            return data()[index].reshape(1, 2, 2)

        def describe(self, index):
            return f"pictures/{index}.png"

    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Unflatten(1, (1, 2, 2)))
    nan = NaN()
    loop = toy_loop({"nan": nan, "plant": Plant(spoil)}, model=model, data=Named(), run_dir=tmp_path)
    loop.run()
    (sample,) = nan.diagnosis.samples
    index = loop.feed.order(0)[8 * BAD + row].item()
    assert (sample["row"], sample["index"], sample["name"]) == (row, index, f"pictures/{index}.png")
    (text,) = [text for text in nan.diagnosis.details.values() if "pictures/" in text]
    check_facts(text, f"pictures/{index}.png", f"{sample['timestep']:g}")
    assert text in caplog.text
    # The core names those with a bad loss: all of them.
    assert len(set(re.findall(r"pictures/\d+\.png", caplog.text))) == 8


def test_golden_lines_of_the_report(tmp_path, caplog):
    losses = []
    steps = acting(after_optimizer_step=lambda loop: losses.append(f"{loop.gradients.loss:.4g}"))
    toy_loop({"nan": NaN(), "plant": BREAKS, "steps": steps}, model=model_with(made_nan), run_dir=tmp_path).run()
    for line in (
        "learning rate: 0.01",
        f"epoch: 0, {8 * BAD} samples into it",
        f"updates 1 to {BAD}: losses {' '.join(losses)}",
        "first output not finite: 1 (Odd), in float32",
        "output float32 8 x 8: 64 NaN",
        "outputs of the network: float32 8 x 4: 32 NaN",
    ):
        assert line in caplog.text, line
    (folder,) = (tmp_path / "nan").iterdir()
    assert (folder / "report.txt").read_text().rstrip() in caplog.text
    assert f"replay: hookdiff replay {folder}" in caplog.text


def test_an_infinity_on_purpose_is_not_blamed(tmp_path):
    class Mask(nn.Module):
        def forward(self, x):
            return torch.full_like(x, -math.inf)

    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.mask = nn.Linear(4, 4), Mask()

        def forward(self, x):
            return self.inner(x) + self.mask(x).softmax(1).nan_to_num(0)

    nan = NaN()
    toy_loop({"nan": nan}, model=Masked(), objective=Spoilt(), run_dir=tmp_path).run()
    assert (nan.diagnosis.cause, nan.diagnosis.module) == ("loss", None)


def test_a_cause_that_does_not_occur_again_is_unclear(tmp_path):
    class Once:
        calls = 0

        @hookimpl(wrapper=True)
        def compute_loss(self):
            output = yield
            self.calls += 1
            return LossOutput(output.loss * math.nan) if self.calls == 3 else output

    nan = NaN()
    toy_loop({"nan": nan, "once": Once()}, run_dir=tmp_path).run()
    assert nan.diagnosis.cause == "unclear"


class Net(nn.Module):
    """Dropout, batch norm, and a buffer that no checkpoint holds."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 4))
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, x):
        self.calls = self.calls + 1
        return self.layers(x)


class Around:
    """Records all that a diagnosis could change, before and after it."""

    def look(self, loop):
        gradients = [p.grad for p in loop.model.parameters()]
        values = [gradient.clone() for gradient in gradients]
        hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in loop.model.modules()]
        modes = [module.training for module in loop.model.modules()]
        return gradients, values, torch.get_rng_state(), hooks + modes, loop.plugins["amp"].state_dict()

    @hookimpl(wrapper=True)
    def on_nan(self, loop):
        verdicts = yield
        self.after = self.look(loop)
        return verdicts


class Before:
    @hookimpl(trylast=True)
    def on_nan(self, loop):
        self.before = loop.plugins["around"].look(loop)


@pytest.mark.parametrize("precision", ["fp16", "off"])
def test_a_diagnosis_leaves_no_trace(precision, tmp_path):
    plugins = {"around": (around := Around()), "nan": NaN(), "amp": AMP(precision), "before": (before := Before())}
    with toy_loop(plugins, model=Net(), objective=Spoilt(), run_dir=tmp_path, micro_batch=3) as loop:
        torch.manual_seed(11)
        assert [step.outcome for step in loop.steps()][-1] == "stopped"
    (grads, values, rng, rest, amp), after = before.before, around.after
    assert all(before_it is other for before_it, other in zip(grads, after[0], strict=True))
    assert all(torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in zip(values, after[1], strict=True))
    assert torch.equal(rng, after[2])
    assert (rest, amp) == after[3:]
    assert sum(rest[: len(rest) // 2]) == 0


@pytest.mark.parametrize("micro_batch", [None, 3])
def test_a_diagnosis_keeps_no_graph(micro_batch, graphs, tmp_path):
    plugins = {"nan": NaN("skip"), "plant": Plant(spoil_data)}
    model = graphs.watch(toy_model())
    toy_loop(plugins, model=model, data=data(), steps=BAD + 1, run_dir=tmp_path, micro_batch=micro_batch).run()
    assert graphs.num_made > BAD + 1
    assert graphs.num_alive == 0


@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_buffers_are_those_from_before_the_step(policy, tmp_path):
    seen = []
    sees = acting(before_step=lambda loop: seen.append({n: value.clone() for n, value in loop.model.named_buffers()}))
    plugins, options = {"plant": Plant(spoil_data)}, {"data": data(), "steps": BAD + 1, "run_dir": tmp_path}
    loop = toy_run({"nan": NaN(policy), "sees": sees, **plugins}, model=Net(), **options)
    now = dict(loop.model.named_buffers()) if policy == "stop" else seen[BAD + 1]
    assert_same(now, seen[BAD])
    assert now["calls"] == BAD
    control = toy_run(plugins, model=Net(), **options)  # without the plugin too
    assert_same(dict(control.model.named_buffers()), seen[BAD])


class NaNAt(Spoilt):
    """Has a NaN at the draws in `bad`."""

    def __init__(self, *bad):
        self.bad = bad

    def __call__(self, net, batch):
        output = ToyObjective.__call__(self, net, batch)
        return LossOutput(output.loss * math.nan) if self.drawn in self.bad else output


def test_skips_are_counted_in_a_row(tmp_path, caplog):
    loop = toy_loop({"nan": NaN("skip", max_skips=2)}, objective=NaNAt(1, 2, 5, 6, 9, 10, 11), run_dir=tmp_path)
    assert loop.run() == "on_nan"
    assert (loop.progress.step, loop.progress.position) == (5, 11)
    check_facts(caplog.messages[-1], "skip", 2, "max_skips", "stop")
    assert len(list((tmp_path / "nan").iterdir())) == 3  # keep
    assert caplog.text.count("plugins.nan.keep") == 4


def test_a_bad_weight_is_not_skipped(caplog):
    loop = toy_loop({"nan": NaN("skip", max_skips=9), "plant": Plant(spoil_weight)})
    assert loop.run() == "on_nan"
    assert loop.progress.position == BAD
    (message,) = caplog.messages
    check_facts(message, "skip", "weight", "stop")
    assert "position-" not in message  # nowhere to keep it


def test_a_rollback_needs_a_checkpoint(tmp_path, caplog):
    plugins = {"nan": NaN("rollback"), "checkpoint": Checkpoint(every=10)}
    assert toy_loop(plugins, objective=NaNAt(2), run_dir=tmp_path).run() == "on_nan"
    check_facts(caplog.messages[-1], "checkpoint")


def test_a_rollback_continues_with_the_next_batches(tmp_path):
    plugins = {"nan": NaN("rollback"), "checkpoint": Checkpoint(every=2)}
    with toy_loop(plugins, objective=NaNAt(5), run_dir=tmp_path, steps=6) as loop:
        outcomes = [(step.outcome, step.step) for step in loop.steps()]
    assert outcomes[4:] == [("updated", 5), ("skipped", 4), ("updated", 5), ("updated", 6)]


def test_a_resumed_run_can_roll_back_at_once_and_has_the_state_that_was_saved(tmp_path):
    saved, seen = NaN("rollback"), []
    toy_loop({"nan": saved, "checkpoint": Checkpoint(every=3)}, run_dir=tmp_path, steps=3).run()
    sees = acting(before_step=lambda loop: seen.append(loop.plugins["nan"].state_dict()))
    plugins = {"sees": sees, "nan": NaN("rollback"), "checkpoint": Checkpoint(every=3)}
    loop = toy_loop(plugins, objective=NaNAt(0), run_dir=tmp_path, steps=5, resume=True)
    assert outcomes(loop) == ["skipped", "updated", "updated"]
    assert {**seen[0], "last": saved.state_dict()["last"]} == saved.state_dict()
    assert [values[0] for values in seen[0]["last"]] == [1.0, 2.0, 3.0]
    assert loop.end.reason == "done"


def test_a_run_does_not_roll_back_for_ever(tmp_path, caplog):
    # The updates between repeat those that were rolled back: none is new.
    plugins = {"nan": NaN("rollback", max_skips=2), "checkpoint": Checkpoint(every=2)}
    loop = toy_loop(plugins, objective=NaNAt(3, 5, 7, 9, 11), run_dir=tmp_path)
    assert loop.run() == "on_nan"
    assert loop.progress.position == 7
    check_facts(caplog.messages[-1], "rollback", 2, "max_skips", "stop")


def test_a_folder_that_cannot_be_written_does_not_end_the_run(tmp_path, caplog):
    (tmp_path / "nan").write_text("a file")
    plugins = {"metrics": Metrics(), "nan": NaN("skip")}
    assert toy_loop(plugins, objective=NaNAt(1), run_dir=tmp_path, steps=3).run() == "done"
    (message,) = caplog.messages
    check_facts(message, tmp_path / "nan", "File exists")
    assert "hookdiff replay" not in message
    assert toy_loop({"nan": NaN(keep=0)}, objective=NaNAt(1), run_dir=tmp_path / "other", steps=3).run() == "on_nan"
    assert not (tmp_path / "other").exists()
    assert "position-" not in caplog.messages[-1]


def test_half_written_folders_are_not_counted_and_are_replaced(tmp_path):
    root = tmp_path / "nan"
    name = "step-00000001-position-00000001"
    (root / f".{name}.partial").mkdir(parents=True)
    (root / f".{name}.partial" / "step.json").write_text("{")
    for _ in range(2):  # a run that was resumed meets the step again
        toy_loop({"nan": NaN(keep=1)}, objective=NaNAt(1), run_dir=tmp_path).run()
        assert [path.name for path in root.iterdir()] == [name]


def test_the_state_of_plugins_is_kept_from_before_the_step(tmp_path):
    amp = AMP("fp16", init_scale=8.0)
    toy_loop({"amp": amp, "nan": NaN()}, objective=NaNAt(2), run_dir=tmp_path, model=toy_model(dropout=0.1)).run()
    (folder,) = (tmp_path / "nan").iterdir()
    states = json.loads((folder / "step.json").read_text())["values"]["plugins"]
    assert states["amp"]["scaler"]["scale"] == 8.0
    assert amp.scaler.get_scale() == 4.0
    assert [values[0] for values in states["nan"]["last"]] == [1.0, 2.0]


class Fragile(nn.Module):
    """Makes NaN once its weight is further than 0.01 from 1."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x):
        return x * self.weight * (0.01 - (self.weight - 1).abs().max()).sqrt()


class Numbers:
    """Compares what the loop knows of the gradients, and the weights, before and after the diagnosis."""

    has_compared = False

    def look(self, loop):
        gradients = loop.gradients
        return str((gradients.loss, gradients.total_norm, gradients.finite, gradients.overflowed)), weights(loop)

    @hookimpl(wrapper=True)
    def on_nan(self, loop):
        seen, before = self.look(loop)
        verdicts = yield
        again, after = self.look(loop)
        assert again == seen
        assert_same(after, before)
        self.has_compared = True
        return verdicts


@pytest.mark.parametrize("amp", [{}, {"amp": AMP("fp16", init_scale=2)}], ids=["", "amp"])
@pytest.mark.parametrize("micro_batch", [None, 3])
def test_a_nan_of_the_second_pass_is_found_in_its_module(micro_batch, amp, tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), Fragile(), nn.Linear(8, 4))
    nan, numbers = NaN(), Numbers()
    plugins = {"numbers": numbers, "nan": nan, "sam": SAM(rho=5.0, after=BAD), **amp}
    options = {"model": model, "optimizers": lambda net: torch.optim.SGD(net.parameters(), 1e-4)}
    loop = toy_loop(plugins, run_dir=tmp_path, micro_batch=micro_batch, **options)
    assert loop.run() == "on_nan"
    assert (loop.progress.position, nan.diagnosis.cause, nan.diagnosis.module) == (BAD, "forward", "1")
    check_facts(nan.diagnosis.text, "1 (Fragile)", "NaN")
    assert numbers.has_compared
    assert (model[1].weight - 1).abs().max() < 0.01


@pytest.mark.parametrize("micro_batch", [None, 3])
def test_a_bad_weight_of_a_plugin_is_named(micro_batch, tmp_path):
    plant = Plant(lambda loop, batch: loop.plugins["weight"].net.weight.data.fill_(math.nan))
    nan = NaN()
    toy_loop({"nan": nan, "weight": Uncertainty(), "plant": plant}, run_dir=tmp_path, micro_batch=micro_batch).run()
    assert (nan.diagnosis.cause, nan.diagnosis.parameter) == ("weight", "weight: weight")


def test_a_run_that_cannot_be_saved_is_diagnosed_too(tmp_path, caplog):
    """The optimizer holds a weight that is not the model's."""
    other = nn.Parameter(torch.ones(4))

    class Scaled(ToyObjective):
        def __call__(self, net, batch):
            output = super().__call__(net, batch)
            return LossOutput(output.loss * (2 + other.mean()).log())

    nan = NaN()
    plugins = {"nan": nan, "plant": Plant(lambda loop, batch: other.data.fill_(-3.0))}
    optimizers = lambda net: torch.optim.AdamW([*net.parameters(), other], 0.01)  # noqa: E731
    assert toy_loop(plugins, objective=Scaled(), optimizers=optimizers, run_dir=tmp_path).run() == "on_nan"
    assert nan.diagnosis.cause == "loss"
    assert list(tmp_path.glob("nan/*")) == []
    check_facts(caplog.messages[-1], "not kept", "AdamW")


MEMORY = """
from torch import nn
from hookdiff import hookimpl
from hookdiff.testing.toy import toy_loop
from hookdiff_ddp import DDP
from hookdiff_nan import NaN

class Heavy(nn.Linear):
    "The second rank has memory for one pass of a step, and none to repeat it."
    passes = 0
    def forward(self, x):
        self.passes += 1
        if rank and self.passes > 1:
            raise torch.OutOfMemoryError("out of memory")
        return super().forward(x)

class Spoils:
    "The third batch is not finite on the second rank."
    @hookimpl
    def before_step(self, loop, batch):
        loop.model.passes = 0
        if rank and loop.progress.position == 2:
            batch.inputs.fill_(torch.nan)

nan = NaN("skip")
loop = toy_loop({"ddp": DDP(), "spoils": Spoils(), "nan": nan}, model=Heavy(4, 4), steps=4)
result = loop.run(), loop.progress.position, nan.diagnosis.cause
"""


@pytest.mark.wide
def test_a_rank_without_memory_for_the_diagnosis_lets_no_other_wait(tmp_path):
    first, second = two_ranks(MEMORY, tmp_path)
    assert first == second
    assert first[:2] == ("done", 5)


def test_ranks_with_a_filler_keep_the_step_of_one_process(tmp_path):
    # The last batch has two samples, of which the first is not finite, so the filler of the third rank is not either.
    data = torch.linspace(-1, 1, 24).reshape(6, 4)
    data[Feed(data).bind(4).order(0)[4]] = torch.nan

    def kept(num):
        def work(rank):
            plugins = {"averaging": Averaging(), "nan": NaN("stop")}
            run, feed = tmp_path / f"on {num}", Feed(data.clone(), drop_last=False)
            assert toy_loop(plugins, data=feed, batch_size=4, steps=4, run_dir=run).run() == "on_nan"

        on_ranks(num, work)
        (folder,) = (tmp_path / f"on {num}" / "nan").iterdir()
        report, step = (json.loads((folder / name).read_bytes()) for name in ("report.json", "step.json"))
        return report["samples"], step["inputs"], step["results"], load_file(folder / "batch.safetensors")["indices"]

    *alone, indices = kept(1)
    *three, others = kept(3)
    assert three == alone
    assert torch.equal(others, indices)
    assert len(indices) == 2
