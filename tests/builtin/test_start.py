import logging
import shutil
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

from hookdiff import ConfigError
from hookdiff.builtin.start import Start
from hookdiff.experiment.build import build_loop
from hookdiff.experiment.config import load_config
from hookdiff.experiment.probe import try_config
from hookdiff.models.load import check_file, load_into
from hookdiff.testing import assert_same, toy_loop, weights

TEXT = """
[run]
steps = 3
batch_size = 16
log_every = 1
device = "cpu"
plugins = ["ema", "checkpoint"]
[data]
source = "digits"
[model]
use = "unet"
channels = 8
num_res_blocks = 1
head_dim = 8
[diffusion]
timesteps = 20
[sampling]
steps = 2
"""


@pytest.fixture
def config(tmp_path):
    def loaded(*given, text=TEXT):
        (tmp_path / "small.toml").write_text(text)
        return load_config(tmp_path / "small.toml", (), given)

    return loaded


class Net(nn.Module):
    def __init__(self, width: int = 3, names: tuple[str, ...] = ("first", "second")) -> None:
        super().__init__()
        for name in names:
            self.add_module(name, nn.Linear(2, width))
        self.norm = nn.BatchNorm1d(width)  # has buffers, one of them a scalar


def saved(path, model):
    save_file(model.state_dict(), path)
    return path


def newest(run):
    return max((run / "checkpoints").iterdir())


def test_a_new_run_starts_from_the_weights_of_another(config, tmp_path):
    build_loop(config(), tmp_path / "first").run()
    for name in ("model", "ema"):
        file = newest(tmp_path / "first") / f"{name}.safetensors"
        given = config(f"model.start_from={file}", "run.seed=7", "run.steps=1")
        loop = build_loop(given, tmp_path / name)
        assert loop.hparams["model"]["start_from"] == str(file)
        with loop:
            assert_same(weights(loop), load_file(file))
            assert_same(loop.plugins["ema"].shadow, load_file(file))  # it starts there too
            assert loop.progress.step == 0


def test_a_resumed_run_has_its_own_weights_and_needs_no_file(config, tmp_path):
    build_loop(config(), tmp_path / "first").run()
    file = shutil.copy(newest(tmp_path / "first") / "model.safetensors", tmp_path / "given.safetensors")
    given = config(f"model.start_from={file}")
    whole = build_loop(given, tmp_path / "whole")
    whole.run()
    build_loop(config(f"model.start_from={file}", "run.steps=2"), tmp_path / "run").run()
    (tmp_path / "given.safetensors").unlink()
    try_config(given, resume=True)
    with pytest.raises(ConfigError, match=r"model\.start_from: .*given\.safetensors: no such file"):
        try_config(given)
    again = build_loop(given, tmp_path / "run", resume=True)
    again.run()
    assert again.progress.step == 3
    assert_same(weights(again), weights(whole))


def test_the_written_config_starts_from_the_same(config, tmp_path):
    build_loop(config("run.steps=1"), tmp_path / "first").run()
    file = newest(tmp_path / "first") / "model.safetensors"
    given = config(f"model.start_from={file}", "model.start_partial=true")
    loop = build_loop(given, tmp_path / "run")
    loop.run()
    again = load_config(tmp_path / "run" / "config.toml")
    assert again.resolved() == loop.hparams
    assert loop.hparams["model"]["start_partial"] is True
    assert "start_from" not in build_loop(config(), tmp_path / "x").hparams["model"]
    assert (
        "start_from"
        not in load_config(tmp_path / "run" / "config.toml", (), ["model.start_from=none"]).resolved()["model"]
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("model.start_form=x", "model.start_form: unknown key; did you mean 'start_from'?"),
        ("model.start_from=''", "model.start_from: "),
        ("model.start_from=", "model.start_from: "),
        ("model.start_partial=1", "model.start_partial: expected true or false, got 1"),
        ("model.start_partial=true", "model.start_partial: needs start_from"),
    ],
)
def test_keys_that_are_wrong(config, given, message):
    with pytest.raises(ConfigError) as caught:
        config(given)
    (_, line) = str(caught.value).split("\n")
    assert line.startswith(f"  {message}")


def test_only_a_run_at_its_beginning_is_touched(tmp_path):
    file = saved(tmp_path / "w.safetensors", nn.Linear(8, 8))
    loop = toy_loop({"start": Start(str(tmp_path / "gone.safetensors"))})
    loop.progress.position = 1
    with loop:
        pass
    assert Start().on_start(loop) is None
    assert file.exists()


def test_values_are_copied_in_place_with_the_dtype_of_the_model(tmp_path):
    theirs, ours = Net().double(), Net()
    theirs.norm.num_batches_tracked += 4
    addresses = [p.data_ptr() for p in ours.parameters()]
    load_into(ours, saved(tmp_path / "w.safetensors", theirs))
    for name, value in ours.state_dict().items():
        assert value.dtype == (torch.int64 if name.endswith("tracked") else torch.float32)
        assert torch.equal(value, theirs.state_dict()[name].to(value.dtype))
    assert [p.data_ptr() for p in ours.parameters()] == addresses


def test_all_that_differs_is_told_at_once(tmp_path):
    file = saved(tmp_path / "w.safetensors", Net(names=("frist", "second")))
    with torch.no_grad():
        model = Net(names=("first", "second"))
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


def test_what_fits_is_loaded_and_the_rest_is_told(tmp_path, caplog):
    theirs = Net(names=("frist", "second"))
    model = Net(names=("first", "second"))
    first = model.first.weight.clone()
    with caplog.at_level(logging.INFO, "hookdiff"):
        load_into(model, saved(tmp_path / "w.safetensors", theirs), partial=True)
    assert torch.equal(model.second.weight, theirs.second.weight)
    assert torch.equal(model.first.weight, first)
    start, differing = (record.getMessage() for record in caplog.records)
    assert start.endswith("w.safetensors: 7 of the model's 9 tensors")
    assert "4 differences\n  missing first.weight" in differing
    with pytest.raises(ConfigError, match="is of another model: 5 differences"):
        load_into(nn.Linear(7, 7), saved(tmp_path / "x.safetensors", nn.BatchNorm1d(2)), partial=True)


@given(st.sets(st.sampled_from("abcdef")), st.sets(st.sampled_from("abcdef"), min_size=1), st.booleans())
def test_every_name_that_fits_is_loaded_or_nothing_is(tmp_path_factory, given, own, partial):
    file = tmp_path_factory.mktemp("w") / "w.safetensors"
    save_file({name: torch.full((2,), float(ord(name))) for name in given}, file)
    model = nn.Module()
    for name in own:
        model.register_parameter(name, nn.Parameter(torch.zeros(2)))
    fits = given == own or (partial and given & own)
    expected = pytest.raises(ConfigError, match=f" {len(given ^ own)} difference")
    with nullcontext() if fits else expected:
        load_into(model, file, partial)
    for name, value in model.named_parameters():
        assert value[0] == (ord(name) if fits and name in given else 0)


def test_files_that_cannot_be_used(tmp_path):
    net = nn.Linear(2, 2)
    whole = saved(tmp_path / "whole.safetensors", net)
    torch.save(net.state_dict(), tmp_path / "new.pt")
    torch.save(net.state_dict(), tmp_path / "old.bin", _use_new_zipfile_serialization=False)
    (tmp_path / "cut.safetensors").write_bytes(whole.read_bytes()[:-3])
    (tmp_path / "empty.safetensors").write_bytes(b"")
    (tmp_path / "text.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    for name, message in {
        "whole.safetensor": "no such file; did you mean 'whole.safetensors'?",
        "new.pt": "is a pickle, which may run any code when it is read; load it with torch.load(",
        "old.bin": "is a pickle, which may run any code",
        "cut.safetensors": "cut short, or no safetensors file: ",
        "empty.safetensors": "cut short, or no safetensors file: ",
        "text.safetensors": "cut short, or no safetensors file: ",
        "nowhere/x.safetensors": "no such file",
        "": "is a folder; name one file: it has cut.safetensors, empty.safetensors, text.safetensors, whole.s",
    }.items():
        with pytest.raises(ConfigError) as caught:
            check_file(tmp_path / name)
        told = str(caught.value)
        assert told.startswith(f"model.start_from: {tmp_path / name}")
        assert message in told
        assert "\n" not in told
    assert check_file(whole) == {"weight": (2, 2), "bias": (2,)}


@given(st.integers(0, 10**6))
def test_a_file_cut_anywhere_is_told(tmp_path_factory, at):
    folder = tmp_path_factory.mktemp("w")
    data = saved(folder / "w.safetensors", nn.Linear(2, 2)).read_bytes()
    (folder / "w.safetensors").write_bytes(data[: at % len(data)])
    with pytest.raises(ConfigError, match=r"w\.safetensors: cut short, or no safetensors file"):
        check_file(folder / "w.safetensors")


def test_a_probe_and_a_run_tell_before_anything_is_made(config, tmp_path):
    given = config(f"model.start_from={tmp_path / 'gone.safetensors'}")
    with pytest.raises(ConfigError, match=r"1 problem\n  model\.start_from: .*gone\.safetensors: no such file$"):
        try_config(given)
    other = saved(tmp_path / "other.safetensors", Net())
    with pytest.raises(ConfigError, match=r"^model\.start_from: .*other\.safetensors is of another model: "):
        build_loop(config(f"model.start_from={other}"), tmp_path / "run").run()
    assert not (tmp_path / "run").exists()
