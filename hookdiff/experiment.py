"""A `Config` becomes a Loop in a run directory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from attrs import evolve
from torch import Generator, nn
from torch.optim import Optimizer

from hookdiff.config import AUTO, Config, Part, refusal
from hookdiff.data import Feed, Images, InMemory, Source
from hookdiff.diffusion import Diffusion, Sampling
from hookdiff.errors import ConfigError, UserError
from hookdiff.loop import Loop
from hookdiff.metrics import Metrics
from hookdiff.models.adapters import adapt, check_contract
from hookdiff.models.init import layers_called
from hookdiff.models.spectral import choose_layers
from hookdiff.optimizers import build_optimizers, build_small, check_patterns
from hookdiff.plugins import Plugins
from hookdiff.run_dir import RunDir
from hookdiff.start import Start, check_file
from hookdiff.structure import missing


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
    own = _own_plugins(config, RunDir(run_dir, overwrite), resume, skip_batches)
    plugins = {**(plugins or {}), **own}
    if clash := plugins.keys() & config.plugins.keys():
        raise ConfigError(f"run.plugins: the name {clash.pop()!r} is taken by the core")
    plugins |= {name: part.build() for name, part in config.plugins.items()}
    if hooks is not None:
        # What is left out stays as a name that hears nothing, so that its saved state is not taken for a stranger's.
        heard = {name for name, plugin in plugins.items() if _hears(plugin, hooks)} | set(keep)
        heard -= {"run_dir", "changes"}  # which stand by a run that trains
        plugins = {name: plugin if name in heard else object() for name, plugin in plugins.items()}
    loop = Loop(
        model,
        lambda prepared: build_optimizers(config.optimizer, prepared, config.groups),
        objective,
        feed,
        evolve(config.run, micro_batch=None) if config.run.micro_batch == AUTO else config.run,
        plugins,
        sampler=sampler,
        run_dir=run_dir,
        resume=resume,
        fresh=fresh,
    )
    loop.hparams = config.resolved()
    return loop


def _hears(plugin: object, hooks: Collection[str]) -> bool:
    """Whether a loop of which only `hooks` matter needs `plugin`; who restores runs saves them, whatever it hears."""
    saves = hasattr(plugin, "restore") and "restore" not in hooks
    return not saves and any(hasattr(plugin, hook) for hook in hooks)


def _own_plugins(config: Config, run_dir: RunDir, resume: bool | Path, skip_batches: int) -> dict[str, object]:
    """Return what the core itself hears of a run, in order; nothing is imported that the config does not ask for."""
    plugins: dict[str, object] = {}
    if config.run.micro_batch == AUTO:
        from hookdiff.fit_micro_batch import FitMicroBatch

        plugins["micro_batch"] = FitMicroBatch()  # before run_dir, which writes down what it finds
    plugins |= {"run_dir": run_dir, "metrics": Metrics()}
    if resume:
        from hookdiff.changes import Changes

        plugins["changes"] = Changes(config.defaults())
    if config.start.get("start_from"):
        plugins["start"] = Start(**config.start)
    if config.initial.spectral_norm:
        from hookdiff.spectral import SpectralNorm

        plugins["spectral_norm"] = SpectralNorm()
    if skip_batches:
        from hookdiff.skip import SkipBatches

        plugins["skip_batches"] = SkipBatches(skip_batches)
    return plugins


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
    """Draw and normalise the weights of `model` as the config says; `output` is the name of its last layer."""
    try:
        config.initial.apply(model, output)
    except ValueError as error:
        raise ConfigError(f"model.{error}") from None


def check_model(config: Config, model: nn.Module, feed: Feed, objective: Diffusion) -> None:
    """Raise ConfigError unless `model` takes what `objective` makes of the data, and returns the same shape."""
    part, times = config.model, objective.process.network_time(objective.draw_times(1, Generator()))
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
        objective.standardised(torch.zeros(1, *feed.shape))
    except ValueError as error:
        raise ConfigError(f"diffusion: {error}") from None
    try:
        sampling.points(objective)
    except ValueError as error:
        raise ConfigError(f"sampling: {error}") from None
    return objective, sampling


def probe(config: Config, *, resume: bool = False) -> None:
    """Find what only building shows, without the data and without a loop.

    The model is made on the meta device, which takes no memory, or for real if it cannot be made there; the optimizer
    on one weight. A run that may `resume` may do so without the file that its model started from.

    Raises ConfigError that lists every problem.
    """
    problems = []
    steps: list[Any] = [
        lambda: pick_device(config.run.device),
        lambda: _probe_model(config, config.feed["transforms"].image_size),
        lambda: _probe_start(config.start.get("start_from") if not resume else None),
        lambda: try_optimizers(config),
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


def _probe_model(config: Config, side: int | None) -> None:
    part = config.model
    if missing(part.target, part.arguments):
        return
    names = [name for name in ("image_size", "sample_size") if part.accepts(name)]
    sides = (side,) if side or not names else (8, 28, 32, 64, 96, 256)
    errors = []
    for guess in sides:
        try:
            _probe_names(config, _probe_one_model(part.given(**dict.fromkeys(names, guess))))
        except ConfigError as error:
            errors.append(str(error))
    # Where the data has the say, only what is wrong in the same way for any size is wrong.
    if len(errors) == len(sides) and len(set(errors)) == 1:
        raise ConfigError(errors[0])


def _probe_one_model(part: Part) -> nn.Module:
    try:
        with torch.device("meta"):
            return build_model(part)
    except ConfigError:
        return build_model(part)  # many models look at a value while they are made, which fails on meta alone


def _probe_names(config: Config, model: nn.Module) -> None:
    """Raise ConfigError for a pattern that names nothing in `model`."""
    try:
        choose_layers(model, config.initial.spectral_norm)
    except ValueError as error:
        raise ConfigError(f"model.{error}") from None
    check_patterns(config.optimizer, model, config.groups)


def try_optimizers(config: Config) -> tuple[Optimizer, ...]:
    """Make the optimizers for one small layer: their groups and rates, without model and data.

    Raises ConfigError for arguments that do not go together, or not with the device.
    """
    try:
        device = pick_device(config.run.device)
    except ConfigError:  # which `probe` tells
        device = torch.device("cpu")
    return build_small(config.optimizer, device)


def _probe_start(path: str | None) -> None:
    if path:
        check_file(Path(path))


def _probe_sampling(config: Config) -> None:
    diffusion, sampling = config.diffusion.build(), config.sampling.build()
    try:
        sampling.points(diffusion)
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
