"""An example of each hook, in the order of the hooks. `hookdiff hooks` and docs/reference/hooks.md show them."""

import json
import math
import shutil
import traceback
from collections.abc import Callable, Generator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import numpy
import torch
from attrs import define, evolve
from safetensors.torch import save_model
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hookdiff import PASS, Batch, Finding, Loop, LossOutput, NonFinite, Reason, Samples, Verdict, hookimpl, saved
from hookdiff.disk import new_file, write_file
from hookdiff.log import Distribution, Event, Picture
from hookdiff.loop import DevicePart
from hookdiff.machine import first_rank_says
from hookdiff.options import Writes


class ChannelsLast:
    """Uses the memory format channels_last on a GPU, for networks that are faster with it."""

    @hookimpl
    def choose(self, device: torch.device) -> Mapping[str, Any]:
        return {"run.channels_last": device.type != "mps"}


@define(eq=False)
class FreezePart:
    """Keeps the weights of one part of the network as they are."""

    part: str  # name of a module, such as "conv_in"

    @hookimpl
    def prepare_model(self, loop: Loop) -> None:
        loop.model.get_submodule(self.part).requires_grad_(False)


class Distributed:
    """Averages the gradients over the processes that torchrun has started."""

    @hookimpl
    def wrap_net(self, net: nn.Module) -> nn.Module:
        return DistributedDataParallel(net)


@define(eq=False)
class StartFrom:
    """Begins with the state of another Loop: StartFrom(deepcopy(other.state_dict()))."""

    state: dict[str, Any]

    @hookimpl
    def restore(self, loop: Loop) -> dict[str, Any]:
        return PASS if loop.progress.step else self.state  # a rollback is left to the plugin that saves


@define(eq=False)
class Versioned:
    """Refuses a checkpoint with a state that a later version of this plugin has saved."""

    version: int = saved(1)

    @hookimpl
    def check_state(self, state: Mapping[str, Any]) -> None:
        if state["version"] > 1:
            raise ValueError(f"it has the version {state['version']}, and this plugin reads 1")


class Anomalies:
    """Names the operation that made a gradient NaN, but makes steps slow."""

    @hookimpl
    def on_start(self, loop: Loop) -> None:
        loop.resources.enter_context(torch.autograd.set_detect_anomaly(True))  # until the run ends


class FirstNorm:
    """Logs the gradient norm of the first weight, which a replayed CUDA graph computes, too."""

    @hookimpl
    def on_device(self) -> list[DevicePart]:
        return []

    @hookimpl
    def after_backward(self, loop: Loop) -> None:
        loop.log.average({"first_norm": loop.gradients.norms[0]})


class MustResume:
    """Stops a job that should continue a run, but has found no checkpoint."""

    @hookimpl
    def on_ready(self, loop: Loop, resumed: bool) -> None:
        if not resumed:
            loop.stop("plugin", "there is no checkpoint to continue from")


class ClassByClass:
    """Trains on class 0 in the first epoch, and on one more class in each further epoch."""

    @hookimpl
    def before_epoch(self, loop: Loop) -> None:
        if loop.feed.labels is not None:
            loop.feed.weigh((loop.feed.labels <= loop.progress.epoch).double())


class MixUp:
    """Mixes a fifth of another image of the batch into each image (Zhang et al. 2018)."""

    @hookimpl
    def make_batch(self, loop: Loop, batch: Batch) -> Batch:
        generator = loop.random.generator("mixup", loop.progress.position, loop.device)
        order = torch.randperm(len(batch), generator=generator, device=loop.device)
        return evolve(batch, inputs=batch.inputs.lerp(batch.inputs[order], 0.2))


@define(eq=False)
class OffsetNoise:
    """Shifts the noise of each sample a little, so that the network learns dark and bright images (Guttenberg 2023)."""

    @hookimpl(wrapper=True)
    def draw(self, loop: Loop, batch: Batch) -> Generator[None, Batch, Batch]:
        drawn, generator = (yield), loop.random.generator("offset", loop.progress.position, loop.device)
        shift = drawn.own(torch.randn(drawn.total, generator=generator, device=loop.device))
        noise = drawn.draws["noise"]
        return drawn.with_draws({"noise": noise + 0.1 * shift.view(-1, *[1] * (noise.dim() - 1))})


class LessDecay:
    """Lowers the weight decay to 0 over the first 1000 updates."""

    @hookimpl
    def before_step(self, loop: Loop) -> None:
        for optimizer in loop.optimizers:
            for group in optimizer.param_groups:
                group["weight_decay"] = 0.01 * max(0.0, 1 - loop.progress.step / 1000)


class LargestGradient:
    """Logs the largest gradient, before any clipping; a CUDA graph may replay the steps that log nothing."""

    @hookimpl
    def needs_host(self, loop: Loop) -> bool:
        return loop.log.due

    @hookimpl
    def on_device(self) -> list[DevicePart]:
        return []

    @hookimpl
    def after_backward(self, loop: Loop) -> None:
        if loop.log.due:
            loop.log({"largest": torch.stack([gradient.abs().max() for gradient in loop.gradients.tensors()]).max()})


class TwoDropouts:
    """Averages the gradients over two draws of dropout."""

    @hookimpl
    def accumulate(self, loop: Loop, batch: Batch) -> LossOutput:
        loss = loop.run_pass(batch)
        loop.run_pass(batch, stream="second dropout")
        for gradient in loop.gradients.tensors():
            gradient /= 2
        return loss


class SyncOnce:
    """Lets DistributedDataParallel average the gradients after the last micro-batch only."""

    @hookimpl(wrapper=True)
    def micro_step(self, loop: Loop, index: int, count: int) -> Generator[None, LossOutput, LossOutput]:
        assert isinstance(loop.net, DistributedDataParallel)
        with nullcontext() if index + 1 == count else loop.net.no_sync():
            return (yield)


class BFloat16:
    """Computes the loss in bfloat16; weights and gradients stay in float32."""

    @hookimpl(wrapper=True)
    def compute_loss(self, loop: Loop) -> Generator[None, LossOutput, LossOutput]:
        with torch.autocast(loop.device.type, torch.bfloat16):
            return (yield)


class Robust:
    """Lets samples with a large loss count less: log(1 + loss) in place of loss."""

    @hookimpl
    def reduce_loss(self, output: LossOutput) -> Tensor:
        assert output.per_sample is not None  # else the hook is not called
        terms = output.per_sample.log1p()
        return terms.mean() if output.weights is None else (terms * output.weights).mean()


class MarkBackward:
    """Shows the backward passes as "backward" in traces of torch.profiler."""

    @hookimpl(wrapper=True)
    def backward(self) -> Generator[None, bool, bool]:
        with torch.profiler.record_function("backward"):
            return (yield)


class SkipSpikes:
    """Makes a step void, without an update, if its gradient norm is over 100."""

    @hookimpl(wrapper=True)
    def unscale(self, loop: Loop) -> Generator[None, bool, bool]:
        is_scaled = yield
        return is_scaled and not 100 < loop.gradients.total_norm < math.inf  # on_nan handles other norms


class SkipBadSamples:
    """Skips a batch if only some of its samples cause the NaN, and stops the run if all of them do."""

    @hookimpl
    def on_nan(self, report: NonFinite) -> Verdict:
        report.notes["samples at fault"] = f"{len(report.samples)} of {len(report.batch)}"
        return "skip" if 0 < len(report.samples) < len(report.batch) else "stop"


class Centralize:
    """Subtracts the mean from the gradient of each output (Yong et al. 2020)."""

    @hookimpl(trylast=True)
    def after_backward(self, loop: Loop) -> None:
        for gradient in loop.gradients.tensors():
            if gradient.dim() > 1:
                gradient -= gradient.flatten(1).mean(1).reshape(-1, *[1] * (gradient.dim() - 1))
        loop.gradients.clear()  # the norms are no longer right


class Limit:
    """Keeps all weights within [-0.5, 0.5]."""

    @hookimpl(wrapper=True)  # plugins that come after the update must see the final weights
    def optimizer_step(self, loop: Loop) -> Generator[None, bool, bool]:
        changed = yield
        for parameter in loop.model.parameters():
            parameter.detach().clamp_(-0.5, 0.5)
        return changed


class StopAtTarget:
    """Ends the run once the loss of a step is below 0.5."""

    @hookimpl
    def after_optimizer_step(self, loop: Loop) -> None:
        if loop.gradients.loss < 0.5:
            loop.stop("plugin", f"the loss is {loop.gradients.loss:.3f}")


class EpochFiles:
    """Writes the weights of each epoch to a file in the run directory."""

    @hookimpl(trylast=True)
    def on_epoch_end(self, loop: Loop) -> None:
        if loop.is_main and loop.run_dir:
            with new_file(loop.run_dir / f"epoch-{loop.progress.epoch}.safetensors") as partial:
                save_model(loop.model, str(partial))


class Snapshot:
    """Writes the weights to a file in the run directory when `loop.save()` or SIGUSR1 asks for a save."""

    @hookimpl
    def on_save_request(self, loop: Loop) -> None:
        if loop.is_main and loop.run_dir:
            with new_file(loop.run_dir / "snapshot.safetensors") as partial:
                save_model(loop.model, str(partial))


class StopFile:
    """Ends the run when somebody puts a file named "stop" into the run directory."""

    @hookimpl
    def between_steps(self, loop: Loop) -> None:
        if loop.run_dir and first_rank_says((loop.run_dir / "stop").exists()):
            loop.stop("plugin", "a file asked for it")


class TwoOfEachClass:
    """Gives each second sample the class of the sample before it."""

    @hookimpl(wrapper=True)
    def amend(self) -> Generator[None, Any, Any]:
        request = yield
        labels = request.labels
        return evolve(request, labels=labels and tuple(labels[k // 2 * 2] for k in range(len(labels))))


class Rounded:
    """Rounds generated images to the 256 values of a PNG."""

    @hookimpl(wrapper=True)
    def sample(self) -> Generator[None, Samples, Samples]:
        samples = yield
        values = (samples.images * 127.5 + 127.5).round()
        return evolve(samples, images=values / 127.5 - 1)


class Brighter:
    """Makes generated images a little brighter; the training is not changed."""

    @hookimpl(wrapper=True)
    def decode(self) -> Generator[None, Tensor, Tensor]:
        pictures = yield
        return (pictures + 0.1).clamp(-1, 1)


class ExportFloat16:
    """Exports weights in float16, as half of the bytes."""

    @hookimpl(wrapper=True)
    def export_weights(self) -> Generator[None, dict[str, Tensor], dict[str, Tensor]]:
        tensors = yield
        return {name: value.half() if value.is_floating_point() else value for name, value in tensors.items()}


class OfferBFloat16:
    """Offers the weights rounded to bfloat16, to see the loss of an export in half precision."""

    @hookimpl
    def offer_weights(self, loop: Loop) -> Mapping[str, Callable[[], Mapping[str, Tensor]]]:
        return {"bf16": lambda: {name: p.detach().bfloat16() for name, p in loop.model.named_parameters()}}


class Latest:
    """Keeps the newest values in latest.json, for a dashboard."""

    @hookimpl
    def on_log(self, loop: Loop, step: int, values: Mapping[str, float]) -> None:
        if loop.is_main and loop.run_dir:
            with new_file(loop.run_dir / "latest.json") as partial:
                write_file(partial, json.dumps({"step": step, **values}).encode())


class ImageArrays:
    """Keeps the newest pictures as .npy files, for a notebook."""

    @hookimpl
    def on_images(self, loop: Loop, images: Mapping[str, Picture]) -> None:
        if loop.is_main and loop.run_dir:
            for name, picture in images.items():
                with new_file(loop.run_dir / f"{name.replace('/', '-')}.npy") as partial, partial.open("xb") as file:
                    numpy.save(file, picture.pixels)


class PrintTexts:
    """Prints logged texts, such as the prompts of samples."""

    @hookimpl
    def on_texts(self, step: int, texts: Mapping[str, str]) -> None:
        for name, text in texts.items():
            print(f"step {step}: {name}: {text}")


class WideWeights:
    """Warns when the range of logged weights is wider than 100."""

    @hookimpl
    def on_distributions(self, loop: Loop, step: int, distributions: Mapping[str, Distribution]) -> None:
        for name, values in distributions.items():
            if values.high - values.low > 100:
                loop.log.report(Finding("warning", f"{name} has values from {values.low:g} to {values.high:g}"), step)


class StopAtFinding:
    """Ends the run at the first finding that is an error."""

    @hookimpl
    def on_event(self, loop: Loop, event: Event) -> None:
        if (event.kind, event.severity) == ("finding", "error"):
            loop.stop("plugin", event.text)


@define(eq=False)
class Mirror:
    """Copies each checkpoint to another disk."""

    folder: Annotated[str, Writes()]

    @hookimpl
    def on_checkpoint(self, path: Path) -> None:
        shutil.copytree(path, Path(self.folder) / path.name, dirs_exist_ok=True)


@define(eq=False)
class Sparse:
    """Offers the final weights, with those close to 0 set to 0, as "sparse"."""

    final: dict[str, Tensor] = saved(factory=dict)

    @hookimpl
    def on_done(self, loop: Loop) -> None:
        self.final = {name: p.detach() * (p.abs() > 0.01) for name, p in loop.model.named_parameters()}

    @hookimpl
    def offer_weights(self) -> Mapping[str, Callable[[], Mapping[str, Tensor]]]:
        return {"sparse": lambda: self.final}


class ErrorFile:
    """Writes the traceback of an error to the run directory, for each rank."""

    @hookimpl
    def on_exception(self, loop: Loop, error: BaseException) -> None:
        if loop.run_dir and loop.run_dir.is_dir():  # the run may have failed before it made the directory
            text = "".join(traceback.format_exception(error))
            with new_file(loop.run_dir / f"error-{loop.rank}.txt") as partial:
                write_file(partial, f"step {loop.progress.step}\n{text}".encode())


@define(eq=False)
class LastRun:
    """Writes the reason for the end of the run to a file, for a dashboard."""

    file: Annotated[str, Writes()]

    @hookimpl
    def on_stop(self, loop: Loop, reason: Reason) -> None:
        if loop.is_main:
            Path(self.file).write_text(f"{loop.run_dir},{loop.progress.step},{reason}\n")
