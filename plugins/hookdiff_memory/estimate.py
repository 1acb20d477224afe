"""The memory that training a config takes, counted on tensors that have a shape and no values.

Two updates are made with such fake tensors through the loop's own hooks, so the count includes autocast, gradient
checkpointing and the states of plugins. The numbers are the bytes requested from the allocator. Its rounding, and the
workspaces of kernels, are not included.
"""

import gc
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from attrs import define
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.optim import Optimizer

from hookdiff import Batch, Config, ConfigError, InMemory, Loop, UserError, build_loop
from hookdiff.disk import flatten
from hookdiff.experiment import make_model, pick_device
from hookdiff.images import Store
from hookdiff.loop import hooks_of, implements, keeps_state, state_of
from hookdiff.models import HeldBytes, as_fake, storages

# Plugins that have none of these hooks, and no state, only write files or make images, and are not measured.
_MEASURED_HOOKS = (*hooks_of("model", "net", "passes"), "draw")


@define(frozen=True, kw_only=True)
class MemoryEstimate:
    """Bytes on the device, by their use."""

    device: str
    batch_size: int  # samples of an update, of one rank
    micro_batch: int  # samples that go through the network at a time
    parameters: int
    buffers: int
    gradients: int
    optimizer: int | None  # its state after an update; None: it cannot run on fake tensors
    plugins: Mapping[str, int]  # bytes of tensors in the state of each plugin that has any
    data: int  # all samples, if a GPU holds them
    batch: int  # inputs, labels and random draws of an update
    activations: int  # tensors saved for the backward pass of a micro-batch, except those above
    per_sample: int  # activations of one more sample in the micro-batch
    peak: int  # the most at one time, with the temporary tensors of an update
    available: int | None = None  # memory of the GPU; None on a CPU
    notes: tuple[str, ...] = ()  # parts that are not in the numbers, with the reason

    @property
    def total(self) -> int:
        """The sum of the parts; `peak` can be less, since activations are freed while gradients are made."""
        states = (self.optimizer or 0) + sum(self.plugins.values())
        return self.parameters + self.buffers + states + self.gradients + self.data + self.batch + self.activations


def estimate_memory(config: Config) -> MemoryEstimate:
    """Count the memory that training `config` takes, without making its weights, its activations or a run directory.

    The data is read for the shape of its samples. `micro_batch = "auto"` is counted as the whole batch.

    Raises ConfigError for a config that cannot be built, and UserError for a model that cannot run without values.
    """
    chosen, cpu = pick_device(config.run.device), torch.device("cpu")
    with tempfile.TemporaryDirectory() as folder, torch.compiler.set_stance("force_eager"):
        for device in (chosen, cpu) if chosen.type == "cuda" else (cpu,):
            for made_on in (torch.device("meta"), cpu):  # many models read values while they are made
                try:
                    return _estimate(config, Path(folder), device, made_on)
                except Exception as error:  # a model may raise anything
                    problem = error
    if isinstance(problem, ConfigError) and not _needs_values(problem):
        raise problem
    raise UserError(f"the memory of {config.model.use} cannot be counted: {_reason(problem)}") from problem


def _needs_values(error: BaseException | None) -> bool:
    """Return whether the value of a fake tensor was read."""
    return isinstance(error, DataDependentOutputException) or (error is not None and _needs_values(error.__cause__))


def _estimate(config: Config, run_dir: Path, device: torch.device, made_on: torch.device) -> MemoryEstimate:
    mode, notes = FakeTensorMode(allow_non_fake_inputs=True), []

    def make(fitted: Config, _: torch.device) -> nn.Module:
        with made_on:
            return _as_fakes(make_model(fitted, made_on), mode, device)

    @contextmanager
    def noted(part: str) -> Iterator[None]:
        """Note an error in place of raising it: a plugin or an optimizer may raise anything."""
        try:
            yield
        except Exception as error:
            notes.append(f"{part}: {_reason(error)}")

    def passes(batch: Batch) -> None:
        loop.gradients.reset()
        with noted("the passes that a plugin makes"):
            loop.hook.accumulate(loop=loop, batch=batch)
            return
        gc.collect()  # the error may hold tensors of these passes
        loop.gradients.reset()
        loop.run_pass(batch)

    def step() -> None:
        with mode:
            for optimizer in optimizers:
                optimizer.step()

    targets = {name: part.target for name, part in config.plugins.items()}
    keep = [name for name, kind in targets.items() if keeps_state(kind) and not implements(kind, "restore")]
    loop = build_loop(config, run_dir, hooks=_MEASURED_HOOKS, keep=keep, make=make)
    loop.prepare()
    for trained in loop.adopted:
        _make_fake(trained.module, trained.optimizer, mode, device)
    optimizers = loop.all_optimizers
    for start in loop.plugins.order("on_start"):  # each plugin by itself
        with noted(f"the plugin {start.plugin_name!r} did not start"):
            start.function(*({"loop": loop}[name] for name in start.argnames))
    for group in (group for each in optimizers for group in each.param_groups):
        group["lr"] = float(group["lr"])  # if the rate is a tensor, torch would update real tensors
    size = -(-config.run.batch_size // loop.num_ranks)
    micro_batch = min(size, loop.config.micro_batch or size)
    batch, more = _batch(loop, size), _batch(loop, micro_batch + 1)
    inputs, parameters, buffers = _tensors(batch), storages(loop.model.parameters()), storages(loop.model.buffers())
    held = parameters | buffers | inputs

    with _saved() as saved:
        loop.hook.micro_step(loop=loop, batch=batch[:micro_batch], index=0, count=1)
    activations = _sum_without(saved, held)  # now, because a later tensor may get the address of a freed one
    passes(batch[:micro_batch])
    weights = [*loop.model.parameters(), *(parameter for _, parameter in loop.adopted.named_parameters())]
    gradients = sum(storages(weight.grad for weight in weights).values())
    optimizer: int | None = None
    with noted("the state of the optimizer"):
        step()
        state = [value for each in loop.optimizers for entry in each.state.values() for value in entry.values()]
        held |= storages(state)
        optimizer = sum(storages(state, device).values())
    plugins: dict[str, int] = {}
    for name, plugin in loop.plugins.items():
        with noted(f"the state of the plugin {name!r}"):
            states = (state_of(keeper) for keeper in (plugin, *loop.adopted.of(name)))
            tensors = [flatten(state)[0].values() for state in states]
            sizes = storages(chain(*tensors), loop.device)
            plugins[name] = _sum_without(sizes, held)
            held |= sizes
    with _saved() as saved:
        loop.hook.micro_step(loop=loop, batch=more, index=0, count=1)
    per_sample = _sum_without(saved, held | _tensors(more)) - activations
    loop.gradients.reset()
    with HeldBytes(held) as now:
        passes(batch[: 2 * micro_batch])  # the second part adds to the gradients of the first
        if optimizer is not None:
            step()

    fixed = {
        "parameters": sum(parameters.values()),
        "buffers": sum(buffers.values()),
        "data": _data(config, loop),
        "batch": sum(inputs.values()),
    }
    return MemoryEstimate(
        device=str(device),
        batch_size=size,
        micro_batch=micro_batch,
        gradients=gradients,
        optimizer=optimizer,
        plugins={name: size for name, size in plugins.items() if size},
        activations=activations,
        per_sample=per_sample,
        peak=sum(fixed.values()) + (optimizer or 0) + sum(plugins.values()) + now.most,
        available=torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None,
        notes=tuple(dict.fromkeys(notes)),
        **fixed,
    )


def _as_fakes(model: nn.Module, mode: FakeTensorMode, device: torch.device) -> nn.Module:
    """Replace all parameters and buffers of `model` by tensors without values on `device`."""
    fake = cache(lambda tensor: as_fake(tensor, mode, device))  # shared tensors stay shared
    for module in model.modules():
        tables: tuple[Any, ...] = (module._parameters, module._buffers)
        for tensors in tables:
            tensors.update({name: fake(tensor) for name, tensor in tensors.items() if tensor is not None})
    return model


def _make_fake(module: nn.Module, optimizer: Optimizer, mode: FakeTensorMode, device: torch.device) -> None:
    """Replace all parameters and buffers of `module`, also in `optimizer`, by tensors without values on `device`."""
    real = list(module.parameters())
    fakes = dict(zip(real, _as_fakes(module, mode, device).parameters(), strict=True))
    for group in optimizer.param_groups:
        group["params"] = [fakes[parameter] for parameter in group["params"]]


def _batch(loop: Loop, size: int) -> Batch:
    """Return a batch of zeros. Its tensors are real, because a network may read times and labels."""
    return loop.hook.draw(loop=loop, batch=loop.feed.blank(size, loop.feed.largest))


def _tensors(batch: Batch) -> dict[int, int]:
    return storages([batch.inputs, batch.labels, *batch.conditions.values(), *batch.draws.values()])


@contextmanager
def _saved() -> Iterator[dict[int, int]]:
    """Collect the bytes of each storage that is saved for a backward pass, by its address."""
    saved: dict[int, int] = {}

    def look(tensor: Tensor) -> Tensor:
        saved.update(storages([tensor]))
        return tensor

    with saved_tensors_hooks(look, lambda tensor: tensor):
        yield saved


def _sum_without(sizes: Mapping[int, int], others: Mapping[int, int]) -> int:
    return sum(size for address, size in sizes.items() if address not in others)


def _data(config: Config, loop: Loop) -> int:
    """Return the bytes of the data if a GPU holds it: see `InMemory.to`."""
    samples = loop.feed.samples
    if loop.device.type != "cuda":
        return 0
    if isinstance(samples, InMemory):
        held = [samples.images, samples.labels, *samples.conditions.values()]
        return sum(storages(held, loop.device).values())
    size = len(samples) * torch.Size(loop.feed.shape).numel()  # decoded, one byte per value
    fits = size <= torch.cuda.mem_get_info(loop.device)[0] // 4
    return size if fits and config.data.of(Store).place(size) != "none" else 0


def _reason(error: BaseException) -> str:
    if _needs_values(error):
        return "it reads values of tensors, which do not exist here"
    return str(error).partition("\n")[0] or type(error).__name__
