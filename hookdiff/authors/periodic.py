"""The base of plugins that do something at regular intervals."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from attrs import define, field

from hookdiff.loop.end import Reason
from hookdiff.loop.hookspecs import hookimpl
from hookdiff.options.every import Due, Every, parse_every
from hookdiff.options.fields import about

if TYPE_CHECKING:
    from hookdiff.loop.loop import Loop


@define(eq=False)
class Periodic(ABC):
    """The base of plugins that act every n steps, epochs or minutes, and once more when the run is done.

    A subclass is a plugin like any other (`@define(eq=False)`) and implements `act`. A subclass may implement any
    hook; the hooks of this class are still called.
    """

    every: Every = field(
        default=Every(1, "epochs"), converter=parse_every, kw_only=True, metadata=about("how often; 0: only at the end")
    )
    _periodic_due: Due = field(init=False)
    _acted_at: int | None = field(init=False, default=None)  # newest step at which `act` was called

    @abstractmethod
    def act(self, loop: Loop) -> None:
        """Act after an update, or at the end of an epoch. All ranks call this method at the same step.

        If a run ends early, such as by a signal, there is no last call.
        """

    # These methods are not named like their hooks, so that a subclass can have the hooks without super().

    @hookimpl(specname="on_start")
    def _start_intervals(self) -> None:
        self._periodic_due, self._acted_at = Due(self.every), None

    @hookimpl(specname="after_optimizer_step")
    def _act_after_step(self, loop: Loop) -> None:
        if self._periodic_due.after_step(loop.progress.step):
            self._act(loop)

    @hookimpl(specname="on_epoch_end")
    def _act_after_epoch(self, loop: Loop) -> None:
        if self._periodic_due.after_epoch(loop.progress.epoch):
            self._act(loop)

    @hookimpl(specname="on_stop")
    def _act_at_the_end(self, loop: Loop, reason: Reason) -> None:
        if reason == "done" and self._acted_at != loop.progress.step:
            self._act(loop)

    def _act(self, loop: Loop) -> None:
        self._acted_at = loop.progress.step
        self.act(loop)
