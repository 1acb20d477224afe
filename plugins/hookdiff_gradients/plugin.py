"""The plugin `gradients`."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Generator, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from attrs import define, evolve, field
from attrs.validators import ge, gt, le, lt
from torch import Tensor

from hookdiff import Alarms, Batch, Finding, Loop, LossOutput, NonFinite, hookimpl, listed
from hookdiff.log import Distribution, Raised
from hookdiff.loop import DevicePart
from hookdiff.machine import local_parts, norms, whole
from hookdiff.options import COUNT, about, numbers, shaped
from hookdiff_gradients.diagnosis import (
    EARLY,
    Cause,
    Limits,
    Numbers,
    conclude,
    diagnose_gradients,
    diagnose_nan,
    num_recent,
)
from hookdiff_gradients.measures import NoiseScale, entry_sizes, noted_norms

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

logger = logging.getLogger("hookdiff")

TINY = torch.finfo(torch.float32).tiny
MIN_RMS = 0.01  # weights of a smaller RMS count as if they had this RMS
NAMED, NAMED_DEAD = 3, 5  # number of tensors, and of dead tensors, that a message names
SHOWN = ("gradients/update_ratio", "gradients/noise_scale")  # also printed; other values only go to files and trackers


@define(frozen=True)
class GradientsState:
    """The saved state of the plugin."""

    history: Tensor = field(validator=[shaped(None, None), numbers(least=0, finite=False)])
    size: Tensor = field(validator=[shaped(), numbers(least=0, finite=False)])
    growth: Tensor = field(validator=[shaped(), numbers()])
    noise: Tensor | None = field(validator=[shaped(3), numbers()])
    num_diagnoses: int = field(validator=COUNT)
    found: dict[str, int] = field(validator=COUNT)  # number of diagnoses by cause
    num_nan: int = field(validator=COUNT)
    alarms: Raised


@define(eq=False)
class GradientMonitor:
    """Measures gradients and updates, and reports when they explode, vanish, or stay zero.

    The norms of every step of the window are kept on the device. In a logged step, the plugin also measures the
    sizes of the entries, the change of the weights and, with several micro-batches or ranks, the noise scale of the
    gradients. Then it makes a diagnosis. Gradients are measured before they are clipped.
    """

    window: int = field(default=100, validator=[ge(20), le(1_000_000)], metadata=about("length of history", "steps"))
    per_tensor: bool = field(default=False, metadata=about("log the norm of each tensor"))
    noise_decay: float = field(
        default=0.9, validator=[ge(0), lt(1)], metadata=about("decay of the average noise scale, per logged step")
    )
    histograms: int = field(
        default=0,
        validator=ge(0),
        metadata=about("interval between histograms of all gradients and weights; 0: none", "steps"),
    )
    explode: float = field(
        default=10.0,
        validator=gt(1),
        metadata=about(
            "report an explosion if the norm in the window's newest tenth exceeds this multiple of the rest"
        ),
    )
    vanish: float = field(
        default=1e-5,
        validator=[gt(0), lt(1)],
        metadata=about(
            "report vanishing gradients below this ratio of these norms, or of the norms of first and last tensors"
        ),
    )
    max_update: float = field(
        default=0.05,
        validator=gt(0),
        metadata=about(
            "report too high a learning rate if one update changes the weights by more than this share of their norm"
        ),
    )
    max_growth: float = field(
        default=2.0,
        validator=gt(1),
        metadata=about("report too high a learning rate if the weights' norm exceeds this multiple within a window"),
    )
    findings: dict[Cause, Finding] = field(factory=dict, init=False)  # of the last logged step; {}: healthy
    _names: list[str] = field(init=False)  # of the trained parameters
    _weights: list[Tensor] = field(init=False)
    _ring: Tensor = field(init=False)  # (window, tensors): norms, by step modulo window
    _count: int = field(default=0, init=False)  # rows written
    _columns: tuple[list[str], Tensor] = field(init=False)  # of the norms that exist, if some tensors have no gradient
    _sizes: dict[str, Tensor] = field(factory=dict, init=False)  # sizes of the entries in the current step
    _histograms: dict[str, Distribution] = field(factory=dict, init=False)  # of the gradients of the current step
    _before: list[Tensor] = field(factory=list, init=False)  # weights before the current update, if its step is logged
    _changes: Tensor = field(init=False)  # (tensors,): |change| of the last update that was measured
    _size: Tensor = field(init=False)  # |weights| at the last step that was a multiple of the window
    _growth: Tensor = field(init=False)  # largest ratio of two such sizes in a row, since the last logged step
    _noise: NoiseScale = field(init=False)
    _alarms: Alarms = field(factory=Alarms, init=False)
    _num_diagnoses: int = field(default=0, init=False)  # diagnoses made
    _num_found: Counter[str] = field(factory=Counter, init=False)  # diagnoses with a finding, by cause
    _num_nan: int = field(default=0, init=False)  # steps that were not finite
    _nonfinite_share: float | None = field(default=None, init=False)  # of tensors, if the newest step failed

    @property
    def limits(self) -> Limits:
        """The thresholds of the findings."""
        return Limits(self.explode, self.vanish, self.max_update, self.max_growth)

    @hookimpl
    def on_start(self, loop: Loop) -> None:
        self._noise = NoiseScale(self.noise_decay, loop.device)
        self._watch(loop)

    def _watch(self, loop: Loop) -> None:
        """Begin an empty history of the parameters that are trained now."""
        gradients = loop.gradients
        trained = {n: p for n, p in zip(gradients.names, gradients.parameters, strict=True) if p.requires_grad}
        # Only once: parameters keep their addresses.
        self._names, self._weights = list(trained), [parameter.detach() for parameter in trained.values()]
        self._ring, self._count = torch.zeros(self.window, len(trained), dtype=gradients.dtype, device=loop.device), 0
        self._columns = [], torch.zeros(0, dtype=torch.long)
        self._changes = self._ring.new_zeros(len(trained))
        self._growth, self._size = self._ring.new_zeros(()), self._ring.new_full((), math.inf)

    @hookimpl(wrapper=True)
    def micro_step(self, loop: Loop, batch: Batch, index: int, count: int) -> Generator[None, LossOutput, LossOutput]:
        if not loop.log.due or batch.most == batch.total:  # one pass on one rank; all other ranks have fillers
            return (yield)
        # On several ranks the backward pass averages the gradients; only a hook gets the gradients of this rank. A
        # sharded parameter has no such hook, so it has no noise scale.
        by_hooks = loop.num_ranks > 1 and index == 0
        rank_norms: list[Tensor] = []
        trained = [parameter for parameter in loop.gradients.parameters if parameter.requires_grad]
        with noted_norms(trained, rank_norms, self._ring.dtype) if by_hooks else nullcontext():
            output = yield
        if index == 0 and (rank_norms or not by_hooks):
            first = torch.stack(rank_norms) if by_hooks else loop.gradients.measure()
            self._noise.after_first(first, 0 if batch.is_filler else len(batch), batch.weight * loop.num_ranks)
        if index == count - 1:
            self._noise.after_last(loop.gradients.measure(), batch.total)
        return output

    @hookimpl
    def after_backward(self, loop: Loop) -> None:
        step_norms = self._norms(loop)  # first, because it may begin a new history
        self._ring[self._count % self.window].copy_(step_norms)
        self._count += 1
        if loop.progress.step % self.window == 0:  # also before the first update
            size = self._norm(self._weights)
            self._growth = torch.maximum(self._growth, size / self._size)
            self._size = size
        self._before, self._histograms = [], {}
        if self.histograms and (loop.progress.step + 1) % self.histograms == 0:
            self._histograms = {f"gradients/{n}": Distribution.of(whole(g)) for n, g in loop.gradients.named().items()}
        if loop.log.due:
            self._before = [weight.clone() for weight in self._weights]
            self._sizes = entry_sizes(loop.gradients.tensors())
            self._noise.update(loop.gradients.norms)

    @hookimpl
    def on_device(self, loop: Loop) -> list[DevicePart]:
        """Return no work: most steps only store the norms, which the loop has measured."""
        return []

    @hookimpl
    def needs_host(self, loop: Loop) -> bool:
        """Return whether this step reads the gradients and the weights, before the update changes the weights."""
        step = loop.progress.step
        has_histogram = self.histograms > 0 and (step + 1) % self.histograms == 0
        return loop.log.due or step % self.window == 0 or has_histogram

    def _norms(self, loop: Loop) -> Tensor:
        """Return the norms of the step, with zeros for parameters without a gradient: (tensors,)."""
        step_norms = loop.gradients.norms
        if len(step_norms) == len(self._names):
            return step_norms
        names = list(loop.gradients.named())
        if not set(names) <= set(self._names):  # some parameters were thawed
            self._watch(loop)
            return self._norms(loop)
        if self._columns[0] != names:
            index = {name: column for column, name in enumerate(self._names)}
            self._columns = names, torch.tensor([index[name] for name in names], device=step_norms.device)
        return step_norms.new_zeros(len(self._names)).index_copy_(0, self._columns[1], step_norms)

    @hookimpl
    def after_optimizer_step(self, loop: Loop) -> None:
        if self._histograms:
            trained = zip(self._names, self._weights, strict=True)
            weights = {f"weights/{name}": whole(weight) for name, weight in trained}
            loop.log.distributions({**self._histograms, **weights})
        if not loop.log.due or not self._before:
            return
        values = {**self._sizes, **self._over_window(), **self._update()}
        if self._noise.known:
            values["noise_scale"] = self._noise.scale
        if self.per_tensor:
            newest = self._rows()[-1]
            values |= {f"norm/{name}": newest[column] for column, name in enumerate(self._names)}
        named = {f"gradients/{name}": value for name, value in values.items()}
        loop.log({name: value for name, value in named.items() if name in SHOWN})
        loop.log({name: value for name, value in named.items() if name not in SHOWN}, detail=True)

    def _update(self) -> dict[str, Tensor]:
        """Return the change of the weights by the update, and their growth: scalars, on the device."""
        before, self._before = self._before, []
        size = self._norm(before)
        torch._foreach_sub_(local_parts(before), local_parts(self._weights))
        self._changes = norms(before, self._ring.dtype)
        growth = torch.maximum(self._growth, size / self._size)
        self._growth = torch.zeros_like(growth)
        return {"update_ratio": torch.linalg.vector_norm(self._changes) / size, "weight_growth": growth}

    def _norm(self, weights: list[Tensor]) -> Tensor:
        """Return the L2 norm over all `weights`, or that of weights with an RMS of `MIN_RMS`, if larger."""
        floor = MIN_RMS * math.sqrt(sum(weight.numel() for weight in weights))
        total: Tensor = torch.linalg.vector_norm(norms(weights, self._ring.dtype)).clamp(min=floor)
        return total

    def _over_window(self) -> dict[str, Tensor]:
        """Return the numbers of the diagnosis: scalars, on the device."""
        rows = self._rows()
        recent, third = num_recent(len(rows)), max(1, len(self._names) // 3)
        totals = torch.linalg.vector_norm(rows, dim=1)
        first, last = (torch.linalg.vector_norm(part, dim=1) for part in (rows[:, :third], rows[:, -third:]))
        depth = first / last.clamp(min=TINY)
        old = slice(-recent) if len(rows) > 1 else slice(None)
        dead = self._dead() if len(rows) == self.window else torch.zeros_like(rows[0])
        return {
            "recent_norm": totals[-recent:].median(),
            "usual_norm": totals[old].median(),
            "depth_ratio": depth[-recent:].median(),
            "usual_depth_ratio": depth[old].median(),
            "zero_share": (rows[-1] == 0).float().mean(),
            "dead_share": dead.float().mean(),
        }

    def _rows(self) -> Tensor:
        """Return the history, oldest step first: (steps, tensors)."""
        if self._count <= self.window:
            return self._ring[: self._count]
        return self._ring.roll(-(self._count % self.window), 0)

    def _dead(self) -> Tensor:
        return (self._ring == 0).all(0)

    @hookimpl
    def on_log(self, loop: Loop, step: int, values: Mapping[str, float]) -> None:
        if "gradients/update_ratio" not in values:
            return
        steps = min(self._count, self.window)
        measured = Numbers(
            steps=steps,
            recent=values["gradients/recent_norm"],
            usual=values["gradients/usual_norm"],
            depth=values["gradients/depth_ratio"],
            usual_depth=values["gradients/usual_depth_ratio"],
            update=values["gradients/update_ratio"],
            growth=values["gradients/weight_growth"],
            dead=round(values["gradients/dead_share"] * len(self._names)),
        )
        self.findings = diagnose_gradients(measured, self.limits)
        if steps >= EARLY or self.findings:
            self._num_diagnoses += 1
            self._num_found.update(self.findings.keys())
        for cause, finding in self.findings.items():
            names = self._tensors(cause)
            place = f"; most in {listed(names, len(names))}" if names else ""
            key: str = cause
            if cause == "dead":
                place, key = f": {listed(names, NAMED_DEAD)}", " ".join([cause, *names[:NAMED_DEAD]])
            self.findings[cause] = finding = evolve(finding, why=finding.why + place)
            quiet = max(self.window, loop.config.log_every)
            loop.log.report(self._alarms.news(step, key, finding, quiet=quiet))

    def _tensors(self, cause: Cause) -> list[str]:
        """Return the names of the tensors that show the `cause` most, or of all dead tensors; reads the device."""
        rows, third = self._rows(), max(1, len(self._names) // 3)
        if cause == "fading":
            return []
        if cause == "dead":
            columns = self._dead().nonzero().flatten()
        else:
            recent = rows[-num_recent(len(rows)) :].mean(0)
            sizes = {"rate": self._changes, "exploding": recent, "vanishing": -rows[:, :third].mean(0)}[cause]
            columns = sizes.topk(min(NAMED, len(sizes))).indices
        return [self._names[column] for column in columns.tolist()]

    @hookimpl
    def on_nan(self, loop: Loop, report: NonFinite) -> None:
        totals = torch.linalg.vector_norm(self._rows(), dim=1).tolist()
        bad, known = len(report.parameters), len(self._names)
        self._nonfinite_share = bad / max(1, known)
        # A NaN spreads backward from the output, so it began at the last bad tensor in the model's order.
        nearest = f"; nearest to the output {report.parameters[-1]}" if bad else ""
        finding = diagnose_nan(totals, report.loss, bad, known, self.limits)
        report.notes["gradients"] = str(evolve(finding, why=finding.why + nearest))
        self._num_nan += 1

    @hookimpl
    def between_steps(self, loop: Loop) -> None:
        if self._nonfinite_share is not None:  # here, because values that are logged during a failed step are dropped
            loop.log.average({"gradients/nonfinite_share": self._nonfinite_share}, detail=True)
            self._nonfinite_share = None

    @hookimpl
    def on_stop(self, loop: Loop) -> None:
        was_done = loop.end.reason == "done" and loop.progress.step == loop.first_step  # the conclusion is logged
        conclusion = conclude(self._num_diagnoses, self._num_found, self._num_nan)
        if loop.is_main and not was_done and conclusion:
            logger.info("gradients: %s", conclusion)

    def history(self) -> dict[str, NDArray[np.floating[Any]]]:
        """Return the norms of the last `window` steps, oldest first, by tensor, and their total as "grad_norm".

        Arrays on the host, (steps,); a tensor without a gradient counts as zero. Costs a transfer.
        """
        rows = self._rows().cpu()
        columns = dict(zip(self._names, rows.T.numpy(), strict=True))
        return {**columns, "grad_norm": torch.linalg.vector_norm(rows, dim=1).numpy()}

    def state_dict(self) -> dict[str, Any]:
        noise = self._noise.state if self._noise.known else None
        tensors = {"history": self._rows(), "size": self._size, "growth": self._growth, "noise": noise}
        counts = {"num_diagnoses": self._num_diagnoses, "found": dict(self._num_found), "num_nan": self._num_nan}
        return {**tensors, **counts, "alarms": self._alarms.state_dict()}

    def load_state_dict(self, state: GradientsState) -> None:
        """Restore a saved state; the history starts empty if other parameters are trained now."""
        rows = state.history[-self.window :]
        if rows.shape[1] == len(self._names):
            self._ring[: len(rows)].copy_(rows)
            self._count = len(rows)
            self._size.copy_(state.size)
            self._growth.copy_(state.growth)
        if state.noise is not None:
            self._noise.load(state.noise)
        self._alarms.load_state_dict(state.alarms)
        self._num_diagnoses, self._num_nan = state.num_diagnoses, state.num_nan
        self._num_found = Counter(state.found)
