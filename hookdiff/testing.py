"""Helpers for tests of plugins: a real Loop, small enough that a test takes milliseconds."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from attrs import evolve
from torch import Generator, Tensor, nn
from torch.overrides import TorchFunctionMode

from hookdiff.data.batch import Batch
from hookdiff.loop import Loop
from hookdiff.objective import LossOutput
from hookdiff.progress import LoopConfig

_READS = ("item", "tolist", "numpy", "cpu", "is_nonzero", "__bool__", "__int__", "__float__", "__index__", "__array__")


class ToyObjective:
    """Learns to predict the noise in samples of any shape: a small diffusion with timesteps and a loss per sample."""

    def draw(self, batch: Batch, generator: Generator) -> Batch:
        noise = torch.randn(batch.inputs.shape, generator=generator)
        timesteps = torch.randint(0, 10, (len(batch),), generator=generator)
        return evolve(batch, draws={"noise": noise, "timesteps": timesteps})

    def __call__(self, net: nn.Module, batch: Batch) -> LossOutput:
        noise, timesteps = batch.draws["noise"], batch.draws["timesteps"]
        level = (timesteps.float() / 10).reshape(-1, *[1] * (noise.dim() - 1))
        error = (net(batch.inputs + level * noise).float() - noise).square().flatten(1).mean(1)
        return LossOutput(error.mean(), error.detach(), timesteps)


class ToySampler:
    """Returns the output of the net for noise."""

    def sample(
        self, net: nn.Module, objective: Any, shape: Any, generators: Any, device: torch.device, /, **wanted: Any
    ) -> Tensor:
        noise = torch.stack([torch.randn(tuple(shape), generator=generator) for generator in generators])
        images: Tensor = net(noise)
        return images


def toy_model(seed: int = 0, dropout: float = 0.0) -> nn.Module:
    """Return a net of two layers on four numbers; `seed` determines the weights."""
    before = torch.get_rng_state()
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.SiLU(), nn.Dropout(dropout), nn.Linear(8, 4))
    torch.set_rng_state(before)
    return model


def toy_loop(
    plugins: Mapping[str, object] | None = None,
    *,
    model: nn.Module | None = None,
    optimizers: Callable[[nn.Module], Any] | None = None,
    objective: Any = None,
    data: Any = None,
    hparams: Mapping[str, Any] | None = None,
    run_dir: Path | None = None,
    resume: bool | Path = False,
    fresh: Iterable[str] = (),
    **config: Any,
) -> Loop:
    """Return a Loop of 20 steps on 40 samples of four numbers; `config` changes the keys of `LoopConfig`."""
    limits = {} if "epochs" in config else {"steps": 20}
    return Loop(
        model or toy_model(),
        optimizers or (lambda prepared: torch.optim.AdamW(prepared.parameters(), lr=0.01, fused=True)),
        objective or ToyObjective(),
        torch.linspace(-1, 1, 160).reshape(40, 4) if data is None else data,
        LoopConfig(**{"batch_size": 8, "log_every": 5, **limits, **config}),
        plugins,
        sampler=ToySampler(),
        hparams=hparams,
        run_dir=run_dir,
        resume=resume,
        fresh=fresh,
    )


def weights(loop: Loop) -> dict[str, Tensor]:
    """Return a copy of the model's state."""
    return {name: value.detach().clone() for name, value in loop.model.state_dict().items()}


def assert_same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    """Raise AssertionError, naming the first tensor that is not exactly equal."""
    assert one.keys() == other.keys(), f"only in one: {sorted(one.keys() ^ other.keys())}"
    for name, value in one.items():
        assert torch.equal(value, other[name]), f"{name} differs by {(value - other[name]).abs().max():g}"


class CountTransfers(TorchFunctionMode):
    """Counts the transfers from the device to the host during a `with`, in `.count`.

    item(), tolist(), numpy(), cpu(), to("cpu"), bool(), int() and float() count, also on a CPU, where they are free.
    `to` with a torch.device does not count, since the device may be the loop's own.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        self.count += name in _READS or (name == "to" and "cpu" in (*args[1:], *(kwargs or {}).values()))
        return func(*args, **(kwargs or {}))
