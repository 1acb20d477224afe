"""Spacings, which choose the points of a process that a sampler visits."""

from abc import ABC, abstractmethod

from attrs import define, evolve, field
from attrs.validators import ge, gt

from hookdiff.diffusion.process import VP, Flow, Point, Process
from hookdiff.options.choices import Choice
from hookdiff.options.fields import about


class Spacing(Choice, ABC):
    """Chooses the points that a sampler visits."""

    kind = "spacing"

    @abstractmethod
    def points(self, process: Process, steps: int) -> list[Point]:
        """Return the `steps` points, noisiest first, without the clean image.

        Raises:
            ValueError: naming `spacing`, if the spacing cannot be used with the process.
        """


@define(frozen=True)
class Trailing(Spacing):
    """Equal distances in time, starting at the noisiest point."""

    def points(self, process: Process, steps: int) -> list[Point]:
        return process.trailing(steps)


@define(frozen=True)
class Leading(Spacing):
    """Timesteps floor(i T / N) + offset of process "vp", so that the last timestep is the offset.

    The first timestep is up to T / N before the noisiest. The network expects traces of an image there, but pure
    noise has none (Lin et al. 2023, arXiv 2305.08891, section 3.3).
    """

    offset: int = field(
        default=0, validator=ge(0), metadata=about("added to each timestep; the steps_offset of diffusers")
    )

    def points(self, process: Process, steps: int) -> list[Point]:
        if not isinstance(process, VP):
            raise ValueError(f"'spacing' cannot be 'leading' for process {process.use!r}, which has no timesteps")
        timesteps = [i * process.timesteps // steps + self.offset for i in reversed(range(steps))]
        if timesteps[0] >= process.timesteps:
            most = process.timesteps - 1 - (timesteps[0] - self.offset)
            raise ValueError(
                f"'spacing.offset' = {self.offset} leads beyond the last timestep; with these steps at most {most}"
            )
        return process.at_timesteps(timesteps)


@define(frozen=True)
class Karras(Spacing):
    """Noise levels that are dense where the noise is low: Karras et al. 2022 (arXiv 2206.00364), eq. 5."""

    rho: float = field(default=7.0, validator=gt(0), metadata=about("larger: more steps where the noise is low"))

    def points(self, process: Process, steps: int) -> list[Point]:
        if process.ends_in_noise:
            raise ValueError(
                "'spacing' cannot be 'karras', since this process ends in pure noise, where sigma / alpha is infinite; "
                "use 'trailing'"
            )
        return [process.at(sigma) for sigma in karras_sigmas(steps, *process.ratio_range, self.rho)]


@define(frozen=True)
class Shifted(Spacing):
    """Equal distances in time of process "flow", with another shift than in training."""

    shift: float = field(validator=gt(0), metadata=about("required; k: t becomes k t / (1 + (k - 1) t)"))

    def points(self, process: Process, steps: int) -> list[Point]:
        return evolve(_flow(process, self), shift=self.shift).trailing(steps)


@define(frozen=True)
class ShiftedBy(Spacing):
    """Equal distances in time of process "flow", with a multiple of the shift in training.

    If that shift depends on the shape of the images (`shift_side`), so does this one.
    """

    factor: float = field(default=3.0, validator=gt(0), metadata=about("k is the shift in training times this"))

    def points(self, process: Process, steps: int) -> list[Point]:
        flow = _flow(process, self)
        return evolve(flow, shift=self.factor * flow.shift).trailing(steps)


def _flow(process: Process, spacing: Spacing) -> Flow:
    if isinstance(process, Flow):
        return process
    raise ValueError(f"'spacing' cannot be {spacing.use!r} for process {process.use!r}, only 'flow'; use 'trailing'")


def karras_sigmas(steps: int, sigma_min: float, sigma_max: float, rho: float = 7.0) -> list[float]:
    """Return `steps` noise levels from `sigma_max` to `sigma_min`; a single level is `sigma_max`."""
    if steps == 1:
        return [sigma_max]
    high, low = sigma_max ** (1 / rho), sigma_min ** (1 / rho)
    inner = [(high + i / (steps - 1) * (low - high)) ** rho for i in range(1, steps - 1)]
    return [sigma_max, *inner, sigma_min]  # the ends exactly


Spacing.known = {
    "trailing": Trailing,
    "leading": Leading,
    "karras": Karras,
    "shifted": Shifted,
    "shifted_by": ShiftedBy,
}
