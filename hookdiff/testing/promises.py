"""The promises that every plugin keeps: it resumes exactly, stands anywhere in the list, and can be left out."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

from hookdiff.errors import UserError
from hookdiff.testing.companions import COMPANIONS
from hookdiff.testing.draws import Draws
from hookdiff.testing.record import PLUGIN, Record, Runs

Make = Callable[[], object]

_SHOWN = 5  # differences in a message


def assert_resumes(
    make_plugin: Make, *, at: Iterable[int] = (1, 5, 12), others: Mapping[str, Make] = COMPANIONS, **loop: Any
) -> None:
    """Raise AssertionError unless a run that is saved and resumed after each step of `at` equals one without a stop.

    Weights, logged values and pictures are compared at every step, optimizers and the states of all plugins at the end,
    to the last bit. Each part of the resumed run has new plugins, a new model and other global generators, and its
    state went through files. The message names what differs first.

    make_plugin: returns a new plugin, such as `lambda: EMA(decay=0.9)`. others: functions that make the other plugins
    of the run, by name. loop: further arguments of `toy_loop`; each run gets copies of model and objective.
    """
    with Runs(make_plugin, others, loop) as runs:
        whole, resumed = _whole_run(runs), Record("the resumed run")
        cuts, run_dir = sorted(at), runs.new_folder()
        for process, until in enumerate((*cuts, None)):
            resumed.until = until
            runs.train(resumed, process=process, run_dir=run_dir)
            if resumed.until:
                break  # the plugin has ended the run
        if resumed.saved is None:
            raise ValueError(f"the run ended after {max(whole.steps, default=0)} steps, and was never saved: at={cuts}")
        _compare(f"a run that was saved and resumed after the steps {cuts} differs from a whole one", whole, resumed)


def assert_any_order(make_plugin: Make, *, others: Mapping[str, Make] = COMPANIONS, **loop: Any) -> None:
    """Raise AssertionError unless the run is the same, to the last bit, wherever the plugin stands among the `others`.

    Two plugins that change gradients are the same in both orders only up to rounding: test such a plugin without the
    companion "limit". The arguments are those of `assert_resumes`.
    """
    with Runs(make_plugin, others, loop) as runs:
        first = _whole_run(runs)
        for place in range(1, len(others) + 1):
            record = Record(f"the run with the plugin after {', '.join(list(others)[:place])}")
            runs.train(record, place=place)
            _compare("the place of the plugin in the list makes a difference", first, record)


def assert_removable(
    make_plugin: Make,
    *,
    changes: Literal["nothing", "training", "model"] = "nothing",
    at: int = 5,
    others: Mapping[str, Make] = COMPANIONS,
    **loop: Any,
) -> None:
    """Raise AssertionError unless the run works without the plugin, also when it is resumed.

    A checkpoint of step `at` that was made with the plugin resumes without it, and one made without it resumes with it,
    by `fresh=`. The plugin draws from no global generator, and a later run in the process is as if it never was there.

    changes: "nothing" for a plugin that leaves weights and the others' logged values as they are, to the last bit;
    "training" for one that changes them; "model" for one that also changes the names of the weights, such as a
    parametrisation: a resume that adds or removes it must raise UserError. The others are those of `assert_resumes`.
    """
    with Runs(make_plugin, others, loop) as runs:
        alone, present, after = Record("the run without it"), Record("the run with it"), Record("the run after that")
        draws = Draws(PLUGIN)
        runs.train(alone, place=None)
        runs.train(present, watch=draws)
        runs.train(after, place=None)
        assert not draws.found, f"the plugin draws where no seed is saved: {'; '.join(draws.found)}"
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
                raise ValueError(f"{what}, ended before it could be saved at step {at}")
            try:
                runs.train(record, place=then, run_dir=run_dir, process=1, fresh=True)
            except UserError as error:
                if changes != "model":
                    raise AssertionError(f"{what} was refused: {error}") from error
                continue
            assert changes != "model", f"{what} was not refused, though the plugin changes the model"
            if changes == "nothing":
                _compare_training(alone, record)


def _whole_run(runs: Runs) -> Record:
    """Return the record of a run with the plugin first in the list; raise AssertionError if a second run differs."""
    whole, again = Record("the first run"), Record("the second run")
    runs.train(whole)
    runs.train(again, process=1)
    whole.texts = {
        path
        for path in whole.end.keys() & again.end.keys()
        if isinstance(whole.end[path], str) and whole.end[path] != again.end[path]
    }
    _compare("two equal runs differ; does the plugin draw from a generator without a seed?", whole, again)
    return whole


def _compare_training(alone: Record, other: Record) -> None:
    """Compare the steps and the values that both runs have."""
    problem = "the plugin changes the training; if it should, say changes='training'"
    _compare(problem, alone.shared(other), other.shared(alone))


def _compare(problem: str, one: Record, other: Record) -> None:
    if found := list(one.differences(other)):
        more = [f"and {len(found) - _SHOWN} more"] * (len(found) > _SHOWN)
        raise AssertionError("\n  ".join([f"{problem}; first:", *found[:_SHOWN], *more]))
