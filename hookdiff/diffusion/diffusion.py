"""The diffusion objective: add noise to images, call the network, and compare its output with the target."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from copy import copy
from functools import cached_property
from typing import Any, cast

import torch
from attrs import Attribute, Factory, define, field
from torch import Generator, Tensor

from hookdiff.data.batch import Batch
from hookdiff.data.memory import to_device
from hookdiff.diffusion.losses import MSE, Loss
from hookdiff.diffusion.prediction import Prediction, q_sample
from hookdiff.diffusion.process import VP, Flow, Process
from hookdiff.diffusion.times import Times
from hookdiff.diffusion.weighting import UniformWeighting, Weighting
from hookdiff.errors import nearest
from hookdiff.models.objective import AnyObjective, LossFunction, LossOutput, Objective
from hookdiff.options.choices import chosen
from hookdiff.options.fields import IS_FINITE, about, between

# (noisy images: n c h w, times: n, int64 or float32[, labels: n, int64][, name=condition ...]) -> n c h w
Net = Callable[..., Tensor]
Given = Mapping[str, Tensor]  # conditions by name, and "labels" (-1: none), n rows each


_ALL, _LABELS = "all", "labels"  # names in `label_dropout` beside the conditions
_PURE = frozenset(Weighting.known.values())  # weightings that depend only on the timestep


def _numbers(value: float | tuple[float, ...] | list[float]) -> tuple[float, ...]:
    return tuple(map(float, value)) if isinstance(value, (tuple, list)) else (float(value),)


def _names(value: str | Iterable[str] | Mapping[str, str]) -> tuple[str, ...] | dict[str, str]:
    if isinstance(value, Mapping):
        return dict(value)
    return (value,) if isinstance(value, str) else tuple(value)


def _are_free_names(_: Any, __: Any, conditions: tuple[str, ...] | dict[str, str]) -> None:
    names = conditions.values() if isinstance(conditions, dict) else conditions
    if taken := {"noise", "timesteps", _LABELS, _ALL}.intersection(names):
        raise ValueError(f"'conditions' cannot be named {taken.pop()!r}: the objective uses this name; choose another")


def _shares(value: float | Mapping[str, float]) -> float | dict[str, float]:
    return dict(value) if isinstance(value, Mapping) else value


def _share_key(name: str, shares: Iterable[str]) -> str:
    """Return the key of `shares` for the condition `name`. The key NAME is also for NAME_mask, unless it has a key."""
    return max((key for key in shares if f"{name}_".startswith(f"{key}_")), key=len, default="")


def _keys_are_conditions(diffusion: Diffusion, option: Attribute[Any], value: float | dict[str, float]) -> None:
    conditions = diffusion.conditions
    known = (_ALL, _LABELS, *(conditions.values() if isinstance(conditions, Mapping) else conditions))
    if isinstance(value, dict) and (strange := [name for name in value if name not in known]):
        raise ValueError(f"'label_dropout' has no condition {strange[0]!r}{nearest(strange[0], known)}")


def _fits_process(diffusion: Diffusion, option: Attribute[Any], value: Any) -> None:
    value.check(diffusion.process)


@define(eq=False, frozen=True)  # frozen, so that `_constants` always match the options
class Diffusion(Objective):
    """The objective that trains a network to denoise; its arguments are the keys of the config table [diffusion].

    Any prediction works with any process, except "epsilon" with a process that ends in pure noise. In a script,
    `conditional` is False by default.

    Raises:
        ValueError: for an argument that is out of its range, or does not fit another; the message names it.
    """

    process: Process = field(default=Flow(), converter=chosen[Process], metadata=about("process that adds noise"))
    prediction: Prediction = field(
        default=Factory(lambda self: self.process.default_prediction, takes_self=True),
        converter=chosen[Prediction],
        validator=_fits_process,
        metadata=about(
            'meaning of the network\'s output; default: "flow_prediction" with process "flow", "v_prediction" '
            'with "vp", "epsilon" with "ddpm", "edm" with "edm"'
        ),
    )
    weighting: Weighting = field(
        default=Factory(lambda self: self.process.default_weighting, takes_self=True),
        converter=chosen[Weighting],
        metadata=about('weight of each noise level in the loss; default: "min_snr" with process "vp", else "uniform"'),
    )
    times: Times = field(
        default=Factory(lambda self: self.process.default_times, takes_self=True),
        converter=chosen[Times],
        validator=_fits_process,
        metadata=about(
            'noise levels drawn in training; default: "logit_normal" with process "flow", "log_normal" with '
            '"edm", else "uniform"; each is stratified, except with "ddpm"'
        ),
    )
    loss: Loss = field(default=MSE(), converter=chosen[Loss], metadata=about("error of each pixel"))
    conditional: bool | None = field(
        default=None,
        metadata=about(
            "give the network the labels; default: true if the model has classes; in a config, true also sets a "
            "missing `model.num_classes` from the data"
        ),
    )
    conditions: tuple[str, ...] | dict[str, str] = field(
        default=(),
        converter=_names,
        validator=_are_free_names,
        metadata=about(
            "names of the conditions that the network gets from the samples by keyword, beside image and label; or a "
            'table of keywords and names, such as { encoder_hidden_states = "caption", "added.time_ids" = "size" }'
        ),
    )
    label_dropout: float | dict[str, float] = field(
        default=0.1,
        converter=_shares,
        validator=[between(0, 1), _keys_are_conditions],
        metadata=about(
            "share of training samples without their label and conditions, for guidance; or a table of independent "
            "shares: for `labels`, for each condition (the share of `size` is also for `size_mask` and other names "
            "that begin with `size_`, unless they have a share), and for `all` of these together"
        ),
    )
    data_mean: float | tuple[float, ...] = field(
        default=0.0,
        converter=_numbers,
        validator=IS_FINITE,
        metadata=about("mean of the images in [-1, 1], one number or one for each channel; x becomes (x - mean) / std"),
    )
    data_std: float | tuple[float, ...] = field(
        default=1.0,
        converter=_numbers,
        validator=between(0, 1e6, open_ends=True),
        metadata=about("standard deviation of the images, like `data_mean`; sampling maps images back to [-1, 1]"),
    )
    _constants: dict[tuple[str, torch.device, torch.dtype], Tensor] = field(init=False, factory=dict, repr=False)
    _nothing: Mapping[str, Tensor | None] = field(init=False, factory=dict, repr=False)

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "weighting", self.weighting.fit(self.prediction))
        if all(std == 1 for std in _numbers(self.data_std)):
            return
        for name, part in (("prediction", self.prediction), ("weighting", self.weighting)):
            if part.sigma_data not in (None, 1):
                raise ValueError(
                    f"'{name}': its sigma_data is {part.sigma_data:g}, and data_std gives the images a standard "
                    f"deviation of 1; write {name} = {{ use = {part.use!r}, sigma_data = 1.0 }}"
                )

    def bind(self, nothing: Mapping[str, Tensor | None]) -> Diffusion:
        """Return a copy with other null conditions, the values of the conditions in an unconditional sample.

        `nothing` has these values by name, for one sample. The loop passes those of the feed, such as the embedding of
        an empty text. A condition with the value None stays unchanged. Default: zeros.

        Raises:
            ValueError: if `label_dropout` names a condition with the value None.
        """
        shares = self.label_dropout if isinstance(self.label_dropout, dict) else {}
        if stay := [name for name in shares if name in nothing and nothing[name] is None]:
            raise ValueError(f"'label_dropout' cannot drop {stay[0]!r}, which every sample keeps; remove that key")
        objective = copy(self)
        object.__setattr__(objective, "_nothing", nothing)
        object.__setattr__(objective, "_constants", {})
        return objective

    def without(self, given: Given) -> dict[str, Tensor]:
        """Return labels and conditions of unconditional samples: -1, and the null conditions of `bind` or zeros."""
        return {name: self._without(name, column) for name, column in given.items()}

    def _without(self, name: str, column: Tensor) -> Tensor:
        if name == _LABELS or name not in self._nothing:
            return torch.full_like(column, -1 if name == _LABELS else 0)
        if (nothing := self._nothing[name]) is None:
            return column
        key = f"nothing {name}", column.device, column.dtype
        if key not in self._constants:
            self._constants[key] = nothing.to(column)
        return self._constants[key].expand_as(column)

    @cached_property
    def keywords(self) -> dict[str, str]:
        """The names of conditions, by the network's keyword for each. Keyword "a.b" is the key "b" of a dict "a"."""
        return dict(self.conditions) if isinstance(self.conditions, dict) else {name: name for name in self.conditions}

    @cached_property
    def condition_names(self) -> tuple[str, ...]:
        """The names of the conditions, each once."""
        return tuple(dict.fromkeys(self.keywords.values()))

    @property
    def drops(self) -> bool:
        """Whether training drops the label, and each condition, in some samples."""
        shares, names = self._dropout, (*[_LABELS] * bool(self.conditional), *self.condition_names)
        return bool(shares.get(_ALL)) or all(shares.get(_share_key(name, shares)) for name in names)

    @property
    def _dropout(self) -> dict[str, float]:
        return self.label_dropout if isinstance(self.label_dropout, dict) else {_ALL: self.label_dropout}

    def remarks(self) -> list[str]:
        """Return a warning if the noise level at which sampling starts has the weight 0, so that it is not trained."""
        of_noise = self.weighting.weights(self.prediction, torch.zeros(1), torch.ones(1))
        if not self.process.ends_in_noise or of_noise.any():
            return []
        return [
            f"diffusion.weighting: {self.weighting.use!r} gives pure noise, where sampling starts, a weight of 0, so "
            "the network never learns that step; use 'uniform' or 'edm'"
        ]

    def draw(self, batch: Batch, generator: Generator) -> Batch:
        """Return `batch` with the random draws of this step in `draws`, on the device of the inputs.

        `noise` is standard normal, float32, of the shape of the inputs. `timesteps` (n) are times of the process: int64
        in 0..T-1, or float32; their distribution may depend on the shape. `labels` (if the objective is conditional)
        and the conditions come from the batch; in some samples, `without` replaces them. Numbers are drawn on the
        generator's device, so a CPU generator gives the same numbers for every device. They are drawn for all samples
        of the step, also on other ranks, so that a sample gets the same numbers on any number of ranks.

        Raises:
            ValueError: if the batch has no labels for a conditional objective, or lacks one of the conditions, or if
                the process does not fit the shape of the inputs.
        """
        shape, device, where = (batch.total, *batch.inputs.shape[1:]), batch.inputs.device, generator.device
        noise = batch.own(torch.randn(shape, generator=generator, device=where, dtype=torch.float32))
        times = batch.own(self.times.draw(self.process.for_shape(shape[1:]), batch.total, generator))
        drawn = {"noise": to_device(noise, device), "timesteps": to_device(times, device)}
        if given := self.given(batch):
            dropped = {}
            for name in (_ALL, *given):
                if name in self._dropout:
                    chance = batch.own(torch.rand(batch.total, generator=generator, device=where, dtype=torch.float32))
                    dropped[name] = to_device(chance < self._dropout[name], device)
            for name, nothing in self.without(given).items():
                masks = [dropped[key] for key in (_ALL, _share_key(name, dropped)) if key in dropped]
                rows = torch.stack(masks).any(0) if masks[1:] else masks[0] if masks else None
                column = given[name]
                drawn[name] = column if rows is None else _replaced(column, rows, nothing)
        return batch.with_draws(drawn)

    def given(self, batch: Batch) -> dict[str, Tensor]:
        """Return the labels of `batch`, if the objective is conditional, and the conditions, by name.

        Raises:
            ValueError: if the batch lacks labels or a condition.
        """
        names = self.condition_names
        if not (self.conditional or names):
            return {}
        if self.conditional and batch.labels is None:
            raise ValueError("the objective is conditional, but the data has no labels; set conditional = false")
        if lacking := [name for name in names if name not in batch.conditions]:
            there = ", ".join(map(repr, batch.conditions)) or "none"
            near = nearest(lacking[0], batch.conditions)
            raise ValueError(f"the data has no condition {', '.join(map(repr, lacking))}; it has {there}{near}")
        labels = {_LABELS: batch.labels} if self.conditional and batch.labels is not None else {}
        return {**labels, **{name: batch.conditions[name] for name in names}}

    def __call__(self, net: Net, batch: Batch) -> LossOutput:
        """Return the loss of `net` on a batch that went through `draw`.

        The network gets float32 images, under autocast too, the times as `Process.network_time` returns them, and the
        labels and conditions as drawn. The error is computed in float32 and averaged over c h w, then weighted
        and averaged over the samples; `LossOutput.per_sample` is without the weights.

        Raises:
            ValueError: if the network's output has another shape than its images.
        """
        noise, times = batch.draws["noise"], batch.draws["timesteps"]
        alpha, sigma, log_snr = self.process.rates(times, noise.ndim)
        x0 = self.normalize(batch.inputs)
        x_t = q_sample(x0, noise, alpha, sigma)
        # Autocast leaves additions and multiplications alone, so x_t and the target stay float32. The times are never
        # cast, because bfloat16 would round 999 to 1000.
        output = self.predict(net, x_t, self.process.network_time(times), batch.draws, alpha, sigma)
        target = self.prediction.target(x0, noise, alpha, sigma)
        if output.shape != target.shape:  # broadcasting might give a meaningless loss
            expected = f"that of its images, {tuple(target.shape)}"
            raise ValueError(f"the network returned the shape {tuple(output.shape)}; it must be {expected}")
        error = self.loss(output.float(), target)
        per_sample = error.flatten(1).mean(1)
        if type(self.weighting) is UniformWeighting:
            return LossOutput(error.mean(), per_sample, times, log_snr.flatten())
        weights = self._weights(times, alpha, sigma)
        return LossOutput((weights * per_sample).mean(), per_sample, times, log_snr.flatten(), weights)

    def _weights(self, times: Tensor, alpha: Tensor, sigma: Tensor) -> Tensor:
        if type(self.weighting) not in _PURE or not isinstance(self.process, VP):
            return self.weighting.weights(self.prediction, alpha.flatten(), sigma.flatten())
        key = "weights", times.device, alpha.dtype
        if key not in self._constants:  # a table of all timesteps, since a dozen small operations slow each step
            every = torch.arange(self.process.timesteps, device=times.device)
            self._constants[key] = self.weighting.weights(self.prediction, *self.process.rates(every, 1)[:2])
        return self._constants[key].index_select(0, times)

    def floor(self, timesteps: Tensor, variance: float | Tensor) -> Tensor:
        """Return the least squared error of a network that knows only the mean and the variance of the data.

        `timesteps` are times of the process (n); `variance`, above 0, is the variance of normalized pixels. The result
        (n, float32) is the mean over c h w of the squared error of the output, without the weights. No network does
        better on white Gaussian images. Real images have structure, and a network that has learnt some of it has a
        lower error. A network with a higher error has not even learnt brightness and contrast.

        The target is u = a x0 + b noise, and x_t = alpha x0 + sigma noise. For Gaussian images of variance v the error
        is Var(u | x_t) = Var(u) - Cov(u, x_t)² / Var(x_t), with Var(u) = a² v + b², Cov(u, x_t) = a alpha v + b sigma:

            v (a sigma - b alpha)² / (alpha² v + sigma²)
        """
        of_image, of_noise, alpha, sigma = self._target_rates(timesteps)
        across = of_image * sigma - of_noise * alpha
        return variance * across * across / (alpha * alpha * variance + sigma * sigma)

    def target_variance(self, timesteps: Tensor, variance: float | Tensor) -> Tensor:
        """Return a² v + b², the variance of the target: the error of a network that knows only the target's mean.

        Arguments and result are as in `floor`, which is never larger.
        """
        of_image, of_noise, _, _ = self._target_rates(timesteps)
        return of_image * of_image * variance + of_noise * of_noise

    def _target_rates(self, timesteps: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return a and b of the target a x0 + b noise, alpha and sigma at `timesteps`, n each."""
        alpha, sigma, _ = self.process.rates(timesteps, 1)
        ones, zeros = torch.ones_like(alpha), torch.zeros_like(alpha)
        target = self.prediction.target
        return target(ones, zeros, alpha, sigma), target(zeros, ones, alpha, sigma), alpha, sigma

    def predict(self, net: Net, x_t: Tensor, times: Tensor, given: Given, alpha: Any, sigma: Any) -> Tensor:
        """Return the network's output for x_t, n c h w.

        `times` (as returned by `Process.network_time`) are n; `alpha` and `sigma` broadcast against x_t. The network
        gets the "labels" of `given`, if there are any, and the objective's conditions by keyword. It gets copies,
        since its layers may work in place.
        """
        images = self.prediction.network_input(x_t, alpha, sigma).clone()
        labels = (given[_LABELS].clone(),) if _LABELS in given else ()
        return net(images, times.clone(), *labels, **self.named(given))

    def named(self, given: Given) -> dict[str, Any]:
        """Return copies of the conditions in `given`, by the keywords of the network."""
        arguments: dict[str, Any] = {}
        for keyword, name in self.keywords.items():
            outer, _, key = keyword.partition(".")
            (arguments.setdefault(outer, {}) if key else arguments)[key or outer] = given[name].clone()
        return arguments

    def normalize(self, images: Tensor) -> Tensor:
        """Return `images` (n c h w) as (x - data_mean) / data_std."""
        return images if not self.is_normalized else (images - self._each("mean", images)) / self._each("std", images)

    def denormalize(self, images: Tensor) -> Tensor:
        """Undo `normalize`."""
        return images if not self.is_normalized else images * self._each("std", images) + self._each("mean", images)

    @cached_property
    def is_normalized(self) -> bool:
        """Whether `normalize` changes anything."""
        return (self.data_mean, self.data_std) != ((0.0,), (1.0,))

    def _each(self, which: str, images: Tensor) -> Tensor:
        key = which, images.device, images.dtype
        if key not in self._constants:  # a copy in each step would make the host wait for the device
            values = _numbers(self.data_mean if which == "mean" else self.data_std)
            if len(values) not in (1, images.shape[1]):
                raise ValueError(f"data_{which} has {len(values)} numbers; give 1, or {images.shape[1]}, one a channel")
            self._constants[key] = images.new_tensor(values).view(-1, 1, 1)
        return self._constants[key]


def _replaced(column: Tensor, rows: Tensor, nothing: Tensor) -> Tensor:
    return torch.where(rows.view(-1, *[1] * (column.dim() - 1)), nothing, column)


def as_diffusion(objective: LossFunction, *members: str) -> Diffusion | None:
    """Return the objective, without an adapter around it, if it has these `members` of a Diffusion; else None."""
    given = objective.origin if isinstance(objective, AnyObjective) else objective
    return cast(Diffusion, given) if all(hasattr(given, name) for name in members) else None
