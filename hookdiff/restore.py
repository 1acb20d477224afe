"""What a run begins with: the state of the run that goes on in it, or nothing."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hookdiff.errors import UserError
from hookdiff.run_dir import is_empty, no_such_folder
from hookdiff.state import told_if_unfit

if TYPE_CHECKING:
    from hookdiff.loop import Loop

log = logging.getLogger("hookdiff")


class NoCheckpoint(UserError):
    """There is nothing to go on from."""


def restored(loop: Loop) -> Mapping[str, Any]:
    """Return the state that the plugins restore; it is empty for a run that starts.

    Raises UserError when the run was told to go on and nobody can restore it, when the place that was named has no
    checkpoint (NoCheckpoint), and for another seed.
    """
    saved = loop.hook.restore(loop=loop)
    if loop.resume is None:
        return saved
    if not saved:
        _begin_anew(loop, loop.resume)
        return saved
    own, samples = loop.config.seed, len(loop.feed.training)
    with told_if_unfit("random"):
        seed = saved.get("random", {}).get("seed", own)
    with told_if_unfit("data"):
        then = saved.get("data", {}).get("num_samples", samples)
    if seed != own:
        raise UserError(
            f"the checkpoint was made with the seed {seed}, from which all randomness follows; this run has {own}"
        )
    if then != samples:
        log.warning("the data has %s samples to train on, and had %s when the checkpoint was made", samples, then)
    return saved


def is_branch(loop: Loop) -> bool:
    """Whether `loop` goes on from the run of another directory than its own, or from one checkpoint."""
    return bool(loop.resume and loop.run_dir and loop.resume.resolve() != loop.run_dir.resolve())


def reads_checkpoints(loop: Loop) -> bool:
    """Whether a plugin of `loop` restores what it saves."""
    return any(not impl.wrapper and impl.plugin_name != "defaults" for impl in loop.plugins.order("restore"))


def _begin_anew(loop: Loop, place: Path) -> None:
    if not reads_checkpoints(loop):
        raise UserError(
            f"{place}: none of the run's plugins reads checkpoints (implements the hook restore); add the one that it "
            "was saved with (`hookdiff plugins` lists what is installed)"
        )
    if loop.needs_checkpoint:
        raise NoCheckpoint(f"{place} has no checkpoint") if place.exists() else no_such_folder(place)
    if place.is_dir() and not is_empty(place):
        log.info("%s has no checkpoint to go on from: the run starts anew", place)
