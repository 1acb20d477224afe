from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hookdiff import UserError
from hookdiff.testing import assert_same, weights
from hookdiff_ddp import DDP
from hookdiff_fsdp import FSDP
from hookdiff_fsdp.blocks import blocks_of, check_shared
from hookdiff_networks import DiT, UNet
from tests.conftest import check_facts, refused, toy_run, two_ranks


def layers(num: int) -> list[nn.Module]:
    return [nn.Linear(3, 3) for _ in range(num)]


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList([nn.ModuleList(layers(2)), nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.SiLU()})])
        self.middle = nn.Sequential(*layers(2))


def test_the_repeated_blocks_are_what_the_outermost_lists_hold() -> None:
    assert list(blocks_of(Tower(), ())) == ["stages.0.0", "stages.0.1", "stages.1.a"]
    assert list(blocks_of(nn.Sequential(*layers(3)), ())) == ["0", "1", "2"]
    dit = DiT(in_channels=1, image_size=8, patch_size=4, hidden_size=16, num_heads=2, depth=3)
    assert list(blocks_of(dit, ())) == ["blocks.0", "blocks.1", "blocks.2"]
    unet = blocks_of(UNet(in_channels=1, image_size=8, channels=8, head_dim=8, num_res_blocks=1), ())
    assert all(name.startswith(("down.", "mid.", "up.")) for name in unet)


def test_patterns_name_blocks_inner_ones_first() -> None:
    assert list(blocks_of(Tower(), ["middle", "middle.*"])) == ["middle.1", "middle.0", "middle"]
    with refused(UserError, "plugins.fsdp.blocks", "midle", "middle"):
        blocks_of(Tower(), ["midle"])


@pytest.mark.parametrize("model", [nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), nn.SiLU())])
def test_one_unit_for_the_whole_model_is_refused(model: nn.Module) -> None:
    with refused(UserError, "plugins.fsdp.blocks", "ddp"):
        blocks_of(model, ())


def test_weights_that_blocks_share_are_refused() -> None:
    tower = Tower()
    check_shared(tower, blocks_of(tower, ()).values())
    tower.middle[1].weight = tower.middle[0].weight
    check_shared(tower, blocks_of(tower, ()).values())  # the rest of the model has both
    check_shared(tower, blocks_of(tower, ["middle"]).values())
    tower.stages[0].append(tower.stages[0][0])  # the same block is called twice
    check_shared(tower, blocks_of(tower, ()).values())
    check_shared(tower, blocks_of(tower, ["stages.0.*", "middle"]).values())
    for patterns in (["middle.0"], ["middle", "middle.0"]):
        with refused(UserError, "plugins.fsdp.blocks", "middle.0.weight", "middle.1.weight"):
            check_shared(tower, blocks_of(tower, patterns).values())


@pytest.mark.parametrize("make", [DDP, FSDP])
def test_on_one_process_it_changes_nothing(make: Any) -> None:
    plain, loop = (toy_run(plugins, micro_batch=3) for plugins in ({}, {"ranks": make()}))
    assert_same(weights(plain), weights(loop))
    assert loop.net is loop.model
    assert not any(isinstance(value, torch.distributed.tensor.DTensor) for value in loop.model.parameters())


FULL = """
from hookdiff import SampleRequest, UserError
from hookdiff.authors import ImageMaker
from hookdiff.testing.toy import toy_loop
from hookdiff_ddp import DDP
from hookdiff_fsdp import FSDP
from tests.on_ranks import Net

class Full:
    "Has memory for two images."
    batch_size = 8
    def sample(self, net, objective, shape, generators, device, **wanted):
        if len(generators) > 2:
            raise MemoryError
        return torch.zeros(len(generators), *shape)

result = []
for plugin in (DDP(), FSDP()):
    loop = toy_loop({"ranks": plugin}, model=Net(0.0), steps=1)
    with loop, loop.using(sampler=Full()):
        made = ImageMaker(loop).make(range(5), lambda part: SampleRequest(len(part)))
        try:
            result.append([len(part) for part in made])
        except UserError as error:
            result.append(str(error))
"""


@pytest.mark.wide
def test_ranks_that_share_a_model_do_not_halve_their_images_alone(tmp_path: Path) -> None:
    for apart, together in two_ranks(FULL, tmp_path):
        assert apart == [2, 2, 1]
        check_facts(together, 5, "cpu", "sampling.batch_size")


OPTIMIZERS = """
from hookdiff import UserError
from hookdiff.experiment.optimizers import OPTIMIZERS, Groups, build_optimizers
from hookdiff.experiment.part import Part
from hookdiff.options.imports import import_object
from hookdiff.machine.dtensor import whole
from hookdiff.testing.toy import toy_loop
from hookdiff_ddp import DDP
from hookdiff_fsdp import FSDP
from tests.on_ranks import Net

def train(name, plugin):
    kind = import_object(OPTIMIZERS[name], "the optimizer")
    part = Part("optimizer", name, kind, {"lr": 0.01}, "use", {Groups: {"no_decay": ()}})
    torch.manual_seed(0)
    loop = toy_loop({"ranks": plugin}, model=Net(0.0), optimizers=lambda model: build_optimizers(part, model), steps=3)
    try:
        loop.run()
    except UserError as error:
        return str(error)
    return torch.cat([whole(value.detach()).flatten() for value in loop.model.parameters()])

result = {}
for name in ("sgd", "adagrad", "rmsprop"):
    result[name] = float((train(name, DDP()) - train(name, FSDP())).abs().max())
for name in ("rprop", "adafactor"):
    result[name] = train(name, FSDP())
"""


def test_optimizers_train_in_pieces_as_in_copies_or_are_refused(tmp_path: Path) -> None:
    for results in two_ranks(OPTIMIZERS, tmp_path):
        assert all(results[name] < 1e-6 for name in ("sgd", "adagrad", "rmsprop"))
        for name in ("rprop", "adafactor"):
            check_facts(results[name].lower(), "optimizer", name, "adamw")
