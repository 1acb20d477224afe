"""Checks a saved state, and loads it into a run that is resumed or rolled back."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import define
from torch import Tensor, nn

from hookdiff.data.feed_state import another_encoder
from hookdiff.data.marks import Mark, changed_parts
from hookdiff.disk.lock import is_locked
from hookdiff.disk.paths import is_empty, no_such_folder
from hookdiff.disk.tree import State
from hookdiff.errors import NoCheckpoint, UserError, listed
from hookdiff.loop.adopted import ADOPTED
from hookdiff.loop.contract_checks import implements
from hookdiff.loop.counts import Progress
from hookdiff.loop.saved import checked, keeps_state, restore_state
from hookdiff.loop.state import has_state
from hookdiff.machine.dtensor import names_of_all_ranks, place
from hookdiff.machine.joining import is_of_ranks
from hookdiff.models.load import differences, load_state
from hookdiff.models.names import plain_name
from hookdiff.models.optimizer_state import check_optimizer, load_optimizer
from hookdiff.options.every import Every
from hookdiff.options.software import changed
from hookdiff.options.structure import fields_of, options_of, structured
from hookdiff.terminal.notice import notice
from hookdiff.terminal.words import in_words

if TYPE_CHECKING:
    from hookdiff.loop.loop import Loop

logger = logging.getLogger("hookdiff")


@define
class Restoring:
    """Loads saved states into `loop`.

    `is_required`: the place to resume from must have a checkpoint. `fresh`: the plugins that ignore their saved state.
    """

    loop: Loop
    is_required: bool
    fresh: tuple[str, ...]

    @contextmanager
    def loading(self, saved: State) -> Iterator[None]:
        """Load `saved`: weights and optimizers before the `with` block, and the states of plugins after it.

        `saved` is empty if there is no checkpoint. The run then starts anew, unless it requires a checkpoint
        (NoCheckpoint) or no plugin reads checkpoints (UserError). Raises UserError for a state that does not fit.
        """
        self._check_start(saved)
        if not saved:
            yield
            return
        self._check(saved, self.fresh)
        self._load(saved)
        yield
        self._load_plugins(saved["plugins"], self.fresh)

    def _check_start(self, saved: State) -> None:
        if (folder := self.loop.resume) is None:
            return
        if not saved:
            if not self.loop.plugins.implement("restore"):
                raise UserError(
                    f"{folder}: none of the run's plugins reads checkpoints (implements the hook restore); add the "
                    "plugin that saved it (`hookdiff plugins` lists what is installed)"
                )
            if self.is_required:
                if not folder.exists():
                    raise no_such_folder(folder)
                is_running = is_locked(folder, besides=self.loop.resources)
                raise no_checkpoint(folder, self.loop.plugins.values(), is_running)
            if folder.is_dir() and not is_empty(folder):
                notice(f"{folder} has no checkpoint to go on from: the run starts anew")
            return
        with refused_if_unfit("versions"):
            changes = changed(saved.get("versions", {}), self.loop.plugins.versions)
        if changes:
            logger.info("changed since the checkpoint: %s", ", ".join(changes))
        run_seed, num_samples = self.loop.feed.seed, len(self.loop.feed.training)
        with refused_if_unfit("random"):
            seed = saved.get("random", {}).get("seed", run_seed)
        with refused_if_unfit("data"):
            facts = saved.get("data", {}).get("facts", {})
            before = facts.get("num_samples", num_samples)
            counts = f"{num_samples:,} samples to train on; the checkpoint was made with {before:,}"
            moved = _moved_class(facts.get("classes") or (), tuple(map(str, self.loop.feed.classes or ())))
            known = dict(facts.get("encoders") or {})
            marks = structured(dict[str, Mark], facts.get("marks") or {})
        encoders = self.loop.feed.facts.encoders if known else {}
        others = [another_encoder(k, v, known[k]) for k, v in encoders.items() if known.get(k, v) != v]
        if seed != run_seed:
            raise UserError(
                f"the checkpoint was made with run.seed = {seed}, which this run must keep; it has {run_seed}"
            )
        if others:
            raise UserError("\n".join(others))
        if before != num_samples:
            logger.warning("the data has %s", counts)
        if moved and self.loop.objective.conditional:
            raise UserError(f"{moved}; the network has learnt the numbers: put the classes in their old order")
        if moved:
            logger.warning("%s", moved)
        if parts := changed_parts(marks, self.loop.feed.facts.marks if marks else {}):
            logger.warning("the data has changed since the checkpoint: %s", ", ".join(parts))

    def _check(self, saved: State, fresh: Collection[str]) -> None:
        """Raise UserError unless every part of `saved` fits the run; nothing is loaded before."""
        with refused_if_unfit("model"):
            _check_model(self.loop.model, saved["model"], self.loop.resume is not None)
        with refused_if_unfit("optimizers"):
            optimizers = saved.get("optimizers", {})
            numbers = [str(index) for index in range(len(self.loop.optimizers))]
            if "optimizers" in saved and sorted(optimizers) != sorted(numbers):
                raise ValueError(f"it has {len(optimizers)} optimizers, the run has {len(self.loop.optimizers)}")
            for index, state in optimizers.items():
                check_optimizer(self.loop.optimizers[int(index)], self.loop.model, state, self.loop.resume is not None)
        with refused_if_unfit("progress"):
            structured(Progress, saved["progress"])
        with refused_if_unfit("log"):
            structured(dict[str, tuple[float, int]], saved["log"])
        with refused_if_unfit("data"):
            self.loop.feed.check_state(saved.get("data", {}))
        self._check_plugins(saved["plugins"], fresh)

    def _check_plugins(self, states: State, fresh: Collection[str]) -> None:
        """Check the state of each plugin; warn of a saved state that belongs to no plugin of the run.

        Raises UserError, with their names, if plugins that keep state have none in the file and are not `fresh`.
        """
        keepers = self._keepers(fresh)
        if new := [name for name in keepers if name not in states]:
            many = len(new) > 1
            raise UserError(
                f"the checkpoint has no state of the plugin{'s' * many} {', '.join(map(repr, new))}, which "
                f"{'keep' if many else 'keeps'} one; to start {'them' if many else 'it'} fresh from the restored "
                f"weights add {' '.join(f'--fresh {name}' for name in new)} (in a script: Loop(..., "
                f"fresh={[*fresh, *new]}))"
            )
        for name in keepers:
            with _refused_plugin(name):
                self._check_plugin(name, states[name])
        if unclaimed := [name for name in states if name not in self.loop.plugins]:
            logger.warning(
                "the checkpoint has the state of plugins that this run does not have: %s", ", ".join(unclaimed)
            )

    def _check_plugin(self, name: str, state: State) -> None:
        plugins = self.loop.plugins
        is_finite = self.loop.resume is not None  # a replay begins with the weights of a step that failed
        if adopted := self.loop.adopted.of(name):
            structured(dict[str, dict[str, Any]], state[ADOPTED])
            if len(state[ADOPTED]) != len(adopted):
                raise ValueError(f"{ADOPTED}: there are {len(state[ADOPTED])} modules, the plugin has {len(adopted)}")
            for index, trained in enumerate(adopted):
                saved = state[ADOPTED][str(index)]
                _check_model(trained.module, saved["module"], is_finite, f"module of the plugin {name!r}")
                check_optimizer(trained.optimizer, trained.module, saved["optimizer"], is_finite)
        of_plugin = {key: value for key, value in state.items() if key != ADOPTED}
        if keeps_state(plugins[name]):
            checked(type(plugins[name]), of_plugin)
        plugins.ask(name, "check_state", model=self.loop.model, state=of_plugin)

    def _keepers(self, fresh: Collection[str]) -> list[str]:
        return [name for name in self.loop.plugins if has_state(self.loop, name) and name not in fresh]

    def _load(self, saved: State) -> None:
        """Load counts, weights and optimizer state; hyper-parameters stay as the config sets them.

        An optimizer without a saved state begins with an empty one.
        """
        with refused_if_unfit("model"):
            load_state(self.loop.model, saved["model"])
        with refused_if_unfit("optimizers"):
            for index, state in saved.get("optimizers", {}).items():
                load_optimizer(self.loop.optimizers[int(index)], self.loop.model, state)
        self.loop.progress.load_state_dict(saved["progress"])
        self.loop.log.load_state_dict(saved["log"])
        self.loop.feed.load_state_dict(saved.get("data", {}))

    def _load_plugins(self, states: State, fresh: Collection[str]) -> None:
        for name in self._keepers(fresh):
            with _refused_plugin(name):
                state = dict(states[name])
                if adopted := self.loop.adopted.of(name):
                    saved = state.pop(ADOPTED)
                    for index, trained in enumerate(adopted):
                        trained.load_state_dict(saved[str(index)])
                if keeps_state(plugin := self.loop.plugins[name]):
                    restore_state(plugin, state)

    def roll_back(self) -> bool:
        """Go back to the newest checkpoint, but keep the position in the data, so that other batches follow.

        Returns False without a checkpoint. A checkpoint of this process has the state of all plugins, also of those
        in `fresh`.
        """
        if not (saved := self.loop.hook.restore(loop=self.loop)):
            logger.error("there is no checkpoint to go back to: the run stops")
            return False
        here, data = self.loop.progress.state_dict(), self.loop.feed.state_dict()
        with refused_if_unfit("progress"):
            fresh = () if structured(Progress, saved["progress"]).step > self.loop.first_step else self.fresh
        self._check(saved, fresh)
        self._load(saved)
        self._load_plugins(saved["plugins"], fresh)
        self.loop.progress.load_state_dict({**here, "step": self.loop.progress.step})
        self.loop.feed.load_state_dict(data)
        return True


def no_checkpoint(run: Path, plugins: Iterable[object], is_running: bool) -> NoCheckpoint:
    """Return the error for a run without a checkpoint; it says when those of `plugins` that save make the first."""
    savers = [plugin for plugin in plugins if implements(type(plugin), "restore") and fields_of(type(plugin))]
    intervals = [value for plugin in savers for value in options_of(plugin).values() if isinstance(value, Every)]
    missing, is_due = ("no checkpoint yet", "is due") if is_running else ("no checkpoint", "was due")
    when = "".join(f"{_moment(every)}, or " for every in intervals if every.amount)
    return NoCheckpoint(
        f"{run} has {missing}" + (f": the first {is_due} {when}at the end of the run" if intervals else "")
    )


def _moment(every: Every) -> str:
    match every.unit:
        case "steps":
            return f"at step {every.amount:,.0f}"
        case "epochs":
            return f"after {every.amount:,.0f} epoch{'s' * (every.amount != 1)}"
    return f"after {in_words(every.amount)}"


def _moved_class(before: Sequence[str], now: Sequence[str]) -> str:
    """Return a text on the first class that has another number now; "" if there is none."""
    for number, name in enumerate(before):
        if name in now and now[number : number + 1] != (name,):  # two classes may have one name
            return (
                f"the class {name!r} has the number {now.index(name)} in the data, and had {number} at the checkpoint"
            )
    return ""


@contextmanager
def refused_if_unfit(part: str, way_out: str = "") -> Iterator[None]:
    """Turn an error into a UserError: the state is of another version, or was edited."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{error}{way_out}") from error
    except (ArithmeticError, LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        if is_of_ranks(error):
            raise
        # A ValueError of a check is a whole sentence; other errors, such as KeyError, say little without their type.
        reason = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise UserError(f"the checkpoint's state of {part!r} cannot be loaded: {reason}{way_out}") from error


def _refused_plugin(name: str) -> AbstractContextManager[None]:
    return refused_if_unfit(name, f"; --fresh {name} starts it anew from the restored weights")


def _check_model(model: nn.Module, saved: State, is_finite: bool, of: str = "model") -> None:
    """Raise UserError unless `saved` are tensors for `model`, with finite weights if `is_finite`; `of` names it."""
    structured(dict[str, Any], saved)
    current = model.state_dict()
    if parametrised := sorted({plain_name(name) for name in current.keys() ^ saved.keys() if plain_name(name) != name}):
        raise UserError(
            f"the checkpoint is of a {of} with other parametrisations of {listed(parametrised, 3)}; add the "
            "plugin that makes them to the run, with the same keys as at the checkpoint"
        )

    def compared(kind: str, read: Callable[[Tensor], object]) -> str:
        ours, its = ({n: read(v) for n, v in state.items() if isinstance(v, Tensor)} for state in (current, saved))
        return differences(ours, its, kind)

    if differing := compared("shape", lambda value: tuple(value.shape)) or compared("dtype", lambda value: value.dtype):
        raise UserError(f"the checkpoint is of another {of}: {differing}")
    if odd := sorted(current.keys() ^ saved.keys()):  # values of `get_extra_state`
        raise UserError(f"the checkpoint is of another {of}: only one of the two has {listed(odd, 3)}")
    # Buffers, such as a mask, may hold infinities.
    parameters = {name: parameter for name, parameter in model.named_parameters() if name in saved and is_finite}
    bad = [name for name, parameter in parameters.items() if not saved[name][place(parameter)].isfinite().all()]
    if bad := names_of_all_ranks(bad, parameters.values()):
        raise UserError(f"the checkpoint's {of} holds values that are not finite: {listed(bad, 3)}")
