import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tomli
import tomli_w
import torch
from diffusers import UNet2DConditionModel, UNet2DModel
from safetensors.torch import load_file, save_file

from hookdiff import build_loop, load_config
from hookdiff.experiment.build import build_model
from hookdiff.testing.compare import assert_same
from tests.conftest import Command, Succeed, check_facts, check_refused, warnings

CONFIG = """
[run]
steps = 2
batch_size = 8
device = "cpu"
plugins = ["checkpoint"]
[data]
source = "digits"
[model]
use = "pretrained"
path = "base"
[sampling]
steps = 2
"""
FILE = "diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module")
def network() -> Any:
    torch.manual_seed(5)
    blocks = {"down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2}
    return UNet2DModel(8, 1, 1, **blocks, block_out_channels=(8, 16), layers_per_block=1, norm_num_groups=4)


@pytest.fixture
def here(network: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the network in `base`, and a config that trains it, as the working directory."""
    monkeypatch.chdir(tmp_path)
    network.save_pretrained("base")
    Path("c.toml").write_text(CONFIG)
    return tmp_path


def change_a_byte(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def test_it_is_the_network_of_its_folder_and_draws_nothing(here: Path, network: Any) -> None:
    before = torch.get_rng_state()
    made: Any = build_model(load_config("c.toml", settings=["model.dropout=0.25"]).model)
    assert torch.equal(torch.get_rng_state(), before)
    assert_same(made.state_dict(), network.state_dict())
    assert (made.config.dropout, made.config.block_out_channels) == (0.25, [8, 16])
    save_file({name: value.half() for name, value in network.state_dict().items()}, here / "base" / FILE)
    halves: Any = build_model(load_config("c.toml", settings=["model.gradient_checkpointing=true"]).model)
    assert halves.dtype == torch.float32
    assert halves.is_gradient_checkpointing


def test_a_trial_reads_no_weights(here: Path) -> None:
    change_a_byte(here / "base" / FILE)
    with torch.device("meta"):
        made = build_model(load_config("c.toml", settings=[f"model.digest={'0' * 32}"]).model)
    assert {value.device.type for value in made.parameters()} == {"meta"}


def test_what_is_written_to_the_config_of_a_run_is_read_again(here: Path) -> None:
    """The type of `attention_head_dim` in diffusers has no list of two numbers, which SDXL has."""
    blocks = {"down_block_types": ("CrossAttnDownBlock2D",) * 2, "up_block_types": ("CrossAttnUpBlock2D",) * 2}
    sizes: dict[str, Any] = {"block_out_channels": (8, 16), "norm_num_groups": 4, "attention_head_dim": (2, 4)}
    UNet2DConditionModel(8, 1, 1, **blocks, **sizes, cross_attention_dim=8).save_config("base")
    table = load_config("c.toml").resolved()
    assert table["model"]["attention_head_dim"] == [2, 4]
    Path("d.toml").write_text(tomli_w.dumps(table))
    assert load_config("d.toml").resolved()["model"] == table["model"]


def test_the_network_of_a_pipeline_is_found(here: Path, network: Any) -> None:
    shutil.move("base", "inside")
    Path("base").mkdir()
    shutil.move("inside", "base/unet")
    Path("base/model_index.json").write_text('{"_class_name": "DDPMPipeline"}')
    assert_same(build_model(load_config("c.toml").model).state_dict(), network.state_dict())


def test_a_run_keeps_the_digest_and_refuses_other_weights(
    here: Path, succeed: Succeed, hookdiff: Command, caplog: pytest.LogCaptureFixture
) -> None:
    succeed("run", "c.toml", "--out", "run")
    table = tomli.loads(Path("run/config.toml").read_text())["model"]
    assert (table["use"], table["sample_size"], len(table["digest"])) == ("pretrained", 8, 32)
    assert table["block_out_channels"] == [8, 16]
    shutil.move("base", "moved")
    check_refused(hookdiff("sample", "run"), "model.path", "base")
    succeed("resume", "run", "--steps", "3", "--set", "model.path=moved")
    change_a_byte(here / "moved" / FILE)
    for words, fact in (
        (("resume", "run", "--steps", "4"), "model.path"),
        (("run", "c.toml", "--out", "run", "--resume"), "model.digest"),
    ):
        refusal = hookdiff(*words, "--set", "model.path=moved")
        check_refused(refusal, fact, table["digest"])
        assert "--fresh" not in refusal[2]
    assert not warnings(caplog)


def test_the_first_loss_is_that_of_the_weights(here: Path) -> None:
    """Two runs that differ only in how the network is made have the same losses."""
    table = load_config("c.toml").resolved()
    del table["model"]["path"], table["model"]["precision"]
    table["model"] |= {"use": "diffusers:UNet2DModel", "start_from": f"base/{FILE}"}
    Path("d.toml").write_text(tomli_w.dumps(table))
    losses = []
    for config in ("c.toml", "d.toml"):
        with build_loop(load_config(config), here / config.removesuffix(".toml")) as loop:
            losses.append([step.loss for step in loop.steps()])
    assert losses[0] == losses[1]


def spoil(folder: Path, what: str) -> None:
    file, config = folder / FILE, folder / "config.json"
    if what == "config":
        config.unlink()
    elif what == "key":
        Path("c.toml").write_text(CONFIG.replace('path = "base"\n', ""))
    elif what == "class":
        config.write_text(json.dumps({**json.loads(config.read_text()), "_class_name": "UNet2DModell"}))
    elif what == "pickle":
        file.rename(folder / "diffusion_pytorch_model.bin")
    elif what == "file":
        shutil.rmtree(folder)
        folder.write_text("")
    else:
        tensors = load_file(file)
        first, *_, last = sorted(tensors)
        tensors |= {"extra.weight": tensors.pop(first), last: tensors[last][:1].clone()}
        save_file(tensors, file)


@pytest.mark.parametrize(
    ("what", "settings", "facts"),
    [
        ("config", (), ("model.path", "config.json")),
        ("class", (), ("model.path", "'UNet2DModell'", "did you mean", "UNet2DModel")),
        ("pickle", (), ("model.path", "pickle", "safetensors")),
        ("file", (), ("model.path", "is a file", "from_single_file")),
        ("weights", (), ("model.path", "missing conv_in.bias", "unexpected extra.weight", "has shape")),
        ("", ("model.init=xavier",), ("model.init", "folder")),
        ("", ("model.zero_output=true",), ("model.zero_output", "folder")),
        ("", ("model.dropuot=0.1",), ("model.dropuot", "'dropout'")),
        ("key", (), ("model", "needs path")),
        ("", ("model.path=bose",), ("model.path", "bose", "base")),
    ],
)
def test_bad_input_is_one_message(
    here: Path, hookdiff: Command, what: str, settings: tuple[str, ...], facts: tuple[str, ...]
) -> None:
    if what:
        spoil(here / "base", what)
    result = hookdiff("run", "c.toml", "--out", "run", *(word for each in settings for word in ("--set", each)))
    check_refused(result, *facts)
    check_facts(result[2], *facts)
    assert not Path("run").exists()
