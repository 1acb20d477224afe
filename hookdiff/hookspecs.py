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
    from hookdiff.loop import Loop
    from hookdiff.nonfinite import NonFinite
    from hookdiff.objective import LossOutput
    from hookdiff.progress import Reason, Verdict
    from hookdiff.sampling import SampleRequest, Samples

HOOKS_VERSION = 1  # of the contract: greater once a hook is removed, renamed, or means something else

hookspec = pluggy.HookspecMarker("hookdiff")
hookimpl = pluggy.HookimplMarker("hookdiff")


class Hooks(Protocol):
    """The hooks in the order in which a run calls them."""

    @hookspec
    def prepare_model(self, loop: Loop) -> None:
        """Moment: once, before the optimizers are made.

        `loop.adopt` takes a module of the plugin's own here. May change: the model in place (shard, compile, freeze,
        initialise).
        """

    @hookspec(firstresult=True)
    def wrap_net(self, loop: Loop, net: nn.Module) -> nn.Module:
        """Seam: once, after `prepare_model`. Return the module that training calls: `net`, or a wrapper of it.

        `loop.model` stays the bare network: state, averages and samples are taken from it. May change: nothing.
        """

    @hookspec(firstresult=True)
    def restore(self, loop: Loop) -> Mapping[str, Any]:
        """Seam: once, with the optimizers made and before `on_start`; also when on_nan decides on a rollback.

        Return a state that `loop.state_dict()` made, or an empty one to start fresh. The loop loads it: weights and
        optimizers at once, plugins right after `on_start`. May change: nothing.
        """

    @hookspec
    def on_start(self, loop: Loop) -> None:
        """Moment: once, after weights and optimizers are loaded, and before the states of plugins are.

        May change: own state; `loop.resources` takes clean-up.
        """

    @hookspec
    def on_ready(self, loop: Loop, resumed: bool) -> None:
        """Moment: once, when the first step is asked for and all states are loaded; `loop.stop()` here trains nothing.

        `resumed` is True if a state was restored. It does not fire in commands that only enter the loop, such as
        `hookdiff sample`, in a run that is done already, or after a rollback. May change: own state, files.
        """

    @hookspec
    def before_epoch(self, loop: Loop) -> None:
        """Moment: before the first batch of each epoch; not in a run that was resumed within the epoch.

        May change: own state; `loop.feed.weigh(weights)` sets how often each sample is drawn in this epoch.
        """

    @hookspec(firstresult=True)
    def make_batch(self, loop: Loop, batch: Batch) -> Batch:
        """Seam: each step, before the noise is drawn. Return the batch to train on: `batch`, or another one.

        A batch without samples (`batch[:0]`) is skipped: it is consumed, and no other hook of the step is called.
        May change: nothing. Wrap it to change what other plugins return.
        """

    @hookspec
    def before_step(self, loop: Loop, batch: Batch) -> None:
        """Moment: each step, before any forward; `batch.draws` holds the noise of the step.

        May change: hyper-parameters of the optimizers, own state.
        """

    @hookspec(firstresult=True)
    def accumulate(self, loop: Loop, batch: Batch) -> LossOutput:
        """Seam: each step, all forward and backward passes of `batch`. Return the loss of the step, detached.

        `loop.run_pass(batch)` makes one pass in micro-batches, and adds to the gradients. A further pass with
        `stream="NAME"` draws other dropout. `loop.gradients.zero()` between two passes drops those of the first. The
        gradients still carry the loss scale. May change: the gradients; weights only during a pass
        (`hookdiff.weights.holding`).
        """

    @hookspec(firstresult=True)
    def micro_step(self, loop: Loop, batch: Batch, index: int, count: int) -> LossOutput:
        """Seam: inside run_pass. Forward and backward of micro-batch `index` of `count`. Return its loss, detached.

        May change: adds to the gradients. Wrap it for DDP's `no_sync`.
        """

    @hookspec(firstresult=True)
    def compute_loss(self, loop: Loop, batch: Batch) -> LossOutput:
        """Seam: inside micro_step. Return the loss with its graph.

        May change: nothing. Wrap it for autocast.
        """

    @hookspec(firstresult=True)
    def reduce_loss(self, loop: Loop, batch: Batch, output: LossOutput) -> Tensor:
        """Seam: inside micro_step, outside of autocast. Return the scalar to minimise, with its graph.

        `output.per_sample` (n, float32, with its graph) and `output.weights` (n, or None) are those of the micro-batch,
        `output.loss` is what the objective makes of them. The result is a mean of terms that depend on one sample each;
        otherwise it would depend on `micro_batch`. Not called for an objective without `per_sample`.
        May change: nothing.
        """

    @hookspec(firstresult=True)
    def backward(self, loop: Loop, loss: Tensor) -> bool:
        """Seam: inside micro_step. `loss` is multiplied by the micro-batch's share of the step. Return True.

        May change: adds to the gradients.
        """

    @hookspec(firstresult=True)
    def unscale(self, loop: Loop) -> bool:
        """Seam: each step, when all micro-batches are done. Return True once the gradients are at true scale.

        False makes the step void: no other hook of the step fires, the batch is consumed, no update is counted.
        May change: the gradients, by a factor.
        """

    @hookspec
    def on_nan(self, loop: Loop, report: NonFinite) -> Verdict | None:
        """Moment: the loss or a gradient is not finite, and no weight has moved yet.

        The strongest verdict wins: "stop" > "rollback" > "skip". Without a verdict the run stops.
        May change: own state; `report.notes`, text by title, which is logged with the report.
        """

    @hookspec
    def after_backward(self, loop: Loop) -> None:
        """Moment: once a step; the gradients are whole, at true scale, and finite.

        Plugins that read gradients are plain, plugins that change them `trylast`. May change: the gradients in place.
        """

    @hookspec(firstresult=True)
    def optimizer_step(self, loop: Loop) -> bool:
        """Seam: update the weights. Return True when they changed.

        False means the update was left out: it is not counted and `after_optimizer_step` does not fire.
        May change: weights, optimizer state.
        """

    @hookspec
    def after_optimizer_step(self, loop: Loop) -> None:
        """Moment: the weights changed and `loop.progress` has counted the step.

        Plugins with state (EMA) are `tryfirst`, evaluations and samples plain, writers of files `trylast`.
        May change: own state, files.
        """

    @hookspec
    def on_epoch_end(self, loop: Loop) -> None:
        """Moment: the data is exhausted and `loop.progress.epoch` has counted the epoch.

        It does not fire when the run ends within an epoch. May change: own state, files.
        """

    @hookspec
    def between_steps(self, loop: Loop) -> None:
        """Moment: after each batch, also a void or skipped one, and after each `on_epoch_end`.

        No step is under way, and the log has just been flushed: the whole run can be saved here.
        May change: files; no state.
        """

    @hookspec(firstresult=True)
    def sample(self, loop: Loop, request: SampleRequest) -> Samples:
        """Seam: a plugin or a script asks for images. Return them with the name of the weights that made them.

        `with loop.weights(request.weights) as name` lends the weights. A plugin that will ask for images makes a
        request for 0 images in `on_start`, which checks that it can be met. May change: nothing that lasts.
        """

    @hookspec
    def offer_weights(self, loop: Loop) -> Mapping[str, Callable[[], Mapping[str, Tensor]]] | None:
        """Moment: `Loop.weights` looks for weights by name.

        Return a function for each average that this plugin holds, by the name of the average; the function returns
        tensors by parameter name. A request without a name gets the first average. May change: nothing.
        """

    @hookspec
    def on_log(self, loop: Loop, step: int, values: Mapping[str, float]) -> None:
        """Moment: the `values` of `step`, given to `loop.log` and `loop.log.average`, as numbers on the host.

        May change: nothing.
        """

    @hookspec
    def on_images(self, loop: Loop, step: int, images: Mapping[str, Tensor]) -> None:
        """Moment: the pictures given to `loop.log.images`: n c h w, uint8, on the CPU.

        May change: nothing.
        """

    @hookspec
    def on_checkpoint(self, loop: Loop, path: Path) -> None:
        """Moment: the checkpoint at `path` is complete on disk.

        Checkpoints are written in the background, so `loop` may be steps further by now. May change: nothing.
        """

    @hookspec
    def on_exception(self, loop: Loop, error: BaseException) -> None:
        """Moment: an error ends the run, before `on_stop`; it reaches all plugins that have started.

        May change: files; no state.
        """

    @hookspec
    def on_stop(self, loop: Loop, reason: Reason) -> None:
        """Moment: once at the end of every run, with the reason: done, time, signal, plugin, on_nan or error.

        It reaches all plugins that have started, also if one of them raises an error. May change: files; no state.
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
            "on_train_batch_end on_batch_end on_step_end on_optimizer_step on_before_zero_grad batch_end after_batch "
            "after_step"
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
