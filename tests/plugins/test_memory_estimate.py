"""The memory counted on tensors without values, compared with that of real runs."""

import json

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from hookdiff import ConfigError, UserError, build_loop
from hookdiff.disk.tree import flatten
from hookdiff.loop.saved import keeps_state, state_of
from hookdiff_memory.estimate import estimate_memory
from tests.conftest import check_facts, output, refused, wide

MODELS = {
    "unet": {"use": "unet", "channels": 8, "channel_mults": [1], "num_res_blocks": 1, "head_dim": 8},
    "dit": {"use": "dit", "hidden_size": 16, "depth": 1, "num_heads": 2, "patch_size": 4},
}
USER = """
import torch
from torch import nn
from hookdiff import hookimpl

class MLP(nn.Module):
    def __init__(self, hidden: int = 100):
        super().__init__()
        self.first, self.last = nn.Linear(64, hidden), nn.Linear(hidden, 64)

    def forward(self, x, timesteps):
        return self.last(torch.relu(self.first(x.flatten(1)))).reshape(x.shape)

class Norms(nn.Module):
    def __init__(self, in_channels: int):
        super().__init__()
        self.layer, self.norm = nn.Conv2d(in_channels, in_channels, 3, padding=1), nn.BatchNorm2d(in_channels)
        self.tied = self.layer
        self.register_buffer("ramp", torch.linspace(0, 1, 50))
        self.start = float(self.ramp[0].item())  # cannot be made on the meta device

    def forward(self, x, timesteps):
        return self.tied(self.norm(self.layer(x)))

class Looks(MLP):
    def forward(self, x, timesteps):
        return super().forward(x if self.first.weight.sum() > 0 else -x, timesteps)

class Reads:
    @hookimpl
    def accumulate(self, loop, batch):
        output = loop.run_pass(batch)
        return output if loop.gradients.total_norm > 1 else loop.run_pass(batch)

class TensorRate:
    @hookimpl
    def on_start(self, loop):
        for group in loop.optimizers[0].param_groups:
            group["lr"] = torch.as_tensor(group["lr"])

    @hookimpl
    def prepare_model(self, loop):
        pass

class Broken:
    @hookimpl
    def on_start(self, loop):
        raise RuntimeError("no tape in the drive")

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass
"""


@pytest.fixture
def config(user_module, load_small):
    """Return a function that loads a config with one of MODELS, or a model of the user's, settings and plugins."""
    user_module("hd_sizes", USER)

    def loaded(model, *settings, plugins=()):
        run = {"steps": 2, "batch_size": 6, "log_every": 1}
        return load_small(*settings, plugins=plugins, run=run, model=MODELS.get(model, {"use": f"hd_sizes:{model}"}))

    return loaded


def num_bytes(tensors):
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def saved_bytes(loop, size):
    """Return the bytes that the forward pass of `size` samples saves in a real run, besides weights and batch."""
    held = [*loop.model.parameters(), *loop.model.buffers()]
    batch = next(loop.feed.batches(0))
    batch = loop.objective.draw(batch, loop.random.generator("noise", 0, loop.device))
    held += [batch.inputs, *batch.draws.values(), *([] if batch.labels is None else [batch.labels])]
    addresses = {tensor.untyped_storage().data_ptr() for tensor in held}
    held_tensors = []  # alive, so that no address comes twice

    def keep(tensor):
        if tensor.untyped_storage().data_ptr() not in addresses:
            held_tensors.append(tensor)
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        loop.hook.micro_step(loop=loop, batch=batch[:size], index=0, count=1)
    return num_bytes(held_tensors)


CASES = [
    ("unet", ("model.num_classes=10", "run.micro_batch=4", "diffusion.weighting=min_snr"), ()),
    *wide(
        ("dit", ("plugins.amp.precision=bf16", "model.dropout=0.1"), ("amp", "ema", "clip")),
        ("dit", ("model.gradient_checkpointing=true", "model.num_classes=10", "optimizer.use=sgd"), ()),
    ),
    ("Norms", ("optimizer.use=adamw", "optimizer.amsgrad=true", "run.micro_batch=3"), ("ema",)),
    ("MLP", ("optimizer.use=sgd", "optimizer.momentum=0.9"), ()),
]


@pytest.mark.parametrize(("model", "settings", "plugins"), CASES)
def test_the_estimate_is_the_memory_of_a_real_run(config, tmp_path, model, settings, plugins):
    loaded = config(model, *settings, plugins=plugins)
    estimate = estimate_memory(loaded)
    assert list(tmp_path.glob("run*")) == []
    with build_loop(loaded, tmp_path / "run") as loop:
        assert estimate.activations == saved_bytes(loop, estimate.micro_batch)
        next(iter(loop.steps()))
        parameters = list(loop.model.parameters())
        assert estimate.parameters == num_bytes(parameters)
        assert estimate.buffers == num_bytes(loop.model.buffers())
        assert estimate.gradients == num_bytes(p.grad for p in parameters)
        states = [entry.values() for optimizer in loop.optimizers for entry in optimizer.state.values()]
        assert estimate.optimizer == num_bytes(value for values in states for value in values)
        kept = {n: flatten(state_of(p))[0] for n, p in loop.plugins.items() if keeps_state(p)}
        live = {id(t.untyped_storage()) for t in (*parameters, *loop.model.buffers())}
        own = {n: [t for t in state.values() if id(t.untyped_storage()) not in live] for n, state in kept.items()}
        assert estimate.plugins == {name: num_bytes(tensors) for name, tensors in own.items() if tensors}
    assert estimate.notes == ()


def test_the_estimate_of_an_mlp_is_its_formula(config):
    n, size, hidden, number = 6, 64, 100, 4
    estimate = estimate_memory(config("MLP", "model.hidden=100", "diffusion.process.use=ddpm", "optimizer.use=adamw"))
    weights = number * (2 * size * hidden + hidden + size)
    assert (estimate.parameters, estimate.gradients, estimate.buffers) == (weights, weights, 0)
    assert estimate.optimizer == 2 * weights + 4 * number  # Adam: two numbers a weight, and a count for each tensor
    # The input of each layer and the output that is compared; the noise it is compared with is in the batch.
    assert estimate.per_sample == number * (size + hidden + size)
    assert estimate.activations == n * estimate.per_sample
    assert estimate.batch == number * n * 2 * size + 8 * n * 2  # images and noise; labels and timesteps are int64
    assert estimate.total == sum((4 * weights, 4 * number, estimate.batch, estimate.activations))
    assert (estimate.device, estimate.data, estimate.available) == ("cpu", 0, None)


@pytest.mark.wide
def test_the_peak_is_that_of_the_allocator(config, tmp_path):
    loaded = config("unet", "model.channels=32", "run.batch_size=32", "run.micro_batch=16")
    estimate = estimate_memory(loaded)
    with build_loop(loaded, tmp_path / "run") as loop:
        steps = iter(loop.steps())
        next(steps)
        with torch.profiler.profile(profile_memory=True, acc_events=True) as profile:
            next(steps)
        events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    # The gradients of the step before are given back, so that the count begins with them.
    fixed = estimate.parameters + estimate.optimizer + estimate.gradients
    assert estimate.peak == pytest.approx(fixed + most, rel=0.1)


@pytest.mark.parametrize("plugins", [[], ["hd_sizes:TensorRate"]])
def test_nothing_is_allocated_for_the_weights(config, plugins):
    loaded = config("MLP", "model.hidden=20000", "optimizer.use=adamw", plugins=plugins)
    with torch.profiler.profile(profile_memory=True, acc_events=True) as profile:
        estimate = estimate_memory(loaded)
    assert estimate.notes == ()
    sizes = [e.nbytes() for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    assert max(sizes) < estimate.parameters / 4


def test_gradient_checkpointing_lowers_activations_and_peak(config):
    plain = estimate_memory(config("dit", "run.batch_size=64"))
    less = estimate_memory(config("dit", "run.batch_size=64", "model.gradient_checkpointing=true"))
    assert less.activations < plain.activations / 2
    assert less.peak < plain.peak
    assert (less.parameters, less.optimizer) == (plain.parameters, plain.optimizer)


def test_a_smaller_micro_batch_needs_less(config):
    whole, half = (estimate_memory(config("MLP", "run.batch_size=400", f"run.micro_batch={n}")) for n in (400, 200))
    assert half.activations == whole.activations - 200 * whole.per_sample
    assert half.peak < whole.peak
    assert (half.batch_size, half.micro_batch) == (400, 200)


@pytest.mark.parametrize("amp", [(), ("amp",)], ids=["", "amp"])
def test_two_passes_are_counted(config, amp):
    settings = ("model.hidden=400", "run.micro_batch=3", "optimizer.use=adamw")
    plain = estimate_memory(config("MLP", *settings, plugins=amp))
    moved = estimate_memory(config("MLP", *settings, plugins=[*amp, "tests.sam:SAM"]))
    assert moved.notes == ()
    same = ("parameters", "gradients", "optimizer", "activations", "per_sample", "batch")
    assert [getattr(moved, name) for name in same] == [getattr(plain, name) for name in same]
    # The weights, and those that they are moved to, are held while gradients are computed.
    assert moved.peak > plain.peak + moved.parameters


def test_the_module_of_a_plugin_is_counted(config):
    plain, learned = (estimate_memory(config("MLP", plugins=names)) for names in ((), ["tests.sam:Uncertainty"]))
    number, weights = 4, 10
    assert learned.notes == ()
    assert learned.plugins == {"uncertainty": number * (3 * weights + 1)}  # Adam: two numbers a weight, and a count
    assert learned.gradients == plain.gradients + number * weights


def test_passes_that_need_values_are_noted_and_counted_as_one(config):
    plain, reads = (estimate_memory(config("MLP", plugins=names)) for names in ((), ["hd_sizes:Reads"]))
    (note,) = reads.notes
    check_facts(note, "passes", "values")
    assert (reads.gradients, reads.peak) == (plain.gradients, plain.peak)


def test_a_plugin_that_cannot_be_counted_is_noted(config):
    estimate = estimate_memory(config("MLP", plugins=["hd_sizes:Broken", "ema"]))
    (note,) = estimate.notes
    check_facts(note, "'broken'", "no tape in the drive")
    assert estimate.plugins == {"ema": estimate.parameters}
    assert estimate.peak == estimate_memory(config("MLP")).peak + estimate.parameters


def test_a_model_that_looks_at_its_weights_is_refused(config):
    with refused(UserError, "memory", "hd_sizes:Looks"):
        estimate_memory(config("Looks"))


def test_a_mistake_in_the_config_is_refused_as_ever(config):
    with refused(ConfigError, "patch_size=3"):
        estimate_memory(config("dit", "model.patch_size=3"))


@pytest.fixture
def count(hookdiff, user_module, write_config):
    """Return a function that runs `hookdiff memory` on an MLP config, and returns exit code, stdout and stderr."""
    user_module("hd_sizes", USER)
    path = write_config(run={"batch_size": 6}, model={"use": "hd_sizes:MLP"})
    return lambda *words: hookdiff("memory", path, *words)


def test_memory_is_printed_as_a_table_in_mib(count):
    out = output(count("--set", "model.hidden=8192", "--set", "optimizer.use=adamw", "--plugins", "ema"))
    rows = {line.split()[0]: line.split(maxsplit=2)[1:] for line in out.splitlines()[1:]}
    expected = {"parameters": 4.03, "gradients": 4.03, "optimizer": 8.06, "plugins.ema": 4.03, "activations": 0.19}
    assert {name: float(rows[name][0]) for name in expected} == expected
    check_facts(rows["activations"][1], 6, 0.032)


@pytest.mark.parametrize(("hidden", "batch_size", "above"), [(8192, 6, False), (2048, 1024, True)])
def test_the_remark_about_the_peak_fits_the_number(count, hidden, batch_size, above):
    words = ("--set", f"model.hidden={hidden}", "--set", "optimizer.use=sgd", "--set", f"run.batch_size={batch_size}")
    sizes = json.loads(count(*words, "--json")[1])
    assert (sizes["peak"] > sizes["total"]) == above, sizes
    (line,) = [line for line in count(*words)[1].splitlines() if line.startswith("peak")]
    assert ("temporary" in line) == above


def test_memory_is_printed_as_json_in_bytes(count, config):
    sizes = json.loads(output(count("--json")))
    assert (sizes["parameters"], sizes["plugins"]) == (4 * (2 * 6400 + 164), {})
    assert sizes["total"] == estimate_memory(config("MLP")).total
