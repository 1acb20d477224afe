"""Does a run that is killed and resumed end as the run that was never stopped? Tried with real processes.

In a temporary folder one run is never stopped, and another of the same config is killed some steps after a checkpoint
in its middle and resumed. Up to there both have to be the same, or nothing can be said; then everything is compared.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import dropwhile
from pathlib import Path
from typing import Any

import tomli_w
from attrs import define, field
from safetensors import safe_open

from hookdiff import experiment
from hookdiff.builtin.metrics import METRICS
from hookdiff.disk.paths import CONFIG
from hookdiff.errors import UserError
from hookdiff.experiment.config import Config
from hookdiff.experiment.part import Part
from hookdiff.experiment.structure import parameters
from hookdiff.progress import Every
from hookdiff.selftest.compare import (
    FILE,
    NOT_COMPARED,
    Difference,
    compare_files,
    compare_numbers,
    compare_tensors,
    compare_values,
    first_difference,
    owner_of_state,
    read_numbers,
    shortened,
    unequal,
)
from hookdiff.selftest.witness import END, RESUMED, SAVED, Witness

_TAIL = 30  # lines of a run that failed
_RESUMED = "when resumed"
_MOST = 5  # things of one kind that are named
_WIDTH = 60  # characters of values beside a name
_PASS = ("micro_step", "backward")  # the hooks in which the network is called


@define(frozen=True)
class Plan:
    """How long the runs are, and where they are cut."""

    steps: int  # of each run
    save_at: int  # step
    log_every: int  # steps
    num_batches: int  # of an epoch
    savers: tuple[str, ...]  # the plugins that save, told to do so at save_at
    untried: tuple[str, ...]  # what would be due after the end only, as "plugins.fid.every = 1000"
    workers: tuple[int, int]  # before the kill, and on the resume

    def __str__(self) -> str:
        middle = [
            what
            for what, length in (("an epoch", self.num_batches), ("a log window", self.log_every))
            if self.save_at % length
        ]
        told = f"step {self.save_at} of {self.steps}"
        return told + (f", in the middle of {' and of '.join(middle)}" if middle else "")


@define
class Outcome:
    """What came out, in words; the first line has the verdict and the plugin to blame."""

    passed: bool
    lines: list[str] = field(factory=list)


def prove(config: Config, steps: int, workers: int, tell: Callable[[str], object]) -> Outcome:
    """Train, kill, resume and compare; `tell` hears what is under way.

    steps: of each run, at least 8. workers: of the data, on the resume. Raises UserError for a config without a plugin
    that saves, or whose runs fail before anything is resumed.
    """
    plan = make_plan(config, steps, workers)
    with tempfile.TemporaryDirectory(prefix="hookdiff-selftest-") as name:
        runs = _Runs(config, plan, Path(name))
        tell(f"training {plan.steps} steps without a stop")
        _expect(runs.train("whole"), 0, "the run that is never stopped", runs.output)
        tell(f"training again, to be killed after a checkpoint at {plan}")
        code = runs.train("cut", kill=True)
        if code == 0:
            raise UserError(
                f"no checkpoint of {_named(plan.savers)} was told of (in on_checkpoint) before the run was over; try "
                f"more --steps than {plan.steps}"
            )
        _expect(code, runs.killed, "the run that was to be killed", runs.output)
        unlike, names = runs.unlike()
        if unlike:
            return _unstable(unlike, runs)
        tell("resuming it")
        if code := runs.train("cut", resume=True):
            last = runs.output[-1] if runs.output else "it said nothing"
            return Outcome(False, [f"the resumed run failed with exit code {code}: {last}", *runs.output])
        return _judge(runs, names)


def make_plan(config: Config, steps: int, workers: int) -> Plan:
    """Choose where to cut: in the middle, but not where an epoch or a log window ends."""
    savers = tuple(name for name, part in config.plugins.items() if hasattr(part.target, "restore"))
    if not savers:
        raise UserError(
            f"{config.path}: none of its plugins saves the run (implements the hook restore), so there is nothing to "
            "resume from; add one with --plugins NAME (`hookdiff plugins` lists what is installed)"
        )
    feed = experiment.build_feed(config, decode=False)
    num_batches = feed.bind(config.run.batch_size).num_batches
    # With a log window as long as the run there would be no numbers to compare.
    log_every = min(config.run.log_every, max(1, steps // 6))

    def cost(step: int) -> tuple[int, int]:
        return sum(length > 1 and step % length == 0 for length in (num_batches, log_every)), abs(step - steps // 2)

    save_at = min(range(steps // 3, steps - steps // 3), key=cost)
    untried = tuple(
        f"plugins.{name}.{key} = {every}"
        for name, part in config.plugins.items()
        for key, every in _frequencies(part)
        if not (name in savers and key == "every") and not _is_due(every, steps, num_batches)
    )
    change = int(config.feed.get("workers", 0)), workers
    return Plan(steps, save_at, log_every, num_batches, savers, untried, change)


def _frequencies(part: Part) -> Iterator[tuple[str, Every]]:
    for key, parameter in parameters(part.target).items():
        value = part.arguments.get(key, parameter.default)
        if isinstance(value, Every) and value.amount:
            yield key, value


def _is_due(every: Every, steps: int, num_batches: int) -> bool:
    return every.amount * {"steps": 1, "epochs": num_batches}.get(every.unit, steps + 1) <= steps


@define
class _Runs:
    """The processes, and what they leave."""

    config: Config
    plan: Plan
    folder: Path
    output: list[str] = field(factory=list)  # the last lines of the last run

    @property
    def killed(self) -> int:
        """The exit code of a process that the witness killed."""
        return signal.SIGTERM if os.name == "nt" else -signal.SIGKILL

    def train(self, name: str, kill: bool = False, resume: bool = False) -> int:
        """Run `name`, or what is left of it, in a process of its own, and return the exit code."""
        table = self.config.resolved()
        table["run"] |= {"log_every": self.plan.log_every, "max_time": 0}
        if (self.config.run.steps or (self.config.run.epochs or 0) * self.plan.num_batches) < self.plan.steps:
            table["run"].pop("epochs", None)
            table["run"]["steps"] = self.plan.steps
        table["run"]["plugins"] = [*table["run"]["plugins"], f"{Witness.__module__}:{Witness.__name__}"]
        for saver in self.plan.savers:
            if "every" in parameters(self.config.plugins[saver].target):
                table["plugins"][saver]["every"] = self.plan.save_at
        if resume and "workers" not in parameters(self.config.data.target):
            table["data"]["workers"] = self.plan.workers[1]
        witness = {"out": str(self.seen(name)), "at": self.plan.save_at, "stop": self.plan.steps, "kill": kill}
        table["plugins"][Witness.__name__.lower()] = witness
        path = self.folder / f"{name}.toml"
        path.write_text(tomli_w.dumps(table), "utf-8")
        code = "from hookdiff.cli import main; main()"
        command = [sys.executable, "-P", "-c", code, "run", str(path), "--out", str(self.run_dir(name))]
        # What can be imported here can be imported there.
        paths = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
        # Into a file: workers of a process that was killed would hold a pipe open.
        with (self.folder / "output").open("w+b") as output:
            ended = subprocess.run(
                [*command, *(["--resume"] if resume else [])],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": paths},
            )
            output.seek(0)
            self.output = output.read().decode(errors="replace").splitlines()[-_TAIL:]
        return ended.returncode

    def run_dir(self, name: str) -> Path:
        return self.folder / name

    def seen(self, name: str) -> Path:
        return self.folder / f"{name}-seen"

    def noted(self, name: str, moment: str) -> dict[str, Any]:
        """Return what the witness wrote at that moment; nothing where the run never came to it."""
        path = self.seen(name) / f"{moment}.json"
        return json.loads(path.read_text("utf-8")) if path.exists() else {}

    def unlike(self) -> tuple[list[Difference], list[str]]:
        """Return how the killed run was unlike the other before it was killed, and what may be: the names of texts.

        Until then both were never stopped.
        """
        whole, cut = (read_numbers(self.run_dir(name) / METRICS) for name in ("whole", "cut"))
        last = max((record["step"] for record in cut), default=0)  # of whose lines some may not be there yet
        early = ([record for record in records if record["step"] < last] for records in (whole, cut))
        states = compare_values(self.noted("whole", SAVED)["state"], self.noted("cut", SAVED)["state"])
        found = [*compare_numbers(next(early), next(early), self.owner), *states]
        return [each for each in found if not each.is_text], [each.what for each in found if each.is_text]

    def compare(self) -> list[Difference]:
        """Return what differs at the end: what was logged in the order of steps, then the states, then files."""
        whole, cut = "whole", "cut"
        return [
            *compare_numbers(
                read_numbers(self.run_dir(whole) / METRICS), read_numbers(self.run_dir(cut) / METRICS), self.owner
            ),
            *compare_values(self.noted(whole, END)["values"], self.noted(cut, END)["values"]),
            *compare_tensors(self.seen(whole) / f"{END}.safetensors", self.seen(cut) / f"{END}.safetensors"),
            *compare_files(self._files(whole), self._files(cut), self.owner),
        ]

    def owner(self, name: str) -> str:
        """Return the plugin that logged the number `name` or wrote the file; "" where it is the core."""
        first = name.partition("/")[0]
        logged = self.noted("whole", END)["owners"] | self.noted("cut", END).get("owners", {})
        known = logged.get(name) or first
        return known if known in self.config.plugins else ""

    def culprit(self, found: Sequence[Difference]) -> str | None:
        """Return the plugin that made the resumed run another, as far as that shows.

        It is the one in whose call weights or gradients became others. Where that does not show, it is one whose is
        something of what was `found`, and whose state was loaded otherwise, or who saves nothing and has lost a field,
        or who draws from a global generator. Whose the first of it is, only if the weights stayed the same: else all
        see what comes of them.
        """
        hook, changed = self._changed()
        drew, owners = self.noted("whole", END)["drew"], [difference.owner for difference in found]
        reloaded, lost = self.reloaded(), self._lost()
        # What comes out of a pass through the network also follows from things that are not traced.
        is_sure = hook not in _PASS or changed in {*reloaded, *drew} or self.forgotten(changed)
        likely = (
            *([changed] if is_sure else []),
            *(plugin for plugin in (*reloaded, *lost, *drew) if plugin in owners),
            *(plugin for plugin in lost if hook and self._passes(plugin)),
            *([] if is_sure else [changed]),
            *([] if hook else owners),
            *drew,
        )
        return next((plugin for plugin in likely if plugin in self.config.plugins), None)

    def _changed(self) -> tuple[str, str]:
        """Return the hook and the plugin in which weights, gradients or rates first were others; "" for none."""
        traces = [self.noted(name, END)["trace"] for name in ("whole", "cut")]
        begin = min((position for position, *_ in traces[1]), default=0)
        # From the first step of the resumed process on: of the one before, the other has what came after it, too.
        both = [dropwhile(lambda call: call[0] < begin or call[1] != "before_step", trace) for trace in traces]
        return next(((call[1], call[2]) for expected, call in zip(*both, strict=False) if expected != call), ("", ""))

    def _lost(self) -> list[str]:
        """Return the plugins that save nothing, and kept a number or generator that was another after the resume."""
        saved, resumed = (moment.get("fields", {}) for moment in self._moments())
        silent = [name for name, part in self.config.plugins.items() if not hasattr(part.target, "state_dict")]

        def is_lost(plugin: str, name: str) -> bool:
            kinds = {type(fields[plugin].get(name)) for fields in (saved, resumed)}
            return len(kinds) == 1 and bool not in kinds  # others are marks of what was done once, most likely

        return [plugin for plugin in silent if any(is_lost(plugin, name) for name in self._changed_fields(plugin))]

    def _passes(self, plugin: str) -> bool:
        """Whether `plugin` has a say in what the network is given and what comes out of it."""
        return any(
            hasattr(self.config.plugins[plugin].target, hook) for hook in ("before_step", "compute_loss", *_PASS)
        )

    def reloaded(self) -> dict[str, list[str]]:
        """Return, by plugin, a line that tells the first of what was not the same in its state once it was loaded."""
        saved, resumed = (moment.get("state", {}) for moment in self._moments())
        told: dict[str, list[str]] = {}
        for name in unequal(saved, resumed):
            if (owner := owner_of_state(name)) in self.config.plugins:
                where, values = first_difference(name, saved, resumed)
                before, after = shortened(values)
                told.setdefault(owner, [f"{where} was {before} when it was saved and {after} once it was loaded"])
        return told

    def forgotten(self, plugin: str) -> list[str]:
        """Return the fields of `plugin` that were others after the resume than at the save, with short values."""
        saved, resumed = (moment.get("fields", {}).get(plugin, {}) for moment in self._moments())
        told = {}
        for name in self._changed_fields(plugin):
            values = " and ".join(str(fields.get(name, "not there")) for fields in (saved, resumed))
            told[name.partition("/")[0]] = "" if "/" in name or len(values) > _WIDTH else f" ({values})"
        return [field + values for field, values in told.items()]

    def _changed_fields(self, plugin: str) -> list[str]:
        saved, resumed = (moment.get("fields", {}).get(plugin, {}) for moment in self._moments())
        # What was not the same twice at the save is a time, or follows from one.
        again = self.noted("cut", SAVED).get("fields", {}).get(plugin, {})
        return [name for name in unequal(saved, resumed) if name not in unequal(saved, again)]

    def drew(self, plugin: str) -> list[str]:
        """Return what to say of a `plugin` that drew from a global generator."""
        hooks = self.noted("whole", END)["drew"].get(plugin)
        if not hooks:
            return []
        told = f"it draws from a global generator in {', '.join(hooks)}"
        return [f"{told}, which is not saved; draw from one with the seed that hookdiff.derive_seed gives"]

    def _moments(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return what was seen at the save and right after the resume, if both were at the same step."""
        saved, resumed = self.noted("whole", SAVED), self.noted("cut", RESUMED)
        return (saved, resumed) if saved.get("step") == resumed.get("step") else ({}, {})

    def counts(self) -> str:
        """Return how much there was to compare."""
        with safe_open(self.seen("whole") / f"{END}.safetensors", "pt") as tensors:
            num_tensors = len(tensors.keys())
        values = sum(not name.startswith(NOT_COMPARED) for name in self.noted("whole", END)["values"])
        numbers = sum(len(record) - 1 for record in read_numbers(self.run_dir("whole") / METRICS))
        return (
            f"{num_tensors} tensors, {values} other values of the state, {numbers} logged numbers, "
            f"{len(self._files('whole'))} files"
        )

    def _files(self, name: str) -> dict[str, Path]:
        """Return the files that a run left besides its checkpoints, by name; hidden ones are not meant for people."""
        # The last save may be complete after the witness has had its turn, so what either run told counts.
        saves = [folder for run in ("whole", "cut") for folder in self.noted(run, END)["checkpoints"]]
        root, skipped = self.run_dir(name), {*saves, CONFIG, METRICS}
        found = {path.relative_to(root): path for path in sorted(root.rglob("*")) if path.is_file()}
        return {
            path.as_posix(): full
            for path, full in found.items()
            if path.parts[0] not in skipped and not any(part.startswith(".") for part in path.parts)
        }


def _judge(runs: _Runs, names: Sequence[str]) -> Outcome:
    """Tell what came out; `names` are texts in the state that no two runs have in common."""
    found = [difference for difference in runs.compare() if difference.what not in names]
    # A text in the state that was the same up to the save has to stay so; one in a file may hold times.
    files = [difference.what for difference in found if difference.is_text and difference.what.startswith(FILE)]
    if wrong := [difference for difference in found if difference.what not in files]:
        return _failure(wrong, runs)
    plan, (before, after) = runs.plan, runs.plan.workers
    lines = [
        f"the resumed run is the run that was never stopped, bit for bit: saved at {plan}; killed later"
        + (f"; resumed with {after} workers after {before}" if before != after else ""),
        f"compared: {runs.counts()}",
    ]
    if names or files:
        lines.append(f"not the same, but texts, which may be names or times: {_some([*names, *files])}")
    if plan.untried:
        lines.append(
            f"not tried, since it is not due within {plan.steps} steps: {_some(plan.untried)}; lower it with --set, or "
            "give more --steps"
        )
    return Outcome(True, lines)


def _failure(found: Sequence[Difference], runs: _Runs) -> Outcome:
    """Tell of the plugin that resumed otherwise, and not of one that only saw what came of it."""
    reloaded = runs.reloaded()
    plugin = runs.culprit(found)
    if plugin is None:
        lines = [
            f"not resumed exactly; first seen: {found[0].told(_RESUMED)}",
            "it belongs to no plugin; do the model, the data or the optimizer keep more than what is in their "
            "state_dict, or draw random numbers of their own?",
        ]
    else:
        lines = [
            f"not resumed exactly because of the plugin {plugin!r}; first seen: {_of(plugin, found).told(_RESUMED)}"
        ]
        lines += reloaded.get(plugin, [])
        if names := runs.forgotten(plugin):
            lines.append(f"not the same at the save and right after the resume: its field {_some(names)}")
        lines += runs.drew(plugin) or [
            "look at its state_dict and load_state_dict: what it keeps from step to step has to be in both, or to "
            "follow from loop.progress"
        ]
    return Outcome(False, [*lines, _all(found)])


def _unstable(found: Sequence[Difference], runs: _Runs) -> Outcome:
    """Tell of a run of which nothing can be said, since it never is the same."""
    likely = (*runs.noted("whole", END)["drew"], *(difference.owner for difference in found))
    plugin = next((plugin for plugin in likely if plugin in runs.config.plugins), None)
    first = (_of(plugin, found) if plugin else found[0]).told("the second time")
    blamed = f", because of the plugin {plugin!r}" if plugin else ""
    lines = [f"the run is not the same twice, even when it is never stopped{blamed}; first seen: {first}"]
    if plugin:
        lines += runs.drew(plugin)
    else:
        lines.append("on a GPU, some operations of torch are not deterministic; try the CPU (--set run.device=cpu)")
    return Outcome(False, [*lines, _all(found)])


def _of(plugin: str, found: Sequence[Difference]) -> Difference:
    return next((difference for difference in found if difference.owner == plugin), found[0])


def _all(found: Iterable[Difference]) -> str:
    counts = Counter(difference.owner or "the core" for difference in found)
    return "all differences: " + ", ".join(f"{count} of {owner}" for owner, count in counts.items())


def _expect(code: int, expected: int, what: str, output: Iterable[str]) -> None:
    if code != expected:
        told = "\n".join(f"  {line}" for line in output)
        raise UserError(f"{what} ended with exit code {code}; what it said last:\n{told}")


def _named(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))


def _some(told: Iterable[str]) -> str:
    listed = list(told)
    return ", ".join(listed[:_MOST]) + (f", and {len(listed) - _MOST} more" if len(listed) > _MOST else "")
