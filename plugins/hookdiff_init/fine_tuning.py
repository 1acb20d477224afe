"""Plans and writes the config that fine-tunes the network of a pipeline."""

from collections.abc import Iterator
from pathlib import Path

import tomli_w
from attrs import define, evolve

from hookdiff import UserError
from hookdiff_init.fit import sides
from hookdiff_init.look import Pictures, read_captions
from hookdiff_init.pipeline import Pipeline
from hookdiff_init.sizes import Sizes, sizes_for
from hookdiff_init.write import CAPTIONS, commented, folder, of_one_size, plain, prompts, size_text

_BATCH = 4
_PASSES = 100  # over the images, if the steps allow it
_FEWEST, _MOST = 400, 1000  # steps
_GRIDS = 4
_NUM = 4  # images in each panel of a grid
# The default plugins, without the guidance by earlier weights: prompts have a guidance of their own.
_PLUGINS = ("lora", "lr", "clip", "amp", "ema", "nan", "checkpoint", "samples", "progress")


@define(frozen=True)
class FineTuning:
    """The choices for a pipeline and a folder of pictures."""

    pipeline: Pipeline
    pictures: Pictures
    side: int  # of the training images in pixels
    caption: str  # of pictures without a caption
    whole: bool  # all weights train, and no adapter
    sizes: Sizes | None = None  # of the training images; None: squares

    @property
    def batch_size(self) -> int:
        return min(_BATCH, self.sizes.most if self.sizes else self.pictures.num)

    @property
    def size(self) -> str:
        """The size of the training images, in words."""
        return size_text(self.side, self.sizes)

    @property
    def steps(self) -> int:
        return min(max(_FEWEST, _PASSES * self.pictures.num // self.batch_size), _MOST)

    @property
    def prompts(self) -> tuple[str, ...]:
        """The texts of the samples; none if the pipeline takes no texts."""
        if not self.pipeline.takes_texts:
            return ()
        captions = self.pictures.captions
        return (captions and captions.prompts) or (self.caption,)

    def export(self, run: str) -> str:
        """Return the command that exports the run, without its first word."""
        if not self.whole:
            return f"export runs/{run} {run}-lora --to lora"
        if not self.pipeline.has_process:  # the sampler may be one that diffusers lacks
            return f"export runs/{run} {run}.safetensors"
        return f"export runs/{run} {run}-whole --to diffusers"


def fine_tuning(pipeline: Pipeline, pictures: Pictures, side: int | None, whole: bool) -> FineTuning:
    """Choose what fits `pipeline` and `pictures`. `side` of the training images: None for that of the pipeline.

    Raises:
        UserError: for a side that the network does not take, and for captions that cannot be read.
    """
    step = pipeline.divisor
    if side and side % step:
        near = max(side - side % step, step)
        raise UserError(f"--image-size {side}: expected a multiple of {step} here, such as {near} or {near + step}")
    chosen = side or pipeline.side or max((each for each in sides(pictures) if each % step == 0), default=step)
    if not pipeline.takes_classes:
        pictures = pictures.without_classes()
    if pipeline.takes_texts and pictures.captioned:
        pictures = evolve(pictures, captions=read_captions(pictures))
    name = Path(str(pictures.path)).resolve().name.replace("_", " ").strip()
    sizes = None if pipeline.only_squares else sizes_for(pictures, chosen, step, pipeline.longest)
    return FineTuning(pipeline, pictures, chosen, plain(name) or "a picture", whole, sizes)


def text(plan: FineTuning, path: Path) -> str:
    """Return the config, as `path` will hold it."""
    return commented(_lines(plan, path))


def _lines(plan: FineTuning, path: Path) -> Iterator[tuple[str, str]]:
    """Yield each line, with its comment."""
    pipeline, name = plan.pipeline, plain(path.stem)
    kind = "all weights of the network" if plan.whole else "an adapter (LoRA) for the network"
    yield "", f"Trains {kind} in {plain(pipeline.path)} on {plan.pictures.summary}:"
    yield "", f"`hookdiff run {plain(path)}`, then `hookdiff {plan.export(name)}`."
    if pipeline.has_process:
        yield "", "What this config leaves open comes from the folder of the network: process and prediction, sampler,"
        yield "", "autoencoder, text encoders and conditions."
        yield "", f'`hookdiff check {plain(path)}` marks these keys by "of the model".'
    yield "", "Nothing was timed: steps and rate are rules of thumb."
    yield "[run]", ""
    passes = round(plan.steps * plan.batch_size / plan.pictures.num)
    why = f"each image {passes} times; after too many steps, samples copy the images: compare the grids"
    yield f"steps = {plan.steps}", why
    limited = of_one_size(plan.batch_size, plan.sizes)
    yield f"batch_size = {plan.batch_size}", f"{limited}; " * bool(limited) + "`micro_batch = 1` needs less memory"
    if not plan.whole:
        yield f"plugins = {list(_PLUGINS)}".replace("'", '"'), ""
    yield "", ""
    yield from _data(plan)
    yield "", ""
    yield "[model]", ""
    yield 'use = "pretrained"', "`gradient_checkpointing = true` needs less memory"
    yield tomli_w.dumps({"path": pipeline.path}).strip(), ""
    yield "", ""
    yield "[optimizer]", ""
    yield 'use = "adamw"', ""
    yield f"lr = {'1e-5' if plan.whole else '1e-4'}", ""
    yield "", ""
    yield "[diffusion]", ""
    if not pipeline.has_process:
        yield "", "The folder does not say how the network was trained: set its process and prediction."
        yield "", f"`hookdiff check {plain(path)}` prints the defaults."
    yield 'weighting = "uniform"', "as in most fine-tuning; the default depends on the process"
    yield "", ""
    if plan.prompts:
        yield "[sampling]", ""
        yield "guidance = { scale = 5.0 }", "at 1 images follow the prompt less, at 8 more"
        yield "", ""
    if not plan.whole:
        yield "[plugins.lora]", ""
        yield "rank = 8", "a higher rank can learn more, and makes a larger file"
        yield "", ""
    yield "[plugins.samples]", ""
    yield f"every = {-(-plan.steps // _GRIDS)}", f"grids are in runs/{name}/samples"
    rows = len(plan.prompts) or 1
    yield f"num = {rows * max(1, _NUM // rows)}", "in each panel"
    if plan.prompts:
        yield from prompts(plan.prompts, "a row each")


def _data(plan: FineTuning) -> Iterator[tuple[str, str]]:
    yield (
        "",
        "There is no key for repeats; for weights of sub-folders, docs/how-to/train-on-a-folder.md has `balanced`.",
    )
    yield "[data]", ""
    yield from folder(plan.pictures, plan.side, plan.sizes, plan.pipeline.channels)
    if not plan.pipeline.takes_texts:
        return
    captions = plan.pictures.captions
    if captions:
        yield CAPTIONS
    if captions is None or captions.lacking:
        ours = f"of the {captions.lacking:,} images without a caption" if captions else "of all images"
        yield (
            tomli_w.dumps({"caption": plan.caption}).strip(),
            f"{ours}: change it to a phrase that says what they show",
        )
