"""A short training, on this process or on several ranks."""

import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from attrs import evolve
from torch import Generator, Tensor, nn

from hookdiff import Batch, Loop, LoopConfig, LossOutput, build_loop, hookimpl, load_config
from hookdiff.data import digits
from hookdiff.experiment.config import make_plugin
from hookdiff.experiment.optimizers import weights_of
from hookdiff.machine import gathered, whole
from hookdiff.machine.joining import joined, leave
from hookdiff.testing import ToySampler
from hookdiff_muon import muon
from tests.conftest import acting
from tests.forked import Rank, forked


class Net(nn.Module):
    """Blocks in a list, one tensor smaller than the number of ranks, and weights outside of the blocks."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.first = nn.Linear(4, 10)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(10, 7), nn.SiLU(), nn.Linear(7, 10)) for _ in range(3))
        self.dropout = nn.Dropout(dropout)
        self.last = nn.Linear(10, 4)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(self.dropout(x))
        made: Tensor = self.last(x) * self.scale
        return made


class Denoise:
    """Predicts the noise, in the precision of the network."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def draw(self, batch: Batch, generator: Generator) -> Batch:
        noise = torch.randn((batch.total, 4), generator=generator)
        return evolve(batch, draws={"noise": batch.own(noise)})

    def __call__(self, net: nn.Module, batch: Batch) -> LossOutput:
        inputs, noise = batch.inputs.to(self.dtype), batch.draws["noise"].to(self.dtype)
        error = (net(inputs + noise) - noise).square().mean(1)
        return LossOutput(error.mean(), error)


class Halves:
    """Makes a pass over every second sample, then one over the others: what two ranks do, in one process."""

    @hookimpl
    def accumulate(self, loop: Loop, batch: Batch) -> LossOutput:
        outputs = [loop.run_pass(batch[start::2]) for start in (0, 1)]
        return LossOutput(torch.stack([output.loss for output in outputs]).mean())


class Asks:
    """Asks for the end after one step, or within it, on one rank alone."""

    def __init__(self, at: int, rank: int, within: bool) -> None:
        self.at, self.rank, self.within = at, rank, within

    @hookimpl
    def before_step(self, loop: Loop) -> None:
        if self.within and (loop.progress.step, loop.rank) == (self.at - 1, self.rank):
            loop.stop("plugin", "enough")

    @hookimpl
    def between_steps(self, loop: Loop) -> None:
        if not self.within and (loop.progress.step, loop.rank) == (self.at, self.rank):
            loop.stop("plugin", "enough")


class Dies:
    """Is killed before a step, on one rank alone."""

    def __init__(self, rank: int, at: int) -> None:
        self.rank, self.at = rank, at

    @hookimpl
    def before_step(self, loop: Loop) -> None:
        if (loop.progress.step, loop.rank) == (self.at - 1, self.rank):
            os.kill(os.getpid(), signal.SIGKILL)


class Spoils:
    """Makes the samples of one step not finite, on one rank alone."""

    def __init__(self, position: int, rank: int) -> None:
        self.position, self.rank = position, rank

    @hookimpl
    def make_batch(self, loop: Loop, batch: Batch) -> Batch:
        is_here = (loop.progress.position, loop.rank) == (self.position, self.rank)
        return evolve(batch, inputs=batch.inputs * torch.nan) if is_here else batch


class Drops:
    """Leaves out the samples with an odd number: each rank is left with another number of them."""

    @hookimpl
    def make_batch(self, batch: Batch) -> Batch:
        assert batch.indices is not None
        kept = (batch.indices % 2 == 0).nonzero().flatten()
        return Batch(batch.inputs[kept], indices=batch.indices[kept])


class Thaws:
    """Trains the first layer from the sixth step on only, and from the eleventh on no longer the last one."""

    @hookimpl
    def prepare_model(self, loop: Loop) -> None:
        loop.model.get_submodule("first").requires_grad_(False)

    @hookimpl
    def before_step(self, loop: Loop) -> None:
        loop.model.get_submodule("first").requires_grad_(loop.progress.step >= 5)
        loop.model.get_submodule("last").requires_grad_(loop.progress.step < 10)


class Looks:
    """Makes a pass without gradients before each update."""

    @hookimpl
    def after_backward(self, loop: Loop) -> None:
        with torch.no_grad():
            loop.model(torch.ones(3, 4, dtype=next(loop.model.parameters()).dtype))


class Sees:
    """Notes the samples and the noise of each step, and how many passes are made."""

    def __init__(self) -> None:
        self.steps: list[Any] = []
        self.passes = 0

    @hookimpl
    def before_step(self, batch: Batch) -> None:
        assert batch.indices is not None
        noise = batch.draws["noise"].double().sum(1).tolist()
        self.steps.append(sorted(zip(batch.indices.tolist(), noise, strict=True)))

    @hookimpl(wrapper=True)
    def micro_step(self) -> Any:
        self.passes += 1
        return (yield)


OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
    "muon": lambda model: muon(weights_of(model), lr=0.01),
}
OWN = {"halves": Halves, "asks": Asks, "spoils": Spoils, "drops": Drops, "looks": Looks, "thaws": Thaws}


def apart(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Return the largest difference of the weights and averages of two runs."""
    assert one["weights"].keys() == other["weights"].keys()
    assert one["averages"].keys() == other["averages"].keys()
    pairs = [(one[part][name], other[part][name]) for part in ("weights", "averages") for name in one[part]]
    return max(float((a.double() - b.double()).abs().max()) for a, b in pairs)


def train(spec: dict[str, Any]) -> dict[str, Any]:
    """Train as `spec` says; return weights, averages, losses and norms, and what each rank has seen."""
    dtype = getattr(torch, spec.get("dtype", "float32"))
    torch.manual_seed(0)
    net = Net(spec.get("dropout", 0.0)).to(dtype)
    if spec.get("unused"):
        net.unused = nn.Linear(2, 2)
    if spec.get("expanded"):
        net.register_buffer("expanded", torch.ones(1).expand(4))
        net.register_buffer("shown", torch.ones(1, dtype=dtype))
        net.register_buffer("of_shown", net.shown.expand(4))
        net.last.register_forward_pre_hook(lambda *_: [net.shown.add_(1), None][1])
    data = torch.randn(60, 4, generator=Generator().manual_seed(1))
    sees = Sees()
    plugins: dict[str, Any] = {"sees": sees}
    for name, options in spec["plugins"].items():
        plugins[name] = OWN[name](**options) if name in OWN else make_plugin(name, {"plugins": {name: options}})
    loop = Loop(
        net,
        OPTIMIZERS[spec.get("optimizer", "adamw")],
        Denoise(dtype),
        data,
        LoopConfig(**{"steps": 20, "batch_size": 12, "log_every": 5, **spec.get("config", {})}),
        plugins,
    )
    with loop:
        steps = [(step.step, step.outcome, step.loss, step.grad_norm) for step in loop.steps()]
        weights = {name: whole(value) for name, value in loop.model.state_dict().items()}
        averages = {name: whole(value) for name, value in getattr(plugins.get("ema"), "shadow", {}).items()}
    end = (loop.end.reason, loop.end.message)
    shown = gathered({"steps": steps, "seen": sees.steps, "passes": sees.passes, "end": end})
    return {"weights": weights, "averages": averages, "ranks": shown}


def train_config(spec: dict[str, Any]) -> dict[str, Any]:
    """Train the config at `spec["path"]` with the plugins of the spec; return the last step and its loss.

    The run ends after ten steps, or is resumed after each number of `spec["steps"]` but the last. `spec["killed"]` is
    the rank that is killed, and before which step.
    """
    own = {"dies": Dies(*spec["killed"])} if "killed" in spec else {}
    for steps in spec.get("steps", [10]):
        settings = [f"run.steps={steps}", f"run.log_every={spec.get('log_every', 1)}"]
        config = load_config(spec["path"], spec["plugins"], settings=settings)
        with build_loop(config, spec["out"], resume=True, plugins=own) as loop:
            loss = [step.loss for step in loop.steps()][-1]
    return {"step": loop.progress.step, "loss": loss}


def measured(plugin: object) -> dict[str, float]:
    """Train for a step, and return what a plugin that measures samples has logged of digits at its end."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    logged: dict[str, float] = {}
    model = nn.Conv2d(1, 1, 1)
    loss = lambda net, batch: net(batch.inputs).square().mean()  # noqa: E731
    plugins = {"plugin": plugin, "logged": acting(on_log=lambda values: logged.update(values))}
    sgd, limits = torch.optim.SGD(model.parameters(), 1e-9), LoopConfig(steps=1, batch_size=8)
    Loop(model, sgd, loss, digits(), limits, plugins, sampler=ToySampler()).run()
    return {name: value for name, value in logged.items() if "digits" in name}


Work = Callable[[dict[str, Any]], dict[str, Any]]


@contextmanager
def started(folder: Path, num: int, work: Work, spec: dict[str, Any]) -> Iterator[list[Rank]]:
    """Start `num` ranks that do the `work` of `spec`; the first one writes what it returns to `folder`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with forked(folder, num, _do, num, port, work, spec, folder / "out.pt") as processes:
        yield processes


def _do(rank: int, num: int, port: int, work: Work, spec: dict[str, Any], out: Path) -> None:
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num, "MASTER_PORT": port}
    os.environ.update({name: str(number) for name, number in numbers.items()}, MASTER_ADDR="127.0.0.1")
    with joined("cpu"):
        result = work(spec)
        if rank == 0:
            torch.save(result, out)
    leave(0)


def done(folder: Path, num: int, work: Work, spec: dict[str, Any]) -> dict[str, Any]:
    """Let `num` ranks do the `work` of `spec`, and return what it returns on the first one."""
    with started(folder, num, work, spec) as processes:
        for code, _, err in [process.finish() for process in processes]:
            assert code == 0, err
    result: dict[str, Any] = torch.load(folder / "out.pt")
    return result
