"""Warnings that are said once, and again only when their cause was gone in between."""

from __future__ import annotations

import logging

log = logging.getLogger("hookdiff")


class Alarms:
    """Which alarms hold and were told."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def tell(self, what: str, message: str, holds: bool, over: bool | None = None) -> None:
        """Warn with `message` when alarm `what` begins to hold; it may be told again once it is `over`.

        It is over when it does not hold, unless said otherwise: a value that crosses a threshold to and fro is one
        alarm.
        """
        if holds and what not in self._told:
            self._told.add(what)
            log.warning(message)
        if not holds if over is None else over:
            self._told.discard(what)
