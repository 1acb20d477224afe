"""The plugin `cuda_graphs`."""

import logging
from collections import Counter
from collections.abc import Iterable

import torch
from attrs import define, field
from attrs.validators import ge

from hookdiff import PASS, Batch, Loop, LossOutput, NonFinite, UserError, hookimpl
from hookdiff.loop import DevicePart, hooks_of
from hookdiff.options import about
from hookdiff_cuda_graphs.recorder import Recorder, recorder_for
from hookdiff_cuda_graphs.step import RecordedStep, can_be_held_back, key_of, options_of

logger = logging.getLogger("hookdiff")

PASSES = hooks_of("passes")  # recorded with the passes
BETWEEN = hooks_of("scale", "update")  # between the passes and the end of the update


@define(eq=False)
class CudaGraphs:
    """Records forward, backward, clipping, optimizer and averages of a step as CUDA graphs, and replays them.

    The host then starts a step with two calls instead of thousands. This saves time where the host is slower than the
    GPU: for small networks, small batches, many layers. If a step is not finite, a flag on the GPU holds back the
    update, and the host reads the flag afterwards, in the only wait of the step. If a plugin must run on the host
    before the update, only the passes are replayed, and the host makes the update. The log names the plugin.

    Samples of several shapes have a recording for each shape, and each recording keeps gradients of its own. Batches of
    another size, and steps in micro-batches, run without a recording. On other devices than CUDA the plugin does
    nothing.
    """

    warmup: int = field(
        default=3,
        validator=ge(1),
        metadata=about(
            "steps of a shape before its recording, in which compilers and kernels choose fast variants", "steps"
        ),
    )
    _recorder: Recorder | None = field(default=None, init=False)
    _parts: list[DevicePart] | None = field(default=None, init=False)  # None: the host makes the updates
    _in_passes: list[str] = field(factory=list, init=False)  # plugins that may need the host for a whole step
    _in_between: list[str] = field(factory=list, init=False)  # plugins that may need the host before the update
    _batch: Batch | None = field(default=None, init=False)  # of the current step, before its passes
    # By the shape of a sample: the steps since the last recording was dropped, and the recordings.
    _seen: Counter[torch.Size] = field(factory=Counter, init=False)
    _steps: dict[torch.Size, RecordedStep] = field(factory=dict, init=False)

    @hookimpl(trylast=True)
    def on_start(self, loop: Loop) -> None:
        self._drop()
        self._recorder = recorder_for(loop.device)
        if self._recorder is None:
            logger.info("cuda_graphs: a %s has no CUDA graphs, so the plugin does nothing", loop.device.type)
            return
        if loop.num_ranks > 1:
            raise UserError("plugins.cuda_graphs: needs a single rank; train without it: --plugins no:cuda_graphs")
        if hindrance := self._hindrance(loop):
            logger.warning("cuda_graphs: no step is recorded, because of %s", hindrance)
            self._recorder = None
            return
        self._parts = self._collect(loop)

    def _hindrance(self, loop: Loop) -> str:
        """Return the reason why the passes cannot be recorded, or an empty text."""
        if others := self._implementing(loop, ["accumulate"]):
            return f"{others[0]}, which makes the passes itself"
        if any(True for _ in loop.adopted):
            return "modules of plugins with optimizers of their own"
        refusing = self._refusing(loop, PASSES)
        return f"{', '.join(refusing)}, which the host must call in the passes" if refusing else ""

    def _collect(self, loop: Loop) -> list[DevicePart] | None:
        """Return the work of plugins in an update, in its order. If the host has to update, log why; return None."""
        asked = [impl.plugin_name for impl in loop.plugins.order("needs_host")]
        self._in_passes = [name for name in self._implementing(loop, PASSES) if name in asked]
        between = [name for name in self._implementing(loop, BETWEEN) if name in asked]
        self._in_between = [name for name in between if name not in self._in_passes]
        reasons = self._refusing(loop, BETWEEN)
        reasons += [type(each).__name__ for each in loop.optimizers if not can_be_held_back(each)]
        if reasons:
            logger.warning("cuda_graphs: the host makes the update in each step, because of %s", ", ".join(reasons))
            return None
        for group in (group for optimizer in loop.optimizers for group in optimizer.param_groups):
            # The learning rate is a tensor in all steps, so a resumed run, which records later, gives the same weights.
            group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32, device=loop.device)
        plugins = self._implementing(loop, hooks_of("update", "after"))
        return [part for name in plugins for part in loop.plugins.ask(name, "on_device", loop=loop) or ()]

    def _refusing(self, loop: Loop, hooks: Iterable[str]) -> list[str]:
        """Return the names of the plugins that implement one of `hooks`, and need the host for it in each step."""
        names = self._implementing(loop, hooks)
        return [name for name in names if loop.plugins.ask(name, "on_device", loop=loop) is None]

    def _implementing(self, loop: Loop, hooks: Iterable[str]) -> list[str]:
        """Return the names of the other plugins that implement one of `hooks`, in the order of their calls."""
        impls = [impl for hook in hooks for impl in loop.plugins.order(hook) if impl.plugin is not self]
        return list(dict.fromkeys(impl.plugin_name for impl in impls if impl.plugin_name in loop.plugins))

    def _drop(self) -> None:
        self._steps, self._seen = {}, Counter()

    @hookimpl(trylast=True)
    def before_step(self, batch: Batch) -> None:
        self._batch = batch

    @hookimpl
    def accumulate(self, loop: Loop, batch: Batch) -> LossOutput:
        is_step, self._batch = batch is self._batch, None  # otherwise a plugin tries passes, without an update
        if self._recorder is None or not is_step or len(batch.split(loop.config.micro_batch)) > 1:
            return PASS
        if any(loop.plugins.ask(name, "needs_host", loop=loop) for name in self._in_passes):
            return PASS
        shape = batch.inputs.shape[1:]
        self._seen[shape] += 1
        if self._seen[shape] <= self.warmup:
            with self._recorder.aside():
                return loop.run_pass(batch)
        step = self._steps.get(shape) or self._record(loop, batch, self._recorder)
        if step.key != key_of(loop, batch):
            return PASS
        is_between = any(loop.plugins.ask(name, "needs_host", loop=loop) for name in self._in_between)
        return step.replay(batch, updates=not is_between and step.options == options_of(loop.optimizers))

    def _record(self, loop: Loop, batch: Batch, recorder: Recorder) -> RecordedStep:
        try:
            step = self._steps[batch.inputs.shape[1:]] = RecordedStep(loop, batch, self._parts, recorder)
        except RuntimeError as error:
            first = error  # the end of the recording fails, too, with a worse message
            while isinstance(first.__context__, RuntimeError):
                first = first.__context__
            reason = str(first).partition("\n")[0]
            raise UserError(
                f"plugins.cuda_graphs: this step cannot be recorded: {reason}\n"
                "  the network, the objective or a plugin needs the host: train with --plugins no:cuda_graphs"
            ) from error
        what = "passes" if self._parts is None else "passes and update"
        logger.info(
            "cuda_graphs: %s are recorded at step %s, and replayed from now on", what, f"{loop.progress.step + 1:,}"
        )
        if sometimes := [*self._in_passes, *self._in_between]:
            logger.info("cuda_graphs: some steps need the host, because of %s", ", ".join(sometimes))
        return step

    @hookimpl
    def on_nan(self, loop: Loop, report: NonFinite) -> None:
        # A rollback gives the optimizer new tensors, at other addresses.
        self._drop()
        if self._recorder is not None:
            self._recorder.renew()
