"""Test that names of parametrised weights become the names of a plain model."""

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from hookdiff.models.names import is_inside, plain_name


class Scaled(nn.Module):
    """A parametrisation with its own parameter and buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, weight: Tensor) -> Tensor:
        return weight * self.scale


def test_names_of_a_parametrised_model_become_plain_names() -> None:
    for model, prefix in ((nn.Linear(2, 3), ""), (nn.Sequential(nn.Linear(2, 3)), "0.")):
        plain = list(model.state_dict())
        layer = model.get_submodule(prefix.strip("."))
        parametrize.register_parametrization(layer, "weight", Scaled())
        parametrize.register_parametrization(layer, "weight", Scaled())
        names = list(model.state_dict())
        inside = {f"{prefix}parametrizations.weight.{k}.{own}" for k in (0, 1) for own in ("scale", "calls")}
        assert {name for name in names if is_inside(name)} == inside
        assert sorted(plain_name(name) for name in names if not is_inside(name)) == sorted(plain)


def test_an_original_in_two_parts_has_no_plain_name() -> None:
    names = list(parametrizations.weight_norm(nn.Linear(2, 3)).state_dict())
    assert [plain_name(name) for name in names] == names
    assert not any(map(is_inside, names))
