"""Starts the ranks of a configured run: the processes that torchrun has started become one run."""

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from hookdiff.builtin.changes import changes
from hookdiff.errors import ConfigError
from hookdiff.experiment.config import Config
from hookdiff.ranks import gathered, is_news, joined, num_launched, rank, shown_once

TRAINS = "trains_on_ranks"  # attribute of a plugin with which several ranks train one model
log = logging.getLogger("hookdiff")


@contextmanager
def launched(config: Config) -> Iterator[None]:
    """Join the other processes of the run, if torchrun has started several, until the end of the `with`.

    A message that several ranks have is shown once. Raises ConfigError if no plugin of the run trains on several ranks,
    and if the ranks have different configs.
    """
    with shown_once():
        if num_launched() > 1 and not any(getattr(part.target, TRAINS, False) for part in config.plugins.values()):
            raise ConfigError(
                f"torchrun has started {num_launched()} processes, and no plugin of the run trains on several: add "
                "--plugins ddp, or --plugins fsdp for a model that does not fit on one device"
            )
    with joined(config.run.device), ExitStack() as stack:
        log.addFilter(_is_shown)
        stack.callback(log.removeFilter, _is_shown)
        _check_same(config)
        yield


def _is_shown(record: logging.LogRecord) -> bool:
    return is_news(record.getMessage()) if record.levelno > logging.INFO else rank() == 0


def _check_same(config: Config) -> None:
    first, *others = gathered(config.resolved())
    for number, other in enumerate(others, 1):
        if found := list(changes(first, other, {})):
            key, one, two = found[0]
            more = f", and {len(found) - 1} keys more" * (len(found) > 1)
            raise ConfigError(
                f"all ranks need the same config: {key} is {one!r} on rank 0 and {two!r} on rank {number}{more}"
            )
