"""The whole contract between the loop and its plugins: the hooks, methods of `Hooks`, and what `plugin` declares.

A *moment* calls every plugin. A *seam* calls plugins until one returns a result; the default in `defaults.py` is called
last. A plugin replaces a seam, or returns PASS to leave it to the next plugin, or surrounds the seam with
`wrapper=True`. A *question* asks one plugin; the answer of a plugin without the method is None. The method of a plugin
takes only the arguments that it uses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar

import pluggy
from attrs import define, evolve, field, fields

from hookdiff.errors import nearest
from hookdiff.loop.dispatch import Changed, Hook, HookKind, Phase
from hookdiff.options.fields import about

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from hookdiff.data.batch import Batch
    from hookdiff.log.distribution import Distribution
    from hookdiff.log.event import Event
    from hookdiff.log.picture import Picture
    from hookdiff.loop.counts import Step, Verdict
    from hookdiff.loop.device_part import DevicePart
    from hookdiff.loop.end import Reason
    from hookdiff.loop.loop import Loop
    from hookdiff.loop.nonfinite import NonFinite
    from hookdiff.models.objective import LossOutput
    from hookdiff.models.sample_request import SampleRequest, Samples

HOOKS_VERSION = 1  # of the contract; it grows when a hook is removed, renamed or redefined

hookimpl = pluggy.HookimplMarker("hookdiff")
_hookspec = pluggy.HookspecMarker("hookdiff")

P = ParamSpec("P")
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
K = TypeVar("K", bound=Callable[..., object])

HOOKS: dict[str, Hook] = {}  # by name, in the order of `Hooks`


def _declared(
    kind: HookKind,
    phase: Phase,
    *,
    ends: bool = False,
    work: str = "",
    like: str = "",
    may_change: tuple[Changed, ...] = (),
) -> Callable[[F], F]:
    """Declare a hook; `like` holds its names in other trainers, with spaces between them."""

    def declare(method: F) -> F:
        name, returned = method.__name__, method.__annotations__["return"]
        result, may_be_absent = returned.removesuffix(" | None").partition("[")[0], returned.endswith(" | None")
        HOOKS[name] = Hook(name, kind, phase, result, may_be_absent, ends, work, tuple(like.split()), may_change)
        return _hookspec(firstresult=kind == "seam")(method)

    return declare


moment = partial(_declared, "moment")
seam = partial(_declared, "seam")  # with a default in `defaults.py`
question = partial(_declared, "question")  # asked by `loop.plugins.ask(NAME_OF_PLUGIN, NAME_OF_HOOK, ...)`


class Hooks(Protocol):
    """The hooks in the order in which a run calls them."""

    @question("config")
    def choose(self, device: torch.device) -> Mapping[str, Any]:
        """Question: once to each plugin of a config, before the loop is made.

        Return values for options that are "auto", as `{"precision": "bf16"}`, and for keys of [run], as "run.KEY".
        Choose them by a rule, not by timing. They are written to config.toml, so that a resumed run keeps them.
        May change: nothing.
        """

    @moment("model", like="configure_model", may_change=("the weights",))
    def prepare_model(self, loop: Loop) -> None:
        """Moment: once, before the optimizers are made. `loop.adopt` takes a module of the plugin's own here.

        May change: the model in place (shard, compile, freeze, initialise).
        """

    @seam("net")
    def wrap_net(self, loop: Loop, net: nn.Module) -> nn.Module:
        """Seam: once, after `prepare_model`. Return the module that training calls: `net`, or a wrapper of it.

        This module becomes `loop.net`. `loop.model` stays the bare network, for state, averages and samples.
        May change: nothing.
        """

    @seam("restore")
    def restore(self, loop: Loop) -> Mapping[str, Any]:
        """Seam: once, with the optimizers made and before `on_start`; also when `on_nan` decides on a rollback.

        Return a state that `loop.state_dict()` made, or an empty dict to start anew. The loop loads this state: weights
        and optimizers at once, plugins right after `on_start`. Learning rates and other hyper-parameters stay as the
        config sets them.
        May change: nothing.
        """

    @question("start")
    def check_state(self, model: nn.Module, state: Mapping[str, Any]) -> None:
        """Question: does the saved `state` fit this plugin and the model? Asked before anything is loaded.

        Raise ValueError if it does not fit, such as an average of other weights. Types are checked before, against the
        types of the fields made by `saved`, or the annotation of the argument of `load_state_dict`.
        May change: nothing.
        """

    @moment("start", like="setup on_fit_start on_init_end")
    def on_start(self, loop: Loop) -> None:
        """Moment: once, after weights and optimizers are loaded, but before the states of plugins are loaded.

        Allocate state here, and raise `UserError` for mistakes of the user. `on_start` is also called in a loop that
        only samples or exports, which has no data: check the data in `on_ready`. Before data is encoded, it is called
        for a trial, on other objects of the same plugins.
        May change: own state; `loop.resources` takes clean-up.
        """

    @question("recording")
    def on_device(self, loop: Loop) -> list[DevicePart] | None:
        """Question: once, after `on_start`, for a step that is recorded once and replayed, such as a CUDA graph.

        Return the device work of this plugin's hooks between the first forward and the update; `[]` if there is none.
        None, or no such method, means that these hooks need the host in each step.

        The hooks are still called; those of the passes while a step is recorded, but not in a replay. `after_backward`
        and all later hooks are called after each replay: the device has updated the weights by then, and
        `loop.gradients.is_applied` is true.
        May change: nothing.
        """

    @moment("start", like="on_train_start on_train_begin fit_start before_fit")
    def on_ready(self, loop: Loop, resumed: bool) -> None:
        """Moment: once, when the first step is asked for and all states are loaded; `loop.stop()` here trains nothing.

        `resumed` is True if a state was restored. It is not called in a loop that only samples or exports, in a run
        that is done already, or after a rollback. Work that must follow every load belongs in `load_state_dict`.

        Plugins that write files are `trylast`, after those that may still refuse the run.
        May change: own state, files.
        """

    @moment("epoch", like="on_train_epoch_start on_epoch_start on_epoch_begin epoch_start before_train")
    def before_epoch(self, loop: Loop) -> None:
        """Moment: before the first batch of each epoch; not in a run that was resumed within the epoch.

        `loop.feed.weigh(weights)` sets how often each sample is drawn in this epoch: one number >= 0 for each sample of
        the whole set, also for those held out. The weights are saved, so that a resumed run has them. Without a call
        each sample is drawn once.
        May change: own state.
        """

    @seam("batch", like="on_before_batch_transfer on_after_batch_transfer after_dataloader")
    def make_batch(self, loop: Loop, batch: Batch) -> Batch:
        """Seam: each step, before the noise is drawn. Return the batch to train on: `batch` or another.

        The batch may have another number of samples; the loss is the mean over them. A batch without samples
        (`batch[:0]`) is skipped: it is consumed, and no other hook of the step is called. Draw random numbers from
        `loop.random`.
        May change: nothing. Wrap this hook to change the batch that other plugins return.
        """

    @seam("batch", work="draw of noise and times")
    def draw(self, loop: Loop, batch: Batch) -> Batch:
        """Seam: each step, after `make_batch`. Return `batch` with the randomness of the step in its `draws`.

        The objective draws noise and times, with a generator of `loop.random` that is the same on all ranks. A plugin,
        too, draws for all `batch.total` samples of the step; `batch.own` returns this rank's share. If a draw depends
        on state, such as earlier losses, save this state, and keep it equal on all ranks. The hook is called again when
        a step is repeated: after a step that was not finite, for `micro_batch = "auto"` and to estimate memory. An
        evaluation calls `loop.objective.draw` instead.
        May change: nothing. Wrap this hook to replace some draws: `drawn.with_draws({"timesteps": times})`.
        """

    @moment("batch", like="on_train_batch_start on_train_batch_begin on_step_begin batch_start before_batch")
    def before_step(self, loop: Loop, batch: Batch) -> None:
        """Moment: each step, before any forward; `batch.draws` holds the noise of the step.

        May change: hyper-parameters of the optimizers, own state.
        """

    @question("recording")
    def needs_host(self, loop: Loop) -> bool:
        """Question: must the hooks of this step run in their usual places? Asked after `before_step`.

        Return True for a step that must not be replayed, such as a logged step. Default: False.
        May change: nothing.
        """

    @seam("passes", like="before_train_batch after_train_batch", may_change=("the gradients",))
    def accumulate(self, loop: Loop, batch: Batch) -> LossOutput:
        """Seam: each step, all forward and backward passes of `batch`. Return the loss of the step, detached.

        `loop.run_pass(batch)` makes one pass in micro-batches, and adds to the gradients; it does not call this hook
        again. A further pass repeats the dropout of the first, or draws other dropout with `stream="NAME"`.
        `loop.gradients` belong to the newest pass, and carry the loss scale until `unscale`. `loop.gradients.zero()`
        clears them between two passes and keeps their norm, so that a pass may also measure gradients alone. An
        overflow in any pass makes the step void, and a NaN in any pass makes it not finite. The loss of any pass may
        be returned. The statistics of batch norm change in each pass; `loop.buffers.put_back()` restores them.
        May change: the gradients; weights only during a pass, by `with holding(loop.model, tensors)` of
        `hookdiff.models`, which takes some or all parameters by name and restores them after any error.
        """

    @seam("passes", like="on_substep_end", may_change=("the gradients",))
    def micro_step(self, loop: Loop, batch: Batch, index: int, count: int) -> LossOutput:
        """Seam: inside `run_pass`. Forward and backward of micro-batch `index` of `count`. Return its loss, detached.

        May change: adds to the gradients. Wrap this hook for DDP's `no_sync`.
        """

    @seam("passes", work="forward and loss", like="training_step before_forward after_forward after_pred")
    def compute_loss(self, loop: Loop, batch: Batch) -> LossOutput:
        """Seam: inside `micro_step`. Return the loss with its graph.

        Wrap this hook for autocast, or to weigh the samples by changing `loss` and `weights` of the output. Several
        wrappers can do this together, but only one plugin can replace `reduce_loss`.
        May change: nothing.
        """

    @seam("passes", like="before_loss after_loss")
    def reduce_loss(self, loop: Loop, batch: Batch, output: LossOutput) -> Tensor:
        """Seam: inside `micro_step`, outside of autocast. Return the scalar to minimise, with its graph.

        `output.per_sample` (n, float32, with its graph) holds the loss of each sample, `output.weights` (n, or None)
        the weights of the objective, `output.loss` the objective's mean of both. The result must be a mean of terms
        that depend on one sample each, so that any `micro_batch` gives the same step. Make weights that are normalised
        over a batch in `make_batch` or `draw`. This hook is not called for an objective without `per_sample`.
        May change: nothing.
        """

    @seam("passes", work="backward", like="on_before_backward before_backward", may_change=("the gradients",))
    def backward(self, loop: Loop, loss: Tensor) -> bool:
        """Seam: inside `micro_step`. `loss` is multiplied by the micro-batch's share of the step. Return True.

        May change: adds to the gradients.
        """

    @seam("scale", may_change=("the gradients",))
    def unscale(self, loop: Loop) -> bool:
        """Seam: each step, after the last micro-batch. Return True once the gradients are at true scale.

        False makes the step void: no other hook of the step is called, the batch is consumed, no update is counted. The
        model's buffers get back their values from before the step.
        May change: the gradients, by a factor.
        """

    @moment("nonfinite")
    def on_nan(self, loop: Loop, report: NonFinite) -> Verdict | None:
        """Moment: the loss or a gradient is not finite, and no weight has changed. Buffers have their earlier values.

        Return "stop", "rollback" or "skip", or None for no verdict. Of several verdicts "stop" wins, then "rollback".
        Default: the run stops with exit code 3. The noise after a skipped step is different, because it
        depends on `progress.position`, which counts batches and not updates. A batch that stopped the run is not
        counted: a resumed run meets it again. A rollback without a checkpoint stops the run.
        May change: own state; `report.notes`, text by title, which is logged with the report.
        """

    @moment(
        "update", like="on_after_backward on_before_optimizer_step on_pre_optimizer_step", may_change=("the gradients",)
    )
    def after_backward(self, loop: Loop) -> None:
        """Moment: once a step; the gradients are complete, at true scale, and finite.

        Hooks that only read gradients are plain; mark hooks that change gradients `trylast`.
        May change: the gradients in place.
        """

    @seam("update", work="optimizer", may_change=("the weights",))
    def optimizer_step(self, loop: Loop) -> bool:
        """Seam: update the weights. Return True when they changed.

        False means that the update was left out: it is not counted, and `after_optimizer_step` is not called.
        May change: weights, optimizer state.
        """

    @moment(
        "after", like="on_train_batch_end on_batch_end on_step_end on_optimizer_step batch_end after_batch after_step"
    )
    def after_optimizer_step(self, loop: Loop) -> None:
        """Moment: the weights changed, and `loop.progress.step` counts the update.

        Updates of state (EMA) are `tryfirst`, evaluations and samples plain, files `trylast`, so that a checkpoint
        holds the average that was measured.
        May change: own state, files.
        """

    @moment("after", like="on_train_epoch_end epoch_end after_epoch after_train")
    def on_epoch_end(self, loop: Loop) -> None:
        """Moment: the data is exhausted, and `loop.progress.epoch` already includes the epoch.

        The hook is not called when the run ends within an epoch.
        May change: own state, files.
        """

    @moment("after")
    def on_save_request(self, loop: Loop) -> None:
        """Moment: `loop.save()` or the signal SIGUSR1 asks for a save; before `between_steps` of the same step.

        A plugin that saves runs notes the request here, and saves in `between_steps`. It is called on all ranks, at the
        same step. If no plugin implements it, a warning is logged.
        May change: own state.
        """

    @moment("after", work="logs", like="batch_checkpoint epoch_checkpoint")
    def between_steps(self, loop: Loop, step: Step | None) -> None:
        """Moment: after each batch, also a void or skipped one, and after each `on_epoch_end`.

        `step` is the outcome of the batch; None after `on_epoch_end`. If a script calls `run_step`, this hook is called
        before the next step, or at the end of the `with`. All plugins and the script have seen the step, and the log is
        flushed, so a run that is saved here resumes exactly.
        May change: files; no state.
        """

    @seam("images")
    def amend(self, loop: Loop, request: SampleRequest) -> SampleRequest:
        """Seam: `loop.sample(request)` calls this once, before `sample`. Return the request to answer.

        Wrap the hook, so that several plugins may amend a request.
        May change: nothing.
        """

    @seam("images")
    def sample(self, loop: Loop, request: SampleRequest) -> Samples:
        """Seam: a plugin or a script calls `loop.sample(request)`. Return the images, and the name of their weights.

        The images are pictures, also if the network makes latents: `loop.decode` turns the output of the sampler into
        pictures, and `loop.sample` clamps these to [-1, 1]. Both are left out if `request.raw`.

        `with loop.weights(request.weights) as name` lends the weights; it raises `UnknownWeights` if no plugin offers
        them. A request for 0 images only checks whether images can be made; a plugin that samples checks this in
        `on_start`.
        May change: nothing that lasts.
        """

    @seam("images")
    def decode(self, loop: Loop, inputs: Tensor) -> Tensor:
        """Seam: `loop.decode(inputs)` turns outputs of the network into pictures. Return them, n c h w, float32.

        `inputs` (n c h w) are samples as `loop.feed` has them, such as latents. Without a codec they are pictures.
        May change: nothing.
        """

    @seam("images")
    def export_weights(self, loop: Loop) -> dict[str, Tensor]:
        """Seam: the network is exported, with the weights that `loop.model` holds now.

        Return its tensors by the names that they had when the network was made. A plugin that puts something around the
        weights, such as adapters, wraps the hook and adds it to them.
        May change: nothing.
        """

    @moment("images")
    def offer_weights(self, loop: Loop) -> Mapping[str, Callable[[], Mapping[str, Tensor]]] | None:
        """Moment: `loop.weights(name)` looks for weights other than the model's own.

        Return a function for each average that this plugin holds, by the name of the average; the function returns
        tensors by parameter name. A request without a name gets the first average of the first plugin.
        May change: nothing.
        """

    @moment("log")
    def on_log(self, loop: Loop, step: int, values: Mapping[str, float]) -> None:
        """Moment: the `values` of `step`, given to `loop.log` and `loop.log.average`, as numbers on the host.

        It may be called several times for a step, and `step` is lower after a rollback. With several ranks it is called
        on the first one alone, as are the four hooks below. `loop.stop` works here. Any other decision
        must be sent to all ranks by `hookdiff.machine.first_rank_says`, which is called in `between_steps`, or in
        `before_step` if the decision changes state. The state of the first rank is saved.
        May change: own state, files.
        """

    @moment("log")
    def on_images(self, loop: Loop, step: int, images: Mapping[str, Picture]) -> None:
        """Moment: the pictures given to `loop.log.images`: finished, as uint8 on the host, each with its metadata.

        May change: files; no state.
        """

    @moment("log")
    def on_texts(self, loop: Loop, step: int, texts: Mapping[str, str]) -> None:
        """Moment: the texts given to `loop.log.texts`.

        May change: files; no state.
        """

    @moment("log")
    def on_distributions(self, loop: Loop, step: int, distributions: Mapping[str, Distribution]) -> None:
        """Moment: the distributions given to `loop.log.distributions`, as histograms on the host.

        May change: files; no state.
        """

    @moment("log")
    def on_event(self, loop: Loop, step: int, event: Event) -> None:
        """Moment: the events given to `loop.log.event`, and the findings given to `loop.log.report`.

        The loop itself reports starts, resumes, rollbacks, ends, steps without an update and checkpoints. Events from
        before the first step arrive when the run is ready.
        May change: files; no state.
        """

    @moment("log", like="on_save")
    def on_checkpoint(self, loop: Loop, path: Path, step: int) -> None:
        """Moment: the checkpoint of `step`, in the folder `path`, is complete on disk; on the rank that writes.

        It is written during training, so `loop` may be steps further. The hook is called once for each save that
        succeeds, at the latest before the next save or at the end of the run, also if the run fails meanwhile. It is
        not called for a save that fails, nor if the process is killed first. A later save of the same step, after
        batches that changed no weights, is a checkpoint of its own in the same folder.
        May change: files; no state.
        """

    @moment("end")
    def on_done(self, loop: Loop) -> None:
        """Moment: once, when the run is done or `loop.stop` has ended it for good, with the reason "done" or "plugin".

        It is called before the last evaluations, pictures and checkpoint. It is not called at a limit of time, a
        signal, `on_nan` or an error, after which a run is resumed. It is called again if the run is resumed, even with
        no step left. Leave the weights as they are, so that a run can be made longer: offer others by `offer_weights`,
        which the key `sampling.weights` may name.
        May change: own state that no later step reads, files.
        """

    @moment("end", ends=True)
    def on_exception(self, loop: Loop, error: BaseException) -> None:
        """Moment: an error ends the run; before `on_stop`, in the same plugins.

        May change: files; no state.
        """

    @moment("end", ends=True, like="on_train_end on_fit_end teardown fit_end after_fit")
    def on_stop(self, loop: Loop, reason: Reason) -> None:
        """Moment: once at the end of every run; `reason` is done, time, signal, plugin, on_nan or error.

        It is called in all plugins that have finished `on_start` or do not define it. `loop.end.message` is the text of
        `loop.stop(reason, message)`. After an error in a plugin it is still called in the others; the first error is
        raised at the end, unless another error has ended the run already.
        May change: files; no state.
        """


HOOK_NAMES = tuple(HOOKS)


def hooks_of(*phases: Phase) -> tuple[str, ...]:
    """Return the names of the hooks of these phases, in the order of a run."""
    return tuple(hook.name for hook in HOOKS.values() if hook.phase in phases)


@define(frozen=True, kw_only=True)
class Declaration:
    """The properties of a plugin class that the core must know."""

    requires: tuple[str, ...] = field(
        default=(), metadata=about("names of plugins that the run must have; a part may require some, too")
    )
    conflicts: tuple[str, ...] = field(default=(), metadata=about("names of plugins that the run must not have"))
    needs: Mapping[str, str] = field(
        factory=dict,
        metadata=about(
            'modules that the plugin imports when it is used, as `{"pandas": "pandas>=2"}`; if one is missing, the '
            "message says what to install"
        ),
    )
    trains_on_ranks: bool = field(
        default=False, metadata=about("whether the plugin makes several ranks train one model")
    )
    hooks_version: int = field(
        default=HOOKS_VERSION,
        metadata=about("version of the hooks for which the plugin is made; an older hookdiff refuses it"),
    )


def _takes(kind: Callable[P, object]) -> Callable[[Callable[..., T]], Callable[P, T]]:
    """Give a function the arguments of the class `kind`, for type checkers."""
    return lambda function: function


@_takes(Declaration)
def plugin(**declared: Any) -> Callable[[K], K]:
    """Declare properties of a plugin class: `@plugin(requires=("ema",))`.

    The keywords are the fields of `Declaration`; a class that declares nothing has their defaults. A subclass inherits
    the declaration of its base, and may replace parts of it.

    Raises:
        TypeError: for a keyword that does not exist.
    """
    known = [keyword.name for keyword in fields(Declaration)]
    for name in declared.keys() - known:
        raise TypeError(f"@plugin has no keyword {name!r}{nearest(name, known)}; it has {', '.join(known)}")

    def declare(kind: K) -> K:
        kind.hookdiff_plugin = evolve(declaration_of(kind), **declared)  # type: ignore[attr-defined]
        return kind

    return declare


def declaration_of(kind: object) -> Declaration:
    """Return the declaration of the class `kind`."""
    declaration: Declaration = getattr(kind, "hookdiff_plugin", Declaration())
    return declaration
