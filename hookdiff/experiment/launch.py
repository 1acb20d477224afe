"""Joins the processes that torchrun has started into one run."""

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from hookdiff.builtin.config_changes import changes
from hookdiff.errors import ConfigError
from hookdiff.experiment.config import Config
from hookdiff.experiment.discovery import installed_that, trains_on_ranks
from hookdiff.machine.joining import is_first_report, joined, num_launched, shown_once
from hookdiff.machine.ranks import gathered, rank

logger = logging.getLogger("hookdiff")


@contextmanager
def launched(config: Config) -> Iterator[None]:
    """Join the other processes of the run, if torchrun has started several, until the end of the `with`.

    A message of several ranks is shown once. Raises ConfigError if no plugin of the run trains on several ranks,
    and if the ranks have different configs.
    """
    with shown_once():
        if num_launched() > 1 and not any(trains_on_ranks(part.target) for part in config.plugins.values()):
            ways_out = " or ".join(f"--plugins {name}" for name in installed_that(trains_on_ranks))
            raise ConfigError(
                f"torchrun has started {num_launched()} processes, and no plugin of the run trains on several: add "
                f"{ways_out} (`hookdiff plugins` describes them)"
            )
    with joined(config.run.device), ExitStack() as stack:
        logger.addFilter(_is_shown)
        stack.callback(logger.removeFilter, _is_shown)
        _check_same(config)
        yield


def _is_shown(record: logging.LogRecord) -> bool:
    return is_first_report(record.getMessage()) if record.levelno > logging.INFO else rank() == 0


def _check_same(config: Config) -> None:
    first, *others = gathered(config.resolved())
    for number, other in enumerate(others, 1):
        if differing := list(changes(first, other, {})):
            key, value, other_value = differing[0]
            text = f"{key} is {value!r} on rank 0, {other_value!r} on rank {number}"
            more = f", and {len(differing) - 1} keys more" * (len(differing) > 1)
            raise ConfigError(f"give all ranks the same config: {text}{more}")
