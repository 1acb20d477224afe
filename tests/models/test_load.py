import logging
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, strategies as st
from safetensors.torch import save_file
from torch import nn

from hookdiff import ConfigError
from hookdiff.authors.testing.compare import assert_same
from hookdiff.models.load import check_file, load_into
from tests.conftest import check_facts, refused, two_ranks


class Net(nn.Module):
    def __init__(self, width: int = 3, names: tuple[str, ...] = ("first", "second")) -> None:
        super().__init__()
        for name in names:
            self.add_module(name, nn.Linear(2, width))
        self.norm = nn.BatchNorm1d(width)  # its buffers include a scalar


def saved(path, model):
    save_file(model.state_dict(), path)
    return path


def test_values_are_copied_in_place_with_the_dtype_of_the_model(tmp_path):
    theirs, ours = Net().double(), Net()
    theirs.norm.num_batches_tracked += 4
    addresses = [p.data_ptr() for p in ours.parameters()]
    load_into(ours, saved(tmp_path / "w.safetensors", theirs))
    for name, value in ours.state_dict().items():
        assert value.dtype == (torch.int64 if name.endswith("tracked") else torch.float32)
        assert torch.equal(value, theirs.state_dict()[name].to(value.dtype))
    assert [p.data_ptr() for p in ours.parameters()] == addresses


def test_golden_message_of_weights_of_another_model(tmp_path):
    file = saved(tmp_path / "w.safetensors", Net(names=("frist", "second")))
    model = Net()
    model.second = nn.Linear(2, 5)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ConfigError) as caught:
        load_into(model, file)
    assert str(caught.value).split("\n") == [
        f"model.start_from: {file} is of another model: 6 differences",
        "  missing first.weight; did you mean 'frist.weight'?",
        "  unexpected frist.bias; did you mean 'first.bias'?",
        "  second.weight has shape (3, 2), the model has (5, 2)",
        "  missing first.bias; did you mean 'frist.bias'?",
        "  unexpected frist.weight; did you mean 'first.weight'?",
        "  and 1 more",
        "  start_partial = true loads what fits: 5 of the model's 9 tensors",
    ]
    assert_same(model.state_dict(), before)


def test_partial_loads_tensors_that_fit_and_logs_the_others(tmp_path, caplog):
    theirs, model = Net(names=("frist", "second")), Net()
    first = model.first.weight.clone()
    with caplog.at_level(logging.INFO, "hookdiff"):
        load_into(model, saved(tmp_path / "w.safetensors", theirs), partial=True)
    assert torch.equal(model.second.weight, theirs.second.weight)
    assert torch.equal(model.first.weight, first)
    start, differing = caplog.records
    assert (start.levelname, differing.levelname) == ("INFO", "WARNING")
    check_facts(start.getMessage(), tmp_path / "w.safetensors", 7, 9)
    check_facts(differing.getMessage(), 4, "first.weight", "frist.weight", "first.bias", "frist.bias")
    with refused(ConfigError, tmp_path / "x.safetensors", 5):
        load_into(nn.Linear(7, 7), saved(tmp_path / "x.safetensors", nn.BatchNorm1d(2)), partial=True)


@given(st.sets(st.sampled_from("abcdef")), st.sets(st.sampled_from("abcdef"), min_size=1), st.booleans())
def test_all_names_that_fit_are_loaded_or_none(tmp_path_factory, given, own, partial):
    file = tmp_path_factory.mktemp("w") / "w.safetensors"
    save_file({name: torch.full((2,), float(ord(name))) for name in given}, file)
    model = nn.Module()
    for name in own:
        model.register_parameter(name, nn.Parameter(torch.zeros(2)))
    fits = given == own or (partial and given & own)
    with nullcontext() if fits else refused(ConfigError, file, len(given ^ own)):
        load_into(model, file, partial)
    for name, value in model.named_parameters():
        assert value[0] == (ord(name) if fits and name in given else 0)


def test_a_part_of_the_weights_is_refused_with_the_way_to_the_whole(tmp_path):
    part = saved(tmp_path / "model-00001-of-00002.safetensors", nn.Linear(2, 1))
    with refused(ConfigError, part, "hookdiff export"):
        load_into(nn.Linear(2, 2), part)
    load_into(nn.Linear(2, 1), part)


def test_files_that_cannot_be_used_are_refused(tmp_path):
    net = nn.Linear(2, 2)
    whole = saved(tmp_path / "whole.safetensors", net)
    torch.save(net.state_dict(), tmp_path / "new.pt")
    torch.save(net.state_dict(), tmp_path / "old.bin", _use_new_zipfile_serialization=False)
    for name, facts in {
        "whole.safetensor": ["'whole.safetensors'"],
        "new.pt": ["pickle", "torch.load"],
        "old.bin": ["pickle", "torch.load"],
        "nowhere/x.safetensors": [],
        "": ["whole.safetensors"],
    }.items():
        with refused(ConfigError, "model.start_from", tmp_path / name, *facts) as caught:
            check_file(tmp_path / name)
        assert "\n" not in str(caught.value)
    assert check_file(whole) == {"weight": (2, 2), "bias": (2,)}


SHARDED = """
import tempfile, torch
from pathlib import Path
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from safetensors.torch import save_file
from hookdiff.machine import dtensor as shards
from hookdiff.models.load import load_into, load_state
torch.manual_seed(0)
theirs, ours = (nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5)) for _ in range(2))
given = {name: value.clone() + 1 for name, value in theirs.state_dict().items()}
fully_shard(ours, mesh=init_device_mesh("cpu", (2,)))
same = lambda: all(torch.equal(shards.whole(value), given[name]) for name, value in ours.state_dict().items())
load_state(ours, given)
found = [same()]
given = {name: value + 1 for name, value in given.items()}
with tempfile.TemporaryDirectory() as folder:
    save_file(given, folder + "/w.safetensors")
    load_into(ours, Path(folder) / "w.safetensors")
result = [*found, same()]
"""


def test_each_rank_loads_its_part_of_a_sharded_model(tmp_path):
    assert two_ranks(SHARDED, tmp_path) == [[True, True]] * 2
