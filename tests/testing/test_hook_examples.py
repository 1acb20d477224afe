"""The example of each hook: its length, and its effect in a small training."""

import ast
import inspect
import json
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import attrs
import numpy
import pytest
import torch
from attrs import evolve
from safetensors.torch import load_file
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hookdiff_cuda_graphs.plugin
from hookdiff import PASS, Batch, Finding, Loop, LossOutput, SampleRequest, UserError, builtin_plugins, hookimpl
from hookdiff.cli.hooks import contract, example, imports
from hookdiff.data import InMemory
from hookdiff.experiment.machine_choices import settle
from hookdiff.log.picture import Picture
from hookdiff.loop.hookspecs import HOOK_NAMES, HOOKS
from hookdiff.testing import assert_same, examples, toy_loop, toy_model, weights
from hookdiff_checkpoint import Checkpoint
from hookdiff_cuda_graphs import CudaGraphs
from tests.conftest import Batches, Logged, acting, check_facts, outcomes, ran, refused, saved, warnings
from tests.replayed import CpuRecorder

LABELS = torch.arange(4).repeat(10)
BY_HOOK = {  # by the first method
    next(name for name, member in vars(kind).items() if hasattr(member, "hookdiff_impl")): kind
    for kind in vars(examples).values()
    if inspect.isclass(kind) and kind.__module__ == examples.__name__
}


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)


def test_every_hook_has_a_short_example_and_a_test() -> None:
    assert list(BY_HOOK) == list(HOOK_NAMES)  # in the order of the hooks
    assert len(set(BY_HOOK.values())) == len(HOOK_NAMES)
    for hook, kind in BY_HOOK.items():
        code = example(hook)
        assert code == inspect.getsource(kind).rstrip()
        # The hooks about which a question is are in its example, and what a plugin offers that has worked at the end.
        most = 15 if HOOKS[hook].kind == "question" or hook == "on_done" else 10
        assert 3 <= len(code.splitlines()) <= most, hook
        assert f"test_{hook}" in globals(), hook


@pytest.mark.parametrize("hook", HOOK_NAMES)
def test_an_example_runs_with_the_imports_that_are_shown_with_it(hook: str) -> None:
    names: dict[str, Any] = {"__name__": "copied"}
    lines = imports([example(hook)])
    exec("\n".join([*lines, example(hook)]), names)
    (name,) = (node.name for node in ast.parse(example(hook)).body if isinstance(node, ast.ClassDef))
    kind = names[name]
    options = {field.name: "0" for field in attrs.fields(kind) if field.init} if attrs.has(kind) else {}
    assert list(toy_loop({"copied": kind(**options)}).plugins) == ["copied"]
    assert len({line.split()[1] for line in lines}) == len(lines)


def test_the_command_prints_the_contract_and_the_example(succeed: Any) -> None:
    lines = [line.strip() for line in succeed("hooks", "make_batch").splitlines()]
    for text in (contract("make_batch"), "\n".join(imports([example("make_batch")])), example("make_batch")):
        assert [line.strip() for line in text.splitlines()] == lines[1 : 1 + len(text.splitlines())]
        lines = lines[1 + len(text.splitlines()) :]


def test_choose(load_small: Any) -> None:
    config = load_small(run={"plugins": ["hookdiff.testing.examples:ChannelsLast"]})
    assert [settle(config, torch.device(kind), {}).run.channels_last for kind in ("cpu", "cuda")] == [True, True]
    assert settle(load_small(), torch.device("cuda"), {}).run.channels_last is False


def test_prepare_model() -> None:
    loop = toy_loop({"freeze": examples.FreezePart("0")}, optimizers=sgd)
    before, after = weights(loop), weights(ran(loop))
    assert [name for name in after if not torch.equal(before[name], after[name])] == ["3.weight", "3.bias"]


def test_wrap_net(one_process: None) -> None:
    loop = ran(toy_loop({"distributed": examples.Distributed()}))
    assert [isinstance(net, DistributedDataParallel) for net in (loop.net, loop.model)] == [True, False]
    assert_same(weights(loop), weights(ran(toy_loop())))


def test_restore() -> None:
    with toy_loop({"start": examples.StartFrom(saved(ran(toy_loop(steps=7))))}) as second:
        assert (second.first_step, len(list(second.steps()))) == (7, 13)
    assert_same(weights(second), weights(ran(toy_loop())))


def test_check_state() -> None:
    first = ran(toy_loop({"mine": examples.Versioned()}, steps=1))
    for version in (1, 2):
        start = examples.StartFrom({**saved(first), "plugins": {"mine": {"version": version}}})
        loop = toy_loop({"mine": examples.Versioned(), "start": start}, steps=2)
        with nullcontext() if version == 1 else refused(UserError, "'mine'", 2, 1):
            loop.run()
        assert loop.progress.step == (2 if version == 1 else 0)


def test_on_start() -> None:
    with toy_loop({"anomalies": examples.Anomalies()}):
        assert torch.is_anomaly_enabled()
    assert not torch.is_anomaly_enabled()


def recorded(monkeypatch: pytest.MonkeyPatch, plugin: object) -> tuple[Logged, list[int]]:
    """Train with steps that are recorded after three; return the log, and how often passes and update are replayed."""
    recorder = CpuRecorder()
    monkeypatch.setattr(hookdiff_cuda_graphs.plugin, "recorder_for", lambda device: recorder)
    optimizer: Any = lambda model: torch.optim.SGD(model.parameters(), lr=0.1, fused=True)  # noqa: E731
    logged = Logged()
    toy_loop({"graphs": CudaGraphs(), "mine": plugin, "sink": logged}, optimizers=optimizer, log_every=10).run()
    return logged, recorder.num_replays


def test_on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    logged, num_replays = recorded(monkeypatch, examples.FirstNorm())
    assert (num_replays, list(logged.of("first_norm"))) == ([17, 17], [10, 20])


def test_on_ready(tmp_path: Path) -> None:
    def made(steps: int, *plugins: object) -> Loop:
        named = {"checkpoint": Checkpoint(), **{type(plugin).__name__: plugin for plugin in plugins}}
        return toy_loop({**builtin_plugins(), **named}, run_dir=tmp_path, resume=True, steps=steps)

    assert outcomes(made(3, examples.MustResume())) == []
    made(3).run()
    resumed = made(5, examples.MustResume())
    assert (outcomes(resumed), resumed.end.reason, resumed.end.message) == (["updated"] * 2, "done", "")


def test_before_epoch() -> None:
    batches = Batches()
    data = InMemory(torch.linspace(-1, 1, 160).reshape(40, 4), LABELS)
    toy_loop({"classes": examples.ClassByClass(), "batches": batches}, data=data, epochs=4).run()
    labels = [batch.labels.tolist() for batch in batches.seen if batch.labels is not None]
    for epoch in range(4):
        assert set().union(*labels[5 * epoch : 5 * epoch + 5]) == set(range(epoch + 1))


def test_draw() -> None:
    shifted, plain = Batches(), Batches()
    toy_loop({"offset": examples.OffsetNoise(), "batches": shifted}, steps=2).run()
    toy_loop({"batches": plain}, steps=2).run()
    offsets = [a.draws["noise"] - b.draws["noise"] for a, b in zip(shifted.seen, plain.seen, strict=True)]
    assert all(offset.std(1).max() < 1e-6 for offset in offsets)  # one number for a sample
    assert 0.05 < torch.cat(offsets).mean(1).std() < 0.15


def test_make_batch() -> None:
    mixed, plain = Batches(), Batches()
    toy_loop({"mix": examples.MixUp(), "batches": mixed}, steps=2).run()
    toy_loop({"batches": plain}, steps=2).run()
    for changed, batch in zip(mixed.seen, plain.seen, strict=True):
        assert len(changed) == len(batch)
        partners = (changed.inputs - 0.8 * batch.inputs) / 0.2
        distances = torch.cdist(partners, batch.inputs)
        assert distances.min(1).values.max() < 1e-5  # each partner is a sample of the batch,
        assert sorted(distances.argmin(1).tolist()) == list(range(8))  # and each sample is a partner once
    assert not torch.equal(*(torch.cdist(batch.inputs, batch.inputs) for batch in mixed.seen))


def test_before_step() -> None:
    rates = []
    with toy_loop({"decay": examples.LessDecay()}, optimizers=sgd, steps=101) as loop:
        for _ in loop.steps():
            rates += [group["weight_decay"] for optimizer in loop.optimizers for group in optimizer.param_groups]
    assert (rates[0], rates[100]) == (0.01, pytest.approx(0.009))


def test_needs_host(monkeypatch: pytest.MonkeyPatch) -> None:
    logged, num_replays = recorded(monkeypatch, examples.LargestGradient())
    assert num_replays == [17, 15]  # the host made the updates of two of the steps that log
    assert list(logged.of("largest")) == [10, 20]


def test_accumulate() -> None:
    def run(plugins: dict[str, object], dropout: float) -> Loop:
        return ran(toy_loop(plugins, model=toy_model(dropout=dropout), optimizers=sgd, steps=1))

    two = {"two": examples.TwoDropouts()}
    assert_same(weights(run(two, 0.0)), weights(run({}, 0.0)))  # the mean of two equal gradients
    one, both = run({}, 0.5), run(two, 0.5)
    assert both.gradients.loss == one.gradients.loss
    assert not torch.equal(weights(both)["0.weight"], weights(one)["0.weight"])


def test_micro_step(one_process: None) -> None:
    seen: list[list[bool]] = []

    class Synced:
        @hookimpl
        def before_step(self) -> None:
            seen.append([])

        @hookimpl(wrapper=True)
        def backward(self, loop: Loop) -> Any:
            assert isinstance(loop.net, DistributedDataParallel)
            seen[-1].append(loop.net.require_backward_grad_sync)
            return (yield)

    plugins = {"distributed": examples.Distributed(), "once": examples.SyncOnce(), "seen": Synced()}
    loop, alone = (ran(toy_loop(chosen, micro_batch=3, steps=4)) for chosen in (plugins, {}))
    assert seen == [[False, False, True]] * 4
    assert_same(weights(loop), weights(alone))


def test_compute_loss() -> None:
    loop = toy_loop({"bf16": examples.BFloat16()}, steps=2)
    dtypes = set()
    loop.model.get_submodule("0").register_forward_hook(lambda *given: dtypes.add(given[2].dtype))
    loop.run()
    assert dtypes == {torch.bfloat16}
    assert {value.dtype for value in (*weights(loop).values(), *loop.gradients.tensors())} == {torch.float32}


def test_reduce_loss() -> None:
    class Weighted:
        @hookimpl(wrapper=True)
        def compute_loss(self, batch: Batch) -> Any:
            return evolve((yield), weights=torch.full((len(batch),), 3.0))

    for plugins, factor in (({}, 1), ({"weighted": Weighted()}, 3)):
        loop = ran(toy_loop({"robust": examples.Robust(), **plugins}, steps=1))
        assert loop.output.per_sample is not None
        torch.testing.assert_close(loop.output.loss, factor * loop.output.per_sample.log1p().mean())


def test_backward() -> None:
    with torch.profiler.profile(acc_events=True) as profile:
        toy_loop({"mark": examples.MarkBackward()}, steps=3, micro_batch=4).run()
    assert sum(event.name == "backward" for event in profile.events()) == 6


class Factor:
    """Multiplies the losses of the second step: of the whole batch, or of one sample."""

    def __init__(self, factor: float, rows: slice = slice(None)) -> None:
        self.factor, self.rows = factor, rows

    @hookimpl(wrapper=True)
    def compute_loss(self, loop: Loop) -> Any:
        output: LossOutput = yield
        if loop.progress.position != 1:
            return output
        assert output.per_sample is not None
        factors = torch.ones(len(output.per_sample))
        factors[self.rows] = self.factor
        losses = output.per_sample * factors
        return evolve(output, loss=losses.mean(), per_sample=losses)


def test_unscale() -> None:
    skip = {"skip": examples.SkipSpikes()}
    assert outcomes(toy_loop({**skip, "large": Factor(1e4)}, steps=2)) == ["updated", "void", "updated"]
    assert outcomes(toy_loop({**skip, "nan": Factor(float("nan"))}, steps=2)) == ["updated", "stopped"]


def test_on_nan(caplog: pytest.LogCaptureFixture) -> None:
    skip = {"skip": examples.SkipBadSamples()}
    one = Factor(float("nan"), slice(2, 3))
    assert outcomes(toy_loop({**skip, "one": one}, steps=2)) == ["updated", "skipped", "updated"]
    assert "samples at fault: 1 of 8" in caplog.text
    assert outcomes(toy_loop({**skip, "all": Factor(float("nan"))}, steps=2)) == ["updated", "stopped"]


def test_after_backward() -> None:
    loop = toy_loop({"centralize": examples.Centralize()}, optimizers=sgd)
    before, after = weights(loop), weights(ran(loop))
    for name in ("0.weight", "3.weight"):
        change = after[name] - before[name]
        assert change.abs().max() > 0.01
        assert change.mean(1).abs().max() < 1e-6
    norms = [gradient.norm() for gradient in loop.gradients.tensors()]
    assert loop.gradients.total_norm == pytest.approx(float(torch.stack(norms).norm()))


def test_optimizer_step() -> None:
    optimizer = lambda model: torch.optim.SGD(model.parameters(), lr=1.0)  # noqa: E731
    loop = ran(toy_loop({"limit": examples.Limit()}, optimizers=optimizer))
    assert max(float(value.abs().max()) for value in weights(loop).values()) == 0.5


def test_after_optimizer_step() -> None:
    with toy_loop({"target": examples.StopAtTarget()}, steps=500) as loop:
        losses = [step.loss for step in loop.steps()]
    assert 1 < len(losses) < 500
    assert min(losses[:-1]) >= 0.5 > losses[-1]
    assert (loop.end.reason, loop.end.message) == ("plugin", f"the loss is {losses[-1]:.3f}")


def test_on_epoch_end(tmp_path: Path) -> None:
    loop = ran(toy_loop({"files": examples.EpochFiles()}, epochs=2, run_dir=tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == {"epoch-1.safetensors", "epoch-2.safetensors"}
    assert_same(load_file(tmp_path / "epoch-2.safetensors"), weights(loop))


def test_on_save_request(tmp_path: Path) -> None:
    ask = acting(after_backward=lambda loop: loop.save() if loop.progress.step == 3 else None)
    ran(toy_loop({"snapshot": examples.Snapshot(), "ask": ask}, run_dir=tmp_path))
    assert_same(load_file(tmp_path / "snapshot.safetensors"), weights(ran(toy_loop(steps=4))))


def test_between_steps(tmp_path: Path) -> None:
    with toy_loop({"stop": examples.StopFile()}, run_dir=tmp_path) as loop:
        for step in loop.steps():
            if step.step == 4:
                (tmp_path / "stop").touch()
    assert (loop.progress.step, loop.end.reason) == (4, "plugin")


def test_amend() -> None:
    seen: list[Any] = []
    note = acting(sample=lambda request: seen.append(request.labels) or PASS)
    with toy_loop({"two": examples.TwoOfEachClass(), "note": note}) as loop:
        for labels in ((3, 1, 2, 0), None):
            with suppress(UserError):  # the network takes no labels
                loop.sample(SampleRequest(4, labels=labels))
    assert seen == [(3, 3, 2, 2), None]


def test_decode() -> None:
    with toy_loop({"brighter": examples.Brighter()}) as loop, toy_loop() as plain:
        made, raw = (loop.sample(SampleRequest(4, raw=raw)).images for raw in (False, True))
        expected = plain.sample(SampleRequest(4, raw=True)).images
        brighter = (expected + 0.1).clamp(-1, 1)
        found = {"raw": raw, "made": made, "decoded": loop.decode(expected)}
        assert_same(found, {"raw": expected, "made": brighter, "decoded": brighter})


def test_sample() -> None:
    with toy_loop({"rounded": examples.Rounded()}) as loop, toy_loop() as plain:
        rounded, images = (each.sample(SampleRequest(4)).images for each in (loop, plain))
    levels = (rounded + 1) * 127.5
    torch.testing.assert_close(levels, levels.round(), atol=1e-4, rtol=0)
    assert (rounded - images).abs().max() <= 0.5 / 127.5 + 1e-6
    assert not torch.equal(rounded, images)


def test_export_weights() -> None:
    with toy_loop({"halves": examples.ExportFloat16()}) as loop:
        expected = {name: value.half() for name, value in loop.model.state_dict().items()}
        assert_same(loop.hook.export_weights(loop=loop), expected)


def test_offer_weights() -> None:
    with toy_loop({"bf16": examples.OfferBFloat16()}) as loop:
        before = weights(loop)
        with loop.weights("bf16") as name:
            assert name == "bf16"
            assert_same(weights(loop), {key: value.bfloat16().float() for key, value in before.items()})
        assert_same(weights(loop), before)


def test_on_log(tmp_path: Path) -> None:
    toy_loop({"latest": examples.Latest()}, run_dir=tmp_path).run()
    latest = json.loads((tmp_path / "latest.json").read_text())
    assert latest["step"] == 20
    assert {"loss", "grad_norm"} <= latest.keys()


def test_on_images(tmp_path: Path) -> None:
    with toy_loop({"arrays": examples.ImageArrays()}, run_dir=tmp_path) as loop:
        next(loop.steps())
        loop.log.images({"samples/ema": Picture(numpy.full((4, 6), 9, numpy.uint8))})
    assert (numpy.load(tmp_path / "samples-ema.npy") == numpy.full((4, 6), 9)).all()


def test_on_texts(capsys: pytest.CaptureFixture[str]) -> None:
    with toy_loop({"print": examples.PrintTexts()}) as loop:
        next(loop.steps())
        loop.log.texts({"prompt": "a red cat"})
    check_facts(capsys.readouterr().out, "step 1", "prompt", "a red cat")


def test_on_distributions(caplog: pytest.LogCaptureFixture) -> None:
    with toy_loop({"wide": examples.WideWeights()}) as loop:
        next(loop.steps())
        loop.log.distributions({"narrow": torch.arange(50.0), "wide": torch.arange(200.0)})
    (warning,) = warnings(caplog)
    check_facts(warning, "step 1", "wide", 199)


def test_on_event() -> None:
    with toy_loop({"stop": examples.StopAtFinding()}) as loop:
        for step in loop.steps():
            loop.log.report(Finding("error" if step.step == 3 else "warning", "too hot"))
    assert (loop.progress.step, loop.end.message) == (3, "too hot")


def test_on_checkpoint(tmp_path: Path) -> None:
    plugins = {"checkpoint": Checkpoint(every=10), "mirror": examples.Mirror(str(tmp_path / "mirror"))}
    toy_loop({**plugins, **builtin_plugins()}, run_dir=tmp_path / "run").run()
    own, copies = (
        {path.name: sorted(file.name for file in path.iterdir()) for path in folder.iterdir() if path.is_dir()}
        for folder in (tmp_path / "run" / "checkpoints", tmp_path / "mirror")
    )
    assert own == copies
    assert len(copies) == 2


def test_on_done() -> None:
    loop = ran(toy_loop({"sparse": examples.Sparse()}))
    before = weights(loop)
    with loop.weights("sparse"):
        assert_same(weights(loop), {name: value * (value.abs() > 0.01) for name, value in before.items()})
        assert any((value == 0).any() for value in weights(loop).values())


def test_on_exception(tmp_path: Path) -> None:
    loop = toy_loop({"file": examples.ErrorFile()}, run_dir=tmp_path)

    def train() -> None:
        with loop:
            for step in loop.steps():
                assert step.step < 3 or 1 / 0

    with pytest.raises(ZeroDivisionError):
        train()
    first, *_, last = (tmp_path / "error-0.txt").read_text().splitlines()
    assert (first, last) == ("step 3", "ZeroDivisionError: division by zero")


def test_on_stop(tmp_path: Path) -> None:
    last = examples.LastRun(str(tmp_path / "last.csv"))
    for name, steps in (("one", 2), ("two", 3)):
        toy_loop({"last": last}, run_dir=tmp_path / name, steps=steps).run()
    assert (tmp_path / "last.csv").read_text() == f"{tmp_path / 'two'},3,done\n"
