"""A `Config` becomes a Loop in a run directory."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from attrs import evolve
from torch import nn

from hookdiff.config import Config, Part, refusal
from hookdiff.data.feed import Feed, Source
from hookdiff.data.memory import InMemory
from hookdiff.errors import ConfigError, UserError
from hookdiff.loop import Loop
from hookdiff.metrics import Metrics
from hookdiff.plugins import Plugins
from hookdiff.run_dir import RunDir
from hookdiff.structure import missing


def build(
    config: Config,
    run_dir: Path,
    *,
    resume: bool = False,
    overwrite: bool = False,
    fresh: Iterable[str] = (),
    hooks: Iterable[str] | None = None,
) -> Loop:
    """Build data, model, objective, optimizer and plugins, and the Loop that holds them.

    `hooks` leaves out the plugins that implement none of them: who only samples needs no others. The model is
    initialised from the run's seed. Raises ConfigError that names the table of what cannot be built.
    """
    device = pick_device(config.run.device)
    source = config.data.build()
    if not isinstance(source, InMemory | Source):
        raise ConfigError(f"data.source: {config.data.use} made a {type(source).__name__}, which has no length or [i]")
    feed = Feed(source, **config.feed)
    config = fit_to_data(config, feed)
    # Plugins, samples and data have streams of their own, so the default generator is the model's.
    torch.manual_seed(config.run.seed)
    model = config.model.build()
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model.use: {config.model.use} made a {type(model).__name__}, expected a torch.nn.Module")
    if not any(True for _ in model.parameters()):
        raise ConfigError(f"model.use: {config.model.use} made a model without parameters")
    model.to(device)
    if config.run.channels_last:
        model.to(memory_format=torch.channels_last)
    plugins: dict[str, object] = {"run_dir": RunDir(run_dir, overwrite), "metrics": Metrics()}
    if clash := plugins.keys() & config.plugins.keys():
        raise ConfigError(f"run.plugins: the name {clash.pop()!r} is taken by the core")
    plugins |= {name: part.build() for name, part in config.plugins.items()}
    if hooks is not None:
        # What is left out stays as a name that hears nothing, so that its saved state is not taken for a stranger's.
        plugins = {name: p if any(hasattr(p, hook) for hook in hooks) else object() for name, p in plugins.items()}
    loop = Loop(
        model,
        lambda prepared: build_optimizer(config.optimizer, prepared),
        config.diffusion.build(),
        feed,
        config.run,
        plugins,
        sampler=config.sampling.build(),
        run_dir=run_dir,
        resume=resume,
        fresh=fresh,
    )
    loop.hparams = config.resolved()
    return loop


def fit_to_data(config: Config, feed: Feed) -> Config:
    """Let the data decide those of the model's arguments that the config leaves open."""
    channels, *sides = feed.shape
    facts: dict[str, Any] = {"in_channels": channels, "image_size": sides[-1] if sides else None}
    if isinstance(feed.source, InMemory):
        facts["num_classes"] = feed.source.num_classes
    model = config.model.given(**facts)
    if lacking := missing(model.target, model.arguments):
        raise ConfigError(f"model: {model.use} needs {', '.join(lacking)}")
    return evolve(config, model=model)


def build_optimizer(part: Part, model: nn.Module) -> Any:
    """Make the optimizer; `fused` unless the config says otherwise, since the others wait for the device."""
    parameter = next(model.parameters())
    fused = parameter.device.type in ("cpu", "cuda", "mps") and "foreach" not in part.arguments
    return part.given(fused=True).build(model.parameters()) if fused else part.build(model.parameters())


def probe(config: Config) -> None:
    """Find what only building shows, without the data and without a loop.

    The model is made on the meta device, which takes no memory, or for real if it cannot be made there; the optimizer
    on one weight.

    Raises ConfigError that lists every problem.
    """
    problems = []
    steps: list[Any] = [
        lambda: pick_device(config.run.device),
        lambda: _probe_model(config.model),
        lambda: build_optimizer(config.optimizer, nn.Linear(1, 1)),
        lambda: _probe_sampling(config),
    ]
    for step in [*steps, *(part.build for part in config.plugins.values())]:
        try:
            step()
        except UserError as error:
            problems.append(str(error))
    if problems:
        raise refusal(config.path, problems)
    Plugins({name: part.build() for name, part in config.plugins.items()})  # do they keep the contract?


def _probe_model(part: Part) -> None:
    if missing(part.target, part.arguments):
        return
    try:
        with torch.device("meta"):
            part.build()
    except ConfigError:
        part.build()  # many models look at a value while they are made, which fails on the meta device alone


def _probe_sampling(config: Config) -> None:
    diffusion, sampling = config.diffusion.build(), config.sampling.build()
    try:
        sampling.sample(None, diffusion, (1,), (), "cpu")  # no images: only the options are looked at
    except ValueError as error:
        raise ConfigError(f"sampling: {error}") from None


def pick_device(name: str) -> torch.device:
    """Return the device called `name`; "auto" is the first of cuda, mps and cpu that is there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.zeros(0, device=name).device
    except (RuntimeError, AssertionError, ImportError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"run.device: {name!r} cannot be used here: {reason}") from None
    if device.type == "meta":
        raise ConfigError("run.device: 'meta' computes nothing")
    return device
