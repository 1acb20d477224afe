"""Checks of every plugin: it resumes exactly, works at any place in the list, and can be left out."""

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Literal

from hookdiff.errors import UserError
from hookdiff.testing.companions import COMPANIONS
from hookdiff.testing.compare import ValueKey, all_differences, fail
from hookdiff.testing.record import PLUGIN, Record, Runs

Make = Callable[[], object]


def assert_resumes(
    make_plugin: Make, *, at: Iterable[int] = (1, 5, 12), others: Mapping[str, Make] = COMPANIONS, **loop: Any
) -> None:
    """Raise AssertionError unless a run that is saved and resumed after the steps `at` equals an uninterrupted run.

    Weights, logged values and pictures are compared at every step, optimizers and the states of all plugins at the end,
    to the last bit. Each part of the resumed run has new plugins, a new model and other states of the global
    generators, and reads its state from files. The message names the first difference.

    Args:
        make_plugin: returns a new plugin, such as `lambda: EMA(decay=0.9)`.
        at: steps after which the run is saved and resumed.
        others: functions that make the other plugins of the run, by name.
        loop: further arguments of `toy_loop`; each run gets copies of model and objective.
    """
    with Runs(make_plugin, others, loop) as runs:
        (whole, texts), resumed = _whole_run(runs), Record("the resumed run")
        cuts, run_dir = sorted(at), runs.new_folder()
        for process, until in enumerate((*cuts, None)):
            resumed.until = until
            runs.train(resumed, process=process, run_dir=run_dir)
            if resumed.until:
                break  # the plugin has ended the run
        if resumed.saved is None:
            steps = max((key.step for key in whole.steps), default=0)
            raise ValueError(f"the run ended after {steps} steps, before a save at {cuts}: give smaller steps in `at`")
        problem = f"a run that was saved and resumed after the steps {cuts} differs from an uninterrupted run"
        _compare(problem + _lost_fields(whole, resumed), whole, resumed, texts)


def _lost_fields(whole: Record, resumed: Record) -> str:
    """Return a text on fields of the plugin that a resume may have lost; "" if there are none."""
    names = [name for name in whole.fields if whole.fields[name] != resumed.fields.get(name)]
    if not names:
        return ""
    return f"; its fields {', '.join(names)} differ at the end, but are not saved: make those that matter by saved(...)"


def assert_any_order(make_plugin: Make, *, others: Mapping[str, Make] = COMPANIONS, **loop: Any) -> None:
    """Raise AssertionError unless the run is the same, to the last bit, wherever the plugin stands among the `others`.

    If two plugins change gradients, the runs in both orders are equal only up to rounding: test such a plugin without
    the companion "limit". The arguments are those of `assert_resumes`.
    """
    with Runs(make_plugin, others, loop) as runs:
        first, texts = _whole_run(runs)
        for place in range(1, len(others) + 1):
            record = Record(f"the run with the plugin after {', '.join(list(others)[:place])}")
            runs.train(record, place=place)
            _compare("the place of the plugin in the list makes a difference", first, record, texts)


def assert_removable(
    make_plugin: Make,
    *,
    changes: Literal["nothing", "training", "model"] = "nothing",
    at: int = 5,
    others: Mapping[str, Make] = COMPANIONS,
    **loop: Any,
) -> None:
    """Raise AssertionError unless the run works without the plugin, also when it is resumed.

    A run saved with the plugin at step `at` can be resumed without it, and a run saved without it can be resumed with
    it, by `fresh=`. The plugin draws from no global generator, and does not change a later run of the process.

    Args:
        make_plugin: returns a new plugin.
        changes: "nothing" for a plugin that leaves weights and the logged values of other plugins as they are, to the
            last bit; "training" for a plugin that changes them; "model" for a plugin that also changes the names of the
            weights, such as a parametrisation: a resume that adds or removes it must raise UserError.
        at: the step of the checkpoint.
        others: functions that make the other plugins of the run, by name.
        loop: further arguments of `toy_loop`.
    """
    with Runs(make_plugin, others, loop) as runs:
        alone, present, after = Record("the run without it"), Record("the run with it"), Record("the run after that")
        runs.train(alone, place=None)
        drew = runs.train(present, is_watched=True).drew.get(PLUGIN, {})
        runs.train(after, place=None)
        facts = [f"from the global generator of {' and '.join(sorted(who))} in {hook}" for hook, who in drew.items()]
        remedy = "take a generator of its own, with derive_seed(loop.config.seed, ...), or make a module in seeded(...)"
        assert not facts, f"the plugin draws where no seed is saved: {'; '.join(facts)}; {remedy}"
        _compare("a run without the plugin differs once the plugin was used in the same process", alone, after)
        if changes == "nothing":
            _compare_training(alone, present)
        for first, then, what in (
            (0, None, "the run saved with the plugin and resumed without it"),
            (None, 0, "the run saved without the plugin and resumed with it, by fresh="),
        ):
            record, run_dir = Record(what, until=at), runs.new_folder()
            runs.train(record, place=first, run_dir=run_dir)
            if record.saved is None:
                raise ValueError(f"{what}, ended before it was saved at step {at:,}: give a smaller `at`")
            try:
                runs.train(record, place=then, run_dir=run_dir, process=1, fresh=True)
            except UserError as error:
                if changes != "model":
                    raise AssertionError(f"{what} was refused: {error}") from error
                continue
            assert changes != "model", f"{what} was not refused, though the plugin changes the model"
            if changes == "nothing":
                _compare_training(alone, record)


def _whole_run(runs: Runs) -> tuple[Record, set[ValueKey]]:
    """Return the record of a run with the plugin first in the list, and the texts in its state that are not compared.

    Such texts, names or times, differ in a second run. Raises AssertionError if any other value differs.
    """
    whole, again = Record("the first run"), Record("the second run")
    runs.train(whole)
    runs.train(again, process=1)
    texts = {each.key for each in all_differences(whole.values, again.values) if each.is_text}
    problem = "two equal runs differ; does the plugin draw without a seed, or share a value with all of its class"
    _compare(f"{problem} (assert_keeps_contract)?", whole, again, texts)
    return whole, texts


def _compare_training(alone: Record, other: Record) -> None:
    """Compare the values at each step that both runs have."""
    problem = "the plugin changes the training; if it should, pass changes='training'"
    both = alone.steps.keys() & other.steps.keys()
    _compare(problem, alone, other, (alone.values.keys() | other.values.keys()) - both)


def _compare(problem: str, first: Record, second: Record, skipped: Collection[ValueKey] = ()) -> None:
    differences = [each for each in all_differences(first.values, second.values) if each.key not in skipped]
    fail(problem, (each.describe(first.name, second.name) for each in differences))
