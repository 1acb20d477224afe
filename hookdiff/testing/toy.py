"""A real Loop, small enough that a test takes milliseconds."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor, nn

from hookdiff.data.batch import Batch
from hookdiff.loop.counts import LoopConfig
from hookdiff.loop.loop import Loop
from hookdiff.models.objective import LossFunction, LossOutput, Objective
from hookdiff.models.sampler import Sampler


class ToyObjective(Objective):
    """Learns to predict the noise in samples of any shape: a small diffusion.

    The noise has the standard deviation (timestep + 1) / 10. The output has the loss, the timestep and the log-SNR of
    each sample.
    """

    def draw(self, batch: Batch, generator: Generator) -> Batch:
        device = generator.device
        noise = torch.randn((batch.total, *batch.inputs.shape[1:]), generator=generator, device=device)
        timesteps = torch.randint(0, 10, (batch.total,), generator=generator, device=device)
        return batch.with_draws({"noise": batch.own(noise), "timesteps": batch.own(timesteps)})

    def __call__(self, net: nn.Module, batch: Batch) -> LossOutput:
        noise, timesteps = batch.draws["noise"], batch.draws["timesteps"]
        level = (timesteps.float() + 1) / 10
        noisy = batch.inputs + level.reshape(-1, *[1] * (noise.dim() - 1)) * noise
        error = (net(noisy).float() - noise).square().flatten(1).mean(1)
        return LossOutput(error.mean(), error, timesteps, -2 * level.log())


class ToySampler(Sampler):
    """Returns the output of the network for pure noise."""

    def sample(
        self, net: nn.Module, objective: LossFunction, shape: Any, generators: Any, *_: Any, **__: Any
    ) -> Tensor:
        noise = torch.stack([torch.randn(tuple(shape), generator=generator) for generator in generators])
        images: Tensor = net(noise)
        return images


def toy_model(seed: int = 0, dropout: float = 0.0) -> nn.Module:
    """Return a network of two layers, with four inputs and outputs; `seed` determines the weights."""
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
    objective: LossFunction | None = None,
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
