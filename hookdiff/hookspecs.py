"""The whole contract between the loop and its plugins: every hook is a method of `Hooks`.

A *moment* calls every plugin. A *seam* (`firstresult=True`) calls plugins until one returns a result; the default in
`defaults.py` is called last. A plugin replaces a seam, or returns PASS to leave it to the next plugin, or surrounds the
seam with `wrapper=True`. The method of a plugin takes only the arguments that it uses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import pluggy

if TYPE_CHECKING:
    from torch import Tensor, nn

    from hookdiff.data.batch import Batch
    from hookdiff.distribution import Distribution
    from hookdiff.events import Event
    from hookdiff.loop import Loop
    from hookdiff.nonfinite import NonFinite
    from hookdiff.objective import LossOutput
    from hookdiff.pictures import Picture
    from hookdiff.progress import Reason, Step, Verdict
    from hookdiff.sampling import SampleRequest, Samples

HOOKS_VERSION = 1  # of the contract: greater once a hook is removed, renamed, or means something else

hookspec = pluggy.HookspecMarker("hookdiff")
hookimpl = pluggy.HookimplMarker("hookdiff")


class Hooks(Protocol):
    """The hooks in the order in which a run calls them."""

    @hookspec
    def prepare_model(self, loop: Loop) -> None:
        """Moment: once, before the optimizers are made. `loop.adopt` takes a module of the plugin's own here.

        May change: the model in place (shard, compile, freeze, initialise).
        """

    @hookspec(firstresult=True)
    def wrap_net(self, loop: Loop, net: nn.Module) -> nn.Module:
        """Seam: once, after `prepare_model`. Return the module that training calls: `net`, or a module that holds it.

        It becomes `loop.net`. `loop.model` stays the bare network, for state, averages and samples.
        May change: nothing.
        """

    @hookspec(firstresult=True)
    def restore(self, loop: Loop) -> Mapping[str, Any]:
        """Seam: once, with the optimizers made and before `on_start`; also when `on_nan` decides on a rollback.

        Return a state that `loop.state_dict()` made, or an empty one to start anew. The loop loads it: weights and
        optimizers at once, plugins right after `on_start`. Learning rates and other hyper-parameters stay as the config
        sets them.
        May change: nothing.
        """

    @hookspec
    def on_start(self, loop: Loop) -> None:
        """Moment: once, after weights and optimizers are loaded, and before the states of plugins are.

        Allocate state here, and raise `UserError` for mistakes of the user.
        May change: own state; `loop.resources` takes clean-up.
        """

    @hookspec
    def on_ready(self, loop: Loop, resumed: bool) -> None:
        """Moment: once, when the first step is asked for and all states are loaded; `loop.stop()` here trains nothing.

        `resumed` is True if a state was restored. It is not called in a loop that only samples or exports, in a run
        that is done already, or after a rollback: what must follow every load belongs in `load_state_dict`.

        Plugins that write files are `trylast`, after those that may still refuse the run.
        May change: own state, files.
        """

    @hookspec
    def before_epoch(self, loop: Loop) -> None:
        """Moment: before the first batch of each epoch; not in a run that was resumed within the epoch.

        `loop.feed.weigh(weights)` sets how often each sample is drawn in this epoch: one number >= 0 for each sample of
        the whole set, also for those held out. The weights are saved, so that a resumed run has them. Without a call
        each sample is drawn once.
        May change: own state.
        """

    @hookspec(firstresult=True)
    def make_batch(self, loop: Loop, batch: Batch) -> Batch:
        """Seam: each step, before the noise is drawn. Return the batch to train on: `batch`, or another one.

        The batch may have another number of samples; the loss is the mean over them. A batch without samples
        (`batch[:0]`) is skipped: it is consumed, and no other hook of the step is called. Draw random numbers from
        `loop.random`.
        May change: nothing. Wrap it to change the batch that other plugins return.
        """

    @hookspec
    def before_step(self, loop: Loop, batch: Batch) -> None:
        """Moment: each step, before any forward; `batch.draws` holds the noise of the step.

        May change: hyper-parameters of the optimizers, own state.
        """

    @hookspec(firstresult=True)
    def accumulate(self, loop: Loop, batch: Batch) -> LossOutput:
        """Seam: each step, all forward and backward passes of `batch`. Return the loss of the step, detached.

        `loop.run_pass(batch)` makes one pass in micro-batches, and adds to the gradients; it does not call this hook
        again. A further pass repeats the dropout of the first, or draws other dropout with `stream="NAME"`.
        `loop.gradients` are those of the newest pass, and carry the loss scale until `unscale`. `loop.gradients.zero()`
        clears them between two passes and keeps their norm: an overflow in any pass makes the step void, and a NaN in
        any pass makes it not finite. The loss may be that of any pass. The statistics of batch norm change in each
        pass; `loop.buffers.put_back()` restores them.
        May change: the gradients; weights only during a pass, by `with holding(loop.model, tensors)` of
        `hookdiff.weights`, which takes some or all parameters by name and restores them after any error.
        """

    @hookspec(firstresult=True)
    def micro_step(self, loop: Loop, batch: Batch, index: int, count: int) -> LossOutput:
        """Seam: inside `run_pass`. Forward and backward of micro-batch `index` of `count`. Return its loss, detached.

        May change: adds to the gradients. Wrap it for DDP's `no_sync`.
        """

    @hookspec(firstresult=True)
    def compute_loss(self, loop: Loop, batch: Batch) -> LossOutput:
        """Seam: inside `micro_step`. Return the loss with its graph.

        May change: nothing. Wrap it for autocast.
        """

    @hookspec(firstresult=True)
    def reduce_loss(self, loop: Loop, batch: Batch, output: LossOutput) -> Tensor:
        """Seam: inside `micro_step`, outside of autocast. Return the scalar to minimise, with its graph.

        `output.per_sample` (n, float32, with its graph) holds the loss of each sample, `output.weights` (n, or None)
        the weights of the objective, `output.loss` what the objective makes of both. The result must be a mean of terms
        that depend on one sample each, so that any `micro_batch` gives the same step: weights that are normalised over
        a batch are made in `make_batch`, or drawn by the objective. Not called for an objective without `per_sample`.
        May change: nothing.
        """

    @hookspec(firstresult=True)
    def backward(self, loop: Loop, loss: Tensor) -> bool:
        """Seam: inside `micro_step`. `loss` is multiplied by the micro-batch's share of the step. Return True.

        May change: adds to the gradients.
        """

    @hookspec(firstresult=True)
    def unscale(self, loop: Loop) -> bool:
        """Seam: each step, after the last micro-batch. Return True once the gradients are at true scale.

        False makes the step void: no other hook of the step is called, the batch is consumed, no update is counted. The
        model's buffers get back their values from before the step.
        May change: the gradients, by a factor.
        """

    @hookspec
    def on_nan(self, loop: Loop, report: NonFinite) -> Verdict | None:
        """Moment: the loss or a gradient is not finite, and no weight has changed. Buffers have their earlier values.

        Return a verdict, or None; the strongest wins: "stop" > "rollback" > "skip". Without a verdict the run stops
        with exit code 3. The noise after a skipped step is different, because it depends on `progress.position`, which
        counts batches and not updates. A batch that stopped the run is not counted: a resumed run meets it again. A
        rollback without a checkpoint to go back to stops the run.
        May change: own state; `report.notes`, text by title, which is logged with the report.
        """

    @hookspec
    def after_backward(self, loop: Loop) -> None:
        """Moment: once a step; the gradients are complete, at true scale, and finite.

        Plugins that read gradients are plain, plugins that change them `trylast`.
        May change: the gradients in place.
        """

    @hookspec(firstresult=True)
    def optimizer_step(self, loop: Loop) -> bool:
        """Seam: update the weights. Return True when they changed.

        False means that the update was left out: it is not counted, and `after_optimizer_step` is not called.
        May change: weights, optimizer state.
        """

    @hookspec
    def after_optimizer_step(self, loop: Loop) -> None:
        """Moment: the weights changed, and `loop.progress.step` counts the update.

        Updates of state (EMA) are `tryfirst`, evaluations and samples plain, files `trylast`, so that a checkpoint
        holds the average that was measured.
        May change: own state, files.
        """

    @hookspec
    def on_epoch_end(self, loop: Loop) -> None:
        """Moment: the data is exhausted, and `loop.progress.epoch` counts the epoch.

        It is not called when the run ends within an epoch.
        May change: own state, files.
        """

    @hookspec
    def between_steps(self, loop: Loop, step: Step | None) -> None:
        """Moment: after each batch, also a void or skipped one, and after each `on_epoch_end`.

        `step` is the outcome of the batch; None after `on_epoch_end`.

        All plugins and the script have seen the step, and the log is flushed: the whole run can be saved here, and
        resumes exactly.
        May change: files; no state.
        """

    @hookspec(firstresult=True)
    def sample(self, loop: Loop, request: SampleRequest) -> Samples:
        """Seam: a plugin or a script calls `loop.sample(request)`. Return the images, and the name of their weights.

        `loop.sample` clamps images of a model of pictures to [-1, 1] afterwards, unless `request.raw`.

        `with loop.weights(request.weights) as name` lends the weights; it raises `UnknownWeights` if no plugin offers
        them. A request for 0 images only checks that it can be met; a plugin that will ask for images makes one in
        `on_start`.
        May change: nothing that lasts.
        """

    @hookspec
    def offer_weights(self, loop: Loop) -> Mapping[str, Callable[[], Mapping[str, Tensor]]] | None:
        """Moment: `loop.weights(name)` looks for weights other than the model's own.

        Return a function for each average that this plugin holds, by the name of the average; the function returns
        tensors by parameter name. A request without a name gets the first average of the first plugin.
        May change: nothing.
        """

    @hookspec
    def on_log(self, loop: Loop, step: int, values: Mapping[str, float]) -> None:
        """Moment: the `values` of `step`, given to `loop.log` and `loop.log.average`, as numbers on the host.

        It may be called several times for a step, and after a rollback the steps go back. With several ranks it is
        called on the first one alone, as are the four hooks below: `loop.stop` works there, and what else it decides
        the others learn in `between_steps`, by `hookdiff.ranks.first_rank_says`. May change: own state, files.
        """

    @hookspec
    def on_images(self, loop: Loop, step: int, images: Mapping[str, Picture]) -> None:
        """Moment: the pictures given to `loop.log.images`: finished, as uint8 on the host, with what is known of each.

        May change: files; no state.
        """

    @hookspec
    def on_texts(self, loop: Loop, step: int, texts: Mapping[str, str]) -> None:
        """Moment: the texts given to `loop.log.texts`.

        May change: files; no state.
        """

    @hookspec
    def on_distributions(self, loop: Loop, step: int, distributions: Mapping[str, Distribution]) -> None:
        """Moment: the distributions given to `loop.log.distributions`, as histograms on the host.

        May change: files; no state.
        """

    @hookspec
    def on_event(self, loop: Loop, step: int, event: Event) -> None:
        """Moment: the events given to `loop.log.event`, and the findings given to `loop.log.report`.

        The loop itself reports starts, resumes, rollbacks, ends, steps without an update and checkpoints. What is
        logged before the first step arrives when the run is ready.
        May change: files; no state.
        """

    @hookspec
    def on_checkpoint(self, loop: Loop, path: Path, step: int) -> None:
        """Moment: the checkpoint of `step`, in the folder `path`, is complete on disk; on the rank that writes.

        It is written during training, so `loop` may be steps further: the hook is called at the latest before the next
        save or at the end of the run, once for each save that succeeds, also if the run fails meanwhile. It is not
        called for a save that fails, nor if the process is killed first. A later save of the same step, after batches
        that changed no weights, is a checkpoint of its own in the same folder.
        May change: files; no state.
        """

    @hookspec
    def on_exception(self, loop: Loop, error: BaseException) -> None:
        """Moment: an error ends the run; before `on_stop`, in the same plugins.

        May change: files; no state.
        """

    @hookspec
    def on_stop(self, loop: Loop, reason: Reason) -> None:
        """Moment: once at the end of every run; `reason` is done, time, signal, plugin, on_nan or error.

        It reaches all plugins with a finished `on_start`, or without one. `loop.end.message` is the text that was given
        to `loop.stop(reason, message)`. An error does not keep the hook from the other plugins: the first one is raised
        at the end, unless the run has ended in an error already.
        May change: files; no state.
        """


HOOK_NAMES = tuple(name for name, member in vars(Hooks).items() if hasattr(member, "hookdiff_spec"))

# For each former name of a hook: its name now, and the version in which it was renamed.
RENAMED: dict[str, tuple[str, int]] = {}

# For names in other trainers (Lightning, Composer, transformers, Keras, fastai), the nearest name here.
ELSEWHERE = {
    other: ours
    for ours, others in {
        "prepare_model": "configure_model",
        "on_start": "setup on_fit_start on_init_end",
        "on_ready": "on_train_start on_train_begin fit_start before_fit",
        "before_epoch": "on_train_epoch_start on_epoch_start on_epoch_begin epoch_start before_train",
        "make_batch": "on_before_batch_transfer on_after_batch_transfer after_dataloader",
        "before_step": "on_train_batch_start on_train_batch_begin on_step_begin batch_start before_batch",
        "accumulate": "before_train_batch after_train_batch",
        "micro_step": "on_substep_end",
        "compute_loss": "training_step before_forward after_forward after_pred",
        "reduce_loss": "before_loss after_loss",
        "backward": "on_before_backward before_backward",
        "after_backward": "on_after_backward on_before_optimizer_step on_pre_optimizer_step",
        "after_optimizer_step": (
            "on_train_batch_end on_batch_end on_step_end on_optimizer_step batch_end after_batch after_step"
        ),
        "on_epoch_end": "on_train_epoch_end epoch_end after_epoch after_train",
        "between_steps": "batch_checkpoint epoch_checkpoint",
        "on_checkpoint": "on_save",
        "on_stop": "on_train_end on_fit_end teardown fit_end after_fit",
        "Evaluation.evaluate": "validation_step on_validation_epoch_end on_evaluate eval_start",
        "state_dict": "on_save_checkpoint",
        "load_state_dict": "on_load_checkpoint",
    }.items()
    for other in others.split()
}
