"""checkpoints/: the names of the checkpoints in it, such as step-00001000; each is a folder.

What is in such a folder is the business of the plugin that writes it.
"""

import re

CHECKPOINTS = "checkpoints"
_NAME = re.compile(r"step-(\d{8,})")


def checkpoint_name(step: int) -> str:
    """Return the name that a run gives to its checkpoint of `step`."""
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """Return the step of the checkpoint `name`, or None for a name that a run does not give."""
    named = _NAME.fullmatch(name)
    return int(named[1]) if named else None
