"""The tensors of a network without what plugins put around its weights."""

from typing import Any

from torch import Tensor, nn
from torch.nn.utils import parametrize

from hookdiff.models.base import left_out


def plain_tensors(net: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of `net`, with the values of parametrised weights in place of their parametrisations.

    A frozen base, which the state of `net` leaves out, is there too. What `get_extra_state` returns is left out.
    """
    held = {**dict(net.named_parameters(remove_duplicate=False)), **dict(net.named_buffers(remove_duplicate=False))}
    state = {name: held[name].detach() for name in left_out(net) if name in held}
    state |= {name: value for name, value in net.state_dict().items() if isinstance(value, Tensor)}
    tensors = {name: value for name, value in state.items() if ".parametrizations." not in f".{name}"}
    for path, module in net.named_modules():
        if parametrize.is_parametrized(module):
            parametrized: Any = module.parametrizations
            tensors |= {f"{path}.{name}".lstrip("."): getattr(module, name) for name in parametrized}
    return tensors
