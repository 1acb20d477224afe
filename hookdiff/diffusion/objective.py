"""The diffusion objective: noise the images, let the network predict, compare."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from attrs import Attribute, define, field
from attrs.validators import and_, ge, gt, le, optional
from torch import Generator, Tensor
from torch.nn import functional

from hookdiff.data.batch import Batch
from hookdiff.diffusion.options import between, one_of, read_by
from hookdiff.diffusion.parametrization import PREDICTION_TYPES, Parametrization, make_parametrization, q_sample
from hookdiff.diffusion.process import Discrete, Flow, Process, VarianceExploding
from hookdiff.diffusion.schedules import BETAS, make_schedule
from hookdiff.diffusion.times import TIMES, USUAL, uniforms
from hookdiff.diffusion.weighting import WEIGHTINGS, loss_weights
from hookdiff.objective import LossOutput

SCHEDULES = (*BETAS, "flow", "edm")
LOSSES = ("mse", "l1", "huber")
_DISCRETE = tuple(BETAS)
_NATURAL = {"flow": "flow_prediction", "edm": "edm"}  # prediction types; "epsilon" for the others

# (network input: n c h w, what it is told of the time: n, int64 or float32[, labels: n, int64]) -> n c h w
Net = Callable[..., Tensor]


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Move `tensor` to `device` without making the host wait for a GPU."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        # The host stages a copy from pageable memory and waits for it; one from pinned memory runs by itself.
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def _can_be_read(diffusion: Any, option: Attribute[Any], value: str | None) -> None:
    """Refuse a prediction that does not tell x0 at the noisy end."""
    name = value or _NATURAL.get(diffusion.schedule, "epsilon")
    if not make_parametrization(name).needs_alpha:
        return
    if diffusion.rescale_betas_zero_snr:
        why, instead = "with rescale_betas_zero_snr", "v_prediction"
    elif diffusion.schedule == "flow":
        why, instead = "of schedule 'flow'", "flow_prediction"
    else:
        return
    raise ValueError(
        f"'{option.name}' cannot be {name!r}: at the end {why} nothing is left of the image, and the noise alone "
        f"does not tell it; use {instead!r}, 'sample' or 'edm'"
    )


def _reaches_the_end(diffusion: Any, option: Attribute[Any], value: str | None) -> None:
    if value == "log_normal" and diffusion.rescale_betas_zero_snr:
        raise ValueError(
            f"'{option.name}' cannot be 'log_normal' with rescale_betas_zero_snr: the last timestep, where "
            "sigma / alpha is infinite, would never be trained; use 'uniform' or 'logit_normal'"
        )


def _has_a_normal(diffusion: Any, option: Attribute[Any], value: float | None) -> None:
    name = diffusion.times or ("log_normal" if diffusion.schedule == "edm" else "uniform")
    if value is not None and name == "uniform":
        raise ValueError(f"'{option.name}' is an option of times 'logit_normal' or 'log_normal', not 'uniform'")


def _numbers(value: float | tuple[float, ...] | list[float]) -> tuple[float, ...]:
    return tuple(map(float, value)) if isinstance(value, (tuple, list)) else (float(value),)


@define(eq=False, frozen=True)  # frozen, so that the tables always belong to the options
class Diffusion:
    """Trains a network to turn noise into images. Its arguments are the section `[diffusion]`.

    The schedules with timesteps are variance-preserving; "flow" is x_t = (1 - t) x0 + t noise, and "edm" is x0 + sigma
    noise (see `hookdiff.diffusion.process`). Any prediction goes with any schedule, except "epsilon" with one that ends
    in pure noise.

    Raises:
        ValueError: naming the argument that is out of its range, not read, or does not fit another.
    """

    schedule: str = field(default="linear", validator=one_of(SCHEDULES))
    # schedules with timesteps
    timesteps: int = field(
        default=1000, validator=and_(ge(1), le(1_000_000), read_by("schedule", SCHEDULES, *_DISCRETE))
    )
    beta_start: float | None = field(  # None: the schedule's own
        default=None,
        validator=and_(
            between(0, 1, open_ends=True), read_by("schedule", SCHEDULES, "linear", "scaled_linear", "sigmoid")
        ),
    )
    beta_end: float | None = field(
        default=None,
        validator=and_(
            between(0, 1, open_ends=True), read_by("schedule", SCHEDULES, "linear", "scaled_linear", "sigmoid")
        ),
    )
    rescale_betas_zero_snr: bool = field(default=False, validator=read_by("schedule", SCHEDULES, *_DISCRETE))
    # flow and edm
    time_shift: float = field(default=1.0, validator=and_(gt(0), read_by("schedule", SCHEDULES, "flow")))
    time_scale: float = field(default=1000.0, validator=and_(gt(0), read_by("schedule", SCHEDULES, "flow", "edm")))
    sigma_min: float = field(default=0.002, validator=and_(gt(0), read_by("schedule", SCHEDULES, "edm")))
    sigma_max: float = field(default=80.0, validator=and_(gt(0), read_by("schedule", SCHEDULES, "edm")))
    # None: "epsilon", "flow_prediction" for schedule "flow", "edm" for schedule "edm"
    prediction_type: str | None = field(default=None, validator=and_(optional(one_of(PREDICTION_TYPES)), _can_be_read))
    sigma_data: float = field(default=0.5, validator=gt(0))  # of the images; prediction and weighting "edm"
    weighting: str = field(default="uniform", validator=one_of(WEIGHTINGS))
    snr_gamma: float = field(default=5.0, validator=and_(gt(0), read_by("weighting", WEIGHTINGS, "min_snr")))
    p2_k: float = field(default=1.0, validator=and_(gt(0), read_by("weighting", WEIGHTINGS, "p2")))
    p2_gamma: float = field(default=1.0, validator=and_(ge(0), read_by("weighting", WEIGHTINGS, "p2")))
    loss: str = field(default="mse", validator=one_of(LOSSES))
    huber_delta: float = field(default=1.0, validator=and_(gt(0), read_by("loss", LOSSES, "huber")))
    # None: "uniform"; "log_normal" for schedule "edm"
    times: str | None = field(default=None, validator=and_(optional(one_of(TIMES)), _reaches_the_end))
    # of the normal distribution in `times`; None: the paper's
    time_mean: float | None = field(default=None, validator=_has_a_normal)
    time_std: float | None = field(default=None, validator=and_(optional(gt(0)), _has_a_normal))
    stratified: bool = False  # spread the times of a batch evenly
    conditional: bool | None = None  # tell the network the labels; None: no, and in a config: if the model takes them
    label_dropout: float = field(default=0.1, validator=between(0, 1))  # share of labels left out, for guidance
    # Mean and standard deviation of the images, of all or of each channel, in their range of [-1, 1]: the network sees
    # (x - mean) / std. What is sampled is back in [-1, 1].
    data_mean: float | tuple[float, ...] = field(default=0.0, converter=_numbers)
    data_std: float | tuple[float, ...] = field(
        default=1.0, converter=_numbers, validator=between(0, 1e6, open_ends=True)
    )
    _constants: dict[tuple[str, torch.device, torch.dtype], Tensor] = field(init=False, factory=dict, repr=False)

    def __attrs_post_init__(self) -> None:
        if self.sigma_min >= self.sigma_max:
            raise ValueError(f"'sigma_min' must be below sigma_max = {self.sigma_max:g}: {self.sigma_min:g}")
        _ = self.process  # a schedule of betas that cannot be is told now

    @cached_property
    def process(self) -> Process:
        """How images turn into noise."""
        if self.schedule == "flow":
            return Flow(self.time_shift, self.time_scale)
        if self.schedule == "edm":
            return VarianceExploding(self.sigma_min, self.sigma_max, self.time_scale)
        zero_snr = self.rescale_betas_zero_snr
        return Discrete(make_schedule(self.schedule, self.timesteps, self.beta_start, self.beta_end, zero_snr=zero_snr))

    @cached_property
    def parametrization(self) -> Parametrization:
        """The meaning of the network's output."""
        return make_parametrization(self.prediction_type or _NATURAL.get(self.schedule, "epsilon"), self.sigma_data)

    def draw(self, batch: Batch, generator: Generator) -> Batch:
        """Return `batch` with the randomness of this step in its draws.

        `noise` is standard normal, float32, of the shape of the inputs; `timesteps`, of shape n, are those of the
        process: int64 in 0..T-1, or float32; `labels`, if the objective is conditional, are the batch's with some
        replaced by -1. All are drawn on the generator's device and moved to that of the inputs, so a CPU generator
        gives the same numbers whatever the inputs live on.

        Raises:
            ValueError: if the objective is conditional and the batch has no labels.
        """
        shape, device, where = batch.inputs.shape, batch.inputs.device, generator.device
        noise = torch.randn(shape, generator=generator, device=where, dtype=torch.float32)
        times = self.draw_times(len(batch), generator)
        drawn = {"noise": to_device(noise, device), "timesteps": to_device(times, device)}
        if self.conditional:
            if batch.labels is None:
                raise ValueError("the objective is conditional, but the data has no labels")
            chance = torch.rand(len(batch), generator=generator, device=where, dtype=torch.float32)
            drawn["labels"] = torch.where(to_device(chance < self.label_dropout, device), -1, batch.labels)
        return Batch(batch.inputs, batch.labels, batch.indices, {**batch.draws, **drawn}, batch.total)

    def draw_times(self, num: int, generator: Generator) -> Tensor:
        """Return `num` times of the process, int64 timesteps or float32, on the generator's device."""
        name = self.times or ("log_normal" if self.schedule == "edm" else "uniform")
        mean, std = USUAL[name]
        mean, std = (mean if self.time_mean is None else self.time_mean), self.time_std or std
        return TIMES[name](self.process, uniforms(num, generator, stratified=self.stratified), mean, std)

    def __call__(self, net: Net, batch: Batch) -> LossOutput:
        """Return the loss of `net` on a batch that went through `draw`.

        The network gets float32 images and the time as `Process.network_time` says it, under autocast too, and the
        labels if the objective is conditional. It must return the shape of its images. The error is taken in float32;
        its mean is over c h w, then, weighted, over the samples. `LossOutput.per_sample` is without the weights.

        Raises:
            ValueError: if the network's output has another shape than its input.
        """
        noise, times = batch.draws["noise"], batch.draws["timesteps"]
        alpha, sigma, log_snr = self.process.rates(times, noise.ndim)
        x0 = self.standardised(batch.inputs)
        x_t = q_sample(x0, noise, alpha, sigma)
        # Autocast leaves additions and multiplications alone, so x_t and the target stay float32. What the network is
        # told of the time stays what it is, because bfloat16 takes 999 for 1000.
        told = self.process.network_time(times)
        output = self.predict(net, x_t, told, batch.draws.get("labels"), alpha, sigma)
        target = self.parametrization.target(x0, noise, alpha, sigma)
        if output.shape != target.shape:  # it might broadcast, and train on nonsense
            shapes = f"{tuple(output.shape)} for images of shape {tuple(target.shape)}"
            raise ValueError(f"the network returned shape {shapes}")
        error = self._error(output.float(), target)
        if self.weighting == "uniform":
            return LossOutput(error.mean(), error.detach().flatten(1).mean(1), times, log_snr.flatten())
        per_sample = error.flatten(1).mean(1)
        weights = self.weights(alpha.flatten(), sigma.flatten())
        return LossOutput((weights * per_sample).mean(), per_sample.detach(), times, log_snr.flatten())

    def weights(self, alpha: Tensor, sigma: Tensor) -> Tensor:
        """Return the weights of samples with these rates, of any one shape."""
        options = {"snr_gamma": self.snr_gamma, "p2_k": self.p2_k, "p2_gamma": self.p2_gamma}
        return loss_weights(self.weighting, self.parametrization, alpha, sigma, sigma_data=self.sigma_data, **options)

    def floor(self, timesteps: Tensor, variance: float | Tensor) -> Tensor:
        """Return the least squared error that who knows only mean and variance of the data can have.

        `timesteps` are times of the process (n), `variance` is that of `standardised` pixels, above 0. It is exact for
        white Gaussian images, where no network does better. Real images have structure, so a network that has learnt
        some of it is below; one that is above has not even learnt how bright and how varied the images are.

        The target is u = a x0 + b noise, x_t = alpha x0 + sigma noise. All being Gaussian, the error that is left is
        Var(u | x_t) = Var(u) - Cov(u, x_t)² / Var(x_t), with Var(u) = a² v + b² and Cov(u, x_t) = a alpha v + b sigma:

            v (a sigma - b alpha)² / (alpha² v + sigma²)

        Returns:
            n, float32: the mean over c h w of the squared error of the output, without the weights.
        """
        of_image, of_noise, alpha, sigma = self._target_rates(timesteps)
        across = of_image * sigma - of_noise * alpha
        return variance * across * across / (alpha * alpha * variance + sigma * sigma)

    def target_variance(self, timesteps: Tensor, variance: float | Tensor) -> Tensor:
        """Return a² v + b², the variance of the target u = a x0 + b noise: the error of who knows only its mean.

        Arguments and result are those of `floor`, which is nowhere above.
        """
        of_image, of_noise, _, _ = self._target_rates(timesteps)
        return of_image * of_image * variance + of_noise * of_noise

    def _target_rates(self, timesteps: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return a and b of the target a x0 + b noise at `timesteps`, alpha and sigma: n each."""
        alpha, sigma, _ = self.process.rates(timesteps, 1)
        one, zero = torch.ones_like(alpha), torch.zeros_like(alpha)
        target = self.parametrization.target
        return target(one, zero, alpha, sigma), target(zero, one, alpha, sigma), alpha, sigma

    def predict(self, net: Net, x_t: Tensor, told: Tensor, labels: Tensor | None, alpha: Any, sigma: Any) -> Tensor:
        """Return the network's output for x_t, n c h w; `told` and `labels` are n, the rates broadcast."""
        shown = self.parametrization.network_input(x_t, alpha, sigma)
        return net(shown, told) if labels is None else net(shown, told, labels)

    def standardised(self, images: Tensor) -> Tensor:
        """Return images (n c h w) as the process has them: (x - data_mean) / data_std."""
        return images if self._in_units else (images - self._each("mean", images)) / self._each("std", images)

    def restored(self, images: Tensor) -> Tensor:
        """Undo `standardised`."""
        return images if self._in_units else images * self._each("std", images) + self._each("mean", images)

    @property
    def _in_units(self) -> bool:
        return self.data_mean == (0.0,) and self.data_std == (1.0,)

    def _each(self, which: str, images: Tensor) -> Tensor:
        key = which, images.device, images.dtype
        if key not in self._constants:  # kept there, because a copy a step would make the host wait for the device
            values: tuple[float, ...] = getattr(self, f"data_{which}")
            if len(values) not in (1, images.shape[1]):
                raise ValueError(f"data_{which} has {len(values)} numbers for images of {images.shape[1]} channels")
            self._constants[key] = images.new_tensor(values).view(-1, 1, 1)
        return self._constants[key]

    def _error(self, output: Tensor, target: Tensor) -> Tensor:
        if self.loss == "mse":
            return functional.mse_loss(output, target, reduction="none")
        if self.loss == "l1":
            return functional.l1_loss(output, target, reduction="none")
        return functional.huber_loss(output, target, reduction="none", delta=self.huber_delta)
