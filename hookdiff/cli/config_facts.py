"""The first lines of `hookdiff check`: the size of the network, the length of the run, and its time if it is known."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from attrs import define

from hookdiff.data.feed import Feed
from hookdiff.data.memory_reader import checked_labels
from hookdiff.data.order import split
from hookdiff.data.source import AnySource
from hookdiff.data.wrong_sources import without_loader
from hookdiff.encoding.encoder import EncoderKeys
from hookdiff.errors import ConfigError, UserError
from hookdiff.experiment.build import fit_model
from hookdiff.experiment.config import Config
from hookdiff.experiment.probe import build_on_meta
from hookdiff.images.items import ItemKeys
from hookdiff.images.source_reader import feed_of
from hookdiff.images.transforms import Transforms
from hookdiff.options.structure import missing
from hookdiff.run_dir.history import History
from hookdiff.terminal.words import in_words

_CHANNELS = 3  # assumed for pictures that are not read
_SAME = ("batch_size", "micro_batch", "device", "attention")  # keys of [run] on which the speed depends


@define(frozen=True)
class DataFacts:
    """The facts about the data that are known without reading pictures."""

    shape: tuple[int, ...]  # of a sample; the sides may be missing
    has_channels: bool = True  # whether the channels in `shape` are known
    num_samples: int | None = None  # to train on
    num_classes: int | None = None
    problem: str = ""  # the reason why the data was not found


def data_facts(config: Config, trial: Feed | None) -> DataFacts:
    """Return the facts about the data; `trial` is its Feed if `try_data` made one. Nothing is downloaded.

    Raises:
        ConfigError: for data that no run can use.
    """
    if trial is not None:
        return DataFacts(trial.shape, num_samples=len(trial.training), num_classes=trial.num_classes)
    transforms = config.data.of(Transforms)
    if any(place.startswith("data.") and place != "data.encode" for place in config.needs_trust):
        return _of_pictures(transforms, None, problem="it may have to be downloaded")
    try:
        source = AnySource(without_loader(config.data.build()))
    except ConfigError as error:  # the data may be on another machine
        return _of_pictures(transforms, None, problem=str(error))
    try:
        labels, classes = checked_labels(source.labels, source.classes, len(source))
        held_out = config.data.shared[Feed].get("held_out", 0)
        training, _ = split(torch.arange(len(source)), labels, held_out)
        shape = source.memory.images.shape[1:] if source.memory else source.shape
        if not source.memory and not source.is_images:  # the first sample is read
            shape = feed_of(source, transforms, **config.data.shared[ItemKeys]).shape
    except UserError as error:
        raise ConfigError(f"data: {error}") from error
    num_classes = None if labels is None else len(classes or range(int(labels.max()) + 1 if len(labels) else 0))
    return _of_pictures(transforms, shape, num_samples=len(training), num_classes=num_classes)


def _of_pictures(transforms: Transforms, shape: Sequence[int] | None, **others: Any) -> DataFacts:
    """Return the facts about samples of this `shape` before the transforms; None: it is not known."""
    if shape is not None and len(shape) != 3:
        return DataFacts(tuple(shape), **others)
    channels, *sides = shape or (_CHANNELS,)
    sides = [transforms.square] * 2 if transforms.square else sides
    known = shape is not None or transforms.channels is not None
    return DataFacts((transforms.channels or channels, *sides), known, **others)


def num_weights(config: Config, data: DataFacts) -> int | None:
    """Return the number of weights of the network; None if it cannot be made yet, as for latents of absent pictures."""
    if data.num_samples is None and config.data.of(EncoderKeys).of_pictures:
        return None
    part = fit_model(config, data.shape, data.num_classes)
    if missing(part.target, part.arguments):
        return None
    try:
        return sum(weight.numel() for weight in build_on_meta(part).parameters())
    except ConfigError:
        return None


def step_seconds(table: Mapping[str, Any], run_dir: Path) -> float | None:
    """Return the median time of a step in `run_dir`, if its run has the network, data and batches of the `table`."""
    if not run_dir.is_dir():
        return None
    try:
        run = History(run_dir)
        same = {"run": {key: table["run"].get(key) for key in _SAME}, "model": table["model"], "data": table["data"]}
        for name, keys in same.items():
            of_run = run.config.get(name)
            if not isinstance(of_run, Mapping) or any(of_run.get(key) != value for key, value in keys.items()):
                return None
        times = list(zip(*run.times, strict=True))
    except (UserError, OSError):  # no run, or a damaged one
        return None
    return median([(late - early) / (end - start) for (start, early), (end, late) in pairwise(times)] or [0]) or None


def first_lines(
    config: Config, data: DataFacts, problems: Sequence[str], weights: int | None, seconds: float | None
) -> Iterator[str]:
    """Yield the lines without "# ". `seconds`: the time of a step."""
    yield f"{config.path}: {'; '.join(problems) or 'no problem'}"
    known = "a number of weights that the data decides" if weights is None else f"{weights:,} weights"
    if weights is not None and not data.has_channels and config.model.accepts("in_channels"):
        known += f", if the pictures have {_CHANNELS} channels"
    yield f"network: {config.model.use} with {known}"
    steps, length = _length(config, data)
    yield f"length: {length}"
    if data.problem:
        yield f"data: not read here: {data.problem.removeprefix('data: ')}"
    if seconds and steps:
        total = in_words(seconds * steps)
        yield f"time: the steps alone take about {total}, at the speed of runs/{config.run.name}"


def _length(config: Config, data: DataFacts) -> tuple[int | None, str]:
    """Return the number of steps, if it is known, and the length of the run in words."""
    run, samples = config.run, data.num_samples
    steps, in_steps = run.steps, f"steps of {run.batch_size:,} samples"
    if samples is None:
        return steps, f"{steps:,} {in_steps}" if steps else f"epochs: {run.epochs:,}, in {in_steps}"
    full, rest = divmod(samples, run.batch_size)
    batches = full + (rest > 0 and not config.data.shared[Feed].get("drop_last", True))
    of_epoch = f"epochs of {samples:,} samples"
    if not batches:
        return (
            steps,
            f"no step: a batch has {run.batch_size:,} samples, the data only {samples:,}; lower run.batch_size",
        )
    if steps:
        return steps, f"{steps:,} {in_steps}, {steps / batches:,.3g} {of_epoch}"
    assert run.epochs is not None  # a config has one of them
    return run.epochs * batches, f"{run.epochs:,} {of_epoch}, {run.epochs * batches:,} {in_steps}"
