"""The training loop. `run_step` is one step, top to bottom; every feature is a plugin."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from attrs import evolve
from torch import Tensor, nn

from hookdiff.data.batch import Batch
from hookdiff.data.feed import Feed
from hookdiff.data.memory import InMemory
from hookdiff.errors import HookError
from hookdiff.log.log import Log
from hookdiff.loop import nonfinite
from hookdiff.loop.adopted import Adopted
from hookdiff.loop.counts import LoopConfig, Outcome, Progress, Step
from hookdiff.loop.dispatch import leave_out_core
from hookdiff.loop.end import FOR_GOOD, End, Reason
from hookdiff.loop.gradients import Gradients
from hookdiff.loop.readonly import ReadOnly
from hookdiff.loop.registry import Plugins, check_partners
from hookdiff.loop.state import NotMade, Optimizers, checked_optimizers, run_state
from hookdiff.machine import ranks
from hookdiff.machine.randomness import Randomness
from hookdiff.models.objective import LossFunction, LossOutput, Objective, as_objective, join
from hookdiff.models.sample_request import SampleRequest, Samples, with_all_members
from hookdiff.models.weights import Buffers, HeldWeights

if TYPE_CHECKING:
    from hookdiff.models.sampler import MakesImages


class Loop(ReadOnly):
    """Trains `model` on `data` until the config, a plugin or the script ends the run.

    All attributes are read-only; only `using`, `weights` and `set_...` change them: see docs/reference/loop.md.

    Args:
        model: the bare network, used for state, averages and samples. Training calls `net`, which may wrap it.
        optimizers: one, several, or a function that makes them from the prepared model.
        objective: draws the randomness of a step and returns the loss; or a function (net, batch) -> loss.
        data: a tensor n c h w, an `InMemory` set, anything with a length and `[i]`, or a `Feed` of such data.
        config: length of the run, batch size, seed and the like.
        plugins: plugins by name, called in this order.
        sampler: makes images from the model; any object with `sample` is accepted. Default: no images are made.
        hparams: the whole config as plain values, for plugins that record it.
        run_dir: the folder for files. Default: nothing is written.
        resume: True continues the run in `run_dir`, if it has a checkpoint; a path continues that run or checkpoint.
        fresh: names of the plugins that ignore their saved state.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Optimizers | Callable[[nn.Module], Optimizers],
        objective: Objective | LossFunction,
        data: Any,
        config: LoopConfig | None = None,
        plugins: Mapping[str, object] | None = None,
        *,
        sampler: MakesImages | None = None,
        hparams: Mapping[str, Any] | None = None,
        run_dir: str | Path | None = None,
        resume: bool | str | Path = False,
        fresh: Iterable[str] = (),
    ) -> None:
        if not isinstance(data, Feed | InMemory | Tensor):
            from hookdiff.images.source_reader import feed_of  # only for other data

            data = feed_of(data)
        self.config: Final = config or LoopConfig()
        self.plugins: Final = Plugins(plugins or {})
        check_partners({name: type(plugin) for name, plugin in self.plugins.items()})
        self.hook: Final = self.plugins.hook
        self.model: Final = model
        self.net: Final = model
        self._make_optimizers: Final = optimizers if callable(optimizers) else lambda _: optimizers
        self.optimizers: Final[tuple[torch.optim.Optimizer, ...]] = NotMade()
        self.adopted: Final = Adopted(self.plugins, next(model.parameters()))
        self.adopt: Final = self.adopted.add  # takes a module of a plugin, in `prepare_model`
        self.gradients: Final = Gradients(model, ())
        self.buffers: Final = Buffers(model)  # as they were before the step
        self.weights: Final = HeldWeights(
            model, lambda: self.hook.offer_weights(loop=self), lambda: self.sampler.weights if self.sampler else None
        )
        self.objective: Final = as_objective(objective)
        self.sampler: Final = with_all_members(sampler, self.objective)
        self.hparams: Final = dict(hparams or {})
        self.run_dir: Final = Path(run_dir) if run_dir else None
        self.resume: Final = self.run_dir if resume is True else Path(resume) if resume else None
        self._must_resume: Final = not isinstance(resume, bool)  # there must be a checkpoint
        self._fresh: Final = tuple(fresh)
        self._is_resumed: Final = False  # a state was loaded
        self._is_ready: Final = True  # `on_ready` has been called since `on_start`
        self.is_branch: Final = bool(self.resume and run_dir and self.resume.resolve() != Path(run_dir).resolve())
        self.progress: Final = Progress(step=0, position=0, epoch=0, samples=0)
        self.first_step: Final = 0  # updates made before this process began
        self.end: Final = End()  # why the run is over
        self._exchange: Final = ranks.Exchange(self.end.votes)  # sums values over the ranks in each step
        self.stop: Final = self.end.stop
        self.save: Final = self.end.save
        self.reduce: Final = ranks.reduced  # the means of values over the ranks
        self.agree: Final = ranks.agree  # whether a flag is true on any rank
        self.log: Final = Log(lambda: self.progress.step, self.config.log_every, partial(self.plugins.call, loop=self))
        self.output: Final = LossOutput(torch.zeros(()))  # of the newest step
        self._unseen: Final[list[Step]] = []  # the newest step, until `between_steps` is called for it
        self.resources: Final = ExitStack()  # plugins push their clean-up
        self.rank: Final = ranks.rank()
        self.num_ranks: Final = ranks.num_ranks()
        self.is_main: Final = self.rank == 0  # only this rank writes files and calls sinks
        self.device: Final = next(model.parameters()).device
        self.random: Final = Randomness(self.config.seed, self.rank)
        self.feed: Final = Feed.of(data).bind(self.config.batch_size, self.config.seed, self.device)
        self._set(_is_made=True)

    def run(self) -> Reason:
        """Train to the end and return the reason for the end."""
        with self:
            for _ in self.steps():
                pass
        return self.end.reason or "done"

    def sample(self, request: SampleRequest) -> Samples:
        """Make images by the hooks `amend` and `sample`; pictures are clamped to [-1, 1], unless the request is raw."""
        request = self.hook.amend(loop=self, request=request)
        return request.finish(self.hook.sample(loop=self, request=request), self.feed)

    def decode(self, inputs: Tensor) -> Tensor:
        """Return the pictures (n c h w, float32) of `inputs` (n c h w) of the network, by the hook `decode`."""
        return self.hook.decode(loop=self, inputs=inputs)

    def using(
        self, *, net: nn.Module | None = None, sampler: MakesImages | None = None
    ) -> AbstractContextManager[None]:
        """Train with another `net`, or sample with another `sampler`, during the `with`."""
        return self._lending(net=net or self.net, sampler=with_all_members(sampler, self.objective) or self.sampler)

    def set_micro_batch(self, size: int | None) -> None:
        """Send `size` samples at a time through the network from now on; None: the whole batch."""
        self._set(config=evolve(self.config, micro_batch=size))
        if "run" in self.hparams:
            self.hparams["run"] = {**self.hparams["run"], "micro_batch": size}

    def set_step(self, step: int) -> None:
        """Set the number of updates to `step`, as a trial does to skip a warm-up; data and weights stay."""
        self.progress.step = step

    def prepare(self) -> None:
        """Prepare the model and make `net`, the optimizers and the gradients; no state is loaded."""
        with self.adopted.taking():
            self.hook.prepare_model(loop=self)
        self._set(net=self.hook.wrap_net(loop=self, net=self.model).train(), buffers=Buffers(self.model))
        optimizers = checked_optimizers(self._make_optimizers(self.model), self.model)
        self._set(optimizers=optimizers, gradients=Gradients(self.model, optimizers, self.adopted, self._exchange))

    @property
    def all_optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        """`optimizers`, and the optimizers of adopted modules."""
        return (*self.optimizers, *self.adopted.optimizers)

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state of the run, which the hook `restore` returns later. The tensors are not copied."""
        assert self.weights.name == "model", "the state of a run was asked for while the model held other weights"
        return run_state(self)

    def __enter__(self) -> Loop:
        self.end.begin()
        with ExitStack() as on_error:
            on_error.push(self)
            self.prepare()
            saved = self.hook.restore(loop=self)
            with self._restoring().loading(saved) if saved or self.resume else nullcontext():
                self._set(first_step=self.progress.step, _is_resumed=bool(saved), _is_ready=False)
                self.plugins.begin()
                self.hook.on_start(loop=self)
            self._unseen.clear()
            on_error.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        if isinstance(error, HookError):
            leave_out_core(error)  # the message names the method
        if error is None:
            with ExitStack() as on_error:
                on_error.push(self)
                self._between_steps()
                if self.end.reason in FOR_GOOD:
                    self.hook.on_done(loop=self)
                on_error.pop_all()
        with closing(self.feed), self.resources, self.log.ending(error):  # flushed before the sinks close
            reason = self.end.close(error)
            if error:
                self.hook.on_exception(loop=self, error=error)
            self.hook.on_stop(loop=self, reason=reason)

    def steps(self) -> Iterator[Step]:
        """Train, and yield after each step: a script may read, log, call `stop`, or break."""
        self.config.check_length()
        while not self.end.is_reached(self.config, self.progress):
            yield from self.run_epoch()

    def run_epoch(self) -> Iterator[Step]:
        """Train on the rest of the current epoch."""
        self._get_ready()
        if not self.end.is_agreed() and self.feed.begin(self.progress.epoch):
            self.hook.before_epoch(loop=self)
        if self.end.is_agreed():  # a plugin has stopped the run
            return
        for batch in self.feed.batches(self.progress.epoch, self.progress.samples):
            yield self.run_step(batch)
            self._between_steps()
            if self.end.is_reached(self.config, self.progress):
                break
        if self.feed.exhausted(self.progress.epoch, self.progress.samples):
            self.progress.end_epoch()
            self.hook.on_epoch_end(loop=self)
            self.hook.between_steps(loop=self, step=None)

    def run_step(self, batch: Batch) -> Step:
        """Train on `batch` and return the outcome; a run that is stopped already trains nothing."""
        self._between_steps()  # for the last step, if a script called `run_step`
        self._get_ready()
        progress, total = self.progress, batch.total
        if self.end.begin_step():
            return progress.consume(total, "stopped")
        self.log.begin_batch()
        batch = self.hook.make_batch(loop=self, batch=batch).in_place_of(batch, self.plugins.make_batches)
        if not batch.total:
            return self._consume(total, "skipped")
        batch = self.hook.draw(loop=self, batch=batch)
        self.hook.before_step(loop=self, batch=batch)
        self.buffers.keep()
        self.gradients.reset(batch.weight)
        self._set(output=self.hook.accumulate(loop=self, batch=batch))
        self.gradients.conclude(self.output.loss)
        if refused := self._refused(batch):
            return self._consume(total, refused, self.gradients.loss, self.gradients.total_norm)
        loss, norm = self.gradients.loss, self.gradients.total_norm  # before any clipping
        self.hook.after_backward(loop=self)
        if not self.hook.optimizer_step(loop=self):
            return self._consume(total, "held", loss, norm)
        self.adopted.update(progress.step + 1)
        step = self._consume(total, "updated", loss, norm)
        self.log.average({"loss": loss, "grad_norm": norm})
        self.hook.after_optimizer_step(loop=self)
        return step

    def run_pass(self, batch: Batch, stream: str = "model") -> LossOutput:
        """Run `batch` forward and backward in micro-batches; return the loss, detached. See the hook `accumulate`."""
        parts, outputs = batch.split(self.config.micro_batch), list[LossOutput]()  # the draws are sliced too
        for index, part in enumerate(parts):
            self.random.seed_dropout(self.progress.position, index, self.device, stream)
            outputs.append(self.hook.micro_step(loop=self, batch=part, index=index, count=len(parts)))
        output = join(outputs, parts)
        self.gradients.begin(output.loss)
        return output

    def _consume(self, samples: int, outcome: Outcome, *loss_and_norm: float) -> Step:
        """Count a batch, and log the values of its hooks if it has made an update."""
        step = self.progress.consume(samples, outcome, *loss_and_norm)
        self.log.end_batch(outcome == "updated")
        self._unseen.append(step)
        return step

    def _between_steps(self) -> None:
        """Call `between_steps` for the newest step, once."""
        if self._unseen:
            if self.end.begin_save():
                self.hook.on_save_request(loop=self)
            self.hook.between_steps(loop=self, step=self._unseen.pop())

    def _get_ready(self) -> None:
        """Call `on_ready` before the first step."""
        if not self._is_ready:
            self._set(_is_ready=True)
            self.hook.on_ready(loop=self, resumed=self._is_resumed)

    def _restoring(self) -> Any:
        from hookdiff.loop.restoring import Restoring  # only to resume

        return Restoring(self, self._must_resume, self._fresh)

    def _refused(self, batch: Batch) -> Outcome | None:
        """Return the outcome of a step that must not change the weights, or None."""
        is_void = not self.hook.unscale(loop=self)
        finite = self.gradients.finite  # the norms and the votes of the ranks come together
        if outcome := self.end.count(is_void, self._exchange.votes):
            self.buffers.put_back()
            return outcome
        if finite or not (report := nonfinite.examine(batch, self.output, self.gradients, self.progress, self.feed)):
            return None
        self.buffers.put_back()
        verdicts = self.hook.on_nan(loop=self, report=report)
        return nonfinite.apply_verdicts(report, verdicts, lambda: self._restoring().roll_back(), self.end)
