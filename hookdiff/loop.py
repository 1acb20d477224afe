"""The training loop. `run_step` is one step, top to bottom; every feature is a plugin."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from hookdiff import nonfinite, ranks, restore, state
from hookdiff.data import Batch, Feed
from hookdiff.gradients import Gradients, clear_gradients
from hookdiff.hookspecs import Reason
from hookdiff.log import Log
from hookdiff.objective import Objective, as_objective, join
from hookdiff.plugins import Plugins
from hookdiff.progress import LoopConfig, Progress, Step
from hookdiff.randomness import Randomness
from hookdiff.sampling import Sampler, SampleRequest, Samples
from hookdiff.state import Optimizers


class Loop:
    """Trains `model` on `data` until the config, a plugin or the script says stop.

    model: weights, averages and samples are always taken from it, bare; `net` is what training calls.
    optimizers: one, several, or a function from the prepared model to them.
    objective: draws a step's randomness and scores its slices; a function (net, batch) -> loss will do.
    data: a tensor n c h w, an `InMemory` set, anything with a length and `[i]`, or a `Feed` of one of them.
    plugins: by name, heard in this order. `fresh` names those that start anew when a state is restored.
    resume: go on with the run in `run_dir`, if it has a checkpoint; or with that of a directory, or one checkpoint.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Optimizers | Callable[[nn.Module], Optimizers],
        objective: Objective | Callable[[nn.Module, Batch], Tensor],
        data: Any,
        config: LoopConfig | None = None,
        plugins: Mapping[str, object] | None = None,
        *,
        sampler: Sampler | None = None,
        run_dir: str | Path | None = None,
        resume: bool | str | Path = False,
        fresh: Iterable[str] = (),
    ) -> None:
        self.model = self.net = model
        self.make_optimizers = optimizers if callable(optimizers) else lambda _: optimizers
        self.objective, self.sampler, self.config = as_objective(objective), sampler, config or LoopConfig()
        self.run_dir, self.fresh = Path(run_dir) if run_dir else None, tuple(fresh)
        self.resume = self.run_dir if resume is True else Path(resume) if resume else None  # whose run goes on here
        self.needs_checkpoint = not isinstance(resume, bool)  # a place that is named has to have one
        self.plugins, self.progress, self.log = Plugins(plugins or {}), Progress(), Log(self)
        self.hook = self.plugins.hook
        self.hparams: Mapping[str, Any] = {}  # the whole config, as plain values, for those who record it
        self.weights = "model"  # whose values the model holds: its own, or an average's while it samples
        self.reason: Reason | None = None  # why the run is over
        self.resources = ExitStack()  # plugins push their clean-up
        self.rank, self.num_ranks, self.is_main = ranks.this_rank()  # is_main gates files and sinks
        self.device, self.random = next(model.parameters()).device, Randomness(self.config.seed, self.rank)
        self.feed = Feed.of(data).bind(self.config, self.device, self.rank, self.num_ranks)

    def run(self) -> Reason:
        """Train to the end and return the reason of it."""
        with self:
            for _ in self.steps():
                pass
        return self.reason or "done"

    def stop(self, reason: Reason = "plugin") -> None:
        """End the run after the step under way; the first reason given stays."""
        self.reason = self.reason or reason

    def sample(self, request: SampleRequest) -> Samples:
        """Make images with what the plugins offer (see the hook `sample`)."""
        return self.hook.sample(loop=self, request=request)

    def __enter__(self) -> Loop:
        self.began = time.monotonic()
        with ExitStack() as on_error:
            on_error.push(self)
            self.hook.prepare_model(loop=self)
            self.optimizers = state.as_tuple(self.make_optimizers(self.model))
            saved = restore.restored(self)
            state.load_weights(self, saved)
            self.gradients = Gradients(self.model, self.optimizers)
            self.net.train()
            self.hook.on_start(loop=self)
            state.load_plugins(self, saved, self.fresh)
            self.begun_at = self.progress.step  # of this process
            on_error.pop_all()
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        with closing(self.feed), self.resources:
            self.reason = "error" if error else self.reason or "plugin"
            self.resources.callback(self.log.flush)  # also when a plugin fails, and before the sinks close
            self.hook.on_stop(loop=self, reason=self.reason)

    def steps(self) -> Iterator[Step]:
        """Train, yielding after each step: the script may look, log, stop, or break."""
        while not self._is_over():
            yield from self.run_epoch()

    def run_epoch(self) -> Iterator[Step]:
        """Train on what is left of the epoch under way."""
        for batch in self.feed.batches(self.progress.epoch, self.progress.samples):
            yield self.run_step(batch)
            self.hook.between_steps(loop=self)
            if self._is_over():
                break
        if self.feed.exhausted(self.progress.samples):
            self.progress.end_epoch()
            self.hook.on_epoch_end(loop=self)
            self.hook.between_steps(loop=self)

    def run_step(self, batch: Batch) -> Step:
        """Make one update from `batch`, or tell why there was none."""
        hook, progress, gradients = self.hook, self.progress, self.gradients
        batch = self.objective.draw(batch, self.random.generator("noise", progress.position, self.device))
        hook.before_step(loop=self, batch=batch)
        clear_gradients(self.optimizers)

        outputs, parts = [], batch.split(self.config.micro_batch)  # the draws are sliced too
        for index, part in enumerate(parts):
            self.random.seed_dropout(progress.position, index, self.device)
            outputs.append(hook.micro_step(loop=self, batch=part, index=index, count=len(parts)))
        self.output = join(outputs, parts)
        gradients.begin(self.output.loss)
        if not hook.unscale(loop=self):
            return progress.consume(batch.total, "void", gradients.loss, gradients.total_norm)
        if not gradients.finite and (report := nonfinite.examine(self, batch)):
            return nonfinite.decide(self, batch, report)
        loss, norm = gradients.loss, gradients.total_norm
        hook.after_backward(loop=self)
        if not hook.optimizer_step(loop=self):
            return progress.consume(batch.total, "held", loss, norm)
        step = progress.consume(batch.total, "updated", loss, norm)
        self.log.average({"loss": loss, "grad_norm": norm})
        hook.after_optimizer_step(loop=self)
        return step

    def _is_over(self) -> bool:
        self.reason = self.reason or self.config.limit_reached(self.progress, time.monotonic() - self.began)
        return self.reason is not None
