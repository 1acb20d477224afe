"""The plugin `spectral`."""

import logging
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

from attrs import define, field
from attrs.validators import min_len
from torch import Generator, Tensor, nn
from torch.nn.modules.conv import _ConvTransposeNd
from torch.nn.utils import parametrize

from hookdiff import ConfigError, Loop, evaluating, hookimpl, nearest
from hookdiff.machine import derive_seed, whole
from hookdiff.models import LAYERS, is_zero, layers_called
from hookdiff.options import about
from hookdiff_spectral.sigma import SETTLING, DividedBySigma, normalised

logger = logging.getLogger("hookdiff")
KEY = "plugins.spectral.layers"


@define(eq=False)
class Spectral:
    """Divides the weights of layers by their largest singular value, which limits how much a layer can amplify.

    `layers` chooses linear layers and convolutions. The layer that the network calls last is not changed, because the
    loss decides how large the output has to be. Layers that start at zero are not changed either, because their
    singular values are zero. The singular vectors are buffers of the model. They follow the weights by one iteration of
    the power method per update (Miyato et al. 2018, arXiv 1802.05957).
    """

    layers: tuple[str, ...] = field(
        default=("*",),
        validator=min_len(1),
        metadata=about('patterns of module names, such as `["*attention*"]`; a module stands for all layers inside it'),
    )
    _layers: list[tuple[DividedBySigma, Tensor]] = field(factory=list, init=False)  # each with the weight it divides

    @hookimpl
    def prepare_model(self, loop: Loop) -> None:
        if not normalised(loop.model):  # skip this when a loop is entered again
            seed = derive_seed(loop.config.seed, "model", position=-1)  # -1, because no update has this position
            normalise(loop.model, self.layers, _output_layer(loop), Generator().manual_seed(seed))

    @hookimpl
    def on_start(self, loop: Loop) -> None:
        self._layers = normalised(loop.model)
        if loop.progress.position == 0:  # weights from a file may have no singular vectors
            self._follow(SETTLING)

    # Called last: a plugin that saves the state before a step must save the vectors from before the step.
    @hookimpl(trylast=True)
    def before_step(self) -> None:
        self._follow(1)

    def _follow(self, times: int) -> None:
        for divided, weight in self._layers:
            divided.iterate(whole(weight), times)


def _output_layer(loop: Loop) -> str | None:
    """Return the name of the linear layer or convolution that is called last, or None if none is called."""
    batch = loop.objective.draw(loop.feed.blank(1), Generator(loop.device).manual_seed(0))
    with layers_called(loop.model) as called, evaluating(loop.model):
        loop.objective(loop.model, batch)
    return called[-1] if called else None


def normalise(model: nn.Module, patterns: Iterable[str], output: str | None, generator: Generator) -> list[str]:
    """Normalise the layers of `model` that `patterns` choose, except the one named `output`; return their names.

    Layers that start at zero are not changed. Raises ConfigError if no layer is left, and for weights that are
    shared or parametrised.
    """
    chosen = choose_layers(model, patterns)
    at_zero = [name for name, layer in chosen.items() if is_zero(layer.weight)]
    layers = {name: layer for name, layer in chosen.items() if name != output and name not in at_zero}
    if not layers:
        raise ConfigError(
            f"{KEY}: choose others than {', '.join(chosen)}: the output layer and layers at zero are never normalised"
        )
    for name, layer in layers.items():
        if parametrize.is_parametrized(layer, "weight"):
            raise ConfigError(f"{KEY}: leave out {name}: its weight is parametrised already")
        names = [n for n, p in model.named_parameters(remove_duplicate=False) if p is layer.weight]
        if len(names) > 1:
            raise ConfigError(f"{KEY}: {' and '.join(names)} are one weight; leave their layers out")
    for layer in layers.values():
        divided = DividedBySigma(layer.weight, isinstance(layer, _ConvTransposeNd), generator)
        parametrize.register_parametrization(layer, "weight", divided)
    logger.info(
        "spectral: %d layers are normalised%s; %d more start at zero and are not changed",
        len(layers),
        f"; the output layer {output} is not" if output in chosen else "",
        len(at_zero) - (output in at_zero),
    )
    return list(layers)


def choose_layers(model: nn.Module, patterns: Iterable[str]) -> dict[str, Any]:
    """Return the layers that `patterns` choose, by name, in the model's order. Each pattern must choose a layer."""
    modules = {name: module for name, module in model.named_modules() if name}
    chosen: set[str] = set()
    for pattern in patterns:
        roots = tuple(f"{name}." for name in modules if fnmatchcase(name, pattern))
        if not roots:
            known = dict.fromkeys([*modules, *(part for name in modules for part in name.split("."))])
            raise ConfigError(f"{KEY}: no module matches {pattern!r}{nearest(pattern.strip('*.'), known)}")
        inside = {n for n, module in modules.items() if isinstance(module, LAYERS) and f"{n}.".startswith(roots)}
        if not inside:
            raise ConfigError(f"{KEY}: no module that matches {pattern!r} has a linear layer or convolution in it")
        chosen |= inside
    return {name: module for name, module in modules.items() if name in chosen}
