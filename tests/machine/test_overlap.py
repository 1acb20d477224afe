"""Models with tensors that show a place in memory several times, as those made by `expand` do."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from hookdiff import Loop, UserError
from hookdiff.disk.tensors import write_tensors
from hookdiff.machine.overlap import is_overlapping
from hookdiff.models.load import load_into
from hookdiff.testing import assert_same, toy_loop, toy_model
from hookdiff_amp import AMP
from hookdiff_checkpoint import Checkpoint
from hookdiff_ema import EMA
from tests.conftest import ran, refused


class Net(nn.Module):
    """Adds a buffer to the output of a small net; each pass gives `update` the module, if there is one."""

    def __init__(self, make: Callable[[nn.Module], Tensor], update: Callable[[Any], object] | None) -> None:
        super().__init__()
        self.inner = toy_model()
        self.register_buffer("base", torch.linspace(0, 1, 4))
        self.register_buffer("shown", make(self))
        self.update = update

    def forward(self, x: Tensor) -> Tensor:
        if self.update and self.training:
            self.update(self)
        return self.inner(x) + self.shown.float().nan_to_num().sum()


def replace(net: Any) -> None:
    net.shown = net.shown + torch.arange(net.shown.numel()).view(net.shown.shape)


def twice(net: nn.Module) -> Tensor:
    net.register_buffer("first", torch.ones(1, 4).expand(3, 4))
    return net.first


MODELS: dict[str, tuple[Callable[[Any], Tensor], Callable[[Any], object] | None]] = {
    "expanded": (lambda _: torch.ones(1, 4).expand(3, 4), None),
    "with NaN": (lambda _: torch.tensor([1.0, torch.nan]).expand(3, 2), None),
    "a number": (lambda _: torch.tensor(2).expand(5), None),
    "halves": (lambda _: torch.linspace(0, 1, 8)[::2, None].expand(4, 3).half(), None),
    "windows": (lambda _: torch.linspace(0, 1, 6).unfold(0, 3, 1), None),
    "with gaps": (lambda _: torch.linspace(0, 1, 8)[::2], None),
    "empty": (lambda _: torch.zeros(1, 1).expand(0, 5), None),
    "two names": (twice, None),
    "of a buffer that changes": (lambda net: net.base[:1].expand(4), lambda net: net.base.mul_(0.9)),
    "of a parameter": (lambda net: net.inner[0].weight.detach()[:1].expand(3, 4), None),
    "replaced": (lambda _: torch.ones(1).expand(4), replace),
    "windows that are replaced": (lambda _: torch.ones(5).unfold(0, 2, 1), replace),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_buffer_trains_and_is_saved_as_what_it_shows(name: str, tmp_path: Path) -> None:
    def train(run: Path, steps: int, resume: bool = False) -> Loop:
        plugins = {
            "ema": EMA(decay=0.9),
            "amp": AMP("fp16", init_scale=2.0**24, growth_interval=3),  # a void step puts buffers back
            "checkpoint": Checkpoint(every=3),
        }
        run.mkdir(exist_ok=True)
        loop = ran(toy_loop(plugins, model=Net(*MODELS[name]), run_dir=run, steps=steps, resume=resume))
        assert loop.plugins["amp"].state_dict()["num_void"]
        return loop

    whole = train(tmp_path / "whole", 8)
    train(tmp_path / "parts", 4)
    again = train(tmp_path / "parts", 8, resume=True)
    shown = whole.model.state_dict()
    assert_same(again.model.state_dict(), shown)
    for file in ("model.safetensors", "ema.safetensors"):
        saved = load_file(tmp_path / "parts" / "checkpoints" / "step-00000008" / file)
        assert_same({"shown": saved["shown"]}, {"shown": shown["shown"]})
    if name == "of a buffer that changes":
        base = again.model.get_buffer("base")
        base += 1
        assert again.model.get_buffer("shown").tolist() == base[:1].tolist() * 4


@pytest.mark.parametrize("values", [torch.full((3, 4), 0.5), torch.rand(3, 4)], ids=["fit", "do not fit"])
def test_a_file_is_loaded_into_an_expanded_buffer_and_a_frozen_parameter(values: Tensor, tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("shown", torch.ones(1, 4).expand(3, 4))
    model.frozen = nn.Parameter(torch.ones(1, 4).expand(3, 4), requires_grad=False)
    given = {"weight": torch.ones(2, 2), "bias": torch.ones(2), "shown": values, "frozen": values + 1}
    write_tensors(tmp_path / "weights.safetensors", given)
    load_into(model, tmp_path / "weights.safetensors")
    assert_same(model.state_dict(), given)
    assert is_overlapping(model.shown) == is_overlapping(model.frozen) == (values.std() == 0)


@pytest.mark.parametrize("make", [lambda one: one.expand(3, 4), lambda one: one[0].unfold(0, 2, 1)])
def test_a_trained_parameter_that_overlaps_is_refused(make: Callable[[Tensor], Tensor]) -> None:
    # Fused optimizers would change each number several times in silence.
    model = toy_model()
    model.scale = nn.Parameter(make(torch.ones(1, 4)))
    with refused(UserError, "scale", tuple(model.scale.shape), "clone()"):
        toy_loop(model=model).run()
    model.scale.requires_grad_(False)
    assert toy_loop(model=model, steps=2).run() == "done"
