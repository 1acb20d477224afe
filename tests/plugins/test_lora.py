import re
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from hookdiff import UserError, build_loop, load_config
from hookdiff.testing.compare import assert_same
from hookdiff.testing.toy import toy_loop
from hookdiff_lora import LoRA
from hookdiff_lora.adapter import adapters_of
from hookdiff_lora.files import load_adapter
from hookdiff_lora.targets import layers_of
from tests.conftest import Command, Succeed, check_facts, check_refused, refused
from tests.on_ranks import done, train_config

diffusers = pytest.importorskip("diffusers", reason="needs hookdiff[lora]")
pytest.importorskip("peft", reason="needs hookdiff[lora]")

CONFIG = """
[run]
steps = 6
batch_size = 8
device = "cpu"
plugins = ["lora", "ema", "autoguidance", "samples", "checkpoint"]
[data]
source = "digits"
[model]
use = "pretrained"
path = "base"
[diffusion.process]
use = "vp"
[optimizer]
use = "adamw"
lr = 0.01
[sampling]
steps = 2
[plugins.ema]
decay = 0.5
[plugins.samples]
every = 3
num = 4
"""
ATTENTION = ["to_q", "to_k", "to_v", "to_out.0"]


def unet(**options: Any) -> Any:
    torch.manual_seed(5)
    blocks = {"down_block_types": ("CrossAttnDownBlock2D",) * 2, "up_block_types": ("CrossAttnUpBlock2D",) * 2}
    sizes = {"block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4, "attention_head_dim": 4}
    return diffusers.UNet2DConditionModel(8, 4, 4, **blocks, **sizes, cross_attention_dim=8, **options)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a network in `base`, and a config that adapts it, as the working directory."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(5)
    blocks = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}
    sizes = {"block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4, "attention_head_dim": 4}
    diffusers.UNet2DModel(8, 1, 1, **blocks, **sizes).save_pretrained("base")
    Path("c.toml").write_text(CONFIG)
    return tmp_path


def adapted(model: nn.Module, **options: Any) -> Any:
    """Return `model` with adapters."""
    LoRA(**options).prepare_model(
        SimpleNamespace(model=model, config=SimpleNamespace(seed=0), device=torch.device("cpu"), is_main=True)  # type: ignore[arg-type]
    )
    return model


def fill(model: nn.Module) -> None:
    """Give the adapters of `model` other values than those with which they begin."""
    for number, adapter in enumerate(adapters_of(model).values()):
        for weight in (adapter.down, adapter.up):
            nn.init.normal_(weight, std=0.1, generator=torch.Generator().manual_seed(number))


@pytest.mark.parametrize("init", ["gaussian", "kaiming"])
def test_an_adapter_adds_alpha_by_rank_b_a_x(init: str) -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(40, 60), torch.randn(3, 40)
    model = nn.Sequential(layer)
    before = layer(x), torch.get_rng_state()
    adapted(model, rank=32, alpha=8.0, targets=("0",), init=init)
    assert torch.equal(torch.get_rng_state(), before[1])
    [adapter] = adapters_of(model).values()
    assert torch.equal(model(x), before[0])  # B is zero
    spread = adapter.down.detach().abs().max() if init == "kaiming" else adapter.down.detach().std()
    assert float(spread) == pytest.approx(40**-0.5 if init == "kaiming" else 1 / 32, rel=0.05)
    fill(model)
    expected = before[0] + 0.25 * x @ adapter.down.T @ adapter.up.T
    assert torch.allclose(model(x), expected, atol=1e-6)
    assert torch.allclose(x @ adapter.merged().T + layer.bias, expected, atol=1e-5)
    assert [name for name, weight in model.named_parameters() if weight.requires_grad] == [
        *("0.lora_A.default.weight", "0.lora_B.default.weight")
    ]


def test_a_run_trains_adapters_alone_and_writes_them_alone(here: Path, succeed: Succeed) -> None:
    base = load_file("base/diffusion_pytorch_model.safetensors")
    losses = []
    for name, settings in (("lora", ()), ("whole", ("no:lora",))):
        with build_loop(load_config("c.toml", plugins=settings), here / name) as loop:
            losses.append([step.loss for step in loop.steps()])
            if name == "lora":
                held = {key.replace(".base_layer", ""): value for key, value in loop.model.named_parameters()}
                assert_same({key: held[key] for key in base}, base)
    assert losses[0][0] == losses[1][0]
    assert losses[0][-1] != losses[1][-1]
    files = [load_file(path) for path in Path("lora/checkpoints/step-00000006").glob("*.safetensors")]
    assert len(files) == 4
    assert not [name for tensors in files for name in tensors if any(known in name for known in base)]
    said = succeed("selftest", "resume", "c.toml", "--steps", "8")
    assert "bit for bit" in said


def test_it_says_how_many_weights_train_and_where(here: Path, succeed: Succeed, caplog: Any) -> None:
    succeed("run", "c.toml", "--out", "run")
    [line] = [each.message for each in caplog.records if each.message.startswith("lora:")]
    assert re.fullmatch(r"lora: [\d,]+ of [\d,]+ weights train, in (\d+) layers: .*", line)
    check_facts(line, *(f"x {name}" for name in ATTENTION))


@pytest.mark.parametrize(
    ("patterns", "ends", "num"),
    [
        ((), {*ATTENTION}, 7 * 8),
        (("to_q",), {"to_q"}, 14),
        (("*attn2*",), {*ATTENTION}, 7 * 4),
        (("mid_block*", "conv_in"), {*ATTENTION, "proj", "net.2", "conv1", "conv_in"}, None),
    ],
)
def test_targets_are_the_ends_of_names_or_patterns(patterns: Any, ends: set[str], num: int | None) -> None:
    layers = layers_of(unet(), patterns)
    assert all(any(name.endswith(end) for name in layers) for end in ends)
    assert num in (None, len(layers))


def from_kohya(tensors: Mapping[str, Tensor], alpha: float) -> dict[str, Tensor]:
    """Return tensors of diffusers under the names of kohya."""
    kohya: dict[str, Tensor] = diffusers.utils.convert_state_dict_to_kohya(dict(tensors))
    return {name: torch.tensor(alpha) if name.endswith(".alpha") else value for name, value in kohya.items()}


@pytest.mark.parametrize("kind", ["diffusers", "kohya", "blocks of the paper"])
def test_it_starts_from_files_of_others_with_their_strength(kind: str, tmp_path: Path) -> None:
    """diffusers loads the same file into a network of its own."""
    from diffusers.loaders import StableDiffusionXLLoraLoaderMixin as Loader

    options: dict[str, Any] = {}
    theirs = adapted(unet(**options), rank=2, targets=("*attn1*", "proj_in"))
    fill(theirs)
    tensors = {}
    for name, adapter in adapters_of(theirs).items():
        tensors |= {f"unet.{name}.lora_A.weight": adapter.down, f"unet.{name}.lora_B.weight": adapter.up}
    tensors = {name: value.detach().clone() for name, value in tensors.items()}
    if kind != "diffusers":
        tensors = from_kohya(tensors, alpha=3.0)
    if kind == "blocks of the paper":
        tensors = {
            name.replace("mid_block_attentions_0", "middle_block_1"): v for name, v in tensors.items() if "mid" in name
        }
    save_file(tensors, tmp_path / "theirs.safetensors")
    known, ours = unet(**options), adapted(unet(**options), rank=2, alpha=8.0, targets=("*attn1*", "proj_in"))
    found, alphas = Loader.lora_state_dict(dict(tensors), unet_config=known.config)
    Loader.load_lora_into_unet(found, alphas, known)
    load_adapter(ours, tmp_path / "theirs.safetensors")
    given = torch.randn(2, 4, 8, 8), torch.tensor([3, 900]), torch.randn(2, 5, 8)
    expected = known.eval()(*given).sample
    assert torch.allclose(ours.eval()(*given).sample, expected, atol=1e-5)
    assert not torch.allclose(unet().eval()(*given).sample, expected, atol=1e-3)


def adapter_file(rank: int = 4, layer: str = "0", **others: Tensor) -> dict[str, Tensor]:
    return {f"{layer}.lora_A.weight": torch.ones(rank, 4), f"{layer}.lora_B.weight": torch.ones(8, rank), **others}


@pytest.mark.parametrize(
    ("tensors", "facts"),
    [
        (adapter_file(rank=8), ("0 has rank 8", "plugins.lora.rank = 8")),
        (adapter_file(layer="3"), ("3 has no adapter", "plugins.lora.targets")),
        (adapter_file(layer="5"), ("no layer 5",)),
        (adapter_file() | {"0.lora_A.weight": torch.ones(4, 5)}, ("0: A has shape (4, 5)", "(4, 4)")),
        (adapter_file() | {"0.lora_B.weight": torch.full((8, 4), torch.nan)}, ("0: B", "not finite")),
        (adapter_file(hada_w1=torch.ones(1)), ("hada_w1", "no file of LoRA")),
        ({"text_encoder.x.lora_A.weight": torch.ones(1)}, ("no file of LoRA", "no tensors of adapters")),
    ],
)
def test_files_that_do_not_fit_are_refused(tensors: dict[str, Tensor], facts: tuple[str, ...], tmp_path: Path) -> None:
    save_file(tensors, tmp_path / "a.safetensors")
    loop = toy_loop({"lora": LoRA(targets=("0",), start_from=str(tmp_path / "a.safetensors"))})
    with refused(UserError, "plugins.lora.start_from", "a.safetensors", *facts):
        loop.run()


@pytest.mark.parametrize(
    ("settings", "facts"),
    [
        (("rank=0",), ("plugins.lora.rank", "0")),
        (("targets=['to_kk']",), ("plugins.lora.targets", "'to_kk'", "did you mean", "to_k")),
        (("targets=['conv_norm_out']",), ("plugins.lora.targets", "conv_norm_out, a GroupNorm")),
        (("targets=['mid_block']",), ("plugins.lora.targets", "no layer", "mid_block.*")),
        (("start_from=none.safetensors",), ("plugins.lora.start_from", "none.safetensors")),
    ],
)
def test_bad_input_is_one_message(
    here: Path, hookdiff: Command, settings: tuple[str, ...], facts: tuple[str, ...]
) -> None:
    result = hookdiff(
        "run", "c.toml", "--out", "run", *(w for each in settings for w in ("--set", f"plugins.lora.{each}"))
    )
    check_refused(result, *facts)
    check_facts(result[2], *facts)
    assert not Path("run").exists()


def test_a_network_without_layers_to_adapt_is_refused() -> None:
    with refused(UserError, "plugins.lora", "no linear layer"):
        layers_of(nn.Sequential(nn.LayerNorm(4)), ())
    with refused(UserError, "plugins.lora.targets", "no attention", "0"):
        layers_of(nn.Sequential(nn.Linear(4, 4)), ())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of torch's compiler
def test_it_trains_the_same_compiled_and_with_gradient_checkpointing(here: Path) -> None:
    losses = []
    for name, plugins, settings in (
        ("plain", (), ()),
        ("compiled", ("compile",), ("plugins.compile.backend=eager",)),
        ("checkpointed", (), ("model.gradient_checkpointing=true",)),
    ):
        config = load_config("c.toml", ("no:samples", *plugins), settings)
        with build_loop(config, here / name) as loop:
            losses.append([step.loss for step in loop.steps()])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[2] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("plugin", "settings"), [("ddp", ""), ("fsdp", ""), ("fsdp", 'model.precision="bf16"')], ids=str
)
def test_two_ranks_train_as_one(here: Path, plugin: str, settings: str) -> None:
    plugins: tuple[str, ...] = ("no:samples", "no:autoguidance")
    if settings:
        key, value = settings.split("=")
        Path("c.toml").write_text(CONFIG.replace("[model]", f"[model]\n{key.partition('.')[2]} = {value}"))
        plugins += ("amp",)
    alone = train_config({"path": "c.toml", "plugins": plugins, "out": here / "alone"})
    both = done(here, 2, train_config, {"path": "c.toml", "plugins": (*plugins, plugin), "out": here / "both"})
    assert both == {"step": 10, "loss": pytest.approx(alone["loss"], rel=1e-2 if settings else 1e-5)}
    states = [load_file(here / name / "checkpoints/step-00000010/ema.safetensors") for name in ("alone", "both")]
    assert states[0].keys() == states[1].keys()
    assert all("lora_" in name for name in states[0])
