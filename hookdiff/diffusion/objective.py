"""The diffusion objective: noise the images, let the network predict, compare."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from attrs import Attribute, Factory, define, field
from torch import Generator, Tensor

from hookdiff.data.batch import Batch
from hookdiff.diffusion.losses import MSE, Loss, to_loss
from hookdiff.diffusion.prediction import Prediction, q_sample, to_prediction
from hookdiff.diffusion.process import VP, Process, to_process
from hookdiff.diffusion.times import Times, to_times
from hookdiff.diffusion.weighting import UniformWeighting, Weighting, to_weighting
from hookdiff.objective import LossOutput
from hookdiff.options import between

# (network input: n c h w, its time: n, int64 or float32[, labels: n, int64]) -> n c h w
Net = Callable[..., Tensor]


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Move `tensor` to `device` without making the host wait for a GPU."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        # The host stages a copy from pageable memory and waits for it; one from pinned memory runs by itself.
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def _numbers(value: float | tuple[float, ...] | list[float]) -> tuple[float, ...]:
    return tuple(map(float, value)) if isinstance(value, (tuple, list)) else (float(value),)


def _fits_process(diffusion: Any, option: Attribute[Any], value: Any) -> None:
    value.check(diffusion.process)


@define(eq=False, frozen=True)  # frozen, so that the tables always belong to the options
class Diffusion:
    """Trains a network to turn noise into images. Its arguments are the section `[diffusion]`.

    Any prediction goes with any process, except "epsilon" with one that ends in pure noise. What is left out is what
    the field uses with the process: prediction "epsilon" with VP, "flow_prediction" with flow, "edm" with EDM.

    Raises:
        ValueError: naming the argument that is out of its range, or does not fit another.
    """

    process: Process = field(default=VP(), converter=to_process)  # how images turn into noise
    prediction: Prediction = field(  # the meaning of the network's output
        default=Factory(lambda self: Prediction.of(self.process.default_prediction), takes_self=True),
        converter=to_prediction,
        validator=_fits_process,
    )
    weighting: Weighting = field(default=UniformWeighting(), converter=to_weighting)  # how much each noise level counts
    times: Times = field(  # which noise levels a step looks at
        default=Factory(lambda self: Times.of(self.process.default_times), takes_self=True),
        converter=to_times,
        validator=_fits_process,
    )
    loss: Loss = field(default=MSE(), converter=to_loss)  # the error of a pixel
    conditional: bool | None = None  # give the network the labels; None: no, and in a config: if the model takes them
    label_dropout: float = field(default=0.1, validator=between(0, 1))  # share of labels left out, for guidance
    # Mean and standard deviation of the images, of all or of each channel, in their range of [-1, 1]: the network sees
    # (x - mean) / std. What is sampled is back in [-1, 1].
    data_mean: float | tuple[float, ...] = field(default=0.0, converter=_numbers)
    data_std: float | tuple[float, ...] = field(
        default=1.0, converter=_numbers, validator=between(0, 1e6, open_ends=True)
    )
    moved_keys: ClassVar[Mapping[str, str]] = {
        "schedule": "process = 'flow' or 'edm', or process = { use = 'vp', schedule = 'cosine' }",
        "timesteps": "process = { use = 'vp', timesteps = 1000 }",
        "beta_start": "process = { use = 'vp', schedule = { use = 'linear', beta_start = 1e-4 } }",
        "beta_end": "process = { use = 'vp', schedule = { use = 'linear', beta_end = 0.02 } }",
        "rescale_betas_zero_snr": "process = { use = 'vp', rescale_betas_zero_snr = true }",
        "time_shift": "process = { use = 'flow', shift = 3.0 }",
        "time_scale": "process = { use = 'flow', time_scale = 1000.0 }",
        "sigma_min": "process = { use = 'edm', sigma_min = 0.002 }",
        "sigma_max": "process = { use = 'edm', sigma_max = 80.0 }",
        "prediction_type": "prediction = 'v_prediction'",
        "sigma_data": "prediction = { use = 'edm', sigma_data = 0.5 }",
        "snr_gamma": "weighting = { use = 'min_snr', gamma = 5.0 }",
        "p2_k": "weighting = { use = 'p2', k = 1.0 }",
        "p2_gamma": "weighting = { use = 'p2', gamma = 1.0 }",
        "huber_delta": "loss = { use = 'huber', delta = 1.0 }",
        "time_mean": "times = { use = 'logit_normal', mean = 0.0 }",
        "time_std": "times = { use = 'logit_normal', std = 1.0 }",
        "stratified": "times = { use = 'uniform', stratified = true }",
    }
    _constants: dict[tuple[str, torch.device, torch.dtype], Tensor] = field(init=False, factory=dict, repr=False)

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "weighting", self.weighting.fit(self.prediction))
        if all(std == 1 for std in _numbers(self.data_std)):
            return
        for name, part in (("prediction", self.prediction), ("weighting", self.weighting)):
            sigma_data = getattr(part, "sigma_data", 1)
            if sigma_data != 1:
                raise ValueError(
                    f"'{name}': its sigma_data is {sigma_data:g}, and data_std gives the images a standard deviation "
                    f"of 1; write {name} = {{ use = {part.use!r}, sigma_data = 1.0 }}"
                )

    def remarks(self) -> list[str]:
        """Return what is allowed and probably not meant: a weighting that leaves a noise level untrained."""
        if not self.process.ends_in_noise or self.weights(torch.zeros(1), torch.ones(1)).any():
            return []
        return [
            f"diffusion.weighting: {self.weighting.use!r} gives pure noise, where sampling starts, a weight of 0, so "
            "the network never learns that step; use 'uniform' or 'edm'"
        ]

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
        return self.times.draw(self.process, num, generator)

    def __call__(self, net: Net, batch: Batch) -> LossOutput:
        """Return the loss of `net` on a batch that went through `draw`.

        The network gets float32 images and the time as `Process.network_time` gives it, under autocast too, and the
        labels if the objective is conditional. It must return the shape of its images. The error is taken in float32;
        its mean is over c h w, then, weighted, over the samples. `LossOutput.per_sample` is without the weights.

        Raises:
            ValueError: if the network's output has another shape than its input.
        """
        noise, times = batch.draws["noise"], batch.draws["timesteps"]
        alpha, sigma, log_snr = self.process.rates(times, noise.ndim)
        x0 = self.normalize(batch.inputs)
        x_t = q_sample(x0, noise, alpha, sigma)
        # Autocast leaves additions and multiplications alone, so x_t and the target stay float32. The network's time is
        # not cast, because bfloat16 takes 999 for 1000.
        output = self.predict(net, x_t, self.process.network_time(times), batch.draws.get("labels"), alpha, sigma)
        target = self.prediction.target(x0, noise, alpha, sigma)
        if output.shape != target.shape:  # it might broadcast, and train on nonsense
            shapes = f"{tuple(output.shape)} for images of shape {tuple(target.shape)}"
            raise ValueError(f"the network returned shape {shapes}")
        error = self.loss(output.float(), target)
        if type(self.weighting) is UniformWeighting:
            return LossOutput(error.mean(), error.detach().flatten(1).mean(1), times, log_snr.flatten())
        per_sample = error.flatten(1).mean(1)
        weights = self.weights(alpha.flatten(), sigma.flatten())
        return LossOutput((weights * per_sample).mean(), per_sample.detach(), times, log_snr.flatten())

    def weights(self, alpha: Tensor, sigma: Tensor) -> Tensor:
        """Return the weights of samples with these rates, of any one shape."""
        return self.weighting.weights(self.prediction, alpha, sigma)

    def floor(self, timesteps: Tensor, variance: float | Tensor) -> Tensor:
        """Return the least squared error that who knows only mean and variance of the data can have.

        `timesteps` are times of the process (n), `variance` is that of normalized pixels, above 0. It is exact for
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
        target = self.prediction.target
        return target(one, zero, alpha, sigma), target(zero, one, alpha, sigma), alpha, sigma

    def predict(self, net: Net, x_t: Tensor, times: Tensor, labels: Tensor | None, alpha: Any, sigma: Any) -> Tensor:
        """Return the network's output for x_t, n c h w.

        `times`, as the network gets them, and `labels` are n; `alpha` and `sigma` broadcast against x_t.
        """
        shown = self.prediction.network_input(x_t, alpha, sigma)
        return net(shown, times) if labels is None else net(shown, times, labels)

    def normalize(self, images: Tensor) -> Tensor:
        """Return images (n c h w) as the process has them: (x - data_mean) / data_std."""
        return images if not self.is_normalized else (images - self._each("mean", images)) / self._each("std", images)

    def denormalize(self, images: Tensor) -> Tensor:
        """Undo `normalize`."""
        return images if not self.is_normalized else images * self._each("std", images) + self._each("mean", images)

    @property
    def is_normalized(self) -> bool:
        """Whether `normalize` changes anything."""
        return (self.data_mean, self.data_std) != ((0.0,), (1.0,))

    def _each(self, which: str, images: Tensor) -> Tensor:
        key = which, images.device, images.dtype
        if key not in self._constants:  # kept there, because a copy a step would make the host wait for the device
            values: tuple[float, ...] = getattr(self, f"data_{which}")
            if len(values) not in (1, images.shape[1]):
                raise ValueError(f"data_{which} has {len(values)} numbers for images of {images.shape[1]} channels")
            self._constants[key] = images.new_tensor(values).view(-1, 1, 1)
        return self._constants[key]
