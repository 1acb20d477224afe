"""Measures data, network and gradients without any effect on the training."""

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from attrs import define
from torch import Generator, Tensor, nn

from hookdiff import Batch, Loop, Objective, evaluating
from hookdiff.diffusion import Diffusion, Point, as_diffusion
from hookdiff.log import Panel
from hookdiff.models import Buffers

# Fractions of the way from image to noise at which the network is measured.
LEVELS = (0.02, 0.1, 0.25, 0.4, 0.55, 0.7, 0.85, 0.98)
DRAWS = 1000  # times that are drawn, to see which noise levels are trained
SETTLED = 6  # updates after which all layers have gradients, even if some start at zero


@define(frozen=True)
class Inputs:
    """Statistics of a batch of training inputs, before noise is added."""

    num: int  # images
    channels: tuple[int, ...]  # indices of the channels with a single value in the whole batch
    low: float
    high: float
    mean: float
    std: float  # of all values
    scaled_mean: float  # of the standardised values: minus data_mean, over data_std
    scaled_std: float
    nonfinite: float  # share of the values
    constant: float  # share of the images that have one value in all pixels
    same: float  # share of the other images that equal the first

    def __str__(self) -> str:
        return f"values from {self.low:.3g} to {self.high:.3g}, mean {self.mean:.2g}, std {self.std:.2g}"


@define(frozen=True)
class Outputs:
    """The output of the network for a batch, and how much it changes with each input; NaN: not known."""

    mean: float
    std: float
    largest: float  # absolute value
    nonfinite: float  # share of the values
    by_image: float  # change if samples exchange their noisy images, over the size of the output (both RMS)
    by_time: float  # the same if they exchange their times
    by_label: float  # the same without labels

    def __str__(self) -> str:
        return f"mean {self.mean:.2g}, std {self.std:.2g}"


@define(frozen=True)
class Layer:
    """The gradients of a module's own parameters."""

    norm: float | None  # L2; None: no gradient at all
    size: int  # numbers

    @property
    def rms(self) -> float:
        return (self.norm or 0.0) / math.sqrt(self.size)


@define(frozen=True)
class Level:
    """The squared errors of predictions at one noise level, mean over pixels and images."""

    name: str
    error: float  # of the network
    mean_error: float  # of predicting the mean of each pixel
    floor: float  # of the best prediction from the mean of each pixel and the mean variance


@define(frozen=True)
class Drawn:
    """How often a training draws one noise level."""

    name: str
    log_snr: float  # of images of variance 1
    share: float  # of the draws


@contextmanager
def untouched(loop: Loop) -> Iterator[None]:
    """Put the model in eval mode without gradients; restore random state and buffers afterwards."""
    model, on_gpu = loop.model, loop.device.type == "cuda"
    buffers = Buffers(model)
    buffers.keep()
    dtype = next(model.parameters()).dtype
    # Weights in half precision are trained under autocast, which is off here, and the images are float32.
    half = torch.autocast(loop.device.type, dtype) if dtype in (torch.float16, torch.bfloat16) else nullcontext()
    try:
        with evaluating(model), torch.random.fork_rng([loop.device] if on_gpu else []), half, eager(model):
            yield
    finally:
        buffers.put_back()


def eager(model: nn.Module) -> AbstractContextManager[object]:
    """Return a context in which `model` runs uncompiled: a measurement must not start the compiler."""
    compiled = any(getattr(module, "_compiled_call_impl", None) for module in model.modules())
    return torch.compiler.set_stance("force_eager") if compiled else nullcontext()


def measure_inputs(inputs: Tensor, objective: Objective | None = None) -> Inputs:
    """Measure `inputs`, n c h w or n of any shape, also normalized by a Diffusion; one transfer."""
    inputs = inputs.detach().float()
    diffusion = as_diffusion(objective, "normalize") if objective else None
    normalized = diffusion.normalize(inputs) if diffusion else inputs
    flat, scaled = inputs.flatten(1), normalized.flatten(1)
    finite = flat.isfinite()
    low, high = torch.where(finite, flat, math.inf).min(), torch.where(finite, flat, -math.inf).max()
    mean, std = _moments(flat, finite)
    scaled_mean, scaled_std = _moments(scaled, finite)
    constant = (flat.amax(1) == flat.amin(1)).float().mean()
    same = (flat[1:] == flat[:1]).all(1).float().mean() if len(flat) > 1 else flat.new_zeros(())
    by_channel = inputs.transpose(0, 1).flatten(1) if inputs.dim() > 2 else flat.new_zeros(0, 1)
    flags = (by_channel.amax(1) == by_channel.amin(1)).float()
    nonfinite = (~finite).float().mean()
    numbers = torch.stack((low, high, mean, std, scaled_mean, scaled_std, nonfinite, constant, same))
    values: list[float] = torch.cat((numbers, flags)).tolist()
    channels = tuple(index for index, flag in enumerate(values[9:]) if flag)
    return Inputs(len(flat), channels, *values[:9])


def _moments(values: Tensor, finite: Tensor) -> tuple[Tensor, Tensor]:
    count = finite.sum().clamp(min=1)
    mean = torch.where(finite, values, 0).sum() / count
    return mean, (torch.where(finite, values - mean, 0).square().sum() / count).sqrt()


class _Recorder:
    """Stands in for the network and keeps copies of the arguments, and the output, of its first call."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.first: tuple[tuple[tuple[Any, ...], dict[str, Any]], Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        arguments = copy.deepcopy((args, kwargs))  # a layer may change its input in place
        output = self.model(*args, **kwargs)
        self.first = self.first or (arguments, output)
        return output

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


def measure_outputs(loop: Loop, batch: Batch) -> Outputs | None:
    """Measure the output for `batch`, and for `batch` with one input exchanged among samples; one transfer.

    Returns None if the objective calls the network without a tensor, or gets no tensor from it. Call it in `untouched`.
    """
    recorder = _Recorder(loop.model)
    loop.objective(recorder, batch)  # type: ignore[arg-type]
    if recorder.first is None or not isinstance(recorder.first[1], Tensor):
        return None
    arguments, first = recorder.first
    output = first.float()
    size = _rms(output)
    nothing = torch.full_like(size, math.nan)

    def change(index: int, exchange: Callable[[Tensor], Tensor]) -> Tensor:
        args, kwargs = copy.deepcopy(arguments)
        if len(args) <= index or not isinstance(args[index], Tensor) or len(args[index]) != len(output):
            return nothing
        changed = exchange(args[index])
        differs = (changed != args[index]).any()
        other: Tensor = loop.model(*args[:index], changed, *args[index + 1 :], **kwargs)
        return torch.where(differs, _rms(other.float() - output) / size, nothing)

    numbers = [output.mean(), output.std(correction=0), output.abs().amax(), (~output.isfinite()).float().mean()]
    numbers += [change(0, lambda x: x.roll(1, 0)), change(1, lambda t: t.roll(1, 0))]
    numbers.append(change(2, lambda labels: torch.full_like(labels, -1)))
    return Outputs(*torch.stack(numbers).tolist())


def _rms(values: Tensor) -> Tensor:
    return values.square().mean().sqrt()


def measure_layers(loop: Loop) -> dict[str, Layer]:
    """Return the gradients of the step under way by module, with one transfer."""
    norms = dict(zip(loop.gradients.named(), loop.gradients.norms.tolist(), strict=True))
    sizes: dict[str, int] = {}
    parts: dict[str, list[float]] = {}
    for name, parameter in loop.model.named_parameters():
        if parameter.requires_grad:
            layer = name.rpartition(".")[0] or name
            sizes[layer] = sizes.get(layer, 0) + parameter.numel()
            parts.setdefault(layer, []).extend([norms[name]] if name in norms else [])
    return {layer: Layer(math.hypot(*parts[layer]) if parts[layer] else None, size) for layer, size in sizes.items()}


def level_points(process: Any) -> list[Point]:
    """Return the points of a process at `LEVELS`."""
    times = process.from_fraction(torch.tensor(LEVELS))
    alpha, sigma, _ = process.rates(times, 1)
    rows = zip(alpha.tolist(), sigma.tolist(), process.network_time(times).tolist(), strict=True)
    return [Point(*row) for row in rows]


def measure_times(diffusion: Diffusion, shape: Sequence[int]) -> list[Drawn]:
    """Return how often the noise levels around `LEVELS` are among `DRAWS` times of a training on inputs of `shape`."""
    process = diffusion.process.for_shape(shape)
    borders = process.from_fraction((torch.tensor(LEVELS[1:]) + torch.tensor(LEVELS[:-1])) / 2)
    times = diffusion.times.draw(process, DRAWS, Generator().manual_seed(0))
    bounds, drawn = (process.rates(each, 1)[2] for each in (borders, times))
    end = bounds.new_tensor([math.inf])
    upper, lower = torch.cat((end, bounds))[:, None], torch.cat((bounds, -end))[:, None]
    # A timestep on a border counts for both levels: with few timesteps, a level may have no other.
    shares = ((lower <= drawn) & (drawn <= upper)).float().mean(1).tolist()
    return [Drawn(at.label, at.log_snr, share) for at, share in zip(level_points(process), shares, strict=True)]


def _predictions(
    net: Any, diffusion: Diffusion, images: Tensor, given: Mapping[str, Tensor]
) -> Iterator[tuple[Tensor, ...]]:
    """Yield times, x_t, the network's output, alpha and sigma at each of `LEVELS`, and x0 and noise."""
    x0, process = diffusion.normalize(images), diffusion.process.for_shape(images.shape[1:])
    noise = torch.randn(x0.shape, generator=Generator().manual_seed(0)).to(x0)
    for fraction in LEVELS:
        times = process.from_fraction(torch.full((len(images),), fraction)).to(images.device)
        alpha, sigma, _ = process.rates(times, x0.ndim)
        x_t, time = alpha * x0 + sigma * noise, process.network_time(times)
        output = diffusion.predict(net, x_t, time, given, alpha, sigma).float()
        yield times, x_t, output, alpha, sigma, x0, noise


def measure_levels(net: Any, diffusion: Diffusion, images: Tensor, given: Mapping[str, Tensor]) -> list[Level]:
    """Return the network's error on `images` (n c h w, n above 1) at `LEVELS`, always with the same noise."""
    rows = []
    for times, _, output, alpha, sigma, x0, noise in _predictions(net, diffusion, images, given):
        target = diffusion.prediction.target(x0, noise, alpha, sigma)
        error, mean_error = (output - target).square().mean(), target.var(0).mean()
        floor = diffusion.floor(times, x0.var(0).mean()).mean()
        rows.append(torch.stack((error, mean_error, floor)))
    names = [point.label for point in level_points(diffusion.process.for_shape(images.shape[1:]))]
    return [Level(name, *numbers) for name, numbers in zip(names, torch.stack(rows).tolist(), strict=True)]


def draw_levels(
    net: Any,
    diffusion: Diffusion,
    images: Tensor,
    given: Mapping[str, Tensor],
    title: str,
    decode: Callable[[Tensor], Tensor],
) -> Panel:
    """Return a panel with two rows for each image: its noisy versions at `LEVELS`, and the predictions below.

    `decode` turns values of the network into pictures.
    """
    noisy, predicted, process = [images], [images], diffusion.process.for_shape(images.shape[1:])
    for _, x_t, output, alpha, sigma, _, _ in _predictions(net, diffusion, images, given):
        x0, _ = diffusion.prediction.x0_and_noise(output, x_t, alpha, sigma)
        # In a process with unbounded noise, the noisy image is shown as bright as the others.
        noisy.append(diffusion.denormalize(x_t / (alpha.square() + sigma.square()).sqrt()))
        predicted.append(diffusion.denormalize(x0))
    rows = decode(torch.stack((torch.stack(noisy, 1), torch.stack(predicted, 1)), 1).flatten(0, 2))
    shown = rows if rows.shape[1] in (1, 3) else rows[:, :1]  # for latents, the first channel
    return Panel(
        shown.nan_to_num(0.0, 1.0, -1.0).clamp(-1, 1).cpu(),
        len(LEVELS) + 1,
        title,
        row_names=["noisy", "predicted"] * len(images),
        column_names=["image", *(point.label for point in level_points(process))],
    )


def merged(looks: Sequence[Mapping[str, Layer]]) -> dict[str, Layer]:
    """Return each layer from the measurement in which its gradient was largest."""
    by_name: dict[str, list[Layer]] = {}
    for look in looks:
        for name, layer in look.items():
            by_name.setdefault(name, []).append(layer)
    return {name: max(layers, key=lambda each: (each.norm is not None, each.rms)) for name, layers in by_name.items()}
