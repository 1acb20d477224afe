"""The mark of an option that decides whether a part connects to a server."""

from collections.abc import Callable
from typing import Any

from attrs import define


@define(frozen=True)
class Connects:
    """Marks an option that lets a part connect to a server: `mode: Annotated[str | None, Connects(is_online)] = None`.

    The config of a run that is not trusted may not have a value that does.
    """

    connects: Callable[[Any], bool]  # takes the value, or None if there is none
