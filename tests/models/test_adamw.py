import copy
import sys
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor, nn
from torch.autograd.profiler import profile

from hookdiff.models.adamw import AdamW
from hookdiff.testing.compare import assert_same, leaves
from tests.forked import python

SHAPES = ((3, 2), (4,), (2, 1, 3, 3), (5,))


def weights_of(dtype: torch.dtype = torch.float32, device: str = "cpu") -> list[nn.Parameter]:
    draws = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=draws).to(device, dtype)) for shape in SHAPES]


def named(weights: list[nn.Parameter]) -> dict[str, Tensor]:
    """Return copies of the values, by number."""
    return {str(number): weight.detach().clone() for number, weight in enumerate(weights)}


def groups_of(weights: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": weights[::2]}, {"params": weights[1::2], "weight_decay": 0.0, "lr": 3e-3}]


def fill(weights: list[nn.Parameter], step: int, without: int | None = None) -> None:
    """Give all gradients of one `step`, but for the weight number `without`."""
    draws = torch.Generator().manual_seed(step + 1)
    for number, weight in enumerate(weights):
        drawn = torch.randn(weight.shape, generator=draws).to(weight.device, weight.dtype)
        weight.grad = None if number == without else drawn


class TorchesStep(Exception):
    """Torch's own step was made."""


@pytest.fixture
def only_short(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function after which a step of torch's raises TorchesStep."""

    def made(*_: Any, **__: Any) -> None:
        raise TorchesStep

    return lambda: monkeypatch.setattr(sys.modules["torch.optim.adam"], "adam", made)


def ready(**options: Any) -> tuple[AdamW, list[nn.Parameter]]:
    """Return an optimizer after its first step, with gradients for the next."""
    weights = weights_of()
    optimizer = AdamW(groups_of(weights), **{"lr": 1e-2, "fused": True, **options})
    for step in range(2):
        fill(weights, step)
        if not step:
            optimizer.step()
    return optimizer, weights


PLACES = [
    *(("cpu", dtype) for dtype in (torch.float32, torch.float64, torch.bfloat16)),
    pytest.param("cuda", torch.float32, marks=pytest.mark.cuda),
]


@pytest.mark.parametrize(("device", "dtype"), PLACES)
@given(
    betas=st.sampled_from([(0.9, 0.999), (0.0, 0.5)]),
    weight_decay=st.sampled_from([0.0, 0.1]),
    flags=st.sets(st.sampled_from(["amsgrad", "maximize"])),
    missing=st.lists(st.sampled_from([None, 0, 3]), min_size=4, max_size=4),
    rates=st.lists(st.sampled_from([0.0, 1e-3, 1]), min_size=4, max_size=4),
)
def test_it_is_torchs_to_the_last_bit(device, dtype, betas, weight_decay, flags, missing, rates) -> None:
    options: dict[str, Any] = {"betas": betas, "weight_decay": weight_decay, "fused": True}
    options |= dict.fromkeys(flags, True)
    own, others = weights_of(dtype, device), weights_of(dtype, device)
    mine, torchs = AdamW(groups_of(own), **options), torch.optim.AdamW(groups_of(others), **options)
    for step, (without, rate) in enumerate(zip(missing, rates, strict=True)):
        for weights, optimizer in ((own, mine), (others, torchs)):
            fill(weights, step, without)
            optimizer.param_groups[0]["lr"] = rate
            optimizer.step()
    assert_same(named(own), named(others))
    assert_same(dict(leaves(mine.state_dict())), dict(leaves(torchs.state_dict())))


def test_a_plain_step_runs_nothing_of_torchs(only_short: Any) -> None:
    optimizer, weights = ready()
    before = named(weights)
    only_short()
    optimizer.step()
    assert all((weight != before[name]).any() for name, weight in named(weights).items())


def test_a_step_without_any_gradient_changes_nothing() -> None:
    optimizer, weights = ready()
    optimizer.zero_grad()
    before = named(weights)
    optimizer.step()
    assert_same(named(weights), before)


@pytest.mark.parametrize(
    "options", [{"fused": False}, {"amsgrad": True}, {"lr": torch.tensor(1e-2)}, {"capturable": True}]
)
def test_other_options_get_torchs_step(options: dict[str, Any], only_short: Any) -> None:
    optimizer, _ = ready(**options)
    only_short()
    with pytest.raises(TorchesStep):
        optimizer.step()


def test_weights_of_two_dtypes_in_a_group_get_torchs_step(only_short: Any) -> None:
    weights = [*weights_of(), *weights_of(torch.float64)]
    optimizer = AdamW(weights, fused=True)
    fill(weights, 0)
    optimizer.step()
    only_short()
    with pytest.raises(TorchesStep):
        optimizer.step()


def test_a_loaded_state_is_the_one_that_is_trained() -> None:
    first, weights = ready()
    first.step()
    second, others = ready()
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for own, other in zip(others, weights, strict=True):
        own.data.copy_(other.data)
    for optimizer, trained in ((first, weights), (second, others)):
        fill(trained, 7)
        optimizer.step()
    assert_same(named(weights), named(others))


def test_a_closure_is_called_with_gradients() -> None:
    optimizer, weights = ready()

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = sum((weight**2).sum() for weight in weights)
        assert isinstance(loss, Tensor)
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(20)]
    assert losses[-1] < losses[0]


HOOKS = """
import sys
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

sys.modules.pop("hookdiff.models.adamw", None)
assert not hasattr(torch.optim.AdamW.step, "hooked")
weights = [nn.Parameter(torch.ones(2))]
if "after" in sys.argv:
    torch.optim.AdamW(weights)  # from now on the step of this class calls hooks
from hookdiff.models.adamw import AdamW
torch.optim.AdamW(weights)
optimizer, called = AdamW(weights, fused=True), []
weights[0].grad = torch.ones(2)
ends = [
    optimizer.register_step_pre_hook(lambda *_: called.append("before")),
    optimizer.register_step_post_hook(lambda *_: called.append("after")),
    register_optimizer_step_pre_hook(lambda *_: called.append("before all")),
    register_optimizer_step_post_hook(lambda *_: called.append("after all")),
]
for _ in range(2):
    optimizer.step()
    assert sorted(called) == ["after", "after all", "before", "before all"], called
    called.clear()
for end in ends:  # each step calls those that are left: 3, 2, 1 and 0
    end.remove()
    optimizer.step()
print(len(called))
"""


@pytest.mark.parametrize("order", ["after", "before"])
def test_hooks_of_steps_are_called_once_with_torchs_class_before_or_after(order: str) -> None:
    assert python(HOOKS, order) == (0, "6\n", "")


def test_a_profiler_sees_the_step() -> None:
    optimizer, _ = ready()
    with profile() as seen:
        optimizer.step()
    events: Any = seen.function_events
    assert [event.name for event in events].count("Optimizer.step#AdamW.step") == 1


def test_a_scheduler_of_torch_sets_the_rate() -> None:
    optimizer, weights = ready()
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda count: 0.0 if count else 1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
        scheduler.step()
    before = named(weights)
    optimizer.step()
    assert_same(named(weights), before)


def test_a_flag_on_the_device_holds_back_a_step() -> None:
    optimizer, weights = ready()
    before = named(weights)
    held: Any = optimizer
    held.found_inf = torch.ones(())
    optimizer.step()
    assert_same(named(weights), before)
    held.found_inf = torch.zeros(())
    optimizer.step()
    assert all((weight != before[name]).any() for name, weight in named(weights).items())
