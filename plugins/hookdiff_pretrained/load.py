"""Makes a network of diffusers and gives it the weights of its folder."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hookdiff import UserError, listed
from hookdiff.encoding import digest_seen
from hookdiff.models import mark_base
from hookdiff_pretrained.folder import KEY, NetworkFolder

logger = logging.getLogger("hookdiff")


def load(folder: NetworkFolder, options: Mapping[str, Any], digest: str | None, dtype: torch.dtype) -> Any:
    """Return the network of `folder`, made with `options`, with its weights in `dtype`.

    Buffers are float32.

    On the meta device no weights are read, so that a trial takes no memory.

    Raises:
        UserError: for weights that do not fit, or with another digest than `digest`.
    """
    weights = folder.weights()
    with _without_values():
        network: Any = folder.kind(**options)
    shapes = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    trained = {name for name, _ in network.named_parameters()}
    needed = trained | (shapes.keys() & weights.shapes.keys())
    unfit = [
        *(f"missing {name}" for name in sorted(needed - weights.shapes.keys())),
        *(f"unexpected {name}" for name in sorted(weights.shapes.keys() - shapes.keys())),
        *(
            f"{name} has shape {weights.shapes[name]}, the network has {shapes[name]}"
            for name in sorted(needed & weights.shapes.keys())
            if weights.shapes[name] != shapes[name]
        ),
    ]
    if unfit:
        kind = folder.kind.__name__
        raise UserError(f"{KEY}: {weights.path} does not fit the {kind} of {folder.path}:\n  " + "\n  ".join(unfit))
    wanted = {name: dtype for name, weight in network.named_parameters() if weight.is_floating_point()}
    if torch.get_default_device().type == "meta":
        for name in wanted:
            weight = network.get_parameter(name)
            weight.data = weight.data.to(dtype)
        mark_base(network)
        return network
    found = digest_seen([weights], [], asked_by=KEY)
    if digest not in (None, found):
        raise UserError(
            f"{KEY}: {folder.path} has other weights than the run was trained on: their digest is {found}, and the run "
            f"has model.digest = {digest}; name the folder with these weights by --set {KEY}=DIR"
        )
    values = {name: value.to(wanted.get(name, _dtype(value))) for name, value in weights.tensors(weights.shapes)}
    if broken := sorted(name for name in trained if not values[name].isfinite().all()):  # a buffer may mask with -inf
        raise UserError(f"{KEY}: {weights.path}: {listed(broken, 3)} has values that are not finite")
    network.load_state_dict(values, strict=False, assign=True)
    mark_base(network, digest=found)
    logger.info("%s: the %s in %s", KEY, folder.kind.__name__, folder.path)
    return network


def _dtype(value: torch.Tensor) -> torch.dtype:
    return torch.float32 if value.is_floating_point() else value.dtype


@contextmanager
def _without_values() -> Iterator[None]:
    """Make the parameters of a network on the meta device, so that no value is drawn; buffers have their values.

    A buffer, such as a table of positions, may be in no file.
    """
    usual = nn.Module.register_parameter

    def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None:
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        usual(module, name, parameter)

    nn.Module.register_parameter = register  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = usual  # type: ignore[method-assign]
