import torch
from torch import nn

from hookdiff.errors import PluginError
from hookdiff.models.weights import Buffers, evaluating, holding
from hookdiff.testing.compare import assert_same
from tests.conftest import refused


class Odd(nn.Module):
    """A module with a buffer that is replaced, one that grows, one that is None, and those of batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.BatchNorm1d(3))
        self.register_buffer("replaced", torch.zeros(2), persistent=False)
        self.register_buffer("grown", torch.zeros(1, dtype=torch.int64))
        self.register_buffer("absent", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.replaced = self.replaced + 1
        self.grown = torch.cat((self.grown, self.grown + 1))
        return self.inner(x)


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.named_buffers()}


def test_all_buffers_get_their_kept_values_back() -> None:
    model = Odd()
    buffers = Buffers(model)
    buffers.put_back()  # nothing is kept yet
    statistics = model.inner[0].running_mean
    for call in range(3):
        buffers.keep()
        before = values(model)
        assert before["inner.0.num_batches_tracked"] == call
        assert_same(buffers.kept, before)
        model(torch.full((4, 3), torch.inf))
        assert not model.inner[0].running_mean.isfinite().any()
        buffers.put_back()
        assert_same(values(model), before)
        model(torch.randn(4, 3))
    assert model.inner[0].running_mean is statistics  # restored in place: captured graphs keep addresses
    assert model.inner[0].running_var.isfinite().all()


def test_a_model_without_buffers_has_nothing_to_keep() -> None:
    buffers = Buffers(nn.Linear(2, 2))
    buffers.keep()
    assert buffers.kept == {}


def test_an_evaluation_leaves_each_module_in_its_mode() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(), nn.Sequential(nn.Dropout()))
    model[0].eval()  # frozen
    with evaluating(model):
        assert (any(module.training for module in model.modules()), torch.is_grad_enabled()) == (False, False)
    assert [module.training for module in model.modules()] == [True, False, True, True, True]
    assert torch.is_grad_enabled()


def test_a_name_that_no_parameter_has_is_refused_with_the_nearest() -> None:
    with refused(PluginError, "'wieght'", "'weight'"), holding(nn.Linear(1, 1), {"wieght": torch.ones(1, 1)}):
        pass
