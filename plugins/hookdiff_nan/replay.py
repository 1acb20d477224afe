"""Runs a kept step again: as it was, under a changed config, or after training at another learning rate."""

import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import torch
from attrs import asdict, define, evolve, field

from hookdiff import Batch, Config, Loop, Sink, Step, UserError, build_loop, hookimpl, load_config, shown
from hookdiff.authors import rehearsing, without_log
from hookdiff.data import Facts, FeedWithoutData
from hookdiff.experiment import Part
from hookdiff.loop import Progress, hooks_of, implements
from hookdiff.machine import fill_
from hookdiff_nan.diagnose import STEP_HOOKS, eagerly, may_be_compiled
from hookdiff_nan.kept_steps import kept_in
from hookdiff_nan.plugin import NaN
from hookdiff_nan.record import CONFIG, Record, digest_of, read_record, surroundings

P = TypeVar("P")
Say = Callable[[str], None]
_TRAIN_HOOKS = (*STEP_HOOKS, *hooks_of("restore", "epoch", "update", "nonfinite"))
_ERRORS = (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError)  # errors that a network may raise


@define(eq=False)
class Replay:
    """Restores the state before a kept step: progress, weights, buffers, and the plugins that take part in a step."""

    path: str = ""
    say: Say = field(init=False)  # called with a line about inputs that differ
    _record: Record = field(init=False)

    @hookimpl
    def prepare_model(self) -> None:
        self._record = read_record(Path(self.path))

    @hookimpl(tryfirst=True)
    def restore(self, loop: Loop) -> dict[str, Any]:
        parts = self._record.parts
        return {
            "progress": asdict(self._record.facts.progress),
            "log": {},
            "data": parts["data"],
            "model": parts["model"],
            "plugins": {name: state for name, state in parts["plugins"].items() if name in loop.plugins},
        }

    @hookimpl
    @torch.no_grad()
    def on_start(self, loop: Loop) -> None:
        buffers = dict(loop.model.named_buffers())
        for name, value in self._record.parts["buffers"].items():
            buffer = buffers.get(name)
            if buffer is not None and (buffer.shape, buffer.dtype) == (value.shape, value.dtype):
                fill_(buffer, value)

    @hookimpl(tryfirst=True)
    def before_step(self, batch: Batch) -> None:
        if digest_of(batch) != self._record.facts.inputs:
            self.say("differs: the plugins make another batch of the same samples")


def replay(path: Path, plugins: Sequence[str], settings: Sequence[str], anomaly: bool, trust: bool, say: Say) -> bool:
    """Run the step in the folder `path` again and `say` the outcome.

    Returns whether all values of the step are the same to the bit. If `plugins` or `settings` change the config, it
    returns whether the step is now finite; with `anomaly`, whether torch named an operation. trust: see `load_config`.
    Raises UserError if the step cannot run.
    """
    record = read_record(path)
    config = _config(record, plugins, settings, trust, without=("data",))
    parts = {name: part for name, part in config.plugins.items() if not _is_sink(part.target)}
    parts["replay"] = Part("plugins.replay", "replay", Replay, {"path": str(path)})
    fresh = [name for name in parts if name not in record.parts["plugins"]]
    _compute_as_then(record)
    with tempfile.TemporaryDirectory() as folder:
        # Only Replay keeps all its hooks: the other plugins must not write files or make pictures.
        replayed = evolve(config, plugins=parts)
        feed = FeedWithoutData(Facts.of(record.parts["data"].get("facts")), names=record.batch.names_by_index)
        loop = build_loop(replayed, Path(folder), hooks=STEP_HOOKS, fresh=fresh, keep=["replay"], feed=feed)
        _plugin_of(loop, Replay).say = say
        _plugin_of(loop, NaN)  # it makes the report
        with without_log(logging.ERROR), loop:  # the command prints its own report of the step
            for line in _differences(record, surroundings(loop)):
                say(line)
            batch = record.batch.on(loop.device)
            if anomaly and isinstance(record.facts.results.loss, str):
                say("the loss itself is not finite: the cause is not in the backward pass")
            try:
                if anomaly:
                    return _find_operation(loop, batch, say)
                if may_be_compiled() and not record.facts.is_first:
                    _warm_up(loop, batch)
                step = loop.run_step(batch)
            except _ERRORS as error:  # the step ran once, so its files or the code have changed since
                wrong = f"the step does not run here: {type(error).__name__}: {error}"
                raise UserError(f"{record.path}: {wrong}") from error
        again = next(iter(sorted(Path(folder).rglob("step-*-position-*"))), None)
        if again:
            say((again / "report.txt").read_text("utf-8").rstrip())
        if plugins or settings:
            say(_summary(step))
            return not again
        if not again:
            say(f"not reproduced: {_summary(step)}")
            return False
        return _compare(record, read_record(again), say)


def retrain(path: Path, rate: float, plugins: Sequence[str], settings: Sequence[str], trust: bool, say: Say) -> bool:
    """Train up to the step in `path` from the checkpoint before it, at learning rate `rate`, and `say` the outcome.

    Returns whether that step is now finite. The run directory is not changed. trust: see `load_config`.
    """
    record = read_record(path)
    place = record.facts.progress
    if place.step == 0:
        raise UserError("--lr: no update came before the first step, so a rate cannot change it; leave --lr out")
    config = _config(record, plugins, [*settings, f"optimizer.lr={rate!r}"], trust)
    parts = {name: part for name, part in config.plugins.items() if implements(part.target, *_TRAIN_HOOKS)}
    config = evolve(config, plugins={name: part for name, part in parts.items() if not _is_sink(part.target)})
    _compute_as_then(record)
    with tempfile.TemporaryDirectory() as folder:
        source = _link_checkpoint(config, path, Path(folder), place)
        loop = build_loop(config, Path(folder), resume=True)
        with without_log(logging.WARNING), loop:
            begun, position = loop.progress.step, loop.progress.position
            say(f"training batches {position:,} to {place.position:,} at lr {rate:g}, from {source} (step {begun:,})")
            for step in loop.steps():
                if position == place.position:
                    good = step.outcome not in ("stopped", "skipped")
                    say(_summary(step) if good else f"{_summary(step)}\n{_plugin_of(loop, NaN).diagnosis}")
                    return good
                position = loop.progress.position
    say(f"the run ended at batch {position}, before batch {place.position}: {loop.end.reason}")
    return False


def _compute_as_then(record: Record) -> None:
    machine = record.facts.machine
    torch.set_num_threads(machine.threads)
    torch.set_float32_matmul_precision(machine.matmul_precision)
    torch.use_deterministic_algorithms(machine.deterministic)


def _config(
    record: Record, plugins: Sequence[str], settings: Sequence[str], trust: bool, without: Sequence[str] = ()
) -> Config:
    if CONFIG not in record.facts.files:
        raise UserError(f"{record.path} has no {CONFIG}: a script made the run, and only that script can repeat it")
    return load_config(record.path / CONFIG, plugins, settings, trust=trust, without=without)


def _plugin_of(loop: Loop, kind: type[P]) -> P:
    for plugin in loop.plugins.values():
        if isinstance(plugin, kind):
            return plugin
    raise UserError("--plugins: do not remove the plugin that kept the step; replay needs it")


def _is_sink(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Sink)


def _summary(step: Step) -> str:
    how = "finite" if step.outcome in ("updated", "held") else "void" if step.outcome == "void" else "not finite"
    return f"the step is {how}: loss {step.loss:g}, gradient norm {step.grad_norm:g}"


def _differences(record: Record, now: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line about each version and machine property that changed, because it may change bits."""
    for group, before in (("versions", record.facts.versions), ("machine", asdict(record.facts.machine))):
        for name in before.keys() & now[group].keys():
            if before[name] != now[group][name]:
                yield f"differs: {name} is {now[group][name]}, it was {shown(before[name])}"


def _compare(record: Record, again: Record, say: Say) -> bool:
    """Return whether two runs of a step have the same values to the bit; `say` that, or the first difference."""
    if again.facts.inputs != record.facts.inputs:
        say("not reproduced: the inputs differ")
        return False
    if (ranks := record.facts.machine.ranks) > 1:
        say(f"{ranks} ranks made the step, and one process has run it again: its bits are not compared")
        return True
    was, now = record.facts.results, again.facts.results
    pairs: dict[str, tuple[Any, Any]] = {
        "loss": ([was.loss], [now.loss]),
        "losses of the samples": (was.per_sample, now.per_sample),
        "gradients": (was.gradients, now.gradients),
    }
    for what, pair in pairs.items():
        if (first := _first_difference(*pair)) is not None:
            say(f"not reproduced: {what}: {shown(first)}")
            return False
    say(f"reproduced bit for bit: {', '.join(f'{len(before)} {what}' for what, (before, _) in pairs.items())}")
    return True


def _first_difference(before: Any, now: Any) -> str | None:
    if isinstance(before, list):
        before, now = dict(enumerate(before)), dict(enumerate(now))
    if before.keys() != now.keys():
        return f"there are {len(now)}, there were {len(before)}"
    for key, value in before.items():
        if now[key] != value:
            return f"the first that differs is {key}" + ("" if isinstance(value, str) else f": {now[key]}, was {value}")
    return None


def _warm_up(loop: Loop, batch: Batch) -> None:
    """Compile for all batch sizes of the step: a second size changes the code for the first one too."""
    with rehearsing(loop) as passes:
        batch = loop.hook.make_batch(loop=loop, batch=batch)
        passes(loop.hook.draw(loop=loop, batch=batch))


def _find_operation(loop: Loop, batch: Batch, say: Say) -> bool:
    """Run the step under torch's anomaly mode, which keeps the forward's traceback of each operation."""
    with warnings.catch_warnings(record=True) as caught, eagerly():
        warnings.simplefilter("always")
        try:
            with torch.autograd.detect_anomaly():
                loop.run_step(batch)
        except RuntimeError as error:
            if "returned nan values" not in str(error):
                raise
            traces = [text for warning in caught if "Traceback of forward call" in (text := str(warning.message))]
            say("\n".join([str(error), *map(_of_the_model, traces)]))
            return True
    say("no operation of the backward pass made a NaN; look for infinities, or for a NaN of the forward pass")
    return False


def _of_the_model(traceback: str) -> str:
    """Return torch's traceback of an operation without the frames of the command and of the loop."""
    frames = traceback.partition("Traceback")[2].partition("\n (Triggered")[0].splitlines()[1:]
    loop = [number for number, line in enumerate(frames) if line.rstrip().endswith("in compute_loss")]
    return "\n".join(["the operation was called here:", *frames[loop[-1] + 2 if loop else 0 :]])


def _link_checkpoint(config: Config, step: Path, folder: Path, place: Progress) -> str:
    """Link the newest checkpoint before the step at `place` into `folder`; return its name, or a text if there is none.

    The run directory is the nearest folder above the `step` with a config. Links that lead out of it are not followed.
    """
    run_dir = next((above for above in step.resolve().parents if (above / CONFIG).is_file()), folder)
    inner = (path for path in run_dir.glob("*/*") if path.is_dir() and path.resolve().is_relative_to(run_dir))
    candidates = sorted(path for path in inner if path.name not in kept_in(path.parent))
    # Only the plugin that wrote a folder knows its content.
    loop = build_loop(config, folder, resume=True, hooks=("restore",))
    for path in reversed(candidates):
        inside = folder / path.relative_to(run_dir)
        inside.parent.mkdir(parents=True, exist_ok=True)
        inside.symlink_to(path.resolve(), target_is_directory=True)
        state = None
        with without_log(logging.INFO), suppress(UserError):  # an intact checkpoint may come before a damaged one
            state = loop.hook.restore(loop=loop)
        if state and state["progress"]["step"] < place.step and state["progress"]["position"] <= place.position:
            return str(path.relative_to(run_dir))
        inside.unlink()
    return "the start of the run, as no checkpoint from before the step is left"
