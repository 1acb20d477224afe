"""Data and a model that draw random numbers, and plugins that do not resume, which tests of a resume have to find.

`hookdiff selftest resume` imports them in processes of its own.
"""

import random
from collections.abc import Mapping
from typing import Any

import numpy
import torch
from attrs import define, field
from torch import Tensor, nn

from hookdiff import Batch, Loop, Sink, hookimpl


class Rolled:
    """Images of noise, rolled, mirrored and brightened by chance."""

    def __init__(self) -> None:
        self.pixels = torch.rand(40, 1, 8, 8, generator=torch.Generator().manual_seed(0)) - 0.5

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, index: int) -> Tensor:
        image = self.pixels[index].roll(random.randrange(8), 2)
        image = image.flip(1) if numpy.random.rand() < 0.5 else image
        return (image + 0.2 * torch.rand(())).clamp(-1, 1)


class Net(nn.Module):
    """A network with dropout and batch norm."""

    def __init__(self, in_channels: int = 3) -> None:  # the data gives 1
        super().__init__()
        first = nn.Conv2d(in_channels, 8, 3, padding=1)
        self.before = nn.Sequential(first, nn.BatchNorm2d(8), nn.SiLU(), nn.Dropout(0.2))
        self.after = nn.Conv2d(8, in_channels, 3, padding=1)

    def forward(self, x: Tensor, timesteps: Tensor) -> Any:
        return self.after(self.before(x))


@define(eq=False)
class Saved:
    """Adds to the gradients what is left of those before, and saves that."""

    left: list[Tensor] = field(factory=list, init=False)
    steps: int = field(default=0, init=False)

    @hookimpl(trylast=True)
    def after_backward(self, loop: Loop) -> None:
        self.steps += 1
        gradients = list(loop.gradients.tensors())
        if self.left:
            torch._foreach_add_(gradients, self.left, alpha=0.5)
        self.left = [gradient.clone() for gradient in gradients]

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "left": {str(k): left for k, left in enumerate(self.left)}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps = state["steps"]
        self.left = [state["left"][str(k)] for k in range(len(state["left"]))]


class Forgets(Saved):
    """Saves the number of steps only."""

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps = state["steps"]


class Mangles(Saved):
    """Saves all, and loads another number of steps."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict({**state, "steps": 0})


class Breaks(Saved):
    """Cannot load its state."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        raise KeyError("momentum")


class Fails(Saved):
    """Raises an error in the first step."""

    @hookimpl(trylast=True)
    def after_backward(self, loop: Loop) -> None:
        raise RuntimeError("no such thing")


@define(eq=False)
class Scales:
    """Scales a weight by a number that it counts and does not save."""

    updates: int = field(default=0, init=False)

    @hookimpl
    def after_optimizer_step(self, loop: Loop) -> None:
        self.updates += 1
        with torch.no_grad():
            next(loop.model.parameters()).mul_(1 + 1e-4 * self.updates)


@define(eq=False)
class Mirrors:
    """Changes the batch by a generator of its own, which it seeds and does not save."""

    luck: random.Random = field(factory=lambda: random.Random(0), init=False)

    @hookimpl
    def before_step(self, batch: Batch) -> None:
        batch.inputs.mul_(1 - 0.1 * self.luck.random())


class Secret(Mirrors):
    """Draws from a generator of its own that nobody seeds."""

    def __init__(self) -> None:
        self.luck = random.Random()


@define(eq=False)
class Counts:
    """Logs a number that it does not save, under a name that is not its own."""

    seen: int = field(default=0, init=False)

    @hookimpl
    def after_optimizer_step(self, loop: Loop) -> None:
        self.seen += 1
        loop.log({"updates": self.seen})


class Draws:
    """Draws before the loop has seeded anything for the step."""

    @hookimpl
    def before_step(self, loop: Loop) -> None:
        loop.log.average({"luck": torch.rand(())})


class Wild:
    """Draws from a generator that nobody seeds."""

    @hookimpl
    def after_backward(self, loop: Loop) -> None:
        for gradient in loop.gradients.tensors():
            gradient.mul_(1 + 0.01 * random.random())


class Noisy:
    """Logs a number from a generator that nobody can seed, and changes nothing."""

    @hookimpl
    def after_optimizer_step(self, loop: Loop) -> None:
        loop.log({"noisy/number": random.SystemRandom().random()})


class Appends:
    """Writes a file of its own, in which lines appear twice after a resume."""

    @hookimpl
    def after_optimizer_step(self, loop: Loop) -> None:
        assert loop.run_dir
        with (loop.run_dir / "mine.bin").open("ab") as file:
            file.write(b"\xff" + bytes([loop.progress.step]))


class Rows:
    """Writes a table of its own, in which rows appear twice after a resume."""

    @hookimpl
    def after_optimizer_step(self, loop: Loop) -> None:
        assert loop.run_dir
        with (loop.run_dir / "mine.csv").open("a") as file:
            file.write(f"{loop.progress.step},{loop.gradients.loss}\n")


@define(eq=False)
class Sessions(Sink):
    """Writes a file for each session, with times and events, and counts the sessions."""

    file: Any = field(default=None, init=False)
    sessions: int = field(default=0, init=False)

    def open(self, run: Any) -> None:
        self.sessions += 1
        self.file = (run.run_dir / f"session {self.sessions}").open("w")

    def scalars(self, step: int, time: float, values: Mapping[str, float]) -> None:
        self.file.write(f"{step} {time} {values}\n")

    def event(self, step: int, time: float, event: Any) -> None:
        self.file.write(f"{event.kind} {time}\n")

    def close(self) -> None:
        self.file.close()

    def state_dict(self) -> dict[str, Any]:
        return {"sessions": self.sessions}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.sessions = state["sessions"]


class Mute:
    """Says that it saves, and does not."""

    @hookimpl
    def restore(self, loop: Loop) -> dict[str, Any]:
        return {}
