"""Opens a finished or running run: its weights, images, metrics and config. Its data is not needed."""

from __future__ import annotations

import copy
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import cached_property
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
from attrs import define, evolve, field
from torch import Tensor, nn

from hookdiff.authors.image_maker import ImageMaker
from hookdiff.authors.sampler_info import sampler_info, takes_noise
from hookdiff.data.absent_data import FeedWithoutData, absent
from hookdiff.data.feed import Feed
from hookdiff.data.feed_state import Facts, another_encoder
from hookdiff.data.picture_sizes import Size, picture_shapes, size_of, trained_sizes, untrained_text
from hookdiff.diffusion.diffusion import Diffusion
from hookdiff.disk.lock import is_locked
from hookdiff.encoding.codec import PictureCodec
from hookdiff.encoding.encoder import CAPTIONS, INPUTS, EncoderKeys
from hookdiff.encoding.encoder_output import EncoderOutput
from hookdiff.encoding.text_table import TextConditions, TextTable
from hookdiff.encoding.time_ids import names_of
from hookdiff.errors import ConfigError, UserError, nearest
from hookdiff.experiment.build import build_loop, build_sampling, pick_device
from hookdiff.experiment.config import Config, load_config
from hookdiff.experiment.toml_file import read_toml
from hookdiff.images.buckets import Buckets
from hookdiff.images.labels import normal
from hookdiff.images.store import Store
from hookdiff.images.transforms import Transforms
from hookdiff.loop.contract_checks import implements
from hookdiff.loop.hookspecs import hookimpl, hooks_of
from hookdiff.loop.loop import Loop
from hookdiff.loop.restoring import no_checkpoint
from hookdiff.models.load import load_into, load_state
from hookdiff.models.sample_request import SampleRequest
from hookdiff.models.sampler import Sampler
from hookdiff.run_dir.config_toml import CONFIG
from hookdiff.run_dir.history import History
from hookdiff.run_dir.layout import run_of
from hookdiff.run_dir.metrics_jsonl import METRICS
from hookdiff.terminal.bars import shown_works
from hookdiff.terminal.pace import paced

logger = logging.getLogger("hookdiff")

_IMAGE_HOOKS = hooks_of("model", "restore", "images")  # of the plugins that a run needs to make images
_SUFFIX = ".safetensors"


def run_config(
    path: Path,
    plugins: Iterable[str] = (),
    settings: Iterable[str] = (),
    *,
    trust: bool,
    without: Collection[str] = ("data",),
    hooks: Collection[str] | None = None,
) -> Config:
    """Read the config of the run directory `path`, or of a checkpoint in it; see `load_config`."""
    return load_config(run_of(path) / CONFIG, plugins, settings, trust=trust, without=without, hooks=hooks)


@define(frozen=True, kw_only=True)
class _InTrainedSizes(Transforms):
    """The transforms of a run: a picture gets one of the sizes that were trained."""

    trained: Buckets

    @property
    def sized(self) -> Buckets:
        return self.trained


@define(eq=False)
class Saved:
    """A plugin that restores a state that was read before."""

    state: Mapping[str, Any]

    @hookimpl(tryfirst=True)
    def restore(self) -> Mapping[str, Any]:
        return self.state


def load_run(path: str | Path, settings: Iterable[str] = (), *, device: str | None = None, trust: bool = False) -> Run:
    """Open the run directory `path`, or one checkpoint in it: `load_run("runs/x").sample(16)`.

    Nothing is written and nothing locked, so the run may be under way. Neither its data nor its optimizer is made, and
    the directory may be from another machine; only your own classes must be importable, and need `trust`. The newest
    checkpoint is read when it is first needed.

    Args:
        path: the run directory, or a checkpoint in it.
        settings: changes of the config, as `table.key=value`.
        device: such as "cpu". Default: the device of the config, or "auto" if that is not available.
        trust: import the code that the run names, also if no installed package publishes it.

    Raises:
        UserError: for a path that is no run.
    """
    run_of(Path(path))
    return Run(Path(path), tuple(settings), device, trust)


@define(eq=False, slots=False)
class Run:
    """A run, to look at, to sample from and to take weights from; `load_run` opens it.

    A notebook shows a Run that ends a cell: its state, newest picture and curves, without loading weights.
    Memory of the device is free again after `close`, or the end of a `with`.
    """

    path: Path  # as it was given
    settings: tuple[str, ...] = ()
    device: str | None = None
    trust: bool = False
    _held: str | None = field(default=None, init=False)  # the weights of an open `with`
    _reported: set[Size] = field(factory=set, init=False)  # sizes with a warning in the log

    @property
    def run_dir(self) -> Path:
        """The run directory."""
        return run_of(self.path)

    @cached_property
    def config(self) -> dict[str, Any]:
        """The whole config, as in its config.toml: `run.config["optimizer"]["lr"]`."""
        return read_toml(self.run_dir / CONFIG)

    @cached_property
    def _checked(self) -> Config:
        """The config as a loop needs it to make images."""
        without = ("data", "optimizer")
        return run_config(self.path, settings=self.settings, trust=self.trust, without=without, hooks=_IMAGE_HOOKS)

    def __repr__(self) -> str:
        """Return the path, the state of the run, and the step at which it has ended."""
        history = History(self.run_dir)
        end = f" at step {history.outcome.step:,}" if history.outcome.reason else ""
        return f"<Run {self.path}: {history.state}{end}>"

    def _repr_html_(self) -> str:
        """Return the HTML for a notebook, made from the files of the run as they are now."""
        from hookdiff.experiment.notebook import run_html

        return run_html(History(self.run_dir))

    def metrics(self) -> list[dict[str, float]]:
        """Return the logged values, a dict for each step that has some; `pandas.DataFrame(run.metrics())` is a table.

        NaN stands for all values that are not finite.

        Raises:
            UserError: if the run has logged no values.
        """
        steps = dict[int, dict[str, float]]()
        for line in History(self.run_dir).metrics:
            steps.setdefault(line.step, {}).update(line.as_row())
        if not steps:
            raise UserError(f"{self.run_dir / METRICS}: the run has logged nothing")
        return list(steps.values())

    @cached_property
    def loop(self) -> Loop:
        """The Loop that holds the model: it samples, and cannot train.

        Raises:
            UserError: if the run has no checkpoint, or a part of it cannot be imported.
        """
        config = self._checked
        config = evolve(config, run=evolve(config.run, device=self.device or _device_of(config)))
        state = _state_of(config, self.run_dir, self.path)
        saved = {"saved": Saved({**state, "optimizers": {}})}
        facts = Facts.of(state.get("data", {}).get("facts"))
        feed = FeedWithoutData(facts, remembered=_codec(config, facts), texts=_texts(config, facts))
        loop = build_loop(
            config, self.run_dir, resume=self.path, plugins=saved, hooks=_IMAGE_HOOKS, feed=feed, trains=False
        )
        return loop.__enter__()

    def close(self) -> None:
        """Forget the model; it is made again when it is needed."""
        self.__dict__.pop("_checked", None)
        if (loop := self.__dict__.pop("loop", None)) is not None:
            loop.__exit__(None, None, None)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def step(self) -> int:
        """The updates that the weights have had."""
        return self.loop.progress.step

    @property
    def transforms(self) -> Transforms:
        """The transforms that give a picture the form of the samples of the run, without augmentation.

        Pictures keep their size if the samples have one size that is no square, and their channels if these are neither
        grey nor RGB. If samples have several sizes, `transforms.sized.nearest(height, width)` is the size that a
        picture gets, and an argument of `transforms.fit`.
        """
        of_data, (channels, *sides) = self._checked.data.of(Transforms), self.loop.feed.picture_shape
        side = sides[0] if len(sides) == 2 and sides[0] == sides[1] else None
        form: Any = {
            "channels": channels if channels in (1, 3) else None,
            "upscale": of_data.upscale,
            "background": of_data.background,
        }
        if not self.loop.feed.by_shape:
            resize = of_data.resize if of_data.image_size == side else None
            return Transforms(image_size=side, resize=resize, **form)
        sizes = trained_sizes(self.loop.feed)
        trained = of_data.sized.among(sizes) if of_data.has_sizes else Buckets.of_sizes(sizes)
        return _InTrainedSizes(image_size=of_data.image_size or side, buckets=True, trained=trained, **form)

    @property
    def classes(self) -> list[str]:
        """The names of the classes in the order of their numbers, or the numbers; empty if the model takes none."""
        if not self.loop.objective.conditional:
            return []
        known, names = self.loop.feed.num_classes or 0, self.loop.feed.classes
        return list(names) if names else [str(number) for number in range(known)]

    @contextmanager
    def weights(self, name: str | None = None) -> Iterator[str]:
        """Let the model hold other weights during the `with`, which yields their name.

        `name` is the name of an average, "model" for the model's own weights, or a safetensors file. Default: the
        weights of an outer `with weights()`, else the first average, else "model".

        Raises:
            UnknownWeights: for another name.
            ConfigError: for a file of another model.
        """
        if self._held and name in (None, self._held):
            yield self._held
            return
        with self._from_file(name) if name and name.endswith(_SUFFIX) else self.loop.weights(name) as held:
            self._held = held
            try:
                yield held
            finally:
                self._held = None

    def origin(self, weights: str) -> str:
        """Return the name that `weights` yields in words, such as "ema weights of step 1500"."""
        return f"weights in {weights}" if weights.endswith(_SUFFIX) else f"{weights} weights of step {self.step:,}"

    @staticmethod
    def in_loop(weights: str) -> str:
        """Return the loop's name of the weights that `weights` yields: "model" for the weights of a file."""
        return "model" if weights.endswith(_SUFFIX) else weights

    def info(self, weights: str, seed: int) -> dict[str, Any]:
        """Return how the run makes images now, for the metadata of a picture: `sampler_info`, step, weights and seed.

        The argument `weights` is the name that the method `weights` yields.
        """
        return {**sampler_info(self.loop, self.in_loop(weights)), "step": self.step, "weights": weights, "seed": seed}

    @staticmethod
    def usual_strength(mask: Tensor | None) -> float:
        """Return the default strength of `batches`: the share of the steps to run."""
        return 0.8 if mask is None else 1.0

    @contextmanager
    def sampling(
        self,
        *,
        sampler: str | None = None,
        steps: int | None = None,
        guidance_scale: float | None = None,
        precision: str | None = None,
        compile: bool | None = None,
    ) -> Iterator[None]:
        """Let the run sample with other values of [sampling] during the `with`; see `batches`. None changes nothing.

        Raises:
            UserError: for values that do not fit the run.
        """
        changes = {"sampler": sampler, "steps": steps, "guidance.scale": guidance_scale, "precision": precision}
        changes["compile"] = None if compile is None else str(compile).lower()
        with self.loop.using(sampler=self._sampler(changes)):
            yield

    @contextmanager
    def _from_file(self, file: str) -> Iterator[str]:
        model = self.loop.model
        weights = copy.deepcopy(model.state_dict())
        load_into(model, Path(file), asked_by="weights")
        try:
            yield file
        finally:
            load_state(model, weights)

    def model(self, weights: str | None = None) -> nn.Module:
        """Return a copy of the model in eval mode; see `weights` for the names."""
        with self.weights(weights):
            return copy.deepcopy(self.loop.model).eval()

    def labels(self, wanted: Iterable[str | int] | None, num: int) -> tuple[int, ...] | None:
        """Return `num` class numbers: `wanted` in turn, each a class name or number, or -1 for no class.

        None asks for all classes in turn. The result is None for a model without classes, and for a model with
        conditions, because its examples have labels.

        Raises:
            UserError: for an unknown class; the message lists all classes.
        """
        classes = self.classes
        if wanted is None:
            numbers = [] if self.loop.objective.condition_names else list(range(len(classes)))
        elif classes:
            numbers = [_number(label, classes) for label in wanted]
        else:
            raise UserError("the network was trained without labels: leave them out")
        return tuple(islice(cycle(numbers), num)) if numbers else None

    def height_and_width(self, size: str | None) -> Size | None:
        """Return height and width of pictures of a `size` such as "80x48" (width x height); None stays None.

        Raises:
            UserError: for a text that is no size, and for a size that has no latents.
        """
        if size is None:
            return None
        try:
            wanted = size_of(size)
        except ValueError as error:
            raise UserError(f"size: {error}") from None
        self.loop.feed.input_shape(wanted)
        return wanted

    def sample(self, num: int = 16, **options: Any) -> Tensor:
        """Return `num` images: n c h w, float32, on the CPU; pictures are in [-1, 1]. `batches` has the options."""
        with shown_works(), closing(paced(self.batches(num, **options), num, "images")) as parts:
            images = list(parts)
        if images:
            return torch.cat(images)
        feed, size = self.loop.feed, self.height_and_width(options.get("size"))
        made = (feed.picture_shape[0], *size) if size else picture_shapes(feed)[0]
        return torch.empty(0, *(feed.input_shape(size) if options.get("raw") else made))

    def batches(
        self,
        num: int,
        *,
        size: str | None = None,
        numbers: Sequence[int] | None = None,
        labels: Iterable[str | int] | None = None,
        guidance_scale: float | None = None,
        steps: int | None = None,
        sampler: str | None = None,
        precision: str | None = None,
        compile: bool | None = None,
        seed: int = 0,
        weights: str | None = None,
        noise: Tensor | None = None,
        images: Tensor | None = None,
        mask: Tensor | None = None,
        strength: float | None = None,
        conditions: Mapping[str, Tensor] | None = None,
        prompts: Sequence[str] | Mapping[str, Sequence[str]] | None = None,
        negative: str | Mapping[str, str] | None = None,
        stream: str = "sample",
        raw: bool = False,
    ) -> Iterator[Tensor]:
        """Yield `num` images in parts, as many at a time as fit in memory: n c h w, float32, on the CPU.

        Pictures are in [-1, 1]. Image k of a seed is the same in any part, up to rounding.

        Args:
            num: number of images.
            size: width and height of the pictures in pixels, such as "80x48". Default: the most frequent size of the
                training pictures. A size that was not trained logs a warning with the nearest ones that were, once.
            numbers: numbers of the images, which give them their noise. Default: 0 to `num` - 1.
            labels: classes by name or number, used in turn; -1 is no class. Default: all classes in turn.
            guidance_scale: scale of classifier-free guidance. This and the next four replace the values of the config.
            steps: steps of the sampler.
            sampler: name of the sampler, such as "ddim". A sampler with options is a setting of `load_run`:
                `'sampling.sampler={ use = "ddim", eta = 0.5 }'`.
            precision: of the network, "float32" or "bf16".
            compile: compile the network at its first call, which pays off for many images.
            seed: seed of the noise.
            weights: see `Run.weights`.
            noise: standard normal noise to start from, n c h w, one for each image. Samplers that add noise in their
                steps still draw it from the seed.
            images: pictures to start from, in turn: n c h w in [-1, 1].
            mask: region of `images` to make anew, in turn: n 1 h w, bool; the rest is kept.
            strength: with `images`, the share of the steps to run, in (0, 1]. Default: 0.8, or 1 with a mask.
            conditions: the conditions by name, one row for each image. Default: the conditions of the examples that the
                checkpoint keeps, in turn.
            prompts: texts to draw, in turn, for a model that was trained on captions; by kind if it takes several.
            negative: text that guidance leads away from. Default: an empty text.
            stream: "sample", or "evaluate" for the noise of the images that plugins measure.
            raw: keep values outside of [-1, 1]. Default: clamp them.

        Raises:
            UserError: for options that do not fit the run, and if not even one image fits in memory.
            ValueError: for tensors of another shape.
        """
        wanted_size = self.height_and_width(size)
        if noise is not None:
            if noise.shape != (expected := (num, *self.loop.feed.input_shape(wanted_size))):
                raise ValueError(f"noise has the shape {tuple(noise.shape)}, expected {expected}")
            if self.loop.sampler and not takes_noise(self.loop.sampler):
                raise UserError(f"{self.path}: the sampler takes no noise; leave it out")
        changes: Any = {"sampler": sampler, "steps": steps, "guidance_scale": guidance_scale}
        changes |= {"precision": precision, "compile": compile}
        wanted = self.labels(labels, num)
        texts = {name: list(islice(cycle(each), num)) for name, each in self._of_kinds(prompts).items()}
        if strength is None:
            strength = self.usual_strength(mask)

        def request(rows: range) -> SampleRequest:
            return SampleRequest(
                len(rows),
                seed,
                rows.start,
                stream=stream,
                numbers=None if numbers is None else tuple(numbers[rows.start : rows.stop]),
                weights=self.in_loop(name),
                labels=wanted and wanted[rows.start : rows.stop],
                noise=None if noise is None else noise[rows.start : rows.stop],
                images=_in_turn(images, rows),
                mask=_in_turn(mask, rows),
                strength=strength,
                conditions=conditions and {key: column[rows.start : rows.stop] for key, column in conditions.items()},
                texts={key: each[rows.start : rows.stop] for key, each in texts.items()} or None,
                negative=self._of_kinds(negative) or None,
                raw=raw,
            )

        with self.weights(weights) as name, self.sampling(**changes):
            for part in ImageMaker(self.loop, wanted_size).make(range(num), request):
                self._report_untrained(wanted_size)
                yield part

    def _report_untrained(self, size: Size | None) -> None:
        """Log a warning that names the nearest trained sizes, once for each size that was not trained."""
        if size and size not in self._reported and (text := untrained_text(self.loop.feed, size)):
            logger.warning("%s: %s", self.path, text)
            self._reported.add(size)

    def _of_kinds(self, texts: Any) -> dict[str, Any]:
        """Return `texts` by kinds of captions; texts without a name are of the only kind, or of "text"."""
        if texts is None or isinstance(texts, Mapping):
            return dict(texts or {})
        encoders = self.loop.feed.reader.texts
        kinds = encoders.kinds if encoders else ()
        return {kinds[0] if len(kinds) == 1 else CAPTIONS: texts}

    def _sampler(self, changes: Mapping[str, Any]) -> Sampler | None:
        """Return the sampler of the run with `changes` of its keys; a change to None is ignored."""
        settings = [f"sampling.{key}={value}" for key, value in changes.items() if value is not None]
        if not settings:
            return self.loop.sampler
        everything = (*self.settings, *settings)
        without = ("data", "model", "optimizer")
        config = run_config(self.path, settings=everything, trust=self.trust, without=without, hooks=())
        assert isinstance(self.loop.objective, Diffusion)  # as of every config
        return build_sampling(config, self.loop.objective)


def _texts(config: Config, facts: Facts) -> TextConditions | None:
    """Return the encoders of texts. Raises ConfigError if one differs from the encoder of the training."""
    device = pick_device(config.run.device)
    keys = config.data.of(EncoderKeys)
    rows = {key: TextTable(key, value, Store(), device) for key, value in keys.of_texts.items()}
    texts = TextConditions(rows, names_of(keys.of_texts, keys.time_ids))
    for name, digest in texts.digests.items():
        if digest != (expected := facts.encoders.get(name)):
            raise ConfigError(another_encoder(name, digest, expected))
    return texts if rows or texts.time_ids else None


def _codec(config: Config, facts: Facts) -> PictureCodec | None:
    """Return the codec of the latents of a run. Raises ConfigError if it differs from the codec of the training."""
    encoder = config.data.of(EncoderKeys).of_pictures.get(INPUTS)
    if encoder is None or facts.picture_shape is None:
        return None
    if (digest := EncoderOutput(f"data.encode.{INPUTS}", encoder).digest()) != facts.codec:
        raise ConfigError(another_encoder(INPUTS, digest, facts.codec))

    def absent_pictures() -> Feed:
        raise absent()

    return PictureCodec(encoder, digest, facts.picture_shape, absent_pictures, pick_device(config.run.device))


def _device_of(config: Config) -> str:
    """Return the device of the config, or "auto" with a warning if it is not available."""
    try:
        pick_device(config.run.device)
    except ConfigError as error:
        logger.warning("%s; using %s", error, pick_device("auto"))
        return "auto"
    return config.run.device


def _state_of(config: Config, run_dir: Path, place: Path) -> Mapping[str, Any]:
    """Return the state in the newest checkpoint of `place`; raises UserError if there is none."""
    plugins = {name: part.build() for name, part in config.plugins.items() if implements(part.target, "restore")}
    nothing = FeedWithoutData(Facts(shape=(1,), num_samples=0, drop_last=True))
    reader = Loop(nn.Linear(1, 1), (), _no_loss, nothing, plugins=plugins, run_dir=run_dir, resume=place)
    if state := reader.hook.restore(loop=reader):
        return state
    if not plugins:
        raise UserError(f"{place}: none of the run's plugins reads checkpoints: add one with the hook restore")
    raise no_checkpoint(place, plugins.values() if place == run_dir else (), is_locked(place))


def _no_loss(*_: object) -> Tensor:
    raise AssertionError("a loop that only reads a state does not train")


def _number(label: str | int, classes: Sequence[str]) -> int:
    """Return the number of the class with the name or number `label`."""
    names = [normal(name) for name in classes]
    if isinstance(label, str) and normal(label) in names:
        return names.index(normal(label))
    try:
        number = int(label)
    except ValueError:
        number = len(classes)
    if not -1 <= number < len(classes):
        numbered = list(classes) == [str(k) for k in range(len(classes))]
        known = f"0 to {len(classes) - 1}" if numbered else ", ".join(f"{k} {name}" for k, name in enumerate(classes))
        raise UserError(f"no class {label!r}{nearest(str(label), classes)}; the classes are: {known}; -1 is no class")
    return number


def _in_turn(rows: Tensor | None, numbers: Sequence[int]) -> Tensor | None:
    return None if rows is None else rows[[number % len(rows) for number in numbers]]
