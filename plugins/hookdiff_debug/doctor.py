"""Examines a config or a run for `hookdiff doctor`, and trains it for some steps in another folder."""

import copy
import io
import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr
from functools import partial
from pathlib import Path

import torch
from attrs import define, evolve
from torch import Generator, Tensor

from hookdiff import Batch, Config, Finding, Loop, SampleRequest, build_loop, evaluating
from hookdiff.authors import sheet
from hookdiff.diffusion import Diffusion, Sampling
from hookdiff.experiment import LeftOut, Part
from hookdiff.log import Panel
from hookdiff.loop import HOOKS, hooks_of
from hookdiff.models import load_state
from hookdiff.run_dir import run_of
from hookdiff_debug import checks, measure
from hookdiff_debug.measure import SETTLED, Drawn, Level, Outputs
from hookdiff_debug.trial import Trial, run_trial

# Hooks of a step and of sampling. Plugins that write files, or measure now and then, are left out.
_IN_A_STEP = hooks_of("model", "net", "epoch", "batch", "passes", "scale", "update", "images")
_IN_SAMPLING = hooks_of("model", "restore", "images")
_OF_NETWORK = hooks_of("passes", "update")  # hooks whose time counts as the network's, also in a plugin
_LOOP = ("defaults", "metrics", "run_dir", "start")  # plugins whose time counts as the loop's
_TRAINED = 500  # updates after which a network must have learned something
_IMAGES = 64  # images on which the network is measured
_DRAWN = 4  # images in the picture
_MADE = 8  # generated samples
_SAMPLER_STEPS = 30  # at most


@define
class Report:
    """All findings, the most basic first."""

    findings: dict[str, Finding]  # by the name of the check
    trial: Trial
    step: int  # updates that the network had before the trial
    strip: Path | None


@define
class _Portrait:
    """Outputs and errors of a network, with its own weights and with their average, if there is one."""

    shape: Sequence[int]  # of an input on which it was measured, such as c h w
    outputs: Outputs | None
    samples: Tensor
    drawn: Panel
    levels: list[Level]
    average: str | None  # its name, if there is one
    averaged: list[Level]


def examine(config: Config, run: Path | None, steps: int, folder: Path, strip: Path | None) -> Report:
    """Examine `config`, or a checkpoint of its `run`, with a trial of `steps` updates in `folder`.

    Pictures go to `strip`, if given. Raises UserError if the config cannot be built, or the run has no checkpoint.
    """
    # The doctor makes the checks of the plugin debug. The plugin's name stays: a checkpoint may hold its state.
    idle = {name: Part(part.where, part.use, object) for name, part in config.plugins.items() if name == "debug"}
    tried = evolve(config, plugins={**config.plugins, **idle})
    with _listening() as logged, ExitStack() as stack:
        # Both plugins act only before the first step, and the weights of a run come from its checkpoint.
        keep = ("micro_batch",) if run else ("micro_batch", "start")
        loop = build_loop(tried, folder / "run", hooks=_IN_A_STEP, keep=keep)
        before, portrait = 0, None
        if run is not None:
            saved = build_loop(tried, run_of(run), resume=run, hooks=_IN_SAMPLING)
            with saved:
                before, portrait = saved.progress.step, _portray(saved)
                stack.enter_context(loop)
                load_state(loop.model, saved.model.state_dict())
                for optimizer, other in zip(loop.optimizers, saved.optimizers, strict=True):
                    optimizer.load_state_dict(copy.deepcopy(other.state_dict()))
                for module, source in zip(loop.adopted, saved.adopted, strict=True):
                    module.load_state_dict(copy.deepcopy(source.state_dict()))
                loop.progress.load_state_dict(saved.progress.state_dict())
            del saved  # so that its memory is not counted as the trial's
        else:
            stack.enter_context(loop)
        start = None if portrait else _measure(loop, _plain_batch(loop))
        trial = run_trial(loop, steps, whole_rate=run is None)
        portrait = portrait or _portray(loop)
    trained = before >= _TRAINED
    assert isinstance(loop.objective, Diffusion)
    times = measure.measure_times(loop.objective, portrait.shape)
    findings, network = (
        _of_data(loop, trial, times, portrait.shape),
        _of_network(trial, start, portrait, times, run is not None, trained),
    )
    findings |= checks.following(network, checks.cause(findings | network))
    findings |= {"length": _of_length(loop, tried), "trial": checks.check_trial(trial)}
    parts: defaultdict[str, float] = defaultdict(float)
    for (plugin, hook), seconds in trial.parts.items():
        work = HOOKS[hook].work if hook in _OF_NETWORK else ""
        parts[work or ("loop" if plugin in _LOOP else plugin)] += seconds
    findings["time"] = checks.check_time(parts, trial.seconds / trial.steps_timed)
    if trial.peak_memory is not None:
        on_gpu = loop.device.type == "cuda"
        available = torch.cuda.get_device_properties(loop.device).total_memory if on_gpu else None
        findings["memory"] = checks.check_memory(trial.peak_memory, available)
    findings |= {f"logged {number}": Finding("warning", text) for number, text in enumerate(logged, 1)}
    passive = [name for name in tried.plugins if isinstance(loop.plugins[name], LeftOut) and name not in idle]
    left_out = [f"{', '.join(passive)}: not used in a training step or in sampling"] if passive else []
    left_out += ["debug: these are its checks"] if "debug" in config.plugins else []
    if left_out:
        findings["left out"] = Finding("ok", "; ".join(left_out))
    if strip is not None:
        sheet([portrait.drawn]).save(strip)
    return Report(findings, trial, before, strip)


def _of_data(loop: Loop, trial: Trial, times: Sequence[Drawn], shape: Sequence[int]) -> dict[str, Finding]:
    objective = loop.objective
    assert isinstance(objective, Diffusion)
    sigma_data = objective.prediction.sigma_data or objective.weighting.sigma_data
    inputs = checks.check_inputs(trial.inputs, objective.is_normalized, sigma_data, trial.spoiled)
    counts, unknown = None, 0
    if loop.feed.labels is not None:
        labels = loop.feed.labels[loop.feed.training]
        unknown = int((labels < 0).sum())
        counts = torch.bincount(labels[labels >= 0], minlength=loop.feed.num_classes or 0).tolist()
    process = objective.process.for_shape(shape)
    *_, log_snr = process.rates(process.from_fraction(torch.linspace(1e-6, 1 - 1e-6, 101)), 1)
    # If the images have the wrong scale, the schedule is not to blame.
    std = trial.inputs.scaled_std if inputs.severity == "ok" else 1.0
    return {
        "inputs": inputs,
        "labels": checks.check_labels(counts, unknown, bool(objective.conditional)),
        "schedule": checks.check_schedule(log_snr.tolist(), std),
        "times": checks.check_times(times, std),
    }


def _of_network(
    trial: Trial, start: Outputs | None, portrait: _Portrait, times: Sequence[Drawn], resumed: bool, trained: bool
) -> dict[str, Finding]:
    # With a learning rate that is too high, the network looks broken, so the check of the rate comes first.
    findings = {"first output": checks.check_outputs(start, settled=False, is_first=True)} if start else {}
    findings |= {"loss": checks.check_loss(trial), "learning rate": checks.check_learning(trial, trained, resumed)}
    silent = [name for name, layer in trial.layers.items() if layer.norm == 0]
    settled = trained or len(trial.rates) > SETTLED
    findings["gradients"] = checks.check_gradients(trial.layers, silent, portrait.outputs)
    findings["output"] = checks.check_outputs(portrait.outputs, settled)
    findings["response"] = checks.check_response(portrait.outputs, settled)
    if portrait.levels:
        findings["error by time"] = checks.check_levels(portrait.levels, times, trained)
    findings["samples"] = checks.check_samples(portrait.samples, trial.inputs, trained)
    if name := portrait.average:
        findings[name] = checks.check_average(name, portrait.averaged, portrait.levels, trained)
    return findings


def _of_length(loop: Loop, config: Config) -> Finding:
    images, run = min(len(loop.feed), len(loop.feed.training)), config.run
    values = loop.feed.training.numel() and int(torch.Size(loop.feed.shape).numel())
    parameters = sum(p.numel() for p in loop.model.parameters() if p.requires_grad)
    steps = run.steps if run.steps is not None else loop.feed.num_batches(run.epochs or 0)
    return checks.check_length(parameters, images, values, run.batch_size, steps)


def _plain_batch(loop: Loop) -> Batch:
    return next(loop.feed.unaugmented(loop.feed.order(0)[:_IMAGES], _IMAGES))


def _measure(loop: Loop, batch: Batch) -> Outputs | None:
    with measure.untouched(loop):
        return measure.measure_outputs(loop, loop.objective.draw(batch, Generator().manual_seed(0)))


def _portray(loop: Loop) -> _Portrait:
    batch = _plain_batch(loop)
    objective, sampler = loop.objective, loop.sampler
    assert isinstance(objective, Diffusion)  # as of every config
    assert isinstance(sampler, Sampling)
    given = objective.given(batch)
    outputs = _measure(loop, batch)
    levels, averaged, average = list[Level](), list[Level](), None
    if len(batch) > 1:
        errors = partial(measure.measure_levels, loop.model, objective, batch.inputs, given)
        with evaluating(loop.model):
            levels = errors()
            with loop.weights(None) as name:
                averaged = errors()
        average = None if name == "model" else name
    with loop.weights(None) as used, evaluating(loop.model):
        few = {name: column[:_DRAWN] for name, column in given.items()}
        title = "the network predicts the image from its noisy version" + (f"; weights: {used}" if average else "")
        drawn = measure.draw_levels(loop.model, objective, batch.inputs[:_DRAWN], few, title, loop.decode)
    steps = min(sampler.fit(objective).steps or 0, _SAMPLER_STEPS)
    with loop.using(sampler=evolve(sampler, steps=steps)):
        samples = loop.sample(SampleRequest(_MADE, raw=True)).images.float().cpu()
    return _Portrait(batch.inputs.shape[1:], outputs, samples, drawn, levels, average, averaged)


@contextmanager
def _listening() -> Iterator[list[str]]:
    """Hide log and stderr from the terminal; yield the list of the logged warnings, each once."""
    warnings: list[str] = []

    def keep(record: logging.LogRecord) -> bool:
        if record.levelno == logging.WARNING and record.getMessage() not in warnings:
            warnings.append(record.getMessage())
        return False

    log = logging.getLogger("hookdiff")
    log.addFilter(keep)
    try:
        with redirect_stderr(io.StringIO()):
            yield warnings
    finally:
        log.removeFilter(keep)


def as_text(findings: Mapping[str, Finding]) -> str:
    """Return the findings as lines for people: the cause first, if there is an error."""
    cause, warnings = checks.cause(findings), sum(finding.severity == "warning" for finding in findings.values())
    lines = [f"error: {findings[cause]}" if cause else f"no errors, {warnings} warning" + "s" * (warnings != 1), ""]
    for name, finding in findings.items():
        lines.append(f"{finding.severity:<8} {name:<14} {finding}".replace("\n", "\n" + " " * 22))
    return "\n".join(lines)
