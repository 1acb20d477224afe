"""The saves of one run: where it began, its newest checkpoint, and its writer."""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from attrs import define, field

from hookdiff import Alarms, Due, UserError
from hookdiff.machine import first_rank_does, gathered_or_raised, num_ranks, rank
from hookdiff_checkpoint.folder import CheckpointInfo, NewerFormat, find_checkpoints, read_checkpoint
from hookdiff_checkpoint.keep import Logged
from hookdiff_checkpoint.writer import Buffer, Writer

logger = logging.getLogger("hookdiff")

Place = tuple[int, ...]  # step, position and epoch


@define(eq=False)
class RunSaves:
    """The saves of one run; the plugin makes one of these for each run."""

    logged: Logged
    alarms: Alarms = field(factory=Alarms, init=False)
    due: Due = field(init=False)
    writer: Writer | None = field(default=None, init=False)  # None: the folder is not prepared
    revision: dict[str, Any] | None = field(default=None, init=False)  # revision of the code at the start of the run
    damaged: set[Path] = field(factory=set, init=False)  # checkpoints that were skipped
    source: Path | None = field(default=None, init=False)  # the checkpoint that was read last
    start: Place | None = field(default=None, init=False)  # of the checkpoint that the run began from
    finite: set[Buffer] = field(factory=set, init=False)  # finite buffers of that checkpoint
    newest: Place | None = field(default=None, init=False)  # of the newest checkpoint
    number: int = field(default=0, init=False)  # saves so far, those before a resume included
    is_scheduled: bool = field(default=False, init=False)  # the config set the time of the newest checkpoint
    is_changed: bool = field(default=False, init=False)  # plugins changed the state in `on_done`, after the newest save
    is_wanted: bool = field(default=False, init=False)  # a save is due
    is_requested: bool = field(default=False, init=False)  # `loop.save` asked for a save
    is_used_up: bool = field(default=False, init=False)  # the epoch has no further batch
    is_storable: bool = field(default=False, init=False)  # a file can hold the whole state
    rates: str = field(default="", init=False)  # of the optimizers, at the newest save
    problem: str | None = field(default=None, init=False)  # error of the newest save
    is_spoiled: bool = field(default=False, init=False)  # the newest save was not finite

    def read_newest(self, source: Path, fits: Callable[[CheckpointInfo], bool]) -> dict[str, Any] | None:
        """Return the state of the newest intact checkpoint in `source` that `fits`, and warn of damaged checkpoints.

        All ranks return the same state, from a checkpoint that is intact on all ranks.
        """
        checkpoints, problems = first_rank_does(lambda: find_checkpoints(source))
        for checkpoint in filter(fits, checkpoints):
            state, problem = _read(checkpoint.path)
            if isinstance(problem, NewerFormat):
                raise problem
            if problem:
                problems.append(problem)
                self.damaged.add(checkpoint.path.resolve())
                continue
            if rank() == 0:
                for problem in problems:
                    logger.warning("skipped a checkpoint: %s", problem)
            self.source, self.newest = checkpoint.path, place_of(state["progress"])
            self.number, self.is_scheduled = checkpoint.number, checkpoint.scheduled
            return state
        if problems:
            raise UserError("\n  ".join([f"{source}: none of its checkpoints can be used:", *map(str, problems)]))
        return None


def _read(path: Path) -> tuple[dict[str, Any], UserError | None]:
    """Return the state in the checkpoint at `path`, and an error if one of the ranks cannot use it."""
    states: list[dict[str, Any]] = []

    def read() -> UserError | None:
        try:
            states.append(read_checkpoint(path, rank(), num_ranks()))
        except UserError as error:
            return error
        return None

    for at, problem in enumerate(gathered_or_raised(read)):
        if problem:
            return {}, UserError(f"on rank {at}: {problem}") if at else problem
    return states[0], None


def place_of(progress: Mapping[str, int]) -> Place:
    """Return the place of a checkpoint with this `progress`."""
    return progress["step"], progress["position"], progress["epoch"]
