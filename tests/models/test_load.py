import json
import logging
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

from hookdiff import ConfigError
from hookdiff.models.load import check_file, load_into
from hookdiff.testing.compare import assert_same
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


@pytest.mark.parametrize("name", ["second.weight", "norm.running_mean"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e300])
def test_values_that_are_not_finite_are_refused_by_name(tmp_path, name, value):
    theirs, ours = Net().double(), Net()
    before = {key: one.clone() for key, one in ours.state_dict().items()}
    theirs.state_dict()[name].view(-1)[0] = value
    path = saved(tmp_path / "w.safetensors", theirs)
    if name == "norm.running_mean" and value == value:  # a mask of -inf is a buffer too
        load_into(ours, path)
        return
    with refused(ConfigError, "model.start_from", path, name, "finite"):
        load_into(ours, path)
    assert_same(ours.state_dict(), before)


def test_values_are_copied_in_place_with_the_dtype_of_the_model(tmp_path):
    theirs, ours = Net().double(), Net()
    theirs.norm.num_batches_tracked += 4
    addresses = [p.data_ptr() for p in ours.parameters()]
    load_into(ours, saved(tmp_path / "w.safetensors", theirs))
    assert_same(ours.state_dict(), theirs.float().state_dict())  # which leaves integers as they are
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


def save_shards(folder, model):
    """Save the weights in four files with an index, and return that."""
    parts = [{} for _ in range(4)]
    for k, (name, value) in enumerate(model.state_dict().items()):
        parts[k % 4][name] = value
    names = [f"model-{k:05}-of-00004.safetensors" for k in range(1, 5)]
    for name, part in zip(names, parts, strict=True):
        save_file(part, folder / name)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {key: names[k % 4] for k, key in enumerate(model.state_dict())}}))
    return index


def test_shards_are_loaded_by_their_index_or_folder_and_one_of_them_is_refused_with_it(tmp_path):
    theirs = Net()
    index = save_shards(tmp_path, theirs)
    for path in (index, tmp_path):
        ours = Net()
        load_into(ours, path)
        assert_same(ours.state_dict(), theirs.state_dict())
    save_file(Net().state_dict(), tmp_path / "model.safetensors")  # which of both is meant?
    with refused(ConfigError, tmp_path, "name one file", "model.safetensors,", index.name):
        load_into(Net(), tmp_path)
    (tmp_path / "model.safetensors").unlink()
    assert check_file(tmp_path) == {name: tuple(value.shape) for name, value in theirs.state_dict().items()}
    part = tmp_path / "model-00001-of-00004.safetensors"
    for name in (part.name, "renamed.safetensors"):
        if name != part.name:
            index.write_text(index.read_text().replace(part.name, name))
            part.rename(tmp_path / name)
        with refused(ConfigError, tmp_path / name, 4, index) as caught:
            load_into(Net(), tmp_path / name)
        assert "start_partial" not in str(caught.value)


SPOILT = {
    "a missing shard": ("", "model-00002-of-00004.safetensors"),
    "a file outside": ("../model-00001-of-00004.safetensors", "in the folder of"),
    "an absolute path": ("/model-00001-of-00004.safetensors", "in the folder of"),
    "a pickle": ("pytorch_model.bin", "pytorch_model.bin"),
    "no text": (3, "3"),
    "a tensor in two shards": ("", "first.weight"),
    "a tensor without a name": ("", "extra"),
    "a tensor that is not there": ("model-00002-of-00004.safetensors", "first.weight"),
    "no map": ("", "weight_map"),
    "no JSON": ("", "JSON"),
}


@pytest.mark.parametrize("how", SPOILT)
def test_an_index_that_its_files_contradict_is_refused(how, tmp_path):
    index = save_shards(tmp_path, Net())
    place, fact = SPOILT[how]
    content = json.loads(index.read_text())
    second = tmp_path / "model-00002-of-00004.safetensors"
    if place:
        content["weight_map"]["first.weight"] = place
    index.write_text({"no map": "{}", "no JSON": "["}.get(how, json.dumps(content)))
    if how == "a missing shard":
        second.unlink()
    elif how in ("a tensor in two shards", "a tensor without a name"):
        save_file({**load_file(second), fact: torch.zeros(3, 2)}, second)
    model = Net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with refused(ConfigError, "model.start_from", index, fact) as caught:
        load_into(model, tmp_path, partial=True)
    assert "\n" not in str(caught.value)
    assert_same(model.state_dict(), before)


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
