import copy

import torch
from torch import Tensor, nn

from hookdiff import Loop, UserError
from hookdiff.models.base import found_in_base, has_base, leave_out_base, left_out, mark_base
from hookdiff.models.plain import plain_tensors
from hookdiff.testing.compare import assert_same
from hookdiff.testing.toy import toy_loop
from hookdiff_checkpoint import Checkpoint
from hookdiff_ema import EMA
from tests.conftest import acting, refused


def base() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    model.register_buffer("table", torch.arange(3.0))
    mark_base(model, digest="abc")
    return model


class Adapted(nn.Module):
    """A layer with an adapter beside it, as peft makes it: the layer gets another name."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.base_layer, self.adapter = layer, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.base_layer(x) + self.adapter(x)
        return result


def adapt(model: nn.Sequential) -> None:
    model.requires_grad_(False)
    model[0] = Adapted(model[0])


STATISTICS = ["1.running_mean", "1.running_var", "1.num_batches_tracked"]
ADAPTER = ["0.adapter.weight", "0.adapter.bias"]


def test_a_state_has_the_adapter_and_the_statistics_alone() -> None:
    model = base()
    assert has_base(model)
    assert found_in_base(model) == {"digest": "abc"}
    adapt(model)
    leave_out_base(model)
    assert [*model.state_dict()] == [*copy.deepcopy(model).state_dict()] == [*ADAPTER, *STATISTICS]
    frozen = ["0.base_layer.weight", "0.base_layer.bias", "1.weight", "1.bias", "2.weight", "2.bias"]
    assert sorted(left_out(model)) == sorted([*frozen, "table"])
    assert plain_tensors(model).keys() == {*frozen, "table", *ADAPTER, *STATISTICS}  # an export is whole
    before, halves = copy.deepcopy(model), {name: value + 1 for name, value in model.state_dict().items()}
    assert str(model.load_state_dict(halves)) == "<All keys matched successfully>"
    assert_same(model.state_dict(), halves)
    assert all(torch.equal(model.get_parameter(name), before.get_parameter(name)) for name in frozen)
    model[2].weight.requires_grad_()
    with refused(UserError, "2.weight", "frozen", "prepare_model"):
        model.state_dict()


def test_a_base_that_trains_as_a_whole_is_saved_as_a_whole() -> None:
    model = base()
    names = [*model.state_dict()]
    leave_out_base(model)
    assert ([*model.state_dict()], [*left_out(model)]) == (names, [])


def test_checkpoints_and_averages_have_the_adapter_alone_and_resume_exactly(tmp_path) -> None:
    def optimizers(model: nn.Module) -> torch.optim.Optimizer:
        leave_out_base(model)
        trained = [weight for weight in model.parameters() if weight.requires_grad]
        return torch.optim.AdamW(trained, lr=0.01, fused=True)

    def loop(name: str, steps: int) -> Loop:
        torch.manual_seed(1)
        adapts = acting(prepare_model=lambda loop: adapt(loop.model))
        plugins = {"adapts": adapts, "ema": EMA(decay=0.5), "checkpoint": Checkpoint()}
        made = toy_loop(plugins, model=base(), optimizers=optimizers, run_dir=tmp_path / name, resume=True, steps=steps)
        made.run()
        return made

    whole = loop("whole", 6)
    loop("halves", 3)
    resumed = loop("halves", 6)
    assert_same(resumed.state_dict()["model"], whole.state_dict()["model"])
    assert_same(resumed.plugins["ema"].shadow, whole.plugins["ema"].shadow)
    assert [*whole.plugins["ema"].shadow] == ADAPTER
    assert [*whole.state_dict()["model"]] == [*ADAPTER, *STATISTICS]
