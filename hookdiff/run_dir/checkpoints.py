"""checkpoints/: a folder for each checkpoint, with a name such as step-00001000.

The plugin that writes these folders decides on the files in them.
"""

import re

CHECKPOINTS = "checkpoints"
_NAME = re.compile(r"step-(\d{8,})")


def checkpoint_name(step: int) -> str:
    """Return the name that a run gives to its checkpoint of `step`."""
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """Return the step of the checkpoint `name`, or None if `name` is not the name of a checkpoint."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None
