"""Builds a Loop in a run directory from a `Config`."""

import gc
import json
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
from attrs import evolve
from torch import Generator, Tensor, nn

from hookdiff.builtin import builtin_plugins
from hookdiff.builtin.start_from import Start
from hookdiff.data.feed import Feed
from hookdiff.data.memory import InMemory
from hookdiff.data.reader import Reader, find_reader
from hookdiff.data.source import AnySource
from hookdiff.data.wrong_sources import remedy, without_loader
from hookdiff.diffusion.diffusion import Diffusion
from hookdiff.diffusion.sampling import Sampling
from hookdiff.disk.hub import local_path
from hookdiff.disk.reading import read_file
from hookdiff.encoding.captioned_reader import CaptionedReader
from hookdiff.encoding.captions import CaptionKeys, captions_for
from hookdiff.encoding.encoder import INPUTS, EncoderKeys, TextEncoder, is_same_scale, scale_text
from hookdiff.encoding.latent_reader import LatentReader
from hookdiff.errors import ConfigError, UserError
from hookdiff.experiment.config import Config
from hookdiff.experiment.discovery import LeftOut, is_needed
from hookdiff.experiment.machine_choices import filled_in, is_channels_last, prepare_process, recorded, settle
from hookdiff.experiment.optimizers import build_optimizers
from hookdiff.experiment.own_runs import is_remembered, remember
from hookdiff.experiment.part import Part
from hookdiff.experiment.size_checks import check_sizes
from hookdiff.images.item_texts import with_texts
from hookdiff.images.items import ItemKeys
from hookdiff.images.loader import Workers
from hookdiff.images.source_reader import SourceReader, feed_of, reader_of_source
from hookdiff.images.store import Store
from hookdiff.images.transforms import Transforms, size_text
from hookdiff.loop.counts import AUTO
from hookdiff.loop.loop import Loop
from hookdiff.loop.state import check_parameters
from hookdiff.machine.ranks import agree, rank
from hookdiff.models.adapters import adapt, check_forward, num_classes_of
from hookdiff.models.attention_forms import use_attention
from hookdiff.models.base import found_in_base, leave_out_base
from hookdiff.models.compiler import sampling_errors, try_compiler
from hookdiff.models.init import Initialisation, layers_called
from hookdiff.models.load import KEY, load_into
from hookdiff.options.structure import missing, parameters
from hookdiff.run_dir.config_toml import CONFIG
from hookdiff.run_dir.layout import run_of
from hookdiff.terminal.bars import shown_works

logger = logging.getLogger("hookdiff")

_TRAINING_ONLY = {"run_dir", "changes"}  # plugins of a run that trains
_ENCODED = (LatentReader, CaptionedReader)  # readers that may have to encode
_SIZES = ("in_channels", "out_channels", "image_size", "sample_size")  # arguments of models, here and in diffusers


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
    feed: Feed | None = None,
    trains: bool = True,
) -> Loop:
    """Build data, model, objective, optimizer and plugins, and the Loop that holds them.

    Args:
        config: the checked config.
        run_dir: the run directory.
        resume: continue the run in `run_dir`, or start it if it has no checkpoint; a path (see Loop) must have one.
            Changes of fixed keys since the checkpoint are refused (see `Changes`).
        overwrite: remove an earlier run in `run_dir`.
        fresh: names of plugins that start without their saved state (see Loop).
        skip_batches: number of batches to skip at the start.
        plugins: plugins that are called before the plugins of the config.
        hooks: leave out the plugins that implement none of these hooks, such as for a loop that only samples. The
            run directory is then not written.
        keep: names of plugins that are kept even if they implement none of `hooks`.
        make: function that makes the model. Default: `make_model`, which uses the run's seed.
        feed: the data. Default: the data of the config.
        trains: make the optimizers.

    Raises:
        ConfigError: a part cannot be built; the message names its table.
    """
    device = pick_device(config.run.device)
    before = recorded(run_dir, resume)
    asked, config = config, settle(config, device, before)
    prepare_process(config, device)
    if hooks is None and rank() == 0 and (choices := filled_in(asked, config, before)):
        written = ", ".join(f"{key} = {json.dumps(value)}" for key, value in choices.items())
        logger.info("chosen for this %s: %s", device.type, written)
    check_conditions_used(config)
    of_config = {name: part.build() for name, part in config.plugins.items()}  # errors come before hours of encoding
    if feed is None:
        starts = not resume
        check = partial(try_run, config, trains=trains, starts=starts, with_plugins=starts and hooks is None)
        feed = build_feed(config, decode=hooks is None, check=None if make else check)
    config = fit_to_data(config, feed)
    with _sizes_in_errors(feed):
        model = (make or make_model)(config, device)
    config = fit_to_model(config, model)
    objective, sampler = build_objective(config, feed)
    if hooks is None and rank() == 0:
        _report_scale(objective, feed)
    if hooks is None and sampler.compile:
        with sampling_errors():
            try_compiler(device)  # now, and not at the first pictures, far into the run
    with _sizes_in_errors(feed), layers_called(model) as called:
        check_model(config, model, feed, objective, trains)
    with _problems_of_init():
        config.model.of(Initialisation).apply(model, called[-1] if called else None)
    of_core = builtin_plugins(
        overwrite=overwrite,
        signals=False,
        fit_micro_batch=config.run.micro_batch == AUTO,
        skip_batches=skip_batches,
        defaults=config.defaults() if resume else None,
        fixed=config.fixed() if resume else None,
        written=partial(remember, asks=bool(config.needs_trust)) if _is_own(config, run_dir, resume) else None,
        **config.model.shared[Start],
    )
    plugins = {**(plugins or {}), **of_core}
    if clash := plugins.keys() & config.plugins.keys():
        raise ConfigError(f"run.plugins: the core uses the name {clash.pop()!r}; rename the plugin")
    plugins |= of_config
    if hooks is not None:
        heard = {name for name, plugin in plugins.items() if is_needed(plugin, hooks)} | set(keep)
        heard -= _TRAINING_ONLY
        plugins = {name: plugin if name in heard else LeftOut() for name, plugin in plugins.items()}
    return Loop(
        model,
        partial(_optimizers, config.optimizer if trains else None),
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


def _optimizers(part: Part | None, model: nn.Module) -> Any:
    """Return the optimizers of `part` for the prepared `model`, whose frozen base is left out from now on."""
    leave_out_base(model)
    return build_optimizers(part, model) if part else ()


def _is_own(config: Config, run_dir: Path, resume: bool | Path) -> bool:
    """Return whether the user wrote or trusts the config, and the run whose choices it takes over, if any."""
    place = run_dir if resume is True else resume
    if not config.is_own or not place:
        return config.is_own
    try:
        earlier = run_of(place) / CONFIG
        return earlier.samefile(config.path) or is_remembered(earlier, read_file(earlier))
    except UserError:  # there is no such run
        return True


@contextmanager
def _problems_of(where: str) -> Iterator[None]:
    """Turn an error that an object raises for its values into a ConfigError that names `where`."""
    try:
        yield
    except (ValueError, UserError) as error:
        raise ConfigError(str(error) if str(error).startswith(f"{where}.") else f"{where}: {error}") from error


@contextmanager
def _problems_of_init() -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ConfigError(f"model.{error}") from None


def build_feed(
    config: Config,
    decode: bool = True,
    encode: bool | Literal["pictures", "trial"] = True,
    check: Callable[[Feed], None] | None = None,
) -> Feed:
    """Make the Feed of the data.

    Args:
        config: the checked config.
        decode: False reads only shapes and labels.
        encode: False gives the Feed of the pictures, even if the config has encoders. "pictures" encodes pictures, but
            no captions. "trial" encodes only the first sample, so that the Feed has the right shapes. The captions are
            always in `reader.captions`.
        check: is called with the Feed of a trial before anything is encoded.

    Raises:
        ConfigError: for data that cannot be trained on.
    """
    source = without_loader(config.data.build())
    if instead := remedy(source):
        raise ConfigError(f"data.source: {config.data.use} made a {type(source).__name__}: {instead}")
    store = config.data.of(Store)
    if not decode:
        store = evolve(store, store="auto", memory_limit=0)
    with _problems_of("data"), shown_works():
        shared = {name: value for part in (Workers, ItemKeys, Feed) for name, value in config.data.shared[part].items()}
        transforms, encoding = config.data.of(Transforms), config.data.of(EncoderKeys)
        pictures, texts, is_encoded = encoding.of_pictures, encoding.of_texts, encoding.encoded
        unencoded = Transforms() if is_encoded and INPUTS in pictures else transforms
        for name, other in (encoding.encode or {}).items():
            if name not in {**pictures, **texts}:
                kind = type(other).__name__
                raise UserError(f"encode.{name}: derive {kind} from PictureEncoder or TextEncoder, not from Encoder")
        if is_encoded and not pictures:
            raise UserError("encoded: add the table [data.encode.NAME] of the encoder that made the samples")
        source = AnySource(InMemory(source) if isinstance(source, Tensor) else source)
        if texts:
            source = with_texts(source, config.data.of(ItemKeys), config.data.of(Workers))
        # Refused before the pictures are looked at.
        captions_for(source.texts, texts, config.data.of(CaptionKeys), len(source))
        device = pick_device(config.run.device)
        if pictures and encode:
            read = evolve(store, store="none" if source.memory is None else "auto")
            samples = cache(partial(feed_of, source, unencoded, read, **shared))
            of_items = config.data.of(ItemKeys)
            inner: SourceReader | LatentReader = LatentReader(
                source, transforms, store, pictures, samples, device, is_encoded, of_items
            )
        elif not (texts or encoding.time_ids):
            return feed_of(source, unencoded, store, **shared)
        else:
            inner = reader_of_source(feed_of(source, unencoded, store, **shared))
        reader: Reader = inner
        if texts or encoding.time_ids:
            keys, encodes = config.data.of(CaptionKeys), encode in (True, "trial")
            reader = CaptionedReader(inner, texts, keys, store, device, encodes, encoding.time_ids)
        stages = [stage for stage in dict.fromkeys((reader, inner)) if isinstance(stage, _ENCODED)]
        if encode == "trial":
            return Feed(stages[0].trial() if stages else reader, **config.data.shared[Feed])
        is_pending = agree(any(stage.pending for stage in stages))
        trial = Feed(stages[0].trial(), **config.data.shared[Feed]) if check and is_pending else None
    if check and trial:
        check(trial)
    with _problems_of("data"), shown_works():
        for stage in reversed(stages):
            stage.encode()
        return Feed(reader, **config.data.shared[Feed])


def try_run(config: Config, feed: Feed, *, trains: bool = True, starts: bool = True, with_plugins: bool = True) -> None:
    """Raise UserError unless batches and network fit the shapes of `feed`, a trial Feed of `build_feed`.

    If the run `starts`, the weights of `model.start_from` must fit the network too. `with_plugins` also calls
    `on_start` of all plugins, which may refuse the run.
    """
    if _wants_scale(config, feed):  # measuring the scale takes all samples
        num = feed.shape[0]
        config = evolve(config, diffusion=config.diffusion.given(data_mean=(0.0,) * num, data_std=(1.0,) * num))
    if trains:
        feed.bind(config.run.batch_size, config.run.seed)
    _try_network(config, feed, trains, config.model.of(Start) if starts else Start())
    if with_plugins:
        _try_plugins(config, feed)


def _try_network(config: Config, feed: Feed, trains: bool, start: Start) -> None:
    fitted = fit_to_data(config, feed)

    def attempt(place: AbstractContextManager[object]) -> None:
        with _sizes_in_errors(feed), place:
            model = build_model(fitted.model)
        known = fit_to_model(fitted, model)
        objective, _ = build_objective(known, feed)
        with _sizes_in_errors(feed):
            check_model(known, model, feed, objective, trains)
        if start.start_from:
            load_into(model, local_path(start.start_from, KEY), start.start_partial)

    try:
        attempt(torch.device("meta"))
    except Exception:  # a model may read values, which the meta device lacks; another mistake is raised again
        attempt(nullcontext())


def _try_plugins(config: Config, feed: Feed) -> None:
    """Start a run up to `on_start` of all plugins, and forget it. Its log is dropped: the real run logs the same."""
    run = evolve(config.run, micro_batch=None) if config.run.micro_batch == AUTO else config.run
    logger.disabled = True
    try:
        with TemporaryDirectory(prefix="hookdiff-") as folder:
            loop = build_loop(evolve(config, run=run), Path(folder) / "run", feed=feed)
            with loop.resources:
                loop.prepare()
                loop.hook.on_start(loop=loop)
    finally:
        logger.disabled = False
    del loop
    gc.collect()  # its memory is for the encoders


@contextmanager
def _sizes_in_errors(feed: Feed) -> Iterator[None]:
    """Add the sizes of latents and pictures to a ConfigError of a network: the config has only sizes of pictures."""
    try:
        yield
    except ConfigError as error:
        if feed.codec is None:
            raise
        sizes = size_text(feed.shape), size_text(feed.picture_shape)
        raise ConfigError(f"{error}; it gets latents of {sizes[0]}, encoded from pictures of {sizes[1]}") from error


def check_conditions_used(config: Config) -> None:
    """Raise ConfigError for an encoder of texts if the network gets none of its conditions.

    An encoder of pictures only causes a warning, since a plugin may read its conditions.
    """
    encoders = config.data.of(EncoderKeys).encode or {}
    conditions: Diffusion = config.diffusion.build()
    read = set()
    for name in conditions.condition_names:
        makers = [encoder for encoder in encoders if name == encoder or name.startswith(f"{encoder}_")]
        read.add(max(makers, key=len, default=""))
    for name, encoder in encoders.items():
        if name == INPUTS or name in read:
            continue
        gets = ", ".join(map(repr, conditions.condition_names)) or "none"
        way_out = f"add {name!r} to diffusion.conditions, for a network with an argument for it, or remove the encoder"
        text = f"data.encode.{name}: the network gets none of its conditions (it gets {gets}): {way_out}"
        if isinstance(encoder, TextEncoder):
            raise ConfigError(text)
        logger.warning("%s", text)


def _wants_scale(config: Config, feed: Feed) -> bool:
    """Return whether mean and deviation of the data are to be measured."""
    is_set = {"data_mean", "data_std"} <= config.diffusion.arguments.keys()  # as in a run that is resumed
    return bool(feed.codec) and not is_set and config.diffusion.accepts("data_mean")


def _report_scale(objective: Diffusion, feed: Feed) -> None:
    """Warn if the scale of the latents, perhaps from an earlier run, is not the scale of their encoder."""
    moments = feed.codec.encoder.moments() if feed.codec else None
    scale = objective.data_mean, objective.data_std
    if moments and not is_same_scale(scale, moments):  # type: ignore[arg-type]
        text = "diffusion: the latents keep the scale %s; data.encode.%s gives %s"
        logger.warning(text, scale_text(scale), INPUTS, scale_text(moments))  # type: ignore[arg-type]


def fit_to_data(config: Config, feed: Feed) -> Config:
    """Fill in, from the data, the arguments of the model that the config does not set.

    The number of classes is filled in only if the model or `diffusion.conditional = true` requires it; otherwise the
    config decides about labels.
    """
    if config.diffusion.arguments.get("conditional"):
        _check_labels(config, feed)
    if _wants_scale(config, feed):
        latents = find_reader(feed, LatentReader)
        assert latents is not None
        mean, std = latents.scale(feed.training)
        config = evolve(config, diffusion=config.diffusion.given(data_mean=tuple(mean), data_std=tuple(std)))
    model = fit_model(config, feed.shape, feed.num_classes)
    if lacking := missing(model.target, model.arguments):
        raise ConfigError(f"model: {model.use} needs {', '.join(lacking)}")
    return evolve(config, model=model)


def fit_model(config: Config, shape: Sequence[int], num_classes: int | None) -> Part:
    """Return the model with the arguments that samples of this shape and number of classes give it."""
    facts = _facts(shape)
    if num_classes is not None and _wants_classes(config):
        facts["num_classes"] = num_classes
    return config.model.given(**facts)


def set_by_data(config: Config) -> list[str]:
    """Return the arguments of the model that `fit_to_data` may fill in."""
    names = [*_SIZES, *(["num_classes"] if _wants_classes(config) else [])]
    return [name for name in names if config.model.accepts(name)]


def _wants_classes(config: Config) -> bool:
    required = "num_classes" in missing(config.model.target, config.model.arguments)
    return required or bool(config.diffusion.arguments.get("conditional"))


def _check_labels(config: Config, feed: Feed) -> None:
    if feed.num_classes is None:
        raise ConfigError(f"diffusion.conditional: {config.data.use} has no labels for the network; set it to false")


def unused_classes(config: Config, num_classes: int | None) -> str | None:
    """Return a warning if the data has classes that the model does not get, unless the config sets `conditional`."""
    model, decided = config.model, "conditional" in config.diffusion.arguments
    if not num_classes or decided or not model.accepts("num_classes"):
        return None
    if parameters(model.target)["num_classes"].default != 0:  # `fit_to_data` fills it in
        return None
    way_out = "diffusion.conditional = true trains on them, false leaves them out"
    return f"the data has {num_classes} classes, and the model gets none of them: {way_out}"


def _facts(shape: Sequence[int]) -> dict[str, Any]:
    """Return channels and side of samples of this shape, by the names of the arguments for them."""
    channels, *sides = shape
    sizes = (channels, channels, sides[-1], sides[-1]) if sides else (channels, channels)
    return dict(zip(_SIZES, sizes, strict=False))


def make_model(config: Config, device: torch.device) -> nn.Module:
    """Make the model of a run, from its seed, on `device` and in the config's memory format."""
    # Plugins, samples and data have their own streams, so the default generator is the model's.
    torch.manual_seed(config.run.seed)
    model = build_model(config.model)
    model.to(device)
    form = config.run.channels_last
    if is_channels_last(device, *type(model).__mro__) if form == AUTO else form:
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                if tensor.dim() == 4:  # Module.to would refuse a tensor of five dimensions, as in a network for videos
                    tensor.data = tensor.to(memory_format=torch.channels_last)
    use_attention(model, config.run.attention)
    return model


def build_model(part: Part) -> nn.Module:
    """Make the model; a model of another library is adapted to the contract of models."""
    model = part.build()
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model.use: {part.use} made a {type(model).__name__}, expected a torch.nn.Module")
    if not any(True for _ in model.parameters()):
        raise ConfigError(f"model.use: {part.use} made a model without parameters")
    with _problems_of(part.where):
        check_parameters(model)
        return adapt(model)


def time_dtype(objective: Diffusion) -> torch.dtype:
    """Return the dtype of the times that a network gets."""
    return objective.process.network_time(objective.times.draw(objective.process, 1, Generator())).dtype


def check_model(config: Config, model: nn.Module, feed: Feed, objective: Diffusion, trains: bool) -> None:
    """Raise ConfigError unless `model` takes the inputs of `objective` for the data, and returns the same shape.

    If it `trains`, a gradient must reach its output.
    """
    part = config.model
    with _problems_of_init():
        part.of(Initialisation).check(model)
    asked, known = num_classes_of(model), feed.num_classes or 0
    if 0 < asked < known:
        raise ConfigError(f"{part.where}: {part.use} has num_classes = {asked}; set {known}, as in the data")
    times = time_dtype(objective)

    def attempt(shape: Sequence[int], trains: bool = trains) -> None:
        blank = feed.blank(2, shape)
        conditions = objective.named(objective.given(blank)) if objective.conditions else {}
        labels = bool(objective.conditional)
        check_forward(model, shape, labels=labels, times=times, conditions=conditions, trains=trains)

    try:
        attempt(feed.shape)
    except ValueError as error:
        differing = [f"{k} = {v}" for k, v in _facts(feed.shape).items() if part.arguments.get(k, v) != v]
        what = "latents have" if feed.codec else "data has"
        likely = f"; the {what} {', '.join(differing)}" if differing else ""
        raise ConfigError(f"{part.where}: {part.use} {error}{likely}") from error
    if feed.by_shape:
        with _problems_of(part.where):
            check_sizes(part.use, feed, partial(attempt, trains=False))


def fit_to_model(config: Config, model: nn.Module) -> Config:
    """Set `conditional` to whether the network takes labels, unless the config sets it; record the memory format."""
    takes_labels = num_classes_of(model) > 0
    diffusion = config.diffusion.given(conditional=takes_labels)
    if diffusion.arguments["conditional"] and not takes_labels:
        raise ConfigError(f"diffusion.conditional: {config.model.use} takes no labels; set model.num_classes")
    if config.run.channels_last == AUTO:  # a function has made the network
        form = is_channels_last(next(model.parameters()).device, *type(model).__mro__)
        config = evolve(config, run=evolve(config.run, channels_last=form))
    return evolve(config, diffusion=diffusion, model=config.model.given(**found_in_base(model)))


def build_objective(config: Config, feed: Feed) -> tuple[Diffusion, Sampling]:
    """Make the objective and the sampler; raises ConfigError unless they fit each other and the data."""
    with _problems_of("diffusion"):
        objective: Diffusion = config.diffusion.build().bind(feed.nothing)
        objective.normalize(torch.zeros(1, *feed.shape))
        objective.process.for_shape(feed.shape)
    if objective.conditional:
        _check_labels(config, feed)
    if objective.conditions:
        with _problems_of("diffusion.conditions"):
            objective.given(feed.blank(1))
    return objective, build_sampling(config, objective)


def build_sampling(config: Config, objective: Diffusion) -> Sampling:
    """Make the sampler; raises ConfigError unless it can sample from `objective`."""
    sampling: Sampling = config.sampling.build()
    with _problems_of("sampling"):
        sampling.points(objective)
    return sampling


def pick_device(name: str) -> torch.device:
    """Return the device called `name`; "auto" is the first available of cuda, mps and cpu."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.zeros(0, device=name).device
    except (RuntimeError, AssertionError, ImportError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"run.device: {name!r} cannot be used here: {reason}") from None
    if device.type == "meta":
        raise ConfigError("run.device: 'meta' computes nothing; use 'cpu' or 'auto'")
    return device
