"""Chooses the size of images and network: the largest that this machine trains in the given time."""

import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from attrs import define, evolve
from torch import Tensor

from hookdiff import InMemory, UserError, build_loop, load_config
from hookdiff.data import Size, size_of
from hookdiff.experiment import pick_device
from hookdiff_init.look import Pictures
from hookdiff_init.sizes import sizes_for
from hookdiff_init.steps import fewest_steps
from hookdiff_init.write import SHARE, Network, Plan, text

_USUAL = 600.0  # default of the seconds of training
_ENOUGH = 8  # beyond this multiple of the fewest steps, more steps improve little
_GRIDS = 5  # grids of a run, if they take no more than this share
_SIDE = 32  # fewer pixels are hard to recognise, so this side is not reduced to save time
_TRIED = 5  # steps on trial: the fastest counts; the last one draws a grid
_BATCH = 32
_FEWEST = 4  # images of the smallest grid without rows
_SAMPLER_STEPS = 10  # of a grid that takes more than its share with the usual number

_NETWORKS = (
    Network(8, 32, (1, 2), 1),
    Network(16, 32, (1, 2, 2), 1),
    Network(48, 64, (1, 2, 2, 4), 1),
    Network(96, 64, (1, 1, 2, 2, 4), 1),
)


def check_side(side: int) -> None:
    """Raise UserError if no network takes images of this side."""
    if (rest := side % (step := _network(side).divisor)) or side < _NETWORKS[0].side:
        near = max(side - rest, _NETWORKS[0].side)
        raise UserError(f"--image-size {side}: expected a multiple of {step} here, such as {near} or {near + step}")


def fit(pictures: Pictures, seconds: float | None, side: int | None = None, diffusers: bool = False) -> Plan:
    """Return the plan for `pictures` that this machine trains in about `seconds`, after a trial with a grid.

    The seconds include the grids. Default of `seconds`: ten minutes, longer if the images cannot be recognised by then,
    and shorter if more time improves little. `side` is the side of the training images; None: this function chooses it.
    """
    has_limit, seconds = seconds is not None, seconds or _USUAL
    device = pick_device("auto").type
    fitting, planned = None, seconds
    for tried in [side] if side else sides(pictures):
        network = _network(tried)
        sizes = sizes_for(pictures, tried, network.divisor)
        batch_size = min(sizes.most if sizes else pictures.num, _BATCH if device == "cpu" else 2 * _BATCH)
        plan = Plan(tried, network, batch_size, sizes, diffusers, num=pictures.rows or _FEWEST)
        fewest = fewest_steps(tried)
        # The time grows at least with the number of pixels.
        if fitting and fitting.step_seconds * (tried / fitting.side) ** 2 * fewest > seconds:
            break
        try:
            step_seconds, grid_seconds = rehearse(pictures, plan)
        except torch.OutOfMemoryError:
            break
        plan = evolve(plan, step_seconds=step_seconds, grid_seconds=grid_seconds)
        needed = fewest * step_seconds / (1 - SHARE)
        if fitting and needed > seconds:
            break
        planned = seconds if has_limit else min(max(seconds, needed), _ENOUGH * needed)
        fitting = _filled(plan, planned)
    if fitting is None:
        way_out = "; choose a smaller --image-size" if side else ""
        raise UserError(f"too little memory for images of {f'{side} x {side}' if side else 'any size'}{way_out}")
    if fitting.grids * fitting.grid_seconds > SHARE * planned:
        fitting = evolve(fitting, sampler_steps=_SAMPLER_STEPS)
        fitting = _with_steps(evolve(fitting, grid_seconds=rehearse(pictures, fitting)[1]), planned)
    return fitting


def _filled(plan: Plan, seconds: float) -> Plan:
    """Return `plan`, which has the smallest grid, with the grids and steps for which there are `seconds`."""
    for times in (4, 2, 1):  # a grid of twice the images takes at most twice as long
        larger = evolve(plan, num=times * plan.num, grid_seconds=times * plan.grid_seconds)
        grids = min(_GRIDS, int(SHARE * seconds / max(larger.grid_seconds, 1e-9)))
        if grids == _GRIDS:
            break
    return _with_steps(evolve(larger, grids=max(1, grids)), seconds)


def _with_steps(plan: Plan, seconds: float) -> Plan:
    """Return `plan` with the steps for which there are `seconds` beside its grids."""
    return evolve(plan, steps=_rounded((seconds - plan.grids * plan.grid_seconds) / plan.step_seconds))


def sides(pictures: Pictures) -> list[int]:
    """Return the sides to choose from, the smallest first: the side of square images, or powers of two."""
    largest = pictures.side
    known = [side for side in (8, 16, 32, 64, 128) if side <= max(8, largest)]
    if pictures.square and 8 < largest < 128 and largest % _network(largest).divisor == 0:
        known = sorted({*known, largest})
    return [side for side in known if side >= min(_SIDE, known[-1])]


def _network(side: int) -> Network:
    return [network for network in _NETWORKS if network.side <= max(side, _NETWORKS[0].side)][-1]


def _rounded(steps: float) -> int:
    """Return `steps` with two digits, at least 10."""
    steps = max(10, steps)
    return int(round(steps, 2 - len(str(int(steps)))))


def rehearse(pictures: Pictures, plan: Plan) -> tuple[float, float]:
    """Return the seconds of a step and of a grid of `plan` on this machine, with black images and captions "black"."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trial.toml"
        path.write_text(text(pictures, plan, path), "utf-8", errors="replace")
        skipped = ("no:checkpoint", "no:progress", "no:lr")  # these do nothing in a few steps
        config = load_config(path, skipped, [f"run.steps={_TRIED}", f"plugins.samples.every={_TRIED}"])
        kept = {"encode", *(("image_size", "buckets", "bucket_step", "bucket_ratio") if plan.sizes else ())}
        shared = {kind: {k: v for k, v in keys.items() if k in kept} for kind, keys in config.data.shared.items()}
        black = evolve(config.data.bare(), target=lambda: _black(pictures, plan), shared=shared)
        ticks = []
        with build_loop(evolve(config, data=black), Path(folder) / "run") as loop:
            for _ in loop.steps():
                ticks.append(time.perf_counter())
    *steps, last = (after - before for before, after in pairwise(ticks))
    return min(steps), max(0.0, last - min(steps))


@define
class _Oblong:
    """Black images in several sizes."""

    sizes: list[Size]  # of each image
    channels: int
    labels: Tensor | None
    texts: Mapping[str, Sequence[Sequence[str]]] | None
    classes: None = None

    def __len__(self) -> int:
        return len(self.sizes)

    def load(self, index: int) -> Tensor:
        return torch.zeros(self.channels, *self.sizes[index], dtype=torch.uint8)

    def describe(self, index: int) -> str:
        return f"black image {index}"


def _black(pictures: Pictures, plan: Plan) -> InMemory | _Oblong:
    """Return black images for two batches, or, if the images have several sizes, for a batch of each size in a grid."""
    drawn = plan.sizes.drawn if plan.sizes else []
    num = plan.batch_size * (len(drawn) or 2)
    labels = torch.arange(num) % len(pictures.classes) if pictures.classes else None
    texts = {"text": [["black"]] * num} if pictures.texts else None
    if drawn:
        return _Oblong([size_of(drawn[k % len(drawn)]) for k in range(num)], pictures.channels, labels, texts)
    images = torch.zeros(num, pictures.channels, plan.side, plan.side, dtype=torch.uint8)
    return InMemory(images, labels, texts=texts)
