"""Measures changes of a config beside the config itself, to say which to try first."""

import statistics
from collections.abc import Iterator
from pathlib import Path

from attrs import define

from hookdiff import Config, InMemory, UserError, load_config
from hookdiff.machine import free_memory, num_cpus
from hookdiff_profile.steps import running

WORTH = 1.03  # a change is worth a try if its speed is at least this multiple of the config's
_ROUNDS = 3
_MOST = 9  # changes of a config


@define(frozen=True)
class Change:
    """A change of a config, as the options --plugins and --set write it."""

    plugins: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()

    def __str__(self) -> str:
        plugins = [f"--plugins {','.join(self.plugins)}"] if self.plugins else []
        return " ".join((*plugins, *(f"--set {each}" for each in self.settings)))


@define(frozen=True)
class Outcome:
    """The measured speed with a change."""

    change: Change
    ratio: float | None = None  # speed over the speed of the config; None: the change cannot be used
    why: str = ""  # the change cannot be used


def changes(config: Config, device: str, is_stored: bool, channels_last: bool) -> Iterator[Change]:
    """Yield the changes that fit `config`. `is_stored`: no epoch reads the data again; `channels_last`: the setting."""
    if "amp" not in config.plugins:
        yield Change(("amp",))
    elif config.plugins["amp"].use == "amp":
        yield Change(("no:amp",))
    yield Change(settings=(f"run.channels_last={str(not channels_last).lower()}",))
    for size in (2 * config.run.batch_size, config.run.batch_size // 2):
        if size:
            yield Change(settings=(f"run.batch_size={size}",))
    if not is_stored:
        yield Change(settings=(f"data.workers={max(1, num_cpus() - 1)}",))
        yield Change(settings=("data.store=disk",))
    names = ("compile", "cuda_graphs") if device == "cuda" else ("compile",)
    missing = [name for name in names if name not in config.plugins]
    yield from (Change((name,)) for name in missing)
    if len(missing) == 2:  # together they gain more
        yield Change(tuple(missing))


def tried(
    path: Path, plugins: tuple[str, ...], settings: tuple[str, ...], steps: int, trust: bool = False
) -> Iterator[Outcome]:
    """Yield the outcome of each change of the config at `path`, timed in turns with the config, `steps` steps each."""
    config = load_config(path, plugins, settings, trust=trust)
    with running(config, _MOST * _ROUNDS * steps) as (loop, step):
        stored, form = isinstance(loop.feed.samples, InMemory), bool(loop.hparams["run"]["channels_last"])

        def ratio(change: Change) -> float:
            switches, keys, ratios = (*plugins, *change.plugins), (*settings, *change.settings), []
            changed = load_config(path, switches, keys, trust=trust)
            with running(changed, _ROUNDS * steps) as (other, other_step):
                size = other.config.batch_size / loop.config.batch_size
                for _ in range(_ROUNDS):
                    seconds = statistics.median(step() for _ in range(steps))
                    ratios.append(size * seconds / statistics.median(other_step() for _ in range(steps)))
            return statistics.median(ratios)

        for change in changes(config, loop.device.type, stored, form):
            try:
                outcome = Outcome(change, ratio(change))
            except (UserError, ValueError, MemoryError, RuntimeError) as error:  # of a compiler, or too little memory
                outcome = Outcome(change, why=str(error).partition("\n")[0])
            free_memory(loop.device)  # of this change, for the next change
            yield outcome
