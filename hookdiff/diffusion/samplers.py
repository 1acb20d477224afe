"""Samplers: from noise back to images, with a trained network."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from attrs import define, evolve, field
from attrs.validators import and_, ge, gt, le, optional
from torch import Generator, Tensor

from hookdiff.diffusion.objective import Diffusion, Net, to_device
from hookdiff.diffusion.options import between, one_of, read_by
from hookdiff.diffusion.parametrization import noise_from_x0, q_sample
from hookdiff.diffusion.process import IMAGE, SPACINGS, Flow, Point
from hookdiff.diffusion.steps import churned, ddim_step, ddpm_step, dpmpp_2m_step, heun_step


def _standard_normal(shape: Sequence[int], generators: Sequence[Generator], device: torch.device) -> Tensor:
    drawn = [torch.randn(*shape, generator=g, device=g.device, dtype=torch.float32) for g in generators]
    return to_device(torch.stack(drawn), device)


@define(eq=False)
class Chain:
    """The images of one call of the network, on their way from noise."""

    options: Sampling
    net: Net
    diffusion: Diffusion
    labels: Tensor | None
    generators: Sequence[Generator]
    before: tuple[Tensor, Point] | None = None  # x0 and the moment of the step before, for those who want it

    def step(self, x: Tensor, now: Point, after: Point) -> Tensor:
        """Lead `x` from `now` to `after`."""
        options = self.options
        if options.s_churn:
            x, now = self._churn(x, now)
        return SAMPLERS[options.sampler](self, x, now, after)

    def look(self, x: Tensor, at: Point) -> tuple[Tensor, Tensor]:
        """Return the image, clamped if the options say so, and the noise that the network sees in `x`."""
        options, diffusion = self.options, self.diffusion
        output = self._output(x, at).to(x.dtype)
        x0, noise = diffusion.parametrization.x0_and_noise(output, x, at.alpha, at.sigma)
        if not options.clips:
            return x0, noise
        shown = diffusion.restored(x0)
        if options.thresholding:
            shown = thresholded(shown, options.dynamic_thresholding_ratio)
        x0 = diffusion.standardised(shown.clamp(-1, 1))
        return x0, noise_from_x0(x, x0, at.alpha, at.sigma)

    def noised(self, mean: Tensor, std: float) -> Tensor:
        """Return `mean` with fresh noise; without noise to add none is drawn, so the chain is a function of x_T."""
        return mean + std * _standard_normal(mean.shape[1:], self.generators, mean.device) if std else mean

    def _output(self, x: Tensor, at: Point) -> Tensor:
        options, labels = self.options, self.labels
        low, high = options.guidance_interval
        if labels is None or options.guidance_scale == 1 or not low <= at.ratio <= high:
            return self._ask(x, at, labels)
        # One call for both; and in this form a scale of 0 is the unconditional output exactly.
        both = self._ask(torch.cat([x, x]), at, torch.cat([labels, torch.full_like(labels, -1)]))
        with_label, without = both.chunk(2)
        return without + options.guidance_scale * (with_label - without)

    def _ask(self, x: Tensor, at: Point, labels: Tensor | None) -> Tensor:
        whole = isinstance(at.time, int)
        told = torch.full((len(x),), at.time, device=x.device, dtype=torch.int64 if whole else x.dtype)
        return self.diffusion.predict(self.net, x, told, labels, at.alpha, at.sigma)

    def _churn(self, x: Tensor, now: Point) -> tuple[Tensor, Point]:
        options = self.options
        level = churned(now, options.s_churn, options.steps, options.s_tmin, options.s_tmax)
        if level == now.ratio:
            return x, now
        higher = self.diffusion.process.at(level)
        std = options.s_noise * math.sqrt(level**2 - now.ratio**2)
        return self.noised(x / now.alpha, std) * higher.alpha, higher


def _ddim(chain: Chain, x: Tensor, now: Point, after: Point) -> Tensor:
    return chain.noised(*ddim_step(*chain.look(x, now), now, after, chain.options.eta))


def _ddpm(chain: Chain, x: Tensor, now: Point, after: Point) -> Tensor:
    x0, _ = chain.look(x, now)
    return chain.noised(*ddpm_step(x, x0, now, after, chain.options.variance))


def _euler(chain: Chain, x: Tensor, now: Point, after: Point) -> Tensor:
    # Whatever the coordinates of the probability flow, Euler's method moves x0 and the noise apart in a straight line.
    return q_sample(*chain.look(x, now), after.alpha, after.sigma)


def _heun(chain: Chain, x: Tensor, now: Point, after: Point) -> Tensor:
    seen, process = chain.look(x, now), chain.diffusion.process
    end = q_sample(*seen, after.alpha, after.sigma)
    unreadable = chain.diffusion.parametrization.needs_sigma or chain.options.clips  # a division by sigma
    if not after.sigma and (unreadable or not process.knows_image):
        return end  # as algorithm 2 of the paper
    if not now.alpha and not process.straight:
        return end  # sigma / alpha is infinite
    return heun_step(x, seen, chain.look(end, after), now, after, straight=process.straight)


def _dpmpp_2m(chain: Chain, x: Tensor, now: Point, after: Point) -> Tensor:
    x0, _ = chain.look(x, now)
    before, chain.before = chain.before, (x0, now)
    return dpmpp_2m_step(x, x0, before, now, after)


SAMPLERS: dict[str, Callable[[Chain, Tensor, Point, Point], Tensor]] = {
    "ddim": _ddim,
    "ddpm": _ddpm,
    "euler": _euler,
    "heun": _heun,
    "dpmpp_2m": _dpmpp_2m,
}


def thresholded(images: Tensor, ratio: float) -> Tensor:
    """Scale each image down to [-1, 1] by the quantile `ratio` of its |x|, where that is above 1, and clamp.

    Dynamic thresholding: Saharia et al. 2022 (arXiv 2205.11487), section 2.3. `images` are n c h w.
    """
    bound = images.abs().flatten(1).quantile(ratio, dim=1).clamp(min=1).view(-1, 1, 1, 1)
    return (images / bound).clamp(-1, 1)


@define(eq=False, frozen=True)  # frozen, so that no option can be set past the check of the others
class Sampling:
    """Makes images. Its arguments are the section `[sampling]`.

    Raises:
        ValueError: naming the argument that is out of its range or that the chosen sampler does not read.
    """

    sampler: str = field(default="ddim", validator=one_of(SAMPLERS))
    steps: int = field(default=50, validator=ge(1))  # of the sampler; heun calls the network twice in each
    # None: "trailing", and "karras" for schedule "edm"; see sampling_timesteps and karras_sigmas
    spacing: str | None = field(default=None, validator=optional(one_of(SPACINGS)))
    rho: float = field(default=7.0, validator=and_(gt(0)))  # spacing "karras": how dense where the noise is low
    time_shift: float | None = field(default=None, validator=optional(gt(0)))  # schedule "flow"; None: as in training
    # ddim only: how much of DDPM's noise is added back in each step, 0 to 1
    eta: float = field(default=0.0, validator=and_(ge(0), le(1), read_by("sampler", SAMPLERS, "ddim")))
    # ddpm only: the variance of that noise
    variance: str = field(
        default="fixed_small",
        validator=and_(one_of(("fixed_small", "fixed_large")), read_by("sampler", SAMPLERS, "ddpm")),
    )
    # euler and heun: fresh noise in each step, S_churn of Karras et al. 2022, where s_tmin <= sigma / alpha <= s_tmax
    s_churn: float = field(default=0.0, validator=and_(ge(0), read_by("sampler", SAMPLERS, "euler", "heun")))
    s_tmin: float = field(default=0.0, validator=and_(ge(0), read_by("sampler", SAMPLERS, "euler", "heun")))
    s_tmax: float = field(default=math.inf, validator=and_(ge(0), read_by("sampler", SAMPLERS, "euler", "heun")))
    s_noise: float = field(default=1.0, validator=and_(gt(0), read_by("sampler", SAMPLERS, "euler", "heun")))  # its std
    clip_sample: bool = True  # clamp every predicted image to [-1, 1]
    thresholding: bool = False  # instead, scale its range down to [-1, 1] where it is wider: Imagen's, per image
    dynamic_thresholding_ratio: float = field(
        default=0.995, validator=between(0, 1)
    )  # quantile of |x0| that is the range
    guidance_scale: float = field(default=1.0, validator=ge(0))  # 1: none
    # guidance is for low <= sigma / alpha <= high alone
    guidance_interval: tuple[float, float] = field(default=(0.0, math.inf), validator=between(0, math.inf))
    batch_size: int = field(default=256, validator=ge(1))  # images a call of the network

    def sample(
        self,
        net: Net,
        diffusion: Diffusion,
        shape: Sequence[int],
        generators: Sequence[Generator],
        device: torch.device | str,
        dtype: torch.dtype = torch.float32,
        noise: Tensor | None = None,
        labels: Tensor | None = None,
        images: Tensor | None = None,
        strength: float = 0.8,
    ) -> Tensor:
        """Return one image for each generator.

        All noise of image k comes from `generators[k]`, so it does not matter which other images are made, or
        how many at a time: image k is the same to the bit wherever the network's result for it is. Matrix
        products and convolutions choose their algorithm by batch size; with them it is the same to rounding.

        With `clip_sample` the noise is recomputed from the clamped image, so that the two still make up x_t;
        without it, a step is an affine map of x_t and the network's output. Eval mode is the caller's to set.

        Args:
            net: the network, called as `Diffusion` calls it, with images of `dtype`.
            diffusion: the objective that the network was trained with.
            shape: of one image, c h w.
            generators: one an image; on the CPU, so that the noise is the same on every device.
            device: where the network is.
            dtype: of x_t, float32 or float64. The noise is drawn in float32 whatever it is.
            noise: standard normal noise to start from, n c h w; the generators then only give that of the steps.
            labels: n, int64; -1 is no class. Needed if the objective is conditional.
            images: n c h w in [-1, 1]: start from these, noised, rather than from pure noise.
            strength: with `images`, the share of the steps that are made, in (0, 1]: 1 leaves little of the image.

        Returns:
            `dtype` of shape n c h w on `device`; in [-1, 1] with `clip_sample` or `thresholding`.

        Raises:
            ValueError: if the options do not fit the objective, `dtype` is another one, or a tensor has another shape.
        """
        points = self.points(diffusion)
        if dtype not in (torch.float32, torch.float64):
            raise ValueError(f"{dtype} would round small steps away: use float32, and autocast in the net")
        made = torch.empty(len(generators), *shape, device=device, dtype=dtype)
        for name, given in (("noise", noise), ("images", images)):
            if given is not None and given.shape != made.shape:
                raise ValueError(f"{name} has shape {tuple(given.shape)}, expected {tuple(made.shape)}")
        if labels is not None and labels.shape != made.shape[:1]:
            raise ValueError(f"labels has shape {tuple(labels.shape)}, expected ({len(made)},)")
        if diffusion.conditional and labels is None and len(made):
            raise ValueError("the network was trained with labels: give one for each image, or -1 for none")
        if images is not None:
            if not 0 < strength <= 1:
                raise ValueError(f"strength must be in (0, 1]: {strength:g}")
            points = points[len(points) - max(1, int(self.steps * strength + 1e-9)) :]
        # Not inference_mode: a tensor that the network makes in it and keeps, such as a table of positions,
        # could never take part in a backward pass.
        with torch.no_grad():
            for start in range(0, len(made), self.batch_size):
                rows = slice(start, start + self.batch_size)
                x = _standard_normal(shape, generators[rows], made.device) if noise is None else noise[rows]
                x = x.to(made)
                if images is None:
                    x = x * diffusion.process.initial_scale
                else:
                    x = q_sample(diffusion.standardised(images[rows].to(made)), x, points[0].alpha, points[0].sigma)
                told = labels[rows].to(made.device) if labels is not None and diffusion.conditional else None
                chain = Chain(self, net, diffusion, told, generators[rows])
                for now, after in pairwise((*points, IMAGE)):
                    x = chain.step(x, now, after)
                shown = diffusion.restored(x)
                made[rows] = shown.clamp(-1, 1) if self.clips else shown  # data_std and data_mean have rounded
        return made

    @property
    def clips(self) -> bool:
        """Whether predicted images are kept in [-1, 1]."""
        return self.clip_sample or self.thresholding

    def points(self, diffusion: Diffusion) -> list[Point]:
        """Return the moments that a chain visits, noisiest first, without the image itself.

        Raises ValueError, naming the key, for options that do not fit `diffusion`.
        """
        process = diffusion.process
        if self.time_shift is not None:
            if not isinstance(process, Flow):
                raise ValueError(f"'time_shift' is for schedule 'flow', not {diffusion.schedule!r}")
            process = evolve(process, time_shift=self.time_shift)
        spacing = self.spacing or process.spacings[0]
        if spacing not in process.spacings:
            known = ", ".join(process.spacings)
            raise ValueError(
                f"'spacing' {spacing!r} does not fit schedule {diffusion.schedule!r}; known there: {known}"
            )
        if spacing == "karras" and process.ends_in_noise:
            raise ValueError("'spacing' 'karras' needs a largest sigma: with rescale_betas_zero_snr it is infinite")
        if self.guidance_scale != 1 and diffusion.conditional is not None:
            if not diffusion.conditional:
                raise ValueError("'guidance_scale' needs a network that was trained with labels, and this one was not")
            if not diffusion.label_dropout:
                raise ValueError(
                    "'guidance_scale' needs diffusion.label_dropout above 0: the network never saw no label"
                )
        low, high = self.guidance_interval
        if low > high:
            raise ValueError(f"'guidance_interval' must be [low, high]: [{low:g}, {high:g}]")
        return process.points(self.steps, spacing, self.rho)
