"""Refuses parameters that cannot be trained."""

from torch import Tensor

from hookdiff.errors import UserError
from hookdiff.machine.overlap import is_overlapping


def check_parameter(name: str, parameter: Tensor) -> None:
    """Raise UserError for a parameter that is complex, or has entries that share memory.

    Norms and optimizers here take no complex numbers. An update would change a shared number several times.
    """
    if parameter.is_complex():
        kind = str(parameter.dtype).removeprefix("torch.")
        raise UserError(
            f"{name} is {kind}, and complex weights cannot be trained; keep its real and imaginary part as a "
            f"parameter of shape {(*parameter.shape, 2)}, and call torch.view_as_complex on it in forward"
        )
    if is_overlapping(parameter):
        raise UserError(
            f"{name}, of shape {tuple(parameter.shape)}, has entries that share memory, as after expand(), and "
            "no optimizer can train that; call clone() after expand(), or keep the smaller tensor as the parameter and "
            "expand it in forward"
        )
