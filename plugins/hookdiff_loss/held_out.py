"""The loss of held-out samples, always with the same noise."""

import torch
from attrs import define, field
from torch import Generator, Tensor

from hookdiff import Alarms, Finding, Loop, saved
from hookdiff.machine import derive_seed, summed
from hookdiff.options import COUNT, numbers

RISE = 1.03  # ratio to the lowest held-out loss
IN_A_ROW = 3  # worse measurements before overfitting is reported
MUCH_WORSE = 1.25  # report overfitting again above this multiple of the reported held-out loss


def fixed_loss(loop: Loop, indices: Tensor) -> Tensor:
    """Return the mean loss of the samples `indices` (n, int64) without augmentation, as a scalar on the device.

    The noise and the time of a sample depend only on its position in `indices`, so two measurements differ only by the
    weights. Each rank computes the losses of its share of the samples.
    """
    generator = Generator(loop.device)
    total = torch.zeros(2, device=loop.device)  # loss, samples
    for position, batch in enumerate(loop.feed.shared(indices)):
        generator.manual_seed(derive_seed(loop.config.seed, "evaluate", position))
        for part in loop.objective.draw(batch, generator).split(loop.config.micro_batch):
            loss = loop.hook.compute_loss(loop=loop, batch=part).loss.float()
            if not part.is_filler:
                total += torch.stack((loss * len(part), torch.full_like(loss, len(part))))
    total = summed(total)
    return total[0] / total[1]


def some_of(indices: Tensor, num: int) -> Tensor:
    """Return at most `num` of `indices`, spread evenly, because data is often sorted by class."""
    places = torch.linspace(0, len(indices) - 1, min(num, len(indices)), dtype=torch.float64)
    return indices[places.round().long()]


@define(eq=False)
class Overfitting:
    """Finds a held-out loss that rises while the loss of trained samples falls."""

    alarms: Alarms = field(factory=Alarms)  # its state is saved elsewhere
    _best: float | None = saved(None, validator=numbers(finite=False))  # lowest held-out loss
    _trained: float = saved(0.0, validator=numbers(finite=False))  # loss of trained samples at the same step
    _step: int = saved(0, validator=COUNT)  # the step of both
    _worse: int = saved(0, validator=COUNT)  # worse measurements in a row

    def observe(self, step: int, held_out: float, trained_on: float) -> Finding | None:
        """Add a measurement; return a new finding, if any."""
        is_best = self._best is None or held_out < self._best
        if self._best is None or is_best:
            self._best, self._trained, self._step = held_out, trained_on, step
        worse = held_out > RISE * self._best and trained_on < self._trained
        self._worse = self._worse + 1 if worse else 0
        finding = Finding(
            "warning",
            f"the network has overfitted since step {self._step:,}",
            f"the held-out loss rose from {self._best:.4g} to {held_out:.4g}, that of trained samples fell from "
            f"{self._trained:.4g} to {trained_on:.4g}",
            "to stop there, more data, augmentation, dropout, or a smaller network",
        )
        holds = finding if self._worse >= IN_A_ROW else None
        return self.alarms.news(step, "overfitting", holds, over=is_best, size=held_out, growth=MUCH_WORSE)
