"""A `Config` becomes a Loop in a run directory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from attrs import evolve
from torch import Generator, nn

from hookdiff.builtin import builtin_plugins
from hookdiff.data import Feed, Images, InMemory, Source
from hookdiff.diffusion import Diffusion, Sampling
from hookdiff.errors import ConfigError, UserError
from hookdiff.experiment.config import Config
from hookdiff.experiment.optimizers import build_optimizers
from hookdiff.experiment.part import Part
from hookdiff.experiment.structure import missing
from hookdiff.loop import Loop
from hookdiff.models.adapters import adapt, check_contract
from hookdiff.models.init import layers_called
from hookdiff.progress import AUTO


def build_loop(
    config: Config,
    run_dir: Path,
    *,
    resume: bool | Path = False,
    overwrite: bool = False,
    fresh: Iterable[str] = (),
    skip_batches: int = 0,
    plugins: Mapping[str, object] | None = None,
    hooks: Collection[str] | None = None,
    keep: Iterable[str] = (),
    make: Callable[[Config, torch.device], nn.Module] | None = None,
) -> Loop:
    """Build data, model, objective, optimizer and plugins, and the Loop that holds them.

    `hooks` leaves out the plugins that implement none of them, but those called as in `keep`: who only samples needs no
    others, and its run directory is not written. `plugins` are heard before those of the config. `resume=True` goes on
    with the run in `run_dir`, or starts where that has no checkpoint; a path, as Loop takes it, must have one. What
    cannot change since the checkpoint is refused (see `Changes`). `skip_batches` are passed over at the start. The
    model is initialised from the run's seed, unless `make` makes another.

    Raises ConfigError that names the table of what cannot be built.
    """
    device = pick_device(config.run.device)
    feed = build_feed(config, decode=hooks is None)
    config = fit_to_data(config, feed)
    model = (make or make_model)(config, device)
    config = fit_to_model(config, model)
    objective, sampler = build_objective(config, feed)
    with layers_called(model) as called:
        check_model(config, model, feed, objective)
    initialise(config, model, called[-1] if called else None)
    own = builtin_plugins(
        overwrite=overwrite,
        signals=False,
        fit_micro_batch=config.run.micro_batch == AUTO,
        skip_batches=skip_batches,
        defaults=config.defaults() if resume else None,
        **config.start,
    )
    plugins = {**(plugins or {}), **own}
    if clash := plugins.keys() & config.plugins.keys():
        raise ConfigError(f"run.plugins: the name {clash.pop()!r} is taken by the core")
    plugins |= {name: part.build() for name, part in config.plugins.items()}
    if hooks is not None:
        # What is left out stays as a name that hears nothing, so that its saved state is not taken for a stranger's.
        heard = {name for name, plugin in plugins.items() if _hears(plugin, hooks)} | set(keep)
        heard -= {"run_dir", "changes"}  # which stand by a run that trains
        plugins = {name: plugin if name in heard else object() for name, plugin in plugins.items()}
    return Loop(
        model,
        lambda prepared: build_optimizers(config.optimizer, prepared, config.groups),
        objective,
        feed,
        evolve(config.run, micro_batch=None) if config.run.micro_batch == AUTO else config.run,
        plugins,
        sampler=sampler,
        hparams=config.resolved(),
        run_dir=run_dir,
        resume=resume,
        fresh=fresh,
    )


def _hears(plugin: object, hooks: Collection[str]) -> bool:
    """Whether a loop of which only `hooks` matter needs `plugin`; who restores runs saves them, whatever it hears."""
    saves = hasattr(plugin, "restore") and "restore" not in hooks
    return not saves and any(hasattr(plugin, hook) for hook in hooks)


def build_feed(config: Config, decode: bool = True) -> Feed:
    """Look at the data and decode it where it is to be kept, unless only its shape and labels are asked for.

    Raises ConfigError for what cannot be trained on.
    """
    source = config.data.build()
    if not isinstance(source, InMemory | Images | Source):  # a tensor is a Source in this respect
        raise ConfigError(f"data.source: {config.data.use} made a {type(source).__name__}, which has no length or [i]")
    store = config.feed["store"] if decode else evolve(config.feed["store"], store="auto", memory_limit=0)
    try:
        return Feed(source, **{**config.feed, "store": store})
    except UserError as error:
        raise ConfigError(f"data: {error}") from error


def fit_to_data(config: Config, feed: Feed) -> Config:
    """Let the data decide those of the model's arguments that the config leaves open.

    Whether a model is told of classes is asked for in the config, so their number is only given to one that cannot do
    without.
    """
    facts = _facts(feed)
    if feed.num_classes is not None and "num_classes" in missing(config.model.target, config.model.arguments):
        facts["num_classes"] = feed.num_classes
    model = config.model.given(**facts)
    if lacking := missing(model.target, model.arguments):
        raise ConfigError(f"model: {model.use} needs {', '.join(lacking)}")
    return evolve(config, model=model)


def _facts(feed: Feed) -> dict[str, Any]:
    """Return what the data says of a model, by the names that arguments have for it here and in diffusers."""
    channels, *sides = feed.shape
    side = {"image_size": sides[-1], "sample_size": sides[-1]} if sides else {}
    return {"in_channels": channels, "out_channels": channels, **side}


def make_model(config: Config, device: torch.device) -> nn.Module:
    """Make the model of a run, from its seed, on `device` and in the config's memory format."""
    # Plugins, samples and data have streams of their own, so the default generator is the model's.
    torch.manual_seed(config.run.seed)
    model = build_model(config.model)
    model.to(device)
    if config.run.channels_last:
        model.to(memory_format=torch.channels_last)
    return model


def build_model(part: Part) -> nn.Module:
    """Make the model, following our contract also where another library made it."""
    model = part.build()
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model.use: {part.use} made a {type(model).__name__}, expected a torch.nn.Module")
    if not any(True for _ in model.parameters()):
        raise ConfigError(f"model.use: {part.use} made a model without parameters")
    try:
        return adapt(model)
    except ValueError as error:
        raise ConfigError(f"{part.where}: {error}") from None


def initialise(config: Config, model: nn.Module, output: str | None) -> None:
    """Draw the weights of `model` as the config says; `output` is the name of its last layer."""
    try:
        config.initial.apply(model, output)
    except ValueError as error:
        raise ConfigError(f"model.{error}") from None


def check_model(config: Config, model: nn.Module, feed: Feed, objective: Diffusion) -> None:
    """Raise ConfigError unless `model` takes what `objective` makes of the data, and returns the same shape."""
    part, times = config.model, objective.process.network_time(objective.times.draw(objective.process, 1, Generator()))
    asked, known = getattr(model, "num_classes", None) or 0, feed.num_classes or 0
    if 0 < asked < known:
        raise ConfigError(f"{part.where}: {part.use} has num_classes = {asked}, the data has {known} classes")
    try:
        check_contract(model, feed.shape, labels=bool(objective.conditional), times=times.dtype)
    except ValueError as error:
        differing = {key: said for key, said in _facts(feed).items() if part.arguments.get(key, said) != said}
        likely = "; the data says " + ", ".join(f"{key} = {said}" for key, said in differing.items())
        raise ConfigError(f"{part.where}: {part.use} {error}{likely if differing else ''}") from error


def fit_to_model(config: Config, model: nn.Module) -> Config:
    """Tell the network the labels if it takes them, unless the config says otherwise."""
    takes_labels = bool(getattr(model, "num_classes", 0))
    diffusion = config.diffusion.given(conditional=takes_labels)
    if diffusion.arguments["conditional"] and not takes_labels:
        raise ConfigError(f"diffusion.conditional: {config.model.use} takes no labels; set model.num_classes")
    return evolve(config, diffusion=diffusion)


def build_objective(config: Config, feed: Feed) -> tuple[Diffusion, Sampling]:
    """Make the objective and the sampler, and see that they fit each other and the data."""
    objective: Diffusion = config.diffusion.build()
    sampling: Sampling = config.sampling.build()
    if objective.conditional and feed.labels is None:
        raise ConfigError(f"diffusion.conditional: the network is told of classes, and {config.data.use} has no labels")
    try:
        objective.normalize(torch.zeros(1, *feed.shape))
    except ValueError as error:
        raise ConfigError(f"diffusion: {error}") from None
    try:
        sampling.points(objective)
    except ValueError as error:
        raise ConfigError(f"sampling: {error}") from None
    return objective, sampling


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
