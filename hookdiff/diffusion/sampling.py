"""Sampling: from noise back to images, with a trained network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Literal

import torch
from attrs import converters, define, evolve, field, validators
from attrs.validators import ge, le
from torch import Generator, Tensor

from hookdiff.data.memory import to_device
from hookdiff.diffusion.chain import Chain, standard_normal
from hookdiff.diffusion.clipping import Clipping
from hookdiff.diffusion.diffusion import Diffusion, Net, as_diffusion
from hookdiff.diffusion.guidance import ClassifierFree, Guidance
from hookdiff.diffusion.prediction import q_sample
from hookdiff.diffusion.process import IMAGE, Point, Process
from hookdiff.diffusion.solvers import Solver
from hookdiff.diffusion.spacing import Spacing
from hookdiff.errors import UserError
from hookdiff.models.base import half_computed
from hookdiff.models.compiler import compiled
from hookdiff.models.objective import AnyObjective, LossFunction
from hookdiff.models.sampler import Sampler
from hookdiff.options.choices import chosen
from hookdiff.options.fields import about
from hookdiff.terminal.pace import paced


@define(eq=False, frozen=True)
class Sampling(Sampler):
    """Makes images from noise, or from other images; its arguments are the keys of the config table [sampling].

    The process decides the defaults of sampler, spacing and clipping; the sampler decides the default of steps.
    """

    sampler: Solver | None = field(
        default=None,
        converter=converters.optional(chosen[Solver]),
        metadata=about(
            'method; default: "dpmpp_2m" with process "flow" or "vp", "ddpm" with "ddpm", "heun" with "edm"'
        ),
    )
    steps: int | None = field(
        default=None,
        validator=validators.optional([ge(1), le(1_000_000)]),
        metadata=about(
            "number of steps; at most the timesteps of the process, if it has some; default: 25 with the samplers "
            'of second order, "dpmpp_2m" and "heun", else 50'
        ),
    )
    spacing: Spacing | None = field(
        default=None,
        converter=converters.optional(chosen[Spacing]),
        metadata=about(
            'noise levels of the steps; default: "shifted" by three times the shift of the training with process '
            '"flow", or "shifted_by" three with a `shift_side`; "karras" with "edm", else "trailing"'
        ),
    )
    clipping: Clipping | None = field(
        default=None,
        converter=converters.optional(chosen[Clipping]),
        metadata=about('clipping of predicted images; default: "clamp" with process "vp" or "ddpm", else "none"'),
    )
    guidance: Guidance = field(
        default=ClassifierFree(),
        converter=chosen[Guidance],
        metadata=about("combination of the network's outputs with and without label and conditions"),
    )
    precision: Literal["float32", "bf16"] = field(
        default="float32",
        metadata=about(
            'precision of the network, by autocast: "float32", or "bf16", which is faster; steps are float32'
        ),
    )
    compile: bool = field(
        default=False,
        metadata=about("compile the network at its first call: a minute or more, which pays off for many images"),
    )
    weights: str | None = field(
        default=None,
        metadata=about(
            'weights for samples, exports and metrics, unless a command or a plugin names others: "model", or the '
            "name of an average; default: the first average, if there is one"
        ),
    )
    batch_size: int = field(
        default=256, validator=ge(1), metadata=about("the most images in one call of the network; a CPU makes fewer")
    )

    def fit(self, diffusion: Diffusion) -> Sampling:
        """Return these options, filled in with the defaults of the process of `diffusion`."""
        sampler, steps, spacing, clipping = self._parts(diffusion.process)
        return evolve(self, sampler=sampler, steps=steps, spacing=spacing, clipping=clipping)

    def _parts(self, process: Process) -> tuple[Solver, int, Spacing, Clipping]:
        sampler = self.sampler or Solver.of(process.default_sampler)
        spacing = self.spacing or Spacing.of(process.default_spacing)
        steps = self.steps or sampler.usual_steps
        return sampler, steps, spacing, self.clipping or Clipping.of(process.default_clipping)

    def check_objective(self, objective: LossFunction) -> None:
        """Raise UserError unless `objective` is a `Diffusion`."""
        _diffusion_of(objective)

    def sample(
        self,
        net: Net,
        diffusion: LossFunction,
        shape: Sequence[int],
        generators: Sequence[Generator],
        device: torch.device | str,
        dtype: torch.dtype = torch.float32,
        noise: Tensor | None = None,
        labels: Tensor | None = None,
        images: Tensor | None = None,
        strength: float = 0.8,
        conditions: Mapping[str, Tensor] | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Return one image for each generator.

        All noise of image k comes from `generators[k]`, so image k does not depend on the other images or on their
        number, up to rounding in the network: matrix products and convolutions choose their algorithm by batch size.
        The caller sets eval mode.

        With a `mask`, the rest of `images` is kept, as in RePaint, Lugmayr et al. 2022 (arXiv 2201.09865), eq.
        8, without its resampling. After each step of any sampler, with m = 1 where the image is known,

            x_t = m (alpha_t x0 + sigma_t noise) + (1 - m) x_t of the step

        where x0 is the normalized image and the noise is fresh.

        Args:
            net: the network, called as `Diffusion` calls it, with images of `dtype`.
            diffusion: the objective that the network was trained with, a `Diffusion`.
            shape: shape of one image, c h w.
            generators: one for each image; on the CPU, so that the noise is the same on every device.
            device: device of the network.
            dtype: of x_t, float32 or float64. The noise is drawn in float32 in any case.
            noise: standard normal noise to start from, n c h w; the generators then draw only the noise of the steps.
            labels: n, int64; -1 is no class. Required if the objective is conditional.
            images: n c h w in [-1, 1]: start from these, with noise added, rather than from pure noise.
            strength: with `images`, the share of the steps to run, in (0, 1]: 1 leaves little of the image.
            conditions: the conditions by name, n rows each. Required if the objective has `conditions`.
            mask: n 1 h w, bool, with `images`: the region to make anew; a strength of 1 ignores its old pixels.

        Returns:
            `dtype` of shape n c h w on `device`; in [-1, 1] unless `clipping` is "none".

        Raises:
            ValueError: for options that do not fit the objective, another dtype, or a tensor of the wrong shape.
            UserError: for another objective than a `Diffusion`.
        """
        diffusion = _diffusion_of(diffusion)
        solver, steps, _, clipping = self._parts(diffusion.process)
        points = self.points(diffusion, shape)
        if dtype not in (torch.float32, torch.float64):
            raise ValueError(f"{dtype} would round small steps away: use float32, and autocast in the net")
        results = torch.empty(len(generators), *shape, device=device, dtype=dtype)
        for name, tensor in (("noise", noise), ("images", images)):
            if tensor is not None and tensor.shape != results.shape:
                raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected {tuple(results.shape)}")
        if labels is not None and labels.shape != results.shape[:1]:
            raise ValueError(f"labels has shape {tuple(labels.shape)}, expected ({len(results)},)")
        if diffusion.conditional and labels is None and len(results):
            raise ValueError("the network was trained with labels: give one for each image, or -1 for no class")
        conditions = conditions or {}
        for name, column in conditions.items():
            if column.shape[:1] != results.shape[:1]:
                raise ValueError(f"condition {name!r} has shape {tuple(column.shape)}, expected {len(results)} rows")
        if set(conditions) != set(diffusion.condition_names) and len(results):
            got, needed = (", ".join(map(repr, names)) or "none" for names in (conditions, diffusion.condition_names))
            raise ValueError(f"expected the conditions {needed}, with which the network was trained, got {got}")
        if mask is not None and (
            images is None or mask.shape != (len(results), 1, *shape[1:]) or mask.dtype != torch.bool
        ):
            got = "no images" if images is None else f"{tuple(mask.shape)} of {mask.dtype}"
            raise ValueError(f"a mask needs images, and shape {(len(results), 1, *shape[1:])} of torch.bool; got {got}")
        if images is not None:
            if not 0 < strength <= 1:
                raise ValueError(f"strength must be in (0, 1], got {strength:g}")
            points = points[len(points) - max(1, int(steps * strength + 1e-9)) :]
        net = compiled(net) if self.compile else net
        # Not inference_mode: a tensor that the network caches in it, such as a table of positions, could not be used in
        # a later backward pass. It is not faster either. Autocast is around all steps, so that the
        # weights are cast once; it leaves the additions and multiplications of the steps alone.
        with torch.no_grad(), half_computed(net, results.device, always=self.precision == "bf16"):
            for start in range(0, len(results), self.batch_size):
                rows = slice(start, start + self.batch_size)
                x = standard_normal(shape, generators[rows], results.device) if noise is None else noise[rows]
                x = x.to(results)
                if images is None:
                    x = x * diffusion.process.initial_scale
                else:
                    x0 = diffusion.normalize(images[rows].to(results))
                    x = q_sample(x0, x, points[0].alpha, points[0].sigma)
                known = {name: to_device(column[rows], results.device) for name, column in conditions.items()}
                if labels is not None and diffusion.conditional:
                    known["labels"] = to_device(labels[rows], results.device)
                unknown = None if mask is None else to_device(mask[rows], results.device)
                chain = Chain(net, diffusion, clipping, self.guidance, steps, known, generators[rows])
                pairs = pairwise((*points, IMAGE))
                for point, next_point in paced(pairs, len(points), "sampling", "steps", size=lambda _: 1):
                    x = solver.step(chain, x, point, next_point)
                    if unknown is not None:
                        known_x = chain.noised(next_point.alpha * x0, next_point.sigma)
                        x = torch.where(unknown, x, known_x)
                x = diffusion.denormalize(x)
                results[rows] = x.clamp(-1, 1) if clipping.clips else x  # denormalize has rounded
        return results

    def points(self, diffusion: Diffusion, shape: Sequence[int] | None = None) -> list[Point]:
        """Return the points that a chain visits, noisiest first, without the clean image.

        They are those for images of `shape`, c h w, if the process depends on it. Default: those of the process itself,
        as for images of its `shift_side`.

        Raises:
            ValueError: naming the key, for options that do not fit `diffusion`.
        """
        sampler, steps, spacing, _ = self._parts(diffusion.process)
        sampler.check(diffusion.process)
        self.guidance.check(diffusion)
        process = diffusion.process if shape is None else diffusion.process.for_shape(shape)
        return spacing.points(process, steps)


def _diffusion_of(objective: LossFunction) -> Diffusion:
    if diffusion := as_diffusion(objective, "process"):
        return diffusion
    kind = type(objective.origin if isinstance(objective, AnyObjective) else objective).__name__
    raise UserError(
        f"Sampling makes images of a Diffusion, and the objective is a {kind}: write Diffusion(loss=...) for a loss of "
        "your own, or give the Loop a sampler of your own, an object with sample(net, objective, shape, ...)"
    )
