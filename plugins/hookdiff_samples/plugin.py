"""The plugin `samples`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from attrs import Attribute, converters, define, evolve, field
from attrs.validators import ge, le, optional
from torch import Tensor

from hookdiff import Every, Loop, Periodic, SampleRequest, UserError, hookimpl, listed, nearest, parse_every
from hookdiff.authors import ANIMATION_FORMATS, ImageMaker, by_class, sampler_info, save_animation, sheet, takes_noise
from hookdiff.data import Size, size_name, size_of, trained_sizes, untrained_text
from hookdiff.diffusion import ClassifierFree, Diffusion, Sampling, Solver
from hookdiff.log import Panel, Picture, grid
from hookdiff.models import Sampler, num_classes_of
from hookdiff.options import about, between, chosen, one_of
from hookdiff.run_dir import picture_files
from hookdiff_samples.between import noise_between
from hookdiff_samples.chain import Recorded
from hookdiff_samples.film import filmstrip, growing_up
from hookdiff_samples.prompts import read_prompts

logger = logging.getLogger("hookdiff")

NAME = "samples"  # logged name of the sheets, and name of their folder
_SHOWN, _FILMED = 4, 5  # images in a strip, and in the filmstrip
_ANIMATED, _FRAMES = 16, 32  # images and frames of the animated denoising
_MOST_CLASSES = 10  # classes that have a row by default
_MOST_SIZES = 3  # sizes that have a panel by default


def _has_both_ends(instance: object, option: Attribute[int], value: int) -> None:
    if value == 1:
        raise ValueError(f"'{option.name}' must be 0, or at least 2 for both ends: 1")


def _are_sizes(instance: object, option: Attribute[tuple[str, ...]], sizes: tuple[str, ...]) -> None:
    for size in sizes:
        try:
            size_of(size)
        except ValueError as error:
            raise ValueError(f"'{option.name}': {error}") from None


def _texts(value: str | Sequence[str]) -> tuple[str, ...] | str:
    return value if isinstance(value, str) else tuple(value)


@define(eq=False)
class SampleGrid(Periodic):
    """Generates images from the same noise at regular intervals, so that one can see the model learn.

    A sheet has a panel for an average of the weights, for the weights themselves, and for each guidance scale; if the
    training pictures have several sizes, for each of the most frequent sizes. A panel has a row for each class. The run
    directory keeps the sheets as `samples/step-00001000.png`, beside strips that show the denoising of some images
    (`samples/denoising`) and images between two noises (`samples/interpolation`). In `samples/filmstrip.png`, each row
    follows one noise over the whole training. The animation `samples/training.webp` is made at the end of the run.
    """

    every: Every = field(default=Every(1000), converter=parse_every, metadata=about("how often; 0: only at the end"))
    num: int = field(
        default=36,
        validator=[ge(1), le(1_000_000)],
        metadata=about("images of a panel; with classes about as many, equally many of each"),
    )
    classes: tuple[str | int, ...] = field(
        default=(),
        converter=tuple,
        metadata=about(f"classes by name or number, a row each, in this order; default: the first {_MOST_CLASSES}"),
    )
    prompts: tuple[str, ...] | str = field(
        default=(),
        converter=_texts,
        metadata=about(
            "texts to draw, a row each, for a network that was trained on captions; or a file with a text in each line"
        ),
    )
    weights: tuple[str, ...] = field(
        default=(),
        converter=tuple,
        metadata=about('weights side by side, such as ["ema", "model"]; default: the average, if any, and "model"'),
    )
    guidance_scales: tuple[float, ...] = field(
        default=(),
        converter=tuple,
        validator=between(0, 1_000_000),
        metadata=about("a panel for each scale of classifier-free guidance; default: the scale in [sampling]"),
    )
    sampler: Solver | None = field(
        default=None,
        converter=converters.optional(chosen[Solver]),
        metadata=about("sampler; default: the sampler in [sampling]"),
    )
    steps: int | None = field(
        default=None,
        validator=optional([ge(1), le(1_000_000)]),
        metadata=about("steps of the sampler; default: the steps in [sampling]"),
    )
    sizes: tuple[str, ...] = field(
        default=(),
        converter=tuple,
        validator=_are_sizes,
        metadata=about(
            'sizes of the images, such as ["64x64", "80x48"] (width x height), a panel each; default: the '
            f"{_MOST_SIZES} most frequent sizes of the training pictures"
        ),
    )
    seed: int = field(default=0, validator=ge(0), metadata=about("seed of the noise"))
    columns: int | None = field(
        default=None, validator=optional(ge(1)), metadata=about("images in a row; default: a nearly square panel")
    )
    scale: int | None = field(
        default=None,
        validator=optional([ge(1), le(1000)]),
        metadata=about("enlargement factor; default: up to about 64 pixels"),
    )
    denoising: int = field(
        default=7,
        validator=[ge(0), le(1000), _has_both_ends],
        metadata=about(
            "columns of a strip that shows the denoising, from noise to image at even log signal-to-noise ratios, both "
            "ends among them; 0: no strip, only the animation"
        ),
    )
    interpolation: int = field(
        default=0,
        validator=[ge(0), le(1000), _has_both_ends],
        metadata=about("images in a row from one noise to another, with both ends; 0: none"),
    )
    animation: str = field(
        default="webp",
        validator=one_of((*ANIMATION_FORMATS, "none")),
        metadata=about('format of the animations of denoising and training: "webp", "gif" or "none"'),
    )
    _labels: tuple[int, ...] = field(init=False, default=())  # number of the class or prompt of each image
    _names: tuple[str, ...] = field(init=False, default=())  # names of the classes, or the prompts
    _is_prompted: bool = field(init=False, default=False)
    _sizes: tuple[Size | None, ...] = field(init=False, default=(None,))  # height and width; None: the only size
    _usual: Size | None = field(init=False, default=None)  # the most frequent of these sizes, which the strips have

    @hookimpl
    def on_start(self, loop: Loop) -> None:
        """Raise UserError for settings that this run cannot sample with, before the run starts."""
        for name in self.weights or (None,):
            loop.sample(SampleRequest(0, weights=name))
        if (self.sampler or self.steps or self.guidance_scales) and not isinstance(loop.sampler, Sampling):
            raise UserError("plugins.samples: remove sampler, steps, guidance_scales, or use hookdiff's own Sampling")
        if len(shape := loop.feed.picture_shape) != 3:
            shown = " x ".join(map(str, shape))
            raise UserError(f"plugins.samples: remove it; this run makes samples of {shown}, and no images (c h w)")
        if self.interpolation and loop.sampler and not takes_noise(loop.sampler):
            raise UserError("plugins.samples.interpolation: set 0; the sampler takes no argument `noise`")
        prompts: tuple[str, ...]
        prompts = read_prompts(Path(self.prompts)) if isinstance(self.prompts, str) else self.prompts
        self._labels, self._names, self._is_prompted = (), prompts, bool(prompts)
        if prompts:
            if self.classes:
                raise UserError("plugins.samples: set classes or prompts, not both")
            texts, encoders = self._of_prompts(loop, range(len(prompts))), loop.feed.reader.texts
            assert encoders is not None
            encoders.embed(texts)  # now, so that an error does not come late in the run
            self._labels = tuple([*range(len(prompts))] * max(1, self.num // len(prompts)))
        elif loop.objective.conditional:
            num = num_classes_of(loop.model)
            if num < 1:
                raise UserError("plugins.samples.classes: give the network an attribute `num_classes`; it has labels")
            self._names = tuple(loop.feed.classes or map(str, range(num)))
            numbers = [self._number(name) for name in self.classes] or list(range(min(num, _MOST_CLASSES)))
            self._labels = tuple(numbers * max(1, self.num // len(numbers)))
        elif self.classes:
            raise UserError("plugins.samples.classes: remove it or set model.num_classes; the network has no classes")
        for _, sampler in self._samplers(loop):
            if isinstance(sampler, Sampling) and isinstance(loop.objective, Diffusion):
                try:
                    sampler.points(loop.objective)
                except ValueError as error:
                    raise UserError(f"plugins.samples: {error}") from None
        self._choose_sizes(loop)

    def _choose_sizes(self, loop: Loop) -> None:
        """Choose the sizes of the panels; raise UserError for a size that the network refuses."""
        known = trained_sizes(loop.feed)
        usual = [*known][:_MOST_SIZES] if loop.feed.by_shape else [None]
        self._sizes = tuple(dict.fromkeys(map(size_of, self.sizes) if self.sizes else usual))
        self._usual = max(self._sizes, key=lambda size: known.get(size, 0) if size else 0)
        for size in self._sizes:
            if size and (text := untrained_text(loop.feed, size)):
                try:
                    self._made(loop, loop.sampler, "model", labels=self._labels[:1], num=1, size=size)
                except UserError as error:
                    raise UserError(f"plugins.samples.sizes: {error}") from None
                logger.warning("plugins.samples.sizes: %s", text)

    def _of_prompts(self, loop: Loop, numbers: Iterable[int]) -> dict[str, list[str]]:
        """Return the prompts with these numbers, as `texts` for a SampleRequest."""
        encoders = loop.feed.reader.texts
        kinds = encoders.kinds if encoders else ()
        if len(kinds) != 1:
            known = f"with {listed(kinds, 3)}" if kinds else "without captions"
            raise UserError(f"plugins.samples.prompts: need a network with captions of one kind; this one is {known}")
        return {kinds[0]: [self._names[number] for number in numbers]}

    def _number(self, name: str | int) -> int:
        number = self._names.index(name) if isinstance(name, str) and name in self._names else name
        if not isinstance(number, int) or not -1 <= number < len(self._names):
            near = nearest(name, self._names) if isinstance(name, str) else ""
            known = f"expected a name, or a number from 0 to {len(self._names) - 1}, or -1 for no class"
            raise UserError(f"plugins.samples.classes: there is no class {name!r}{near}; {known}")
        return number

    def _samplers(self, loop: Loop) -> Iterator[tuple[str, Sampler | None]]:
        """Yield for each guidance scale the text that it adds to a title, and its sampler."""
        sampler = loop.sampler
        if not isinstance(sampler, Sampling):
            yield "", sampler
            return
        sampler = evolve(sampler, sampler=self.sampler or sampler.sampler, steps=self.steps or sampler.steps)
        if not self.guidance_scales:
            yield "", sampler
        guidance = sampler.guidance if isinstance(sampler.guidance, ClassifierFree) else ClassifierFree()
        for scale in self.guidance_scales:
            yield f", guidance {scale:g}", evolve(sampler, guidance=evolve(guidance, scale=scale))

    def act(self, loop: Loop) -> None:
        """Make the images on all ranks, which may share one sharded model; the first rank logs the images."""
        names = self.weights or tuple(dict.fromkeys((loop.sample(SampleRequest(0)).weights, "model")))
        samplers = list(self._samplers(loop))
        (_, first), *_ = samplers
        recorded = self._recorded(loop, first)
        recording = recorded
        panels: list[Panel] = []
        for size, name, (text, sampler) in product(self._sizes, names, samplers):
            used = sampler
            if recording and size == self._usual and isinstance(sampler, Sampling):
                assert isinstance(loop.objective, Diffusion)
                used, recording = evolve(sampler.fit(loop.objective), sampler=recording), None
            shown = "model, not averaged" if name == "model" and len(names) > 1 else name
            title = [size_name(size)] if size and self._has_sizes else []
            title += [f"{shown}{text}"] if len(names) * len(samplers) > 1 else []
            titles = [", ".join(title), *([] if panels else self._left_out())]
            panels.append(self._panel(self._made(loop, used, name, size=size), "; ".join(filter(None, titles))))
        strips = self._between(loop, first, names[0]) if self.interpolation else None
        if not loop.is_main:
            return
        rows = tuple(dict.fromkeys(self._labels))
        info = {**self._info(loop, first, names[0], rows), "weights": list(names)}
        if len(samplers) > 1:
            info["guidance_scale"] = list(self.guidance_scales)
        if self._has_sizes:
            del info["size"]
            info["sizes"] = [size_name(size) for size in self._sizes if size]
        abreast = len(samplers) if len(samplers) > 1 else 2
        if len(self._sizes) > 1:  # a row for each size, or one row of all sizes
            abreast = len(names) * len(samplers) if len(names) * len(samplers) > 1 else len(self._sizes)
        pictures = {NAME: sheet(panels, scale=self.scale, abreast=min(abreast, len(panels)), info=info)}
        if recorded and recorded.is_complete and self.denoising:
            strip = recorded.strip(self.denoising, _SHOWN)
            info = self._info(loop, first, names[0], self._labels[: len(recorded.frames[0][:_SHOWN])])
            pictures[f"{NAME}/denoising"] = sheet([strip], scale=self.scale, info=info)
        if strips:
            pictures[f"{NAME}/interpolation"] = strips
        loop.log.images(pictures)
        if self._is_prompted:
            loop.log.texts({f"{NAME}/prompts": "\n".join(self._names)})
        self._film(loop, recorded, self._info(loop, first, names[0], rows))

    @property
    def _has_sizes(self) -> bool:
        """Whether the panels name their sizes."""
        return bool(self.sizes) or len(self._sizes) > 1

    def _left_out(self) -> list[str]:
        """Return a text that names the classes without rows; nothing if the config chose the classes."""
        without = [name for label, name in enumerate(self._names) if label not in self._labels]
        if self.classes or self._is_prompted or not without:
            return []
        return [f"{len(without)} of {len(self._names)} classes are not shown: {listed(without, 3)}"]

    def _info(self, loop: Loop, sampler: Sampler | None, weights: str, rows: Sequence[int]) -> dict[str, Any]:
        """Return the settings that made the images of a picture; `rows` are the labels of its rows, if any."""
        kind = "prompts" if self._is_prompted else "classes"
        classes = {kind: [self._names[label] if label >= 0 else "-" for label in rows]} if rows else {}
        with loop.using(sampler=sampler):
            settings = sampler_info(loop, weights)
        return {"weights": [weights], "seed": self.seed, **settings, **self._size_info(self._usual), **classes}

    def _size_info(self, size: Size | None) -> dict[str, str]:
        return {"size": size_name(size)} if size and self._has_sizes else {}

    def _recorded(self, loop: Loop, sampler: Sampler | None) -> Recorded | None:
        if isinstance(sampler, Sampling) and isinstance(loop.objective, Diffusion):
            solver = sampler.fit(loop.objective).sampler
            return Recorded(solver, _ANIMATED, loop.decode, bool(loop.feed.codec)) if solver else None
        return None

    def _made(
        self,
        loop: Loop,
        sampler: Sampler | None,
        weights: str,
        noise: Tensor | None = None,
        labels: tuple[int, ...] = (),
        *,
        num: int | None = None,
        size: Size | None = None,
    ) -> Tensor:
        """Return the images of a panel, or one image for each of `noise` and its label: n c h w, on the CPU."""
        labels = labels or self._labels
        num = num or (len(noise) if noise is not None else len(labels) or self.num)

        def request(part: range) -> SampleRequest:
            rows = slice(part.start, part.stop)
            begin = None if noise is None else noise[rows]
            asked: Any = {"labels": labels[rows] or None}
            if self._is_prompted:
                asked = {"texts": self._of_prompts(loop, labels[rows])}
            return SampleRequest(len(part), self.seed, part.start, weights=weights, noise=begin, **asked)

        with loop.using(sampler=sampler):
            images = torch.cat(list(ImageMaker(loop, size).make(range(num), request)))
        if broken := int((~images.isfinite()).flatten(1).any(1).sum()):
            step = loop.progress.step
            logger.warning(
                "samples at step %s: %d of %d images are not finite (NaN is black)", f"{step:,}", broken, len(images)
            )
        return images

    def _panel(self, images: Tensor, title: str) -> Panel:
        if not self._labels:
            return Panel(images, self.columns, title)
        return evolve(by_class(images, self._labels, self._names, self.columns), title=title)

    def _between(self, loop: Loop, sampler: Sampler | None, weights: str) -> Picture:
        """Return a picture with rows of images, each row between two noises."""
        noise = noise_between(loop.feed.input_shape(self._usual), self.seed, _SHOWN, self.interpolation)
        row_labels = [self._labels[row % len(self._labels)] for row in range(_SHOWN)] if self._labels else []
        labels = tuple(label for label in row_labels for _ in range(self.interpolation))
        if isinstance(sampler, Sampling):
            # New noise in each step would hide the change between images.
            sampler = evolve(sampler, sampler="ddim")
        images = self._made(loop, sampler, weights, noise, labels, size=self._usual)
        return grid(images, self.interpolation, self.scale).with_info(**self._info(loop, sampler, weights, row_labels))

    def _film(self, loop: Loop, recorded: Recorded | None, info: Mapping[str, Any]) -> None:
        """Write the filmstrip and the animated denoising; `info` is the info of a panel."""
        if loop.run_dir is None:
            return
        rows = info.get("classes") or info.get("prompts", ())
        of_panel = self._size_info(self._sizes[0])  # a film has the first panel of each sheet
        if film := filmstrip(picture_files(loop.run_dir, NAME), _FILMED, rows):
            _write(loop.run_dir / NAME / "filmstrip.png", evolve(film, info={**info, **of_panel, **film.info}).save)
        if recorded and recorded.is_complete and self.animation != "none":
            shown = (recorded.frames[k] for k in recorded.evenly(_FRAMES))
            frames = [grid(frame, scale=self.scale).as_pillow() for frame in shown]
            path = loop.run_dir / NAME / f"denoising.{self.animation}"
            _write(path, lambda path: save_animation(frames, path, frame=80))

    @hookimpl(trylast=True)
    def on_stop(self, loop: Loop) -> None:
        """Animate the training."""
        if loop.run_dir is None or not loop.is_main or self.animation == "none":
            return
        frames = growing_up(picture_files(loop.run_dir, NAME))
        if len(frames) > 1:
            _write(loop.run_dir / NAME / f"training.{self.animation}", lambda path: save_animation(frames, path))


def _write(path: Path, save: Callable[[Path], object]) -> None:
    try:
        save(path)
    except (OSError, RuntimeError, ValueError) as error:  # Pillow's errors for images that a format cannot hold
        logger.warning("samples: %s cannot be written: %s", path, getattr(error, "strerror", None) or error)
