"""The mark of an option that decides whether a part connects to a server."""

from collections.abc import Callable
from typing import Any

from attrs import define


@define(frozen=True)
class Connects:
    """Marks an option that lets a part connect to a server: `mode: Annotated[str | None, Connects(is_online)] = None`.

    The config of a run that is not trusted may not set a value that connects.
    """

    connects: Callable[[Any], bool]  # takes the value of the option, or None if the config sets none
