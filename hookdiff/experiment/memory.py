"""How much memory the training of a config takes, counted on tensors that have a shape and no values.

Two updates are made of fake tensors through the loop's own hooks, so autocast, gradient checkpointing and what plugins
keep are in the count. The numbers are those that an allocator is asked for: its rounding, and what a kernel takes for
itself, come on top.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from attrs import define
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.optim import Optimizer

from hookdiff.data import Batch, InMemory
from hookdiff.disk.tree import flatten
from hookdiff.errors import ConfigError, UserError
from hookdiff.experiment import build
from hookdiff.gradients import clear_gradients
from hookdiff.models.memory import HeldBytes, as_fakes, storages

if TYPE_CHECKING:
    from hookdiff.experiment.config import Config
    from hookdiff.loop import Loop

# Plugins that have a part in forward and backward, or keep something; those that write files or make images do not.
HOOKS = ("prepare_model", "wrap_net", "micro_step", "compute_loss", "backward", "state_dict")


@define(frozen=True, kw_only=True)
class MemoryEstimate:
    """Bytes on the device, by what takes them."""

    device: str
    batch_size: int  # samples of an update, of one rank
    micro_batch: int  # samples that go through the network at a time
    parameters: int
    buffers: int
    gradients: int
    optimizer: int | None  # its state once it has made an update; None: it cannot be run on fake tensors
    plugins: Mapping[str, int]  # the tensors in the state of each that has some
    data: int  # the set, where a GPU holds it
    batch: int  # inputs, labels and draws of an update
    activations: int  # kept for the backward pass of a micro-batch: each storage once, and nothing of the above
    per_sample: int  # what one more sample in the micro-batch adds to the activations
    peak: int  # the most that is held at one time, with all that comes and goes in an update
    available: int | None = None  # the memory of the device, where it has its own
    notes: tuple[str, ...] = ()  # what is not in the numbers, and why

    @property
    def total(self) -> int:
        """The sum of the parts; `peak` can be less, since gradients come as activations go."""
        kept = self.parameters + self.buffers + (self.optimizer or 0) + sum(self.plugins.values())
        return kept + self.gradients + self.data + self.batch + self.activations


def estimate_memory(config: Config) -> MemoryEstimate:
    """Count what training `config` takes, without making its weights, its activations or a run directory.

    The data is looked at for the shape of its samples. `micro_batch = "auto"` is counted as the whole batch.

    Raises ConfigError for what cannot be built, and UserError for a model that cannot be run without values.
    """
    chosen, cpu = build.pick_device(config.run.device), torch.device("cpu")
    with tempfile.TemporaryDirectory() as folder, torch.compiler.set_stance("force_eager"):
        for device in (chosen, cpu) if chosen.type == "cuda" else (cpu,):
            for made_on in (torch.device("meta"), cpu):  # many models look at a value while they are made
                try:
                    return _estimate(config, Path(folder), device, made_on)
                except Exception as error:  # whatever a model may raise
                    problem = error
    if isinstance(problem, ConfigError) and not _looked(problem):
        raise problem
    reason = "it looks at values, and they are made without any" if _looked(problem) else _first_line(problem)
    raise UserError(f"the memory of {config.model.use} cannot be counted: {reason}") from problem


def _looked(error: BaseException | None) -> bool:
    """Whether something wanted to know a value of a fake tensor."""
    return isinstance(error, DataDependentOutputException) or (error is not None and _looked(error.__cause__))


def _estimate(config: Config, run_dir: Path, device: torch.device, made_on: torch.device) -> MemoryEstimate:
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def make(fitted: Config, _: torch.device) -> nn.Module:
        with made_on:
            return as_fakes(build.make_model(fitted, made_on), mode, device)

    loop = build.build_loop(config, run_dir, hooks=HOOKS, make=make)
    notes = _start(loop)
    size = -(-config.run.batch_size // loop.num_ranks)
    micro_batch = min(size, loop.config.micro_batch or size)
    batch, more = _batch(loop, size), _batch(loop, micro_batch + 1)
    parts = batch.split(micro_batch)
    held = storages([*loop.model.parameters(), *loop.model.buffers(), *_tensors(batch)])

    with _saved() as saved:
        _micro_step(loop, parts[0])
    activations = _sum_without(saved, held)  # at once: what is made later may get the address of what is gone
    gradients = sum(storages(parameter.grad for parameter in loop.model.parameters()).values())
    optimizer: int | None = None
    try:
        _step(loop.optimizers, mode)
        state = [value for each in loop.optimizers for entry in each.state.values() for value in entry.values()]
        held |= storages(state)
        optimizer = sum(storages(state, device).values())
    except Exception as error:  # whatever an optimizer may raise
        notes.append(f"the state of the optimizer: {_first_line(error)}")
    plugins, more_notes = _plugin_states(loop, held)
    with _saved() as saved:
        loop.hook.compute_loss(loop=loop, batch=more)
    per_sample = _sum_without(saved, held | storages(_tensors(more))) - activations
    clear_gradients(loop.optimizers)
    with HeldBytes(held) as now:
        for part in parts[:2]:  # a second one finds the gradients of the first
            _micro_step(loop, part)
        if optimizer is not None:
            _step(loop.optimizers, mode)

    parameters = sum(storages(loop.model.parameters()).values())
    buffers = sum(storages(loop.model.buffers()).values())
    inputs = sum(storages(_tensors(batch)).values())
    data = _data(config, loop)
    return MemoryEstimate(
        device=str(device),
        batch_size=size,
        micro_batch=micro_batch,
        parameters=parameters,
        buffers=buffers,
        gradients=gradients,
        optimizer=optimizer,
        plugins=plugins,
        data=data,
        batch=inputs,
        activations=activations,
        per_sample=per_sample,
        peak=parameters + buffers + (optimizer or 0) + sum(plugins.values()) + data + inputs + now.most,
        available=torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None,
        notes=(*notes, *more_notes),
    )


def _start(loop: Loop) -> list[str]:
    """Begin as the loop does, but let each plugin start by itself; return what could not be counted."""
    loop.prepare()
    notes = []
    for heard in loop.plugins.order("on_start"):
        try:
            heard.function(*({"loop": loop}[name] for name in heard.argnames))
        except Exception as error:  # whatever a plugin may raise
            notes.append(f"the plugin {heard.plugin_name!r} did not start: {_first_line(error)}")
    return notes


def _batch(loop: Loop, size: int) -> Batch:
    """Return a batch of zeros. Its values are real, since a network may look at times and labels."""
    inputs = torch.zeros(size, *loop.feed.shape, device=loop.device)
    labels = None if loop.feed.labels is None else torch.zeros(size, dtype=torch.int64, device=loop.device)
    batch = Batch(inputs, labels, torch.zeros(size, dtype=torch.int64))
    return loop.objective.draw(batch, loop.random.generator("noise", 0, loop.device))


def _tensors(batch: Batch) -> list[Tensor | None]:
    return [batch.inputs, batch.labels, *batch.draws.values()]


def _micro_step(loop: Loop, part: Batch) -> None:
    loop.hook.micro_step(loop=loop, batch=part, index=0, count=1)


@contextmanager
def _saved() -> Iterator[dict[int, int]]:
    """Note the bytes of each storage that is saved for a backward pass, by its address."""
    saved: dict[int, int] = {}

    def look(tensor: Tensor) -> Tensor:
        saved.update(storages([tensor]))
        return tensor

    with saved_tensors_hooks(look, lambda tensor: tensor):
        yield saved


def _sum_without(storages: Mapping[int, int], others: Mapping[int, int]) -> int:
    return sum(size for address, size in storages.items() if address not in others)


def _step(optimizers: Iterable[Optimizer], mode: FakeTensorMode) -> None:
    with mode:
        for optimizer in optimizers:
            optimizer.step()


def _plugin_states(loop: Loop, held: dict[int, int]) -> tuple[dict[str, int], list[str]]:
    """Add what plugins keep to what is `held`; return the bytes of each, and what could not be counted."""
    sizes, notes = {}, []
    for name, plugin in loop.plugins.items():
        if hasattr(plugin, "state_dict"):
            try:
                tensors, _ = flatten(plugin.state_dict())
            except Exception as error:  # whatever a plugin may raise
                notes.append(f"the state of the plugin {name!r}: {_first_line(error)}")
                continue
            own = storages(tensors.values(), loop.device)
            if size := _sum_without(own, held):
                sizes[name] = size
            held |= own
    return sizes, notes


def _data(config: Config, loop: Loop) -> int:
    """Return the bytes of the set where a GPU holds it: see `InMemory.to`."""
    samples = loop.feed.samples
    if isinstance(samples, InMemory):
        return (
            sum(storages([samples.images, samples.labels], loop.device).values()) if loop.device.type == "cuda" else 0
        )
    size = len(samples) * torch.Size(loop.feed.shape).numel()  # decoded, a byte a number
    kept = loop.device.type == "cuda" and config.feed["store"].place(size) != "none"
    return size if kept and size <= torch.cuda.mem_get_info(loop.device)[0] // 4 else 0


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0] or type(error).__name__
