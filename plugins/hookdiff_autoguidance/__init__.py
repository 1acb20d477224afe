"""Guides samples away from the outputs that the network had earlier in its training."""

import logging
from collections.abc import Callable, Generator, Mapping
from typing import Any, TypeGuard

from attrs import define, evolve, field
from attrs.validators import ge
from torch import Tensor, nn
from torch.func import functional_call

from hookdiff import Loop, SampleRequest, Samples, hookimpl, saved
from hookdiff.diffusion import Ask, ClassifierFree, Given, Guidance, Net, Point, Sampling
from hookdiff.machine import is_sharded
from hookdiff.models import Sampler, choose_weights, compiled
from hookdiff.options import COUNT, about, between, is_interval

logger = logging.getLogger("hookdiff")
OWN = "model"  # the name of weights that are not an average


@define(frozen=True)
class AwayFrom(Guidance):
    """Guides by d + (scale - 1) (d - g), for the outputs d of the network and g of the `guide`.

    This is eq. 3 of Karras et al. 2024 (arXiv 2406.02507). Outside of the `interval` of sigma / alpha the output is d,
    and the guide is not called.
    """

    guide: Net
    scale: float
    interval: tuple[float, float]

    @property
    def use(self) -> str:
        return "autoguidance"

    def output(self, ask: Ask, x: Tensor, at: Point, given: Given) -> Tensor:
        output = ask(x, given)
        low, high = self.interval
        if not low <= at.ratio <= high:
            return output
        return output + (self.scale - 1) * (output - ask(x, given, net=self.guide))


@define(eq=False)
class Autoguidance:
    """Guides samples away from earlier outputs of the network (Karras et al. 2024, arXiv 2406.02507).

    The guide is a copy of the averaged weights from earlier in the run. It makes the same mistakes as the network, but
    larger, so the difference from the guide's output to the network's points away from these mistakes. Each step of the
    sampler calls the guide and the network. The guide takes as much host memory as the weights.

    Only samples of averaged weights are guided. This plugin does not guide samples if classifier-free guidance is on,
    if the weights are sharded, or if the sampler is not one of hookdiff.
    """

    scale: float = field(default=1.5, validator=ge(1), metadata=about("strength; 1: no guidance"))
    at: float = field(
        default=0.3,
        validator=between(0, 0.95, open_ends=True),  # a later guide would hardly differ from the average
        metadata=about("share of the run at which the last guide is made; each earlier one at this share of the next"),
    )
    interval: tuple[float, float] = field(
        default=(0.0, 2.5),
        converter=tuple,
        validator=is_interval,
        metadata=about("lowest and highest sigma / alpha at which guidance is used"),
    )
    _step: int = saved(0, validator=COUNT)  # updates before the guide was copied
    _weights: dict[str, Tensor] = saved(factory=dict)  # of the guide, by parameter name, in the host
    _end: int | None = field(default=None, init=False)  # last step of the run, if it has one

    @hookimpl
    def on_start(self, loop: Loop) -> None:
        self._step, self._weights = 0, _average_of(loop)  # takes the memory before the first step
        if not self._weights:
            logger.info("autoguidance: no samples are guided, since the weights are sharded or have no average")

    @hookimpl
    def on_ready(self, loop: Loop) -> None:
        self._end = loop.config.planned_steps(loop.feed)

    @hookimpl
    def before_step(self, loop: Loop) -> None:
        # If the guide were copied after the update, samples of other plugins would depend on the order of plugins.
        step = loop.progress.step
        if self._step < landmark(step, self.at, self._end):
            self._step, self._weights = step, _average_of(loop)

    @hookimpl(wrapper=True)
    def sample(self, loop: Loop, request: SampleRequest) -> Generator[None, Samples, Samples]:
        sampler = loop.sampler
        has_guide = self._step and self._weights and self.scale > 1
        if not (has_guide and request.weights != OWN and _is_unguided(sampler)):
            return (yield)
        guide = self._guide(loop.model) if request.num else loop.model  # no images need no guide
        away = AwayFrom(compiled(guide) if sampler.compile else guide, self.scale, self.interval)
        with loop.using(sampler=evolve(sampler, guidance=away)):
            return (yield)

    def _guide(self, model: nn.Module) -> Callable[..., Tensor]:
        """Return a function that calls `model` with the weights of the guide."""
        parameters = {name: parameter for name, parameter in model.named_parameters() if name in self._weights}
        # Autocast keeps its copies of weights only if the weights require gradients.
        held = {name: self._weights[name].to(weight).detach().requires_grad_() for name, weight in parameters.items()}
        return lambda *arguments, **named: functional_call(model, held, arguments, named)

    @hookimpl
    def check_state(self, model: nn.Module, state: Mapping[str, Any]) -> None:
        """Raise ValueError unless the saved guide has the names and shapes of the weights of `model`."""
        parameters = dict(model.named_parameters())
        for name, value in state["weights"].items():
            if name not in parameters:
                raise ValueError(f"the guide is of another model: the model of this run has no weight {name!r}")
            if value.shape != parameters[name].shape:
                shapes = f"{tuple(value.shape)}, the model's {tuple(parameters[name].shape)}"
                raise ValueError(f"the guide is of another model: the shape of its {name} is {shapes}")


def _average_of(loop: Loop) -> dict[str, Tensor]:
    """Return a copy of the first average in host memory; {} without an average, or if its weights are sharded."""
    name, values = choose_weights(None, OWN, loop.hook.offer_weights(loop=loop))
    average = {} if name == OWN else values()
    if any(map(is_sharded, average.values())):
        return {}
    return {key: value.detach().to("cpu", copy=True) for key, value in average.items()}


def _is_unguided(sampler: Sampler | None) -> TypeGuard[Sampling]:
    return isinstance(sampler, Sampling) and type(sampler.guidance) is ClassifierFree and sampler.guidance.scale == 1


def landmark(step: int, share: float, end: int | None) -> int:
    """Return the newest step, up to `step`, at which a guide is copied; 0 before the first guide.

    A run that ends at step `end` copies the last guide at step `end` * `share`. Each earlier guide is copied at `share`
    times the step of the next guide, so that the first guides are soon replaced. A run without an end replaces the
    guide of step s at step s / `share`.
    """
    at = 1.0 if end is None else end * share
    while end is None and at / share <= step:
        at /= share
    while int(at) > step:
        at *= share
    return int(at)
