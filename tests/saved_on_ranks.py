"""A run with checkpoints, on this process or on several ranks."""

import errno
import logging
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hookdiff import Loop, UserError, hookimpl
from hookdiff.disk.tree import flatten
from hookdiff.experiment.optimizers import weights_of
from hookdiff.machine import fill_, gathered, is_sharded, local, num_ranks, rank, whole
from hookdiff.testing.toy import toy_loop
from hookdiff_checkpoint import Checkpoint
from hookdiff_ddp import DDP
from hookdiff_ema import EMA
from hookdiff_muon import muon


class Rows(torch.optim.Optimizer):
    """Keeps a mean of squares for each row: sharded state with another shape than its weight."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    mean = parameter.grad.square().mean(-1)
                    state = self.state[parameter]
                    state["rows"] = state["rows"].lerp(mean, 0.1) if state else mean
                    parameter.sub_(0.01 * parameter.grad / (state["rows"].unsqueeze(-1).sqrt() + 1e-8))


OPTIMIZERS: dict[str, Any] = {
    "rows": lambda model: Rows([parameter for parameter in model.parameters() if parameter.dim() == 2]),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, fused=True, amsgrad=True),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
    "muon": lambda model: muon(weights_of(model), lr=0.01),
}


class Net(nn.Module):
    """Two blocks, a weight smaller than the number of ranks, statistics that each rank has whole, and tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 7), nn.SiLU(), nn.Linear(7, 4)) for _ in range(2))
        self.last = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("mask", torch.full((3,), -torch.inf))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        made: Tensor = self.last(x) * self.scale
        return made


class Shard:
    """Shards the blocks, and then the rest, over all ranks; alone, it does nothing."""

    @hookimpl(trylast=True)
    def prepare_model(self, loop: Loop) -> None:
        if num_ranks() == 1:
            return
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (num_ranks(),))
        net: Any = loop.model
        for block in net.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(net, mesh=mesh, reshard_after_forward=True)


class Keeps:
    """Keeps tensors of its own: a sharded one under another name than the model's, and one that is not sharded."""

    @hookimpl
    def on_start(self, loop: Loop) -> None:
        net: Any = loop.model
        self.seen = torch.zeros_like(net.blocks[0][0].weight.detach())
        self.count = torch.zeros(())

    @hookimpl
    def after_optimizer_step(self, loop: Loop) -> None:
        net: Any = loop.model
        self.seen.add_(net.blocks[0][0].weight.detach())
        self.count.add_(1)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "count": self.count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        fill_(self.seen, state["seen"])
        self.count.copy_(state["count"])


class Spoil:
    """Makes one weight infinite after a step, in the part of one rank alone."""

    def __init__(self, at: int, rank: int) -> None:
        self.at, self.rank = at, rank

    @hookimpl
    def after_optimizer_step(self, loop: Loop) -> None:
        if (loop.progress.step, loop.rank) == (self.at, self.rank):
            net: Any = loop.model
            local(net.last.weight)[0] = torch.inf


class Bad:
    """Makes the samples of one batch not finite on all ranks, and asks for a rollback."""

    def __init__(self, position: int) -> None:
        self.position = position

    @hookimpl
    def before_step(self, loop: Loop, batch: Any) -> None:
        if loop.progress.position == self.position:
            batch.inputs.fill_(torch.nan)

    @hookimpl
    def on_nan(self) -> Any:
        return "rollback"


class Fault:
    """Makes the save of one step fail on one rank: by an error of the disk, or by the death of the rank.

    The fault meets the thread when it makes the file, or gives the name, in which `name` is found.
    """

    def __init__(self, at: int, rank: int, kind: str, name: str) -> None:
        self.at, self.rank, self.kind, self.name, self.is_due = at, rank, kind, name, True
        sys.addaudithook(self.audit)

    def audit(self, event: str, arguments: Any) -> None:
        is_new = event == "open" and str(arguments[1]).startswith("x")
        if not (self.is_due and (is_new or event == "os.rename") and rank() == self.rank):
            return
        path = Path(arguments[not is_new])
        if f"step-{self.at:08d}" in str(path) and self.name in path.name:
            self.is_due = False
            if self.kind == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            number = getattr(errno, self.kind)
            raise OSError(number, os.strerror(number))


class Crash:
    """Raises an error on one rank, before a step."""

    def __init__(self, at: int, rank: int) -> None:
        self.at, self.rank = at, rank

    @hookimpl
    def before_step(self, loop: Loop) -> None:
        if (loop.progress.step, loop.rank) == (self.at - 1, self.rank):
            raise RuntimeError("mine")


class Sees:
    """Notes the checkpoints that are announced, and the warnings."""

    def __init__(self) -> None:
        self.announced: list[str] = []
        self.said: list[str] = []
        self.handler = logging.Handler(logging.WARNING)
        self.handler.emit = lambda record: self.said.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("hookdiff").addHandler(self.handler)

    @hookimpl
    def on_checkpoint(self, path: Path) -> None:
        self.announced.append(path.name)


class Score:
    """Logs values, by the number of their step."""

    def __init__(self, values: Mapping[str, float]) -> None:
        self.values = values

    @hookimpl
    def after_optimizer_step(self, loop: Loop) -> None:
        if (at := str(loop.progress.step)) in self.values:
            loop.log({"score": self.values[at]})


SHARDED: dict[str, Any] = {"shard": {}, "keeps": {}, "ema": {"decay": [0.9, 0.99]}, "checkpoint": {"every": 2}}
PLUGINS: dict[str, Any] = {"shard": Shard, "ddp": DDP, "keeps": Keeps, "spoil": Spoil, "bad": Bad, "fault": Fault}
PLUGINS |= {"crash": Crash, "score": Score, "ema": EMA, "checkpoint": Checkpoint}


def values(loop: Loop) -> dict[str, Any]:
    """Return the whole tensors and the other values of the state of `loop`; all ranks must call this."""
    tensors, tree = flatten({key: value for key, value in loop.state_dict().items() if key != "versions"})
    whole_ones = {name: whole(tensor).clone() for name, tensor in tensors.items()}
    return {"tensors": whole_ones, "tree": tree, "sharded": sorted(n for n, t in tensors.items() if is_sharded(t))}


def run(spec: dict[str, Any]) -> dict[str, Any]:
    """Train as `spec` says; return the state when the run begins and when it ends, and what each rank has seen.

    RANK in the directory stands for the number of the rank, which then has its run in a folder of its own.
    """
    run_dir = spec["run_dir"]
    if "RANK" in run_dir.name:
        os.chdir(run_dir.with_name(run_dir.name.replace("RANK", str(rank()))))
        run_dir = Path("run")
    sees = Sees()
    plugins = {"sees": sees, **{name: PLUGINS[name](**options) for name, options in spec["plugins"].items()}}
    torch.manual_seed(spec.get("seed", 0))
    loop = toy_loop(
        plugins,
        model=Net(),
        optimizers=OPTIMIZERS[spec.get("optimizer", "adamw")],
        run_dir=run_dir,
        resume=spec.get("resume", False),
        steps=spec["steps"],
    )
    error, begun, ended = None, {}, {}
    try:
        with loop:
            begun = values(loop)
            for _ in loop.steps():
                pass
            ended = values(loop)
    except UserError as caught:
        error = type(caught).__name__, str(caught)
    finally:
        logging.getLogger("hookdiff").removeHandler(sees.handler)
    end = [loop.end.reason, loop.end.message]
    seen = {"error": error, "announced": sees.announced, "said": sees.said, "end": end, "step": loop.progress.step}
    return {"begun": begun, "ended": ended, "ranks": gathered(seen)}


def spec_of(run_dir: Path, steps: int, **options: Any) -> dict[str, Any]:
    """Return what `run` is to do, by default with `SHARDED`."""
    run_dir.mkdir(exist_ok=True)
    return {"run_dir": run_dir, "steps": steps, "plugins": SHARDED, **options}
