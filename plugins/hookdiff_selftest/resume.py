"""Tests with real processes whether a run that is killed and resumed ends like a run that was never stopped.

In a temporary folder one run is never stopped. A second run of the same config is killed some steps after a checkpoint
in its middle, and resumed. Up to the kill both runs must be the same, or nothing can be proved. At the end, states,
logged numbers and files are compared.
"""

from __future__ import annotations

import inspect
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, dropwhile
from pathlib import Path
from typing import Any

import tomli_w
from attrs import Factory, define, evolve, field

from hookdiff import Config, Every, Sink, UserError, listed
from hookdiff.experiment import build_feed, set_by_data
from hookdiff.images import Workers
from hookdiff.loop import hooks_of, implements, keeps_state
from hookdiff.run_dir import CONFIG, EVENTS, METRICS
from hookdiff.testing import Difference, ValueKey, all_differences, is_digest, unescaped
from hookdiff_selftest.state_recorder import END, RESUMED, SAVED, Note, StateRecorder
from hookdiff_selftest.written import files, inside, logged

_REPORT = "report.html"  # not compared: it contains times of events
_TAIL = 30  # last lines shown of a run that failed
_MOST = 5  # names shown in a list
_NETWORK = hooks_of("passes")  # the hooks in which the network is called
_KILLED = signal.SIGTERM if os.name == "nt" else -signal.SIGKILL  # the exit code of a process that the recorder killed
_GPU = "on a GPU, some operations of torch are not deterministic; try the CPU (--set run.device=cpu)"
_OWN_GENERATOR = "look for a generator without a seed in a plugin, the model or the data"
_ATTEMPTS = 3  # at most this many plugins are tested by restoring their fields
_FILE_ADVICE = "steps after the checkpoint are trained again: a plugin has to cut its file back to the resumed step"
_NO_PLUGIN = (
    "no plugin is known to be the cause; look for state of the model, the data or the optimizer that is not in their "
    "state_dict, and for random numbers that they draw themselves"
)
_LOOK = (
    "look at its state: each value that it keeps from step to step has to be in saved fields (or state_dict), or to "
    "follow from loop.progress"
)


@define(frozen=True)
class Plan:
    """How long the runs are, and at which step the second run is saved."""

    steps: int  # steps of each run
    save_at: int  # step of the checkpoint
    log_every: int  # steps between logs
    num_batches: int  # batches of an epoch
    savers: tuple[str, ...]  # the plugins that save; their `every` becomes save_at
    trackers: tuple[str, ...]  # the plugins that are sinks
    untried: tuple[str, ...]  # options that are due only after the end, such as "plugins.fid.every = 1000"
    workers: tuple[int, int]  # number before the kill, and after the resume

    def __str__(self) -> str:
        lengths = {"an epoch": self.num_batches, "a log window": self.log_every}
        middle = " and of ".join(what for what, length in lengths.items() if self.save_at % length)
        return f"step {self.save_at:,} of {self.steps:,}" + (f", in the middle of {middle}" if middle else "")


def prove(config: Config, steps: int, workers: int, say: Callable[[str], object]) -> tuple[list[str], bool]:
    """Train, kill, resume and compare; `say` is called with each stage.

    Returns the lines of the result, the first with the verdict and the plugin to blame, and whether the test passed.
    Each run has `steps` steps, at least 8. After the resume, `workers` processes load the data. Raises UserError for a
    config without a plugin that saves, and if a run fails before the resume.
    """
    plan = make_plan(config, steps, workers)
    with tempfile.TemporaryDirectory(prefix="hookdiff-selftest-") as folder:
        whole, cut = (SubprocessRun(config, plan, Path(folder), name) for name in ("whole", "cut"))
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
        pair = Pair(whole, cut)
        unlike = pair.differences_before()
        if wrong := [each for each in unlike if not each.is_text and pair.owner(each) not in plan.trackers]:
            return pair.unstable(wrong), False
        say("resuming it")
        if code := cut.train(resume=True):
            last = cut.output[-1] if cut.output else "it printed nothing"
            return [f"the resumed run failed with exit code {code}: {last}", *cut.output], False
        wrong, texts = pair.compare([each.key for each in unlike])
        if plan.trackers and any(each.key.kind == "file" for each in wrong):
            say(f"some files differ, perhaps those of trackers: testing again without {', '.join(plan.trackers)}")
            lines, passed = prove(_without(config, plan.trackers), steps, workers, say)
            if not passed:
                return lines, False
            wrong = [each for each in wrong if each.key.kind != "file"]
        return (pair.failure(wrong, texts, say), False) if wrong else (pair.success(texts), True)


def make_plan(config: Config, steps: int, workers: int) -> Plan:
    """Choose the step of the checkpoint: in the middle, but not where an epoch or a log window ends."""
    savers = tuple(name for name, part in config.plugins.items() if implements(part.target, "restore"))
    if not savers:
        raise UserError(
            f"{config.path}: none of its plugins saves the run (implements the hook restore), so there is nothing to "
            "resume from; add one with --plugins NAME (`hookdiff plugins` lists what is installed)"
        )
    num_batches = build_feed(config, decode=False).bind(config.run.batch_size).num_batches()
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
    change = config.data.of(Workers).workers, workers
    return Plan(steps, save_at, log_every, num_batches, savers, trackers, tuple(untried), change)


def _without(config: Config, names: Sequence[str]) -> Config:
    """Return the config without the plugins `names`."""
    plugins = {name: part for name, part in config.plugins.items() if name not in names}
    run = evolve(config.run, plugins=tuple(part.use for part in plugins.values()))
    return evolve(config, run=run, plugins=plugins)


@define
class SubprocessRun:
    """A run in separate processes, and its files."""

    config: Config
    plan: Plan
    folder: Path
    name: str
    fields: list[str] = field(factory=list)  # PLUGIN/FIELD: saved with the checkpoint, and restored after the resume
    output: list[str] = field(factory=list)  # the last lines of the last process
    run_dir: Path = field(default=Factory(lambda self: self.folder / self.name, takes_self=True))
    notes: Path = field(default=Factory(lambda self: self.folder / f"{self.name}-notes", takes_self=True))
    _notes: dict[str, Note] = field(factory=dict, init=False)  # notes that were read

    def train(self, kill: bool = False, resume: bool = False) -> int:
        """Train, or go on, until the end of the plan or the kill; return the exit code."""
        path = self.folder / f"{self.name}.toml"
        path.write_text(tomli_w.dumps(self._table(kill, resume)), "utf-8")
        code = "from hookdiff.cli import main; main()"
        command = [sys.executable, "-P", "-c", code, "run", str(path), "--out", str(self.run_dir)]
        command += ["--resume"] * resume
        # The process can import the modules that this process can import.
        paths = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
        env = {**os.environ, "PYTHONPATH": paths}
        # The output goes to a file, because the data workers of a killed process would keep a pipe open.
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
        run.pop("import_from", None)  # it may be an untrusted folder; PYTHONPATH has the trusted folders
        run |= {"log_every": plan.log_every, "max_time": 0}
        if (self.config.run.steps or (self.config.run.epochs or 0) * plan.num_batches) < plan.steps:
            run.pop("epochs", None)
            run["steps"] = plan.steps
        for saver in plan.savers:
            if "every" in plugins[saver]:
                plugins[saver]["every"] = plan.save_at
        if resume and "workers" not in inspect.signature(self.config.data.target).parameters:
            table["data"]["workers"] = plan.workers[1]
        run["plugins"] = [*run["plugins"], f"{StateRecorder.__module__}:{StateRecorder.__name__}"]
        options = {"at": plan.save_at, "stop": plan.steps, "kill": kill, "fields": self.fields}
        plugins[StateRecorder.__name__.lower()] = {"out": str(self.notes), **options}
        return table

    def copy(self, name: str, fields: list[str]) -> SubprocessRun:
        """Return a copy of this run and its files that restores `fields` when it is resumed."""
        run = SubprocessRun(self.config, self.plan, self.folder, name, fields)
        shutil.copytree(self.run_dir, run.run_dir)
        shutil.copytree(self.notes, run.notes)
        return run

    def note(self, moment: str) -> Note:
        """Return the note of the recorder at `moment`; an empty note if the run has not reached the moment."""
        if moment not in self._notes and (path := self.notes / f"{moment}.json").exists():
            self._notes[moment] = Note.read(path)
        return self._notes.get(moment) or Note()


@define
class Pair:
    """A run that is never stopped, and a run of the same config that is killed and resumed."""

    whole: SubprocessRun
    cut: SubprocessRun

    def differences_before(self) -> list[Difference]:
        """Return how the two runs differ before the kill."""
        numbers, numbers_of_cut = (logged(run.run_dir / METRICS) for run in (self.whole, self.cut))
        last = max((key.step for key in numbers_of_cut), default=0)  # the last step's lines may be incomplete
        differences = [each for each in all_differences(numbers, numbers_of_cut) if each.key.step < last]
        return differences + all_differences(self.whole.note(SAVED).state, self.cut.note(SAVED).state)

    def compare(self, unlike: Sequence[ValueKey]) -> tuple[list[Difference], list[ValueKey]]:
        """Return the values that differ at the end of the two runs, and the texts that differ.

        Texts may hold names and times; `unlike` are texts already known to differ. The state of a tracker is not
        compared.
        """
        wrong, texts = [], list(unlike)
        for each in all_differences(self.ended(self.whole), self.ended(self.cut)):
            if each.key in unlike or self.owner(each) in self.whole.plan.trackers:
                continue
            # A text of the state that was equal at the save must stay equal. A text in a file may contain times.
            difference = inside(each, self.whole.run_dir, self.cut.run_dir) if each.key.kind == "file" else each
            if difference is None:
                texts.append(each.key)
            else:
                wrong.append(difference)
        return wrong, texts

    def ended(self, run: SubprocessRun) -> dict[ValueKey, Any]:
        """Return the logged numbers of a run, its state at the end, and its files."""
        # The last checkpoint may be complete after the recorder's last hook, so the checkpoints of both runs count.
        checkpoints = (folder for each in (self.whole, self.cut) for folder in each.note(END).checkpoints)
        skipped = {*checkpoints, CONFIG, METRICS, EVENTS, _REPORT}
        return logged(run.run_dir / METRICS) | run.note(END).state | files(run.run_dir, skipped)

    def success(self, texts: Sequence[ValueKey]) -> list[str]:
        """Return the lines about a run that resumed exactly."""
        plan, compared = self.whole.plan, self.ended(self.whole)
        num_tensors, counts = sum(map(is_digest, compared.values())), Counter(key.kind for key in compared)
        before, after = plan.workers
        workers = f"; resumed with {after} workers after {before}" if before != after else ""
        lines = [
            "the resumed run equals the run that was never stopped, bit for bit: "
            f"saved at {plan}; killed later{workers}",
            f"compared: {num_tensors:,} tensors, {counts['saved value'] - num_tensors:,} other values of the state, "
            f"{counts['logged number']:,} logged numbers, {counts['file']:,} files",
        ]
        if texts:
            lines.append(f"texts that differ, as names or times may: {listed(texts, _MOST)}")
        if plan.untried:
            late = listed(plan.untried, _MOST)
            lines.append(
                f"not tried: {late}, not due within {plan.steps} steps; lower it with --set, or give more --steps"
            )
        return lines

    def failure(
        self, wrong: Sequence[Difference], texts: Sequence[ValueKey], say: Callable[[str], object]
    ) -> list[str]:
        """Report the plugin that did not resume exactly, not a plugin that only shows the consequences."""
        changed, suspects = self.changed(), self.suspects(wrong)
        fields: dict[str, list[str]] = {}  # PLUGIN/FIELD by plugin
        for key in (each.key for each in changed if each.key.kind == "field"):
            fields.setdefault(key.plugin, []).append("/".join(map(unescaped, key.name.split("/")[:2])))
        only_files = all(each.key.kind == "file" for each in wrong)
        others = () if only_files else fields
        tried = [plugin for plugin in dict.fromkeys((*suspects, *others)) if plugin in fields][:_ATTEMPTS]
        proved = _confirm(self.whole, {plugin: list(dict.fromkeys(fields[plugin])) for plugin in tried}, texts, say)
        # A plugin that was tested without effect is a less likely cause than a plugin that could not be tested.
        plugin = proved or next(iter(sorted(suspects, key=tried.__contains__)), None)
        lost = [each for each in changed if plugin and each.key.plugin == plugin]
        advice = [f"not the same at the save and right after the resume: {listed(lost, _MOST)}"] if lost else []
        advice += (self.drew(plugin) or [_LOOK]) if plugin else [_FILE_ADVICE if only_files else _NO_PLUGIN]
        verdict = f"not resumed exactly{', perhaps' if plugin and not proved else ''}"
        return self._report(verdict, plugin, wrong, ("the run without a stop", "the resumed run"), advice)

    def unstable(self, wrong: Sequence[Difference]) -> list[str]:
        """Report that two equal runs differ before any stop, so that nothing can be proved about a resume."""
        owners = list(map(self.owner, wrong))
        # Different weights change the logged numbers of every plugin.
        likely = [*self.whole.note(END).drew, *(owners if all(owners) else ())]
        plugin = next((plugin for plugin in likely if plugin in self.whole.config.plugins), None)
        advice = self.drew(plugin) if plugin else [_OWN_GENERATOR, _GPU]
        verdict = f"two runs without a stop are not the same{', perhaps' if plugin else ''}"
        return self._report(verdict, plugin, wrong, ("the first run", "the second run"), advice)

    def _report(
        self, verdict: str, plugin: str | None, wrong: Sequence[Difference], names: tuple[str, str], advice: list[str]
    ) -> list[str]:
        blamed = f" because of the plugin {plugin!r}" if plugin else ""
        first = next((each for each in wrong if self.owner(each) == plugin), wrong[0])
        counts = Counter(self.owner(each) or "the core" for each in wrong).items()
        return [
            f"{verdict}{blamed}; first seen: {first.describe(*names)}",
            *advice,
            "all differences: " + ", ".join(f"{count} of {owner}" for owner, count in counts),
        ]

    def owner(self, difference: Difference) -> str:
        """Return the plugin that logged the number, wrote the file or holds the value; "" where it is the core."""
        key, plugins = difference.key, self.whole.config.plugins
        owners = self.whole.note(END).owners | self.cut.note(END).owners
        known = key.plugin or owners.get(key.name) or key.name.partition("/")[0]
        return known if key.plugin or known in plugins else ""

    def changed(self) -> list[Difference]:
        """Return the plugins' state and fields that differed between the save and the resumed process."""
        saved, again, resumed = self.whole.note(SAVED), self.cut.note(SAVED), self.cut.note(RESUMED)
        if saved.step != resumed.step:  # the run was resumed from a later checkpoint
            return []
        # Items that differ between the two runs at the save are times, or depend on a time.
        unstable = {each.key for each in all_differences(saved.values, again.values)}
        changed = all_differences(saved.values, resumed.values)
        return [each for each in changed if each.key.plugin in self.whole.config.plugins and each.key not in unstable]

    def suspects(self, wrong: Sequence[Difference]) -> list[str]:
        """Return the plugins that may have made the resumed run different, the most likely first.

        The first suspect is the plugin after whose call weights, gradients or rates first differed. But a call of the
        network also depends on values that are not traced. If such a call is the first difference, or the weights never
        differ, the suspects are the plugins that own a value of `wrong` and restored other values, lost a field, or
        drew from a global generator. The owner of the first difference counts only if the weights stayed the same,
        because changed weights show in the logged numbers of every plugin.
        """
        plugins, (hook, first) = self.whole.config.plugins, self._first_change()
        changed, drew = self.changed(), self.whole.note(END).drew
        lost = [each.key.plugin for each in changed if each.key.kind == "saved value"]
        for each in changed:
            # A plugin without saved state has lost a number or a generator, unless the value changes its type: it then
            # most likely only marks that some work was done once.
            kinds = {type(each.here), type(each.there)}
            if not keeps_state(plugins[each.key.plugin].target) and len(kinds) == 1 and bool not in kinds:
                lost.append(each.key.plugin)
        owners = list(map(self.owner, wrong))
        likely = [plugin for plugin in (*lost, *drew) if plugin in owners]
        if hook not in _NETWORK or first in drew or any(each.key.plugin == first for each in changed):
            likely.insert(0, first)
        if hook:
            takes_part = hooks_of("epoch", "batch", "passes")
            likely += [name for name in lost if implements(plugins[name].target, *takes_part)]
            likely.append(first)
        else:
            likely += owners
        return list(dict.fromkeys(plugin for plugin in (*likely, *drew) if plugin in plugins))

    def _first_change(self) -> tuple[str, str]:
        """Return the hook and the plugin in which weights, gradients or rates first differed; "" for none."""
        traces = self.whole.note(END).trace, self.cut.note(END).trace
        begin = min((position for position, *_ in traces[1]), default=0)
        # Start at the first step of the resumed process: the other trace also has the hooks just before it.
        both = [dropwhile(lambda call: call[0] < begin or call[1] != "before_step", trace) for trace in traces]
        return next(((call[1], call[2]) for expected, call in zip(*both, strict=False) if expected != call), ("", ""))

    def drew(self, plugin: str) -> list[str]:
        """Return a line about a `plugin` that drew from a global generator."""
        hooks = self.whole.note(END).drew.get(plugin)
        if not hooks:
            return []
        where = f"it draws from a global generator in {', '.join(hooks)}"
        return [f"{where}, which is not saved; use a generator with a seed of hookdiff.machine.derive_seed"]


def _confirm(
    whole: SubprocessRun, fields: Mapping[str, list[str]], texts: Sequence[ValueKey], say: Callable[[str], object]
) -> str | None:
    """Return the plugin for which restoring its `fields` after a resume removes the difference; None if there is none.

    The run is trained to the save and killed once more, and resumed once for each plugin.
    """
    if not fields:
        return None
    say("training to the checkpoint once more, to find the cause")
    again = SubprocessRun(whole.config, whole.plan, whole.folder, "again", list(chain(*fields.values())))
    if again.train(kill=True) != _KILLED:
        return None
    for index, (plugin, names) in enumerate(fields.items()):
        say(f"resuming it with the fields of {plugin} as they were at the save")
        attempt = again.copy(f"again-{index}", names)
        if attempt.train(resume=True) == 0 and not Pair(whole, attempt).compare(texts)[0]:
            return plugin
    return None


def _expect(code: int, expected: int, what: str, output: Iterable[str]) -> None:
    if code != expected:
        last = "\n".join(f"  {line}" for line in output)
        raise UserError(f"{what} ended with exit code {code}; its last lines:\n{last}")
