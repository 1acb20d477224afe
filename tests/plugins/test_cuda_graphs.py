"""The plugin `cuda_graphs`: on a GPU, and on a CPU with a recorder that notes operations and repeats them."""

import logging
import warnings
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import Any

import pytest
import torch
from torch import nn

import hookdiff_cuda_graphs.plugin
from hookdiff import Feed, InMemory, Loop, LoopConfig, LossOutput, UserError, hookimpl
from hookdiff.authors.trial_passes import rehearsing
from hookdiff.data import digits
from hookdiff.diffusion.diffusion import Diffusion
from hookdiff.experiment.discovery import plugin_class
from hookdiff.experiment.optimizers import weights_of
from hookdiff.images import Transforms, feed_of
from hookdiff.loop.device_part import DevicePart
from hookdiff.models.adamw import AdamW
from hookdiff.testing import CountTransfers, ToyObjective, assert_same, toy_loop, toy_model, weights
from hookdiff_checkpoint import Checkpoint
from hookdiff_cuda_graphs import CudaGraphs
from hookdiff_muon import muon
from hookdiff_networks import DiT, UNet
from tests.conftest import Logged, acting, check_facts, outcomes, ran, refused, toy_run, two_ranks, wide
from tests.data.test_shape_order import Shaped
from tests.replayed import CpuRecorder

WARMUP, STEPS = 3, 20
DROPPING = partial(toy_model, dropout=0.3)
USUAL: dict[str, dict[str, Any]] = {
    "lr": {"warmup": 4},
    "clip": {"rule": {"use": "norm", "max_norm": 0.5}},
    "amp": {"precision": "bf16"},
    "ema": {"decay": [0.9], "std": [0.1]},
    "nan": {},
}
OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda model: AdamW(model.parameters(), lr=1e-3, fused=True),
    "torch's adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True),
    "adam": lambda model: torch.optim.Adam(model.parameters(), lr=1e-3, fused=True),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=1e-3, fused=True),
    "muon": lambda model: muon(weights_of(model), lr=1e-3),
}


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)  # two runs are compared
    return torch.device(request.param, 0) if request.param == "cuda" else torch.device("cpu")


@pytest.fixture
def recorder(device, monkeypatch):
    """The recorder of the tests; on a GPU the real one, whose replays are counted."""
    if device.type == "cpu":
        made = CpuRecorder()
    else:
        made = hookdiff_cuda_graphs.plugin.recorder_for(device)
        made.num_replays, record, count = [0, 0], made.record, [0]

        def counted(work):
            replay, number = record(work), count[0] % 2
            count[0] += 1

            def replay_and_count():
                made.num_replays[number] += 1
                replay()

            return replay_and_count

        made.record = counted
    monkeypatch.setattr(hookdiff_cuda_graphs.plugin, "recorder_for", lambda device: made)
    return made


def plugins(**given: object) -> dict[str, object]:
    return {name: plugin_class(name)(**options) for name, options in USUAL.items()} | given


def graphs() -> CudaGraphs:
    return CudaGraphs(warmup=WARMUP)


def toy(device, given, **options):
    options = {"model": DROPPING(), "steps": STEPS, **options}
    return toy_loop(given, **options | {"model": options["model"].to(device)})


def both(device, make_model=DROPPING, given=None, **options):
    """Run a loop with recorded steps and one with usual ones, each with a model and plugins of its own."""
    loops = []
    for extra in ({"cuda_graphs": graphs()}, {}):
        made = {name: make() for name, make in (given or {}).items()}
        loops.append(ran(toy(device, plugins(**made, **extra), model=make_model(), **options)))
    return loops


def assert_close(loop: Loop, other: Loop, atol: float = 1e-6) -> None:
    """The rate is a float32 on the device, and an average is updated by three operations in place of one."""
    for mine, theirs in (
        (loop.model.state_dict(), other.model.state_dict()),
        (loop.plugins["ema"].shadow, other.plugins["ema"].shadow),  # type: ignore[attr-defined]
    ):
        for name, value in theirs.items():
            torch.testing.assert_close(mine[name], value, rtol=1e-5, atol=atol)


def test_replayed_steps_give_the_weights_and_averages_of_usual_ones(device, recorder):
    replayed, usual = toy(device, plugins(cuda_graphs=graphs())), toy(device, plugins())
    steps = []
    for loop in (replayed, usual):
        with loop:
            steps.append(list(loop.steps()))
    assert recorder.num_replays == [STEPS - WARMUP] * 2
    assert_close(replayed, usual)
    for one, other in zip(*steps, strict=True):
        assert (one.step, one.outcome) == (other.step, other.outcome)
        assert one.loss == pytest.approx(other.loss, rel=1e-4)
        assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-4)


NETWORKS: dict[str, Any] = {
    "unet": partial(UNet, in_channels=1, image_size=8, channels=8, num_res_blocks=1, head_dim=8),
    "dit": partial(DiT, in_channels=1, image_size=8, patch_size=4, hidden_size=16, depth=2),
}
REAL = [("adamw", "unet"), ("muon", "dit"), *wide(*((name, "unet") for name in OPTIMIZERS if name != "adamw"))]


@pytest.mark.parametrize(("optimizer", "network"), REAL)
def test_networks_and_optimizers_of_real_runs(device, recorder, network, optimizer):
    labels = device.type == "cuda"  # on a CPU the networks look at their values, to refuse wrong ones
    loops = []
    for given in (plugins(cuda_graphs=graphs()), plugins()):
        torch.manual_seed(0)
        model, config = NETWORKS[network](num_classes=10 if labels else 0).to(device), LoopConfig(steps=8, batch_size=8)
        diffusion = Diffusion(conditional=labels)
        loops.append(ran(Loop(model, OPTIMIZERS[optimizer], diffusion, Feed(digits()), config, given)))
    assert recorder.num_replays == [5, 5]
    # Where a gradient is near 0, AdamW magnifies its rounding: allow a hundredth of an update at this rate.
    assert_close(*loops, atol=1e-5)


def test_each_shape_of_samples_has_a_recording(device, recorder):
    def objective(net, batch):
        return (net(batch.inputs / 40) - 1).square().mean()

    torch.manual_seed(0)
    nets = [nn.Conv2d(1, 1, 3, padding=1).to(device) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    loops = [
        ran(toy(device, given, model=net, objective=objective, data=Feed(Shaped([24, 16, 8]))))
        for net, given in zip(nets, (plugins(cuda_graphs=graphs()), plugins()), strict=True)
    ]
    assert recorder.num_replays == [STEPS - 3 * WARMUP] * 2
    assert len(loops[0].plugins["cuda_graphs"]._steps) == 3
    assert_close(*loops)


def test_a_replayed_step_makes_the_host_wait_once(device, recorder):
    loop = toy(device, plugins(cuda_graphs=graphs()), log_every=100)
    counts = []
    with loop:
        for batch in (batch for epoch in range(3) for batch in loop.feed.batches(epoch)):
            with CountTransfers() as transfers:
                loop.run_step(batch)
            counts.append(transfers.count)
    assert counts[WARMUP + 1 :] == [1] * (15 - WARMUP - 1)


@pytest.mark.cuda
@pytest.mark.parametrize("recorded", [True, False])
def test_torch_sees_one_wait_in_a_step(recorded):
    """Counted by torch itself: every call that makes the host wait for the device is a warning."""
    loop = Loop(
        UNet(in_channels=1, image_size=8, channels=8, num_res_blocks=1, head_dim=8, num_classes=10).to("cuda"),
        lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True),
        Diffusion(conditional=True),
        feed_of(digits(), Transforms(flip=True)),
        LoopConfig(steps=15, batch_size=8, log_every=100),
        plugins(**({"cuda_graphs": graphs()} if recorded else {})),
    )
    counts = []
    with loop:
        steps = loop.steps()
        for _ in range(15):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                torch.cuda.set_sync_debug_mode("warn")  # which warns that it may miss some
                try:
                    next(steps)
                finally:
                    torch.cuda.set_sync_debug_mode("default")
            counts.append(len([one for one in caught if "called a synchronizing" in str(one.message)]))
    assert counts[WARMUP + 1 :] == [1] * (15 - WARMUP - 1)


class Poison:
    """An objective whose loss is not finite at the positions in `at`."""

    def __init__(self, at):
        self.toy, self.at, self.position = ToyObjective(), at, -1

    def draw(self, batch, generator):
        self.position += 1
        drawn = self.toy.draw(batch, generator)
        if self.position in self.at:
            drawn.draws["noise"][0] = float("nan")
        return drawn

    def __call__(self, net, batch):
        return self.toy(net, batch)


@pytest.mark.parametrize("policy", ["skip", *wide("rollback")])
def test_a_step_that_is_not_finite_changes_nothing(device, recorder, tmp_path, policy):
    loops = []
    for name, given in (("replayed", {"cuda_graphs": graphs()}), ("usual", {})):
        given = plugins(**given, nan=plugin_class("nan")(policy=policy), checkpoint=Checkpoint(every=5))
        loops.append(toy(device, given, objective=Poison({8, 17}), run_dir=tmp_path / name))
        assert outcomes(loops[-1]).count("skipped") == 2
        (kept, *_) = sorted((tmp_path / name / "nan").iterdir())
        assert "position-00000008" in kept.name
    assert loops[0].progress == loops[1].progress
    assert recorder.num_replays[0] > STEPS // 3
    assert_close(*loops)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_step_that_is_not_finite_itself_moves_no_weight_and_no_average(device, recorder, optimizer):
    given = plugins(cuda_graphs=graphs(), nan=plugin_class("nan")(policy="skip"))
    loop = toy(device, given, objective=Poison({9}), optimizers=OPTIMIZERS[optimizer])
    seen = []

    def state():
        held = [value for one in loop.optimizers for state in one.state.values() for value in state.values()]
        return [value.clone() for value in (*weights(loop).values(), *loop.plugins["ema"].shadow.values(), *held)]

    with loop:
        for _ in loop.steps():
            seen.append(state())
    assert recorder.num_replays[1] > 5  # the tenth batch was replayed: three steps before the recording, six after it
    for before, after in zip(seen[8], seen[9], strict=True):
        assert torch.equal(before, after)
    assert not torch.equal(seen[9][0], seen[10][0])


def test_an_overflow_of_the_norm_alone_does_not_lose_the_step(device, recorder):
    """The squares of finite gradients are infinite in float32: the host measures again, and makes the update."""

    class Steep(ToyObjective):
        def __call__(self, net, batch):
            output = super().__call__(net, batch)
            return LossOutput(output.loss * 1e22)

    given = {"clip": plugin_class("clip")(), "ema": plugin_class("ema")()}
    loops = [toy(device, {**given, **extra}, objective=Steep(), steps=6) for extra in ({"cuda_graphs": graphs()}, {})]
    for loop in loops:
        assert outcomes(loop) == ["updated"] * 6
    assert recorder.num_replays == [3, 3]
    assert_close(*loops)


def test_norms_that_are_logged_later_are_those_of_their_step(device, recorder):
    logs = acting(
        after_backward=lambda loop: loop.log.average({"first": loop.gradients.norms[0]}),
        on_device=lambda loop: [],  # it leaves the steps to the device
    )
    loops = both(device, given={"logs": lambda: logs, "sink": Logged}, log_every=10)
    replayed, usual = (loop.plugins["sink"].of("first") for loop in loops)
    assert recorder.num_replays[0] > 0
    assert replayed == pytest.approx(usual, rel=1e-4)


class Reader:
    """A plugin of a user that reads gradients after the backward pass."""

    def __init__(self):
        self.largest = []

    @hookimpl
    def after_backward(self, loop):
        self.largest.append(float(max(one.abs().max() for one in loop.gradients.tensors())))


def test_a_plugin_between_backward_and_update_splits_the_step_and_is_named(device, recorder, caplog):
    caplog.set_level(logging.INFO, "hookdiff")
    replayed, usual = both(device, given={"mine": Reader})
    assert recorder.num_replays == [STEPS - WARMUP, 0]
    assert replayed.plugins["mine"].largest == pytest.approx(usual.plugins["mine"].largest, rel=1e-4)
    assert_close(replayed, usual)
    (said,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    check_facts(said, "cuda_graphs", "update", "mine")


class Shrink:
    """A plugin of a user that shrinks gradients in each step more, and leaves this to the device in a recorded one."""

    @hookimpl
    def on_start(self, loop):
        self.factor = torch.zeros((), device=loop.device)

    @hookimpl
    def after_backward(self, loop):
        if not loop.gradients.is_applied:
            self.fill(loop)
            self.work(loop)

    @hookimpl
    def on_device(self, loop):
        return [DevicePart("update", lambda finite: self.work(loop), lambda: self.fill(loop))]

    def fill(self, loop):
        self.factor.fill_(0.9**loop.progress.step)

    def work(self, loop):
        torch._foreach_mul_(loop.gradients.tensors(), self.factor)
        loop.gradients.clear()


def test_the_work_of_a_plugin_on_the_device_is_recorded(device, recorder):
    loops = both(device, given={"mine": Shrink})
    assert recorder.num_replays == [STEPS - WARMUP] * 2
    assert_close(*loops)


@pytest.mark.parametrize(
    ("given", "optimizer", "reason"),
    [
        ({"clip": lambda: plugin_class("clip")(rule="agc")}, None, "clip"),
        ({}, lambda model: torch.optim.AdamW(model.parameters()), "AdamW"),
        ({}, lambda model: torch.optim.RMSprop(model.parameters()), "RMSprop"),
    ],
)
def test_what_the_device_cannot_hold_back_is_left_to_the_host(device, recorder, caplog, given, optimizer, reason):
    loops = both(device, given=given, optimizers=optimizer)
    assert recorder.num_replays == [STEPS - WARMUP, 0]
    check_facts(caplog.text, "update", reason)
    assert_close(*loops)


def test_plugins_that_measure_some_steps_have_the_host_in_these(device, recorder):
    given = {"gradients": partial(plugin_class("gradients"), window=20), "debug": plugin_class("debug"), "sink": Logged}
    loops = both(device, given=given)
    assert 0 < recorder.num_replays[1] <= recorder.num_replays[0] < STEPS - WARMUP
    assert_close(*loops)
    for (step, mine), (other, theirs) in zip(*(loop.plugins["sink"].calls for loop in loops), strict=True):
        assert step == other
        assert mine == pytest.approx(theirs, rel=1e-3, abs=1e-6), step


def test_passes_on_trial_update_nothing(device, recorder):
    class Tries:
        """A plugin that makes the passes of the step once more after the update."""

        @hookimpl
        def before_step(self, batch):
            self.batch = batch

        @hookimpl
        def after_optimizer_step(self, loop):
            with rehearsing(loop) as passes:
                passes(self.batch)

    loops = both(device, given={"mine": Tries})
    assert recorder.num_replays == [STEPS - WARMUP] * 2
    assert_close(*loops)


class Casts:
    """A plugin that surrounds the loss."""

    @hookimpl(wrapper=True)
    def compute_loss(self):
        return (yield)


@pytest.mark.parametrize(
    "mine", [acting(accumulate=lambda loop, batch: loop.run_pass(batch)), Casts()], ids=["accumulate", "compute_loss"]
)
def test_plugins_in_the_passes_keep_the_step_from_being_recorded(device, recorder, caplog, mine):
    ran(toy(device, plugins(cuda_graphs=graphs(), mine=mine)))
    assert recorder.num_replays == [0, 0]
    check_facts(caplog.text, "cuda_graphs", "mine")


@pytest.mark.wide
def test_micro_batches_and_smaller_batches_are_made_as_usual(device, recorder):
    data = InMemory(torch.linspace(-1, 1, 168).reshape(42, 4))
    for options, replays in (
        ({"micro_batch": 3}, 0),
        ({"data": feed_of(data, drop_last=False), "steps": 12}, 12 - WARMUP - 2),  # two epochs end with two samples
    ):
        recorder.num_replays[:] = [0, 0]
        loops = both(device, **options)
        assert recorder.num_replays == [replays] * 2
        assert_close(*loops)


def test_changed_hyper_parameters_and_thawed_weights_are_heeded(device, recorder):
    def change(loop):
        loop.optimizers[0].param_groups[0]["weight_decay"] = 0.01 if loop.progress.step < 10 else 0.5
        loop.model[3].bias.requires_grad_(loop.progress.step >= 14)

    loops = both(device, given={"mine": lambda: acting(before_step=change)})
    assert_close(*loops)
    assert recorder.num_replays == [14 - WARMUP, 10 - WARMUP]


def test_a_weight_whose_first_gradient_is_recorded_is_updated_by_the_host(device, recorder):
    """Its state would be made anew in each replay."""

    class Late(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.first, self.late, self.calls = nn.Linear(4, 4), nn.Linear(4, 4), 0

        def forward(self, x):
            self.calls += 1
            return self.first(x) + (self.late(x) if self.calls > WARMUP else 0)

    loops = both(device, Late)
    assert recorder.num_replays == [STEPS - WARMUP, 0]
    assert_close(*loops)


@pytest.fixture
def run(device, recorder, tmp_path):
    """Return a function that trains in a folder, with recorded steps or with usual ones."""

    def call(name, steps, is_recorded, resume=False):
        given = plugins(checkpoint=Checkpoint(every=5), **({"cuda_graphs": graphs()} if is_recorded else {}))
        return ran(toy(device, given, run_dir=tmp_path / name, steps=steps, resume=resume))

    return call


@pytest.mark.wide
def test_a_run_resumes_with_or_without_the_plugin(run):
    usual = run("usual", 20, False)
    for name, is_recorded in (("with", True), ("without", False)):
        run(name, 10, not is_recorded)
        assert_close(run(name, 20, is_recorded, resume=True), usual)


def test_a_resumed_run_equals_an_uninterrupted_one_to_the_bit(run):
    """It records its steps elsewhere: usual steps of such a run have the rounding of recorded ones."""
    uninterrupted = run("one", 20, True)
    run("two", 10, True)
    resumed = run("two", 20, True, resume=True)
    assert_same(weights(resumed), weights(uninterrupted))
    assert_same(resumed.plugins["ema"].shadow, uninterrupted.plugins["ema"].shadow)


class Reads(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x) if x.mean().item() > 0 else self.layer(-x)


def refuse_a_reader(device):
    with refused(UserError, "plugins.cuda_graphs", "not permitted", "--plugins no:cuda_graphs"):
        toy(device, plugins(cuda_graphs=graphs()), model=Reads()).run()


def test_a_value_that_the_host_reads_in_the_passes_is_one_message(device, recorder):
    if device.type == "cpu":
        refuse_a_reader(device)
    else:  # in a process of its own, as torch's allocator and its generator are not usable after it
        with ProcessPoolExecutor(1, get_context("spawn")) as process:
            process.submit(refuse_a_reader, device).result()


ON_RANKS = """
from hookdiff.testing import toy_loop
from hookdiff_cuda_graphs import CudaGraphs

loop = toy_loop({"cuda_graphs": CudaGraphs()}, steps=2)
result = loop.num_ranks, loop.run()
"""


def test_ranks_without_graphs_train_too(tmp_path):
    assert two_ranks(ON_RANKS, tmp_path) == [(2, "done")] * 2


def test_a_machine_without_graphs_trains_as_without_the_plugin(caplog):
    caplog.set_level(logging.INFO, "hookdiff")
    loops = [toy_run(plugins(**extra)) for extra in ({"cuda_graphs": graphs()}, {})]
    assert_same(weights(loops[0]), weights(loops[1]))
    check_facts(caplog.text, "cuda_graphs", "cpu")
