"""Writes the config: TOML with a comment on each line that needs one."""

import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import tomli_w
from attrs import define

from hookdiff import LoopConfig, listed
from hookdiff.terminal import in_words
from hookdiff_init.look import Pictures
from hookdiff_init.sizes import Sizes
from hookdiff_init.steps import EXAMPLES, example, fewest_steps

SHARE = 0.1  # of the time, for grids of samples
CAPTIONS = 'captions = "txt"', "the lines of the .txt beside each image"
_LOGS = 20  # lines of a run in metrics.jsonl, at least


@define(frozen=True)
class Network:
    """A network for images with at least this side."""

    side: int
    channels: int
    mults: tuple[int, ...]
    blocks: int

    @property
    def divisor(self) -> int:
        """The number that must divide the sides of its images."""
        return int(2 ** (len(self.mults) - 1))


@define(frozen=True)
class Plan:
    """The choices that depend on the machine."""

    side: int  # of the training images in pixels
    network: Network
    batch_size: int
    sizes: Sizes | None = None  # of the training images; None: squares
    diffusers: bool = False  # the network is one of diffusers, which can make its samples
    steps: int = 1000
    step_seconds: float = 0.0
    num: int = 16  # images in each panel of a grid
    grids: int = 1  # grids of the run; one is at the end
    grid_seconds: float = 0.0
    sampler_steps: int | None = None  # of the grids; None: the usual number

    @property
    def size(self) -> str:
        """The size of the training images, in words."""
        return size_text(self.side, self.sizes)

    @property
    def duration(self) -> str:
        """The time of the training with its grids, in words."""
        return in_words(self._seconds)

    @property
    def _seconds(self) -> float:
        return self.steps * self.step_seconds + self.grids * self.grid_seconds

    @property
    def advice(self) -> tuple[str, ...]:
        """The lines on steps that are too few, and on a grid that takes long; none for a plan without faults."""
        percent = round(100 * self.grids * self.grid_seconds / max(self._seconds, 1e-9))
        long = f"The grid of samples at the end, the smallest one, takes about {percent} % of the time."
        return (*self._on_steps, *[long] * (percent > 100 * SHARE))

    @property
    def _on_steps(self) -> tuple[str, ...]:
        """What to do if the steps are too few to show shapes, and what a real run took, in short lines."""
        fewest, run = fewest_steps(self.side), example(self.side)
        if self.steps >= 0.95 * fewest:  # the steps are rounded to two digits
            return ()
        minutes = math.ceil(1.1 * (fewest * self.step_seconds + self.grids * self.grid_seconds) / 60)
        smaller = " or a smaller --image-size" if self.side > EXAMPLES[0].side else ""
        size = f"{self.side} x {self.side}"
        return (
            f"{self.steps:,} steps are too few to show shapes at {size}, which takes about {fewest:,.0f}.",
            f"Give --minutes {minutes}{smaller}.",
            f"For comparison: {run.steps:,} steps on {run.images} ({run.side} x {run.side}) took {run.time} minutes "
            "on two CPU cores.",
            f"{run.result}.",
        )


def text(pictures: Pictures, plan: Plan, path: Path) -> str:
    """Return the config that trains on `pictures`, as `path` will hold it."""
    return commented(_lines(pictures, plan, path))


def commented(pairs: Iterable[tuple[str, str]]) -> str:
    """Return the text of pairs of a line of TOML, or "", and its comment, or ""."""
    lines = []
    for line, comment in pairs:
        lines.append(f"{line:<27} # {comment}" if line and comment else line or f"# {comment}" * bool(comment))
    return "\n".join(lines) + "\n"


def _lines(pictures: Pictures, plan: Plan, path: Path) -> Iterator[tuple[str, str]]:
    """Yield each line, with its comment."""
    name = plain(path.stem)
    yield "", f"Trains on {pictures.summary}: `hookdiff run {plain(path)}`, then `hookdiff sample runs/{name}`."
    yield "", "All other keys have the values that made the best images in hookdiff's benchmarks."
    yield "", "`hookdiff check` prints them; docs/reference/config.md explains them."
    for line in plan.advice:
        yield "", line
    yield "[run]", ""
    yield f"steps = {plan.steps}", f"about {plan.duration} on this machine; more steps give better images"
    yield f"batch_size = {plan.batch_size}", of_one_size(plan.batch_size, plan.sizes)
    if plan.steps < _LOGS * LoopConfig().log_every:
        yield f"log_every = {max(1, plan.steps // _LOGS)}", "steps between two lines of the log"
    yield "", ""
    yield from _data(pictures, plan.side, plan.sizes)
    yield "", ""
    yield from (_of_diffusers if plan.diffusers else _own)(pictures, plan.network)
    yield "", ""
    if pictures.texts:
        yield "[diffusion]", ""
        yield 'conditions = ["text", "text_mask"]', "train on the captions: their tokens, and the mask of the tokens"
        yield "", ""
    if pictures.classes:
        yield "[diffusion]", ""
        yield "conditional = true", f"train on the classes: {listed([*map(plain, pictures.classes)], 5)}"
        yield "", ""
    condition = "caption" if pictures.texts else "class" if pictures.classes else ""
    if condition or plan.diffusers:
        yield "[sampling]", ""
        if plan.diffusers:
            yield 'sampler = "euler"', "the sampler that diffusers, too, has for flows"
        if condition:
            yield "guidance = { scale = 2.0 }", f"at 1 images follow the {condition} less, at 4 more"
        yield "", ""
    yield "[plugins.samples]", ""
    each = f"a grid takes about {in_words(plan.grid_seconds)}; all are in runs/{name}/samples"
    # Rounded up, so that the end adds no further grid.
    yield f"every = {-(-plan.steps // plan.grids) if plan.grids > 1 else 0}", each + "; 0: only at the end"
    yield f"num = {plan.num}", "in each panel" + "; classes have rows of their own" * (not pictures.texts)
    if plan.sizes:
        yield f"sizes = {_toml(plan.sizes.drawn)}", "the most frequent ones; each has panels of its own"
    if plan.sampler_steps:
        yield f"steps = {plan.sampler_steps}", "of the sampler; the usual number takes more than a tenth of the time"
    if pictures.captions:
        yield from prompts(pictures.captions.prompts, "captions from the folder, a row each")


def prompts(texts: Sequence[str], comment: str) -> Iterator[tuple[str, str]]:
    """Yield the lines of the key `prompts`."""
    first, *others = tomli_w.dumps({"prompts": texts}).strip().split("\n")
    yield first, comment
    for line in others:
        yield line, ""


def _own(pictures: Pictures, network: Network) -> Iterator[tuple[str, str]]:
    yield "", "This network is hookdiff's own, not a class of diffusers: `hookdiff export` writes its weights to"
    other = " `hookdiff init --model diffusers` writes a config with a network that diffusers loads."
    yield "", "safetensors." + other * (not pictures.texts)
    yield "[model]", ""
    yield 'use = "unet"', ""
    yield f"channels = {network.channels}", "a wider network makes better images, and takes longer"
    yield f"channel_mults = {list(network.mults)}", "one number for each halving of the image"
    yield f"num_res_blocks = {network.blocks}", ""
    if pictures.texts:
        yield f"text_dim = {pictures.texts.width}", "features of a token from the text encoder"


def _of_diffusers(pictures: Pictures, network: Network) -> Iterator[tuple[str, str]]:
    widths = [network.channels * mult for mult in network.mults]
    # Attention at the coarsest size, as in the own network.
    down = [*["DownBlock2D"] * (len(widths) - 1), "AttnDownBlock2D"]
    up = ["AttnUpBlock2D", *["UpBlock2D"] * (len(widths) - 1)]
    yield "", "A network of diffusers: `hookdiff export RUN DIR --to diffusers` writes what diffusers loads."
    yield "[model]", ""
    yield 'use = "diffusers:UNet2DModel"', "the keys are its arguments"
    yield f"block_out_channels = {widths}", "wider makes better images, and takes longer; one number for each halving"
    yield f"layers_per_block = {network.blocks}", ""
    yield f"down_block_types = {_toml(down)}", ""
    yield f"up_block_types = {_toml(up)}", ""
    if pictures.classes:
        yield f"num_class_embeds = {len(pictures.classes) + 1}", "the classes, and one more for no class"


def _toml(names: list[str]) -> str:
    return "[" + ", ".join(f'"{name}"' for name in names) + "]"


def _data(pictures: Pictures, side: int, sizes: Sizes | None) -> Iterator[tuple[str, str]]:
    yield "[data]", ""
    if pictures.path is None:
        yield 'source = "digits"', "8 x 8 pixels, from scikit-learn"
        if pictures.side != side:
            yield f"image_size = {side}", ""
            yield "upscale = true", "larger than the images are"
    else:
        yield from folder(pictures, side, sizes)
    if texts := pictures.texts:
        assert pictures.captions is not None
        yield CAPTIONS
        if lacking := pictures.captions.lacking:
            yield 'missing = "empty"', f"{lacking:,} of the images have no caption"
        yield "", ""
        yield "[data.encode.text]", ""
        yield 'use = "text"', "a frozen text encoder of transformers"
        yield tomli_w.dumps({"path": texts.encoder}).strip(), ""
        about = f"the longest caption has {texts.longest}"
        yield f"length = {texts.length}", f"tokens to which a caption is padded or truncated; {about}"
        yield "mask = true", "a mask of the tokens that are not padding"


def size_text(side: int, sizes: Sizes | None) -> str:
    """Return the size of the training images in words; `sizes` is None for squares of `side`."""
    if sizes is None:
        return f"{side} x {side}"
    return f"about {side} x {side}, in {len(sizes.counts)} size{'s' if len(sizes.counts) > 1 else ''}"


def of_one_size(batch_size: int, sizes: Sizes | None) -> str:
    """Return the comment on a `batch_size` that the `sizes` limit, or ""."""
    of_size = sizes is not None and batch_size == sizes.most
    return "a batch has one size, and no size has more images" if of_size else ""


def folder(
    pictures: Pictures, side: int, sizes: Sizes | None, channels: int | None = None
) -> Iterator[tuple[str, str]]:
    """Yield the lines for pictures in a folder, as squares of `side`, or in `sizes` with as many pixels.

    `channels` are those that the network needs; None: any.
    """
    yield 'source = "folder"', ""
    others = f"{pictures.others:,} other file{'s are' if pictures.others > 1 else ' is'} not used"
    yield tomli_w.dumps({"path": pictures.path}).strip(), others if pictures.others else ""
    if pictures.flat:
        yield 'labels = "none"', '"folder": each sub-folder is a class'
    if not pictures.square or pictures.side != side:
        before = f"{pictures.usual_size} pixels" + ", and other sizes" * (len(pictures.sizes) > 1)
        way = "as many pixels as a square of this side" if sizes else "the shorter side is resized, the centre cropped"
        yield f"image_size = {side}", f"of {before}: {way}"
    if sizes:
        yield "buckets = true", sizes.why
        if sizes.step:
            yield f"bucket_step = {sizes.step}", "the network takes sides that are multiples of this"
        if sizes.ratio:
            yield f"bucket_ratio = {sizes.ratio:g}", "the long side by the short one, at most; usually 2"
    if smaller := sizes.small if sizes else pictures.smaller(side):
        yield "upscale = true", f"{smaller} of the images are smaller"
    if channels not in (None, pictures.channels):
        yield f"channels = {channels}", f"as the network takes; the images are {pictures.colour}"
    elif pictures.mixed:
        yield "channels = 3", "some images are grey, others in colour"
    if pictures.transparent:
        yield 'background = "white"', "behind transparent pixels"
    if pictures.unreadable:
        yield 'unreadable = "skip"', f"{pictures.unreadable} of the files cannot be read"
    yield "flip = false", "true also trains on mirror images"


def plain(name: object) -> str:
    """Return a name without characters that a comment may not hold."""
    return "".join(letter if letter.isprintable() else "?" for letter in str(name))
