"""The error at each noise level, and its floor: the error of the best prediction from mean and variance of the data."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from attrs import define, field
from torch import Tensor

from hookdiff import Objective
from hookdiff.diffusion import Diffusion, as_diffusion
from hookdiff.machine import gathered, num_ranks, rank, summed
from hookdiff.options import COUNT, numbers, shaped

MOST = 1 << 14  # samples that are kept before they are summed
MEASURED = 100  # batches over which the variance of the data is measured
LEARNED = 0.5  # a network that has learned explains at least this share of (variance of the target - floor)
TOLERANCE = 0.02  # slack, as a share of the target's variance, for levels with almost nothing to explain
ROWS = 4  # the rows of `sums`: samples, error, floor, variance of the target


@define(frozen=True)
class NoiseLevelsState:
    """The saved state of `NoiseLevels`: the sums of each rank, and the samples that are not in the sums yet."""

    sums: Tensor = field(validator=[shaped(None, ROWS, None, dtype=torch.float32), numbers()])
    num_waiting: list[int] = field(validator=COUNT)  # number of waiting samples of each rank
    streak: Tensor = field(validator=[shaped(None, dtype=torch.int64), numbers(least=0)])
    moments: Tensor = field(validator=[shaped(2, dtype=torch.float32), numbers()])
    num_measured: int = field(validator=COUNT)
    log_snr: Tensor | None = field(default=None, validator=shaped(None))  # waiting samples, by rank
    error: Tensor | None = field(default=None, validator=[shaped(None), numbers()])
    times: Tensor | None = field(default=None, validator=[shaped(None), numbers()])

    def __attrs_post_init__(self) -> None:
        """Raise ValueError for columns of different lengths."""
        lengths = {0 if column is None else len(column) for column in (self.log_snr, self.error, self.times)}
        if len(self.streak) != self.sums.shape[2] or lengths != {sum(self.num_waiting)}:
            raise ValueError("the columns have different lengths")
        if len(self.num_waiting) != len(self.sums):
            raise ValueError(f"sums of {len(self.sums)} ranks, and waiting samples of {len(self.num_waiting)}")


@define(eq=False)
class NoiseLevels:
    """Sums the errors and the floors of samples in bins of the log-SNR, on the device.

    The samples of a step wait until a log is due, or until many wait, so that no kernel runs in most steps.
    """

    objective: Objective
    edges: Sequence[float]  # inner edges of the log-SNR bins, rising; the two outer bins are open
    device: torch.device
    patience: int  # updates after which an unlearned bin is reported
    sums: Tensor = field(init=False)  # ROWS bins, float32
    streak: Tensor = field(init=False)  # bins, int64: updates for which the bin has not been learned
    moments: Tensor = field(init=False)  # sums of mean and mean square of the data, over batches
    num_measured: int = field(init=False, default=0)  # batches in `moments`
    _bounds: Tensor = field(init=False)
    _bins: Tensor = field(init=False)
    _waiting: list[tuple[Tensor, Tensor, Tensor]] = field(init=False, factory=list)  # log-SNR, error, times: n each
    _num_waiting: int = field(init=False, default=0)

    def __attrs_post_init__(self) -> None:
        num = len(self.edges) + 1
        self.moments = torch.zeros(2, device=self.device)
        self._bounds = torch.tensor(self.edges, device=self.device)
        self._bins = torch.arange(num, device=self.device)[:, None]
        self.sums = torch.zeros(ROWS, num, device=self.device)
        self.streak = torch.zeros(num, dtype=torch.int64, device=self.device)

    @property
    def diffusion(self) -> Diffusion | None:
        """The objective if it has a squared error and a floor (see the top of this module), else None."""
        with_loss = as_diffusion(self.objective, "loss")
        return None if with_loss and with_loss.loss.use != "mse" else as_diffusion(self.objective, "floor")

    @property
    def names(self) -> list[str]:
        """The names of the bins, from noise to image, which is also their alphabetical order."""
        ends = ["-inf", *(f"{edge:+.1f}" for edge in self.edges), "+inf"]
        return [f"{k:02d}:{low}..{high}" for k, (low, high) in enumerate(pairwise(ends))]

    def measure(self, inputs: Tensor, weight: float) -> None:
        """Add the images of a step, n c h w, to the moments of the data, in the first `MEASURED` steps.

        `weight` is the share of this rank in the step; all ranks must call this.
        """
        if (diffusion := self.diffusion) and self.num_measured < MEASURED:
            x0 = diffusion.normalize(inputs)
            self.moments += summed(torch.stack((x0.mean(), x0.square().mean())) * weight)
            self.num_measured += 1

    @property
    def variance(self) -> Tensor:
        """Variance of the normalised data over all pixels, as a scalar."""
        mean, square = self.moments / max(1, self.num_measured)
        variance: Tensor = square - mean * mean
        return variance.clamp(min=1e-12)

    def add(self, log_snr: Tensor, error: Tensor, times: Tensor) -> None:
        """Add the log-SNR, the error and the time of each sample of a step, n each."""
        self._waiting.append((log_snr, error, times))
        self._num_waiting += len(error)
        if self._num_waiting >= MOST:
            self._sum()

    @torch.no_grad()
    def _sum(self) -> None:
        if not self._waiting:
            return
        log_snr, error, times = map(torch.cat, zip(*self._waiting, strict=True))
        self._waiting, self._num_waiting = [], 0
        rows = [torch.ones_like(error), error]
        if diffusion := self.diffusion:
            variance = self.variance
            rows += [diffusion.floor(times, variance), diffusion.target_variance(times, variance)]
        # Not index_add_: its sums on a GPU differ from run to run.
        here = torch.bucketize(log_snr, self._bounds) == self._bins
        for row, values in zip(self.sums, rows, strict=False):
            row += torch.where(here, values.float(), 0.0).sum(1)

    def close(self, updates: int) -> dict[str, Any]:
        """Return the sums and counts since the last call, `updates` ago, in the form that `loop.log` takes.

        They cover the samples of all ranks, so all ranks must call this.
        """
        self._sum()
        counts, errors, floors, variances = sums = summed(self.sums).clone()
        self.sums.zero_()
        values: dict[str, Any] = {}
        for name, count, error in zip(self.names, counts, errors, strict=True):
            values[f"loss/snr-{name}"] = error, count
        if self.diffusion:
            for name, count, floor in zip(self.names, counts, floors, strict=True):
                values[f"loss/floor-{name}"] = floor, count
            whole = sums.sum(1)
            values["loss/unexplained"] = whole[1], whole[3]
            above = errors - floors > (1 - LEARNED) * (variances - floors) + TOLERANCE * variances
            streak = torch.where(above, self.streak + updates, 0)
            self.streak = torch.where(counts > 0, streak, self.streak)
            values["loss/unlearned"] = (self.streak >= self.patience).sum()
        return values

    def unlearned(self) -> list[int]:
        """Return the bins that have not been learned for `patience` updates, with one transfer from the device."""
        return [k for k, updates in enumerate(self.streak.tolist()) if updates >= self.patience]

    def ranges(self, bins: Sequence[int]) -> str:
        """Return the log-SNRs of `bins` in words; neighbouring bins are joined to one range."""
        if len(bins) > len(self.edges):
            return "any noise level"
        firsts = [k for k in bins if k - 1 not in bins]
        lasts = [k for k in bins if k + 1 not in bins]
        ranges = []
        for first, last in zip(firsts, lasts, strict=True):
            if not first:
                ranges.append(f"below {self.edges[last]:g}")
            elif last == len(self.edges):
                ranges.append(f"above {self.edges[first - 1]:g}")
            else:
                ranges.append(f"{self.edges[first - 1]:g} to {self.edges[last]:g}")
        return f"log-SNR {', '.join(ranges)}"

    def state_dict(self) -> dict[str, Any]:
        """Return streaks, the moments of the data, and the sums and waiting samples of each rank.

        All ranks must call this. Waiting samples are saved as they are. Summing them here would round the next logged
        values differently, and would use a variance of the data that is still being measured.
        """
        rank_columns = [torch.cat(column).cpu() for column in zip(*self._waiting, strict=True)]
        sums, waiting = zip(*gathered((self.sums.cpu(), rank_columns)), strict=True)
        state: dict[str, Any] = {"sums": torch.stack(sums), "streak": self.streak}
        state["num_waiting"] = [len(columns[0]) if columns else 0 for columns in waiting]
        state |= {"moments": self.moments, "num_measured": self.num_measured}
        if any(waiting):
            columns = map(torch.cat, zip(*filter(None, waiting), strict=True))
            state |= dict(zip(("log_snr", "error", "times"), columns, strict=True))
        return state

    def load_state_dict(self, state: NoiseLevelsState) -> None:
        """Restore a saved state; the bins start empty if their number has changed.

        If the number of ranks has changed, the first rank takes all sums and samples.
        """
        self.moments = state.moments.to(self.device, copy=True)
        self.num_measured = state.num_measured
        self.sums, self.streak = torch.zeros_like(self.sums), torch.zeros_like(self.streak)
        self._waiting, self._num_waiting = [], 0
        if state.sums.shape[1:] != self.sums.shape:
            return
        self.streak = state.streak.to(self.device, copy=True)
        num = len(state.sums)
        ranks = slice(rank(), rank() + 1) if num_ranks() == num else slice(0, num if rank() == 0 else 0)
        self.sums = state.sums[ranks].sum(0).to(self.device)
        start, self._num_waiting = sum(state.num_waiting[: ranks.start]), sum(state.num_waiting[ranks])
        columns = [column for column in (state.log_snr, state.error, state.times) if column is not None]
        if columns and self._num_waiting:
            end = start + self._num_waiting
            log_snr, error, times = (column[start:end].to(self.device, copy=True) for column in columns)
            self._waiting = [(log_snr, error, times)]


def bin_edges(objective: Objective, num: int) -> list[float]:
    """Return the edges between `num` bins of the log-SNR, at equal distances, rounded to a tenth.

    The edges span the times of the process except a hundredth at either end, so that runs of the same process can be
    compared. They are the same for inputs of all shapes, also if the process draws other times for some of them. For an
    objective without a process the edges span -10 to 10.
    """
    low, high = -10.0, 10.0
    if diffusion := as_diffusion(objective, "process"):
        process = diffusion.process
        ends = process.from_fraction(torch.tensor([0.99, 0.01]))
        low, high = process.rates(ends, 1)[2].tolist()
    return [round(low + k * (high - low) / (num - 2), 1) for k in range(num - 1)]
