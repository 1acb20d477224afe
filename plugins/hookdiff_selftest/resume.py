"""Tests with real processes whether a run that is killed and resumed ends like a run that was never stopped.

In a temporary folder one run is never stopped, and another of the same config is killed some steps after a checkpoint
in its middle and resumed. Up to the kill both must be the same, or nothing can be proved; at the end all is compared.
"""

from __future__ import annotations

import inspect
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import dropwhile
from pathlib import Path
from typing import Any

import tomli_w
from attrs import Factory, define, evolve, field

from hookdiff import Config, Every, Feed, Sink, UserError
from hookdiff.disk import CONFIG
from hookdiff.experiment import Part, build_feed, set_by_data
from hookdiff.findings import listed
from hookdiff.history import EVENTS, METRICS
from hookdiff_selftest.compare import (
    DIGEST,
    FILE,
    STATE,
    Difference,
    Item,
    compare,
    fields,
    files,
    inside,
    numbers,
    state,
)
from hookdiff_selftest.witness import END, RESUMED, SAVED, Witness

_REPORT = "report.html"  # it shows when events happened
_TAIL = 30  # lines of a run that failed
_MOST = 5  # names in a list
_NETWORK = ("accumulate", "micro_step", "backward")  # the hooks in which the network is called
_KILLED = signal.SIGTERM if os.name == "nt" else -signal.SIGKILL  # the exit code of a process that the witness killed
_GPU = "on a GPU, some operations of torch are not deterministic; try the CPU (--set run.device=cpu)"
_OWN_GENERATOR = "perhaps a plugin, the model or the data draws from a generator of its own that nobody seeds"
_ATTEMPTS = 3  # plugins of which the fields are restored, to see whether the difference goes away
_FILE_ADVICE = "steps after the checkpoint are trained again: a plugin has to cut its file back to the resumed step"
_NO_PLUGIN = (
    "no plugin is known to be the cause; do the model, the data or the optimizer keep more than what is in their "
    "state_dict, or draw random numbers of their own?"
)
_LOOK = (
    "look at its state_dict and load_state_dict: what it keeps from step to step has to be in both, or to follow from "
    "loop.progress"
)

Note = dict[str, Any]  # the notes of the witness at one moment; empty if the run never reached it


@define(frozen=True)
class Plan:
    """How long the runs are, and where they are cut."""

    steps: int  # of each run
    save_at: int  # step
    log_every: int  # steps
    num_batches: int  # of an epoch
    savers: tuple[str, ...]  # the plugins that save; their `every` becomes save_at
    trackers: tuple[str, ...]  # the plugins that are sinks
    untried: tuple[str, ...]  # options that are due only after the end, such as "plugins.fid.every = 1000"
    workers: tuple[int, int]  # before the kill, and on the resume

    def __str__(self) -> str:
        lengths = {"an epoch": self.num_batches, "a log window": self.log_every}
        middle = " and of ".join(what for what, length in lengths.items() if self.save_at % length)
        return f"step {self.save_at} of {self.steps}" + (f", in the middle of {middle}" if middle else "")


def prove(config: Config, steps: int, workers: int, say: Callable[[str], object]) -> tuple[list[str], bool]:
    """Train, kill, resume and compare; `say` is called with each stage.

    Returns the lines of the result, the first with the verdict and the plugin to blame, and whether the test passed.
    `steps` are those of each run, at least 8; `workers` load the data after the resume. Raises UserError for a config
    without a plugin that saves, and if a run fails before the resume.
    """
    plan = make_plan(config, steps, workers)
    with tempfile.TemporaryDirectory(prefix="hookdiff-selftest-") as folder:
        whole, cut = (Run(config, plan, Path(folder), name) for name in ("whole", "cut"))
        say(f"training {plan.steps} steps without a stop")
        _expect(whole.train(), 0, "the run that is never stopped", whole.output)
        say(f"training again, to be killed after a checkpoint at {plan}")
        code = cut.train(kill=True)
        if code == 0:
            raise UserError(
                f"no checkpoint of {', '.join(map(repr, plan.savers))} was complete (on_checkpoint) before the run was "
                f"over; try more --steps than {plan.steps}"
            )
        _expect(code, _KILLED, "the run that was to be killed", cut.output)
        unlike = _differences_before(whole, cut)
        if wrong := [each for each in unlike if not each.is_text and each.owner not in plan.trackers]:
            return _unstable(wrong, Evidence.of(whole, cut)), False
        say("resuming it")
        if code := cut.train(resume=True):
            last = cut.output[-1] if cut.output else "it printed nothing"
            return [f"the resumed run failed with exit code {code}: {last}", *cut.output], False
        result = Comparison.of(whole, cut, [difference.name for difference in unlike])
        if plan.trackers and any(each.name.startswith(FILE) for each in result.wrong):
            say(f"some files differ, perhaps those of trackers: the same without {', '.join(plan.trackers)}")
            lines, passed = prove(_without(config, plan.trackers), steps, workers, say)
            if not passed:
                return lines, False
            result = evolve(result, wrong=[each for each in result.wrong if not each.name.startswith(FILE)])
        if not result.wrong:
            return result.success(plan), True
        return _failure(result, whole, cut, say), False


def make_plan(config: Config, steps: int, workers: int) -> Plan:
    """Choose where to cut: in the middle, but not where an epoch or a log window ends."""
    savers = tuple(name for name, part in config.plugins.items() if hasattr(part.target, "restore"))
    if not savers:
        raise UserError(
            f"{config.path}: none of its plugins saves the run (implements the hook restore), so there is nothing to "
            "resume from; add one with --plugins NAME (`hookdiff plugins` lists what is installed)"
        )
    num_batches = build_feed(config, decode=False).bind(config.run.batch_size).num_batches
    # With a log window as long as the run there would be no numbers to compare.
    log_every = min(config.run.log_every, max(1, steps // 6))
    untried = []
    for name, part in config.plugins.items():
        for key, parameter in inspect.signature(part.target).parameters.items():
            every = part.arguments.get(key, parameter.default)
            if not isinstance(every, Every) or (name in savers and key == "every"):
                continue
            if every.amount * {"steps": 1, "epochs": num_batches}.get(every.unit, steps + 1) > steps:
                untried.append(f"plugins.{name}.{key} = {every}")

    def cost(step: int) -> tuple[int, int]:
        return sum(length > 1 and step % length == 0 for length in (num_batches, log_every)), abs(step - steps // 2)

    save_at = min(range(steps // 3, steps - steps // 3), key=cost)
    kinds = {name: part.target for name, part in config.plugins.items()}
    trackers = tuple(name for name, kind in kinds.items() if isinstance(kind, type) and issubclass(kind, Sink))
    change = int(config.data.shared[Feed].get("workers", 0)), workers
    return Plan(steps, save_at, log_every, num_batches, savers, trackers, tuple(untried), change)


def _without(config: Config, names: Sequence[str]) -> Config:
    """Return the config without the plugins `names`."""
    plugins = {name: part for name, part in config.plugins.items() if name not in names}
    run = evolve(config.run, plugins=tuple(part.use for part in plugins.values()))
    return evolve(config, run=run, plugins=plugins)


@define
class Run:
    """A run in processes of its own, and its files."""

    config: Config
    plan: Plan
    folder: Path
    name: str
    fields: list[str] = field(factory=list)  # PLUGIN/FIELD: kept at the save, and put back on the resume
    output: list[str] = field(factory=list)  # the last lines of the last process
    run_dir: Path = field(default=Factory(lambda self: self.folder / self.name, takes_self=True))
    notes: Path = field(default=Factory(lambda self: self.folder / f"{self.name}-notes", takes_self=True))

    def train(self, kill: bool = False, resume: bool = False) -> int:
        """Train, or go on, until the end of the plan or the kill; return the exit code."""
        path = self.folder / f"{self.name}.toml"
        path.write_text(tomli_w.dumps(self._table(kill, resume)), "utf-8")
        code = "from hookdiff.cli import main; main()"
        command = [sys.executable, "-P", "-c", code, "run", str(path), "--out", str(self.run_dir)]
        command += ["--resume"] * resume
        # What can be imported here can be imported there.
        paths = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
        env = {**os.environ, "PYTHONPATH": paths}
        # Into a file: workers of a process that was killed would hold a pipe open.
        with (self.folder / "output").open("w+b") as output:
            ended = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=env)
            output.seek(0)
            self.output = output.read().decode(errors="replace").splitlines()[-_TAIL:]
        return ended.returncode

    def _table(self, kill: bool, resume: bool) -> dict[str, Any]:
        plan, table = self.plan, self.config.resolved()
        run, plugins = table["run"], table["plugins"]
        for name in set_by_data(self.config):
            table["model"].pop(name, None)
        run.pop("import_from", None)  # a stranger's folder, perhaps; `train` passes all that is trusted
        run |= {"log_every": plan.log_every, "max_time": 0}
        if (self.config.run.steps or (self.config.run.epochs or 0) * plan.num_batches) < plan.steps:
            run.pop("epochs", None)
            run["steps"] = plan.steps
        for saver in plan.savers:
            if "every" in plugins[saver]:
                plugins[saver]["every"] = plan.save_at
        if resume and "workers" not in inspect.signature(self.config.data.target).parameters:
            table["data"]["workers"] = plan.workers[1]
        run["plugins"] = [*run["plugins"], f"{Witness.__module__}:{Witness.__name__}"]
        options = {"at": plan.save_at, "stop": plan.steps, "kill": kill, "fields": self.fields}
        plugins["witness"] = {"out": str(self.notes), **options}
        return table

    def copy(self, name: str, fields: list[str]) -> Run:
        """Return a copy of this run and its files, which puts back `fields` when it is resumed."""
        made = Run(self.config, self.plan, self.folder, name, fields)
        shutil.copytree(self.run_dir, made.run_dir)
        shutil.copytree(self.notes, made.notes)
        return made

    def note(self, moment: str) -> Note:
        """Return the notes of the witness at `moment`."""
        path = self.notes / f"{moment}.json"
        return json.loads(path.read_text("utf-8")) if path.exists() else {}


def _differences_before(whole: Run, cut: Run) -> list[Difference]:
    """Return how the runs differ up to the kill, that is, before either was stopped."""
    evidence = Evidence.of(whole, cut)
    one, other = (numbers(run.run_dir / METRICS, evidence.owner) for run in (whole, cut))
    last = max((item.step for item in other.values()), default=0)  # some of its lines may not be there yet
    early = ({name: item for name, item in items.items() if item.step < last} for items in (one, other))
    states = (state(note["state"]) for note in (evidence.saved, evidence.again))
    return [*compare(*early), *compare(*states)]


@define
class Evidence:
    """The notes of the witnesses of both runs; they show which plugin is to blame."""

    plugins: Mapping[str, Part]
    saved: Note  # of the whole run, at the step of the save
    again: Note  # of the other run at that step
    resumed: Note  # of the other run, right after its resume
    whole: Note  # of the whole run, at its end
    cut: Note  # of the other run, at its end

    @classmethod
    def of(cls, whole: Run, cut: Run) -> Evidence:
        """Read the notes of two runs."""
        saved, resumed = whole.note(SAVED), cut.note(RESUMED)
        if saved.get("step") != resumed.get("step"):  # it went on from a later checkpoint
            resumed = {}
        return cls(whole.config.plugins, saved, cut.note(SAVED), resumed, whole.note(END), cut.note(END))

    def owner(self, name: str) -> str:
        """Return the plugin that logged the number `name` or wrote the file; "" where it is the core."""
        logged = self.whole["owners"] | self.cut.get("owners", {})
        known = logged.get(name) or name.partition("/")[0]
        return known if known in self.plugins else ""

    def suspects(self, found: Sequence[Difference]) -> list[str]:
        """Return the plugins that may have made the resumed run different, the most likely first.

        It is the plugin whose call first gave other weights, gradients or rates. But a call of the network also depends
        on values that are not traced. If that call is the first difference, or if the weights never differ, it is a
        plugin that owns an item of `found` and restored other values, lost a field, or draws from a global generator.
        The owner of the first difference counts only if the weights stayed the same, because changed weights show in
        the logged numbers of every plugin.
        """
        hook, first = self._first_change()
        changed, drew = self.changed(), self.whole["drew"]
        lost = [each.owner for each in changed if each.name.endswith(STATE) or self._is_lost(each)]
        owners = [difference.owner for difference in found]
        likely = [plugin for plugin in (*lost, *drew) if plugin in owners]
        if hook not in _NETWORK or first in drew or any(each.owner == first for each in changed):
            likely.insert(0, first)
        if hook:
            takes_part = ("before_epoch", "make_batch", "before_step", "compute_loss", "reduce_loss", *_NETWORK)
            likely += [name for name in lost if any(hasattr(self.plugins[name].target, h) for h in takes_part)]
            likely.append(first)
        else:
            likely += owners
        return list(dict.fromkeys(plugin for plugin in (*likely, *drew) if plugin in self.plugins))

    def changed_fields(self) -> dict[str, list[str]]:
        """Return by plugin its fields, as PLUGIN/FIELD, that differed between the save and the resumed process."""
        found: dict[str, list[str]] = {}
        for each in self.changed():
            if not each.name.endswith(STATE):
                key = each.name.removeprefix("the field ").removesuffix(f" of {each.owner}").partition("/")[0]
                found.setdefault(each.owner, []).append(f"{each.owner}/{key.replace('~1', '/').replace('~0', '~')}")
        return {plugin: list(dict.fromkeys(names)) for plugin, names in found.items()}

    def _first_change(self) -> tuple[str, str]:
        """Return the hook and the plugin in which weights, gradients or rates first differed; "" for none."""
        traces = self.whole["trace"], self.cut["trace"]
        begin = min((position for position, *_ in traces[1]), default=0)
        # Start at the first step of the resumed process: the other trace also has the hooks just before it.
        both = [dropwhile(lambda call: call[0] < begin or call[1] != "before_step", trace) for trace in traces]
        return next(((call[1], call[2]) for expected, call in zip(*both, strict=False) if expected != call), ("", ""))

    def _is_lost(self, field: Difference) -> bool:
        """Whether a plugin that saves nothing lost the number or generator in `field`."""
        kinds = {type(field.here.value), type(field.there.value)}
        # A value whose type changes is most likely a mark that something was done once.
        return not hasattr(self.plugins[field.owner].target, "state_dict") and len(kinds) == 1 and bool not in kinds

    def changed(self) -> list[Difference]:
        """Return the plugins' state and fields that differed between the save and the resumed process."""
        if not self.resumed:
            return []
        notes = (self.saved, self.again, self.resumed)
        saved, again, resumed = (state(note["state"]) | fields(note["fields"]) for note in notes)
        # Items that differ between the two runs at the save are times, or depend on one.
        unstable = {difference.name for difference in compare(saved, again)}
        found = [each for each in compare(saved, resumed) if each.owner in self.plugins]
        return [each for each in found if each.name not in unstable]

    def drew(self, plugin: str) -> list[str]:
        """Return a line about a `plugin` that drew from a global generator."""
        hooks = self.whole["drew"].get(plugin)
        if not hooks:
            return []
        where = f"it draws from a global generator in {', '.join(hooks)}"
        return [f"{where}, which is not saved; draw from one with the seed that hookdiff.randomness.derive_seed gives"]


@define(frozen=True)
class Comparison:
    """What differs between the ends of two runs, and what was compared."""

    wrong: list[Difference]
    texts: list[str]  # names of texts that differ, as names or times may
    states: Mapping[str, Item]
    num_logged: int
    num_files: int

    @classmethod
    def of(cls, whole: Run, cut: Run, names: Sequence[str]) -> Comparison:
        """Compare the ends of both runs, but not the items in `names`, nor what a tracker keeps."""
        evidence = Evidence.of(whole, cut)
        # The last checkpoint may be complete after the witness has had its turn, so those of either run count.
        skipped = {*evidence.whole["checkpoints"], *evidence.cut["checkpoints"], CONFIG, METRICS, EVENTS, _REPORT}
        logged = [numbers(run.run_dir / METRICS, evidence.owner) for run in (whole, cut)]
        states = [state(note["state"]) for note in (evidence.whole, evidence.cut)]
        written = [files(run.run_dir, skipped, evidence.owner) for run in (whole, cut)]
        wrong, texts = [], list(names)
        for each in (each for pair in (logged, states, written) for each in compare(*pair)):
            if each.name in names or each.owner in whole.plan.trackers:
                continue
            # A text in the state that was the same up to the save has to stay so; one in a file may hold times.
            if each.is_text and each.name.startswith(FILE):
                found = inside(each, whole.run_dir, cut.run_dir)
                if found is each:
                    texts.append(each.name)
                    continue
                wrong.append(found)
            else:
                wrong.append(each)
        return cls(wrong, texts, states[0], len(logged[0]), len(written[0]))

    def success(self, plan: Plan) -> list[str]:
        """Return the lines about a run that resumed exactly."""
        before, after = plan.workers
        num_tensors = sum(str(item.value).startswith(DIGEST) for item in self.states.values())
        lines = [
            f"the resumed run equals the run that was never stopped, bit for bit: saved at {plan}; killed later"
            + (f"; resumed with {after} workers after {before}" if before != after else ""),
            f"compared: {num_tensors} tensors, {len(self.states) - num_tensors} other values of the state, "
            f"{self.num_logged} logged numbers, {self.num_files} files",
        ]
        if self.texts:
            lines.append(f"texts that differ, as names or times may: {listed(self.texts, _MOST)}")
        if plan.untried:
            late = listed(plan.untried, _MOST)
            lines.append(
                f"not tried: {late}, not due within {plan.steps} steps; lower it with --set, or give more --steps"
            )
        return lines


def _failure(result: Comparison, whole: Run, cut: Run, say: Callable[[str], object]) -> list[str]:
    """Blame the plugin that did not resume, and not one in which the consequences show."""
    evidence = Evidence.of(whole, cut)
    suspects, fields = evidence.suspects(result.wrong), evidence.changed_fields()
    only_files = all(each.name.startswith(FILE) for each in result.wrong)
    others = () if only_files else fields
    tried = [plugin for plugin in dict.fromkeys((*suspects, *others)) if plugin in fields][:_ATTEMPTS]
    proved = _confirm(whole, {plugin: fields[plugin] for plugin in tried}, result.texts, say)
    # A plugin without effect on the difference is less likely than one that could not be tried.
    likely = sorted(suspects, key=lambda plugin: plugin in tried)
    plugin = proved or next(iter(likely), None)
    if plugin is None:
        advice = [_FILE_ADVICE if only_files else _NO_PLUGIN]
        return _report("not resumed exactly", None, False, result.wrong, "when resumed", advice)
    changed = [each for each in evidence.changed() if each.owner == plugin]
    lines = [f"not the same at the save and right after the resume: {listed(changed, _MOST)}"] if changed else []
    lines += evidence.drew(plugin) or [_LOOK]
    return _report("not resumed exactly", plugin, bool(proved), result.wrong, "when resumed", lines)


def _confirm(
    whole: Run, fields: Mapping[str, list[str]], names: Sequence[str], say: Callable[[str], object]
) -> str | None:
    """Return the plugin of which the `fields`, once they are put back after a resume, make the difference go away.

    The run is trained to the save and killed once more, and resumed once for each plugin.
    """
    if not fields:
        return None
    say("training to the checkpoint once more, to find the cause")
    again = Run(whole.config, whole.plan, whole.folder, "again", [name for each in fields.values() for name in each])
    if again.train(kill=True) != _KILLED:
        return None
    for index, (plugin, own) in enumerate(fields.items()):
        say(f"resuming it with the fields of {plugin} as they were at the save")
        attempt = again.copy(f"again-{index}", own)
        if attempt.train(resume=True) == 0 and not Comparison.of(whole, attempt, names).wrong:
            return plugin
    return None


def _unstable(found: Sequence[Difference], evidence: Evidence) -> list[str]:
    """Report a run that is not the same twice, so that nothing can be proved about it."""
    likely: list[str] = [*evidence.whole["drew"]]
    if all(difference.owner for difference in found):  # other weights would show in the numbers of every plugin
        likely += [difference.owner for difference in found]
    plugin = next((plugin for plugin in likely if plugin in evidence.plugins), None)
    advice = evidence.drew(plugin) if plugin else [_OWN_GENERATOR, _GPU]
    return _report("two runs without a stop are not the same", plugin, False, found, "the second time", advice)


def _report(
    verdict: str, plugin: str | None, proved: bool, found: Sequence[Difference], when: str, advice: Sequence[str]
) -> list[str]:
    first = next((difference for difference in found if difference.owner == plugin), found[0])
    blamed = f"{'' if proved else ', perhaps'} because of the plugin {plugin!r}" if plugin else ""
    counts = Counter(difference.owner or "the core" for difference in found)
    return [
        f"{verdict}{blamed}; first seen: {first.describe(when)}",
        *advice,
        "all differences: " + ", ".join(f"{count} of {owner}" for owner, count in counts.items()),
    ]


def _expect(code: int, expected: int, what: str, output: Iterable[str]) -> None:
    if code != expected:
        last = "\n".join(f"  {line}" for line in output)
        raise UserError(f"{what} ended with exit code {code}; its last lines:\n{last}")
