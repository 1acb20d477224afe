import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from hookdiff import Batch, ConfigError, SampleRequest, build_loop, load_config
from hookdiff.diffusion.diffusion import Diffusion
from hookdiff.experiment.probe import try_config
from hookdiff.models.adapters import adapt, check_forward, checkpointable
from hookdiff.options.structure import Problems, arguments, parameters
from hookdiff_memory.estimate import estimate_memory
from hookdiff_networks import DiT, UNet
from tests.conftest import check_one, refused, wide

THEIR_UNET = {
    "use": "diffusers:UNet2DModel",
    "block_out_channels": [8, 16],
    "down_block_types": ["DownBlock2D", "AttnDownBlock2D"],
    "up_block_types": ["AttnUpBlock2D", "UpBlock2D"],
    "layers_per_block": 1,
    "norm_num_groups": 4,
}
THEIR_UNET_OF_TEN = {**THEIR_UNET, "num_class_embeds": 11}  # the last embedding stands for "no class"
THEIR_DIT = {
    "use": "diffusers:DiTTransformer2DModel",
    "num_attention_heads": 2,
    "attention_head_dim": 8,
    "num_layers": 2,
    "num_embeds_ada_norm": 10,
}


class Net(nn.Module):
    """Applies `answer` to the output of a layer."""

    def __init__(self, answer: Any) -> None:
        super().__init__()
        self.layer = nn.Conv2d(1, 1, 1)
        self.answer = answer

    def forward(self, x: Tensor, timesteps: Tensor) -> Any:
        return self.answer(self.layer(x))


def test_our_models_follow_the_contract_and_get_no_hooks() -> None:
    for kind in (UNet, DiT):
        for num_classes in (0, 3):
            model = kind(num_classes=num_classes)
            assert adapt(model) is model
            check_forward(model, (1, 8, 8), labels=num_classes > 0)
            check_forward(model, (1, 16, 8), labels=num_classes > 0)
            assert (len(model._forward_hooks), len(model._forward_pre_hooks)) == (0, 0)
            assert model.training


SMALL_OR_LARGE = pytest.mark.parametrize(("side", "device"), [(4, "cpu"), (2**15, "meta")])


@SMALL_OR_LARGE
def test_the_check_of_a_contract_changes_nothing(side: int, device: str) -> None:
    seen: list[str] = []

    def answer(x: Tensor) -> Tensor:
        seen.append(x.device.type)
        torch.rand(1)
        model.count.add_(1)
        return x

    model = Net(answer)
    model.register_buffer("count", torch.zeros(()))
    before, state = model.count, torch.get_rng_state()
    check_forward(model, (1, side, side))
    assert seen == [device]
    assert torch.equal(state, torch.get_rng_state())
    assert (model.count is before, before.item()) == (True, 0)
    assert all(p.device.type == "cpu" and p.grad is None for p in model.parameters())


@SMALL_OR_LARGE
def test_layers_and_weights_that_are_shared_stay_unchanged(side: int, device: str) -> None:
    seen: list[str] = []

    def answer(x: Tensor) -> Tensor:
        x = twin(again(x))
        seen.append(x.device.type)
        return x

    model = Net(answer)
    again = model.again = model.layer
    twin = model.twin = nn.Conv2d(1, 1, 1)
    twin.weight = model.layer.weight
    before = list(model.parameters())
    check_forward(model, (1, side, side))
    assert seen == [device]
    assert list(map(id, model.parameters())) == list(map(id, before))
    assert twin.weight is model.layer.weight


def test_a_model_that_reads_values_is_checked_with_real_tensors() -> None:
    seen: list[float] = []

    def answer(x: Tensor) -> Tensor:
        seen.append(x.mean().item())
        return x

    check_forward(Net(answer), (1, 4, 4))
    assert len(seen) == 1


def test_the_sample_of_an_output_is_taken() -> None:
    model = Net(lambda x: SimpleNamespace(sample=x))
    check_forward(model, (1, 4, 4))
    x, t = torch.randn(2, 1, 4, 4), torch.tensor([1, 2])
    assert torch.equal(model(x, t), model.layer(x))


@pytest.mark.parametrize(
    ("answer", "facts"),
    [
        (lambda x: x[:, :, :3], ("(2, 1, 3, 4)", "(2, 1, 4, 4)")),
        (lambda x: (x,), ("tuple",)),
        (lambda x: x.nonsense, ("(2, 1, 4, 4)", "'nonsense'")),
    ],
)
def test_a_model_that_breaks_the_contract_is_refused(answer: Any, facts: Any) -> None:
    with refused(ValueError, *facts):
        check_forward(Net(answer), (1, 4, 4))


@pytest.fixture
def config(load_small):
    """Return a function that loads a config with a model and settings; without diffusers the test is skipped."""

    def loaded(model, *settings):
        if model["use"].startswith("diffusers:"):
            pytest.importorskip("diffusers")
        run = {"steps": 3, "batch_size": 8, "log_every": 1, "plugins": ["ema"]}
        return load_small(*settings, run=run, model=model)

    return loaded


@pytest.fixture
def built(config):
    """Return a function that builds a model for digits."""
    return lambda model: config(model).model.given(in_channels=1, out_channels=1, sample_size=8).build()


@pytest.mark.parametrize(
    ("model", "conditional", "facts"),
    [
        ({"use": "dit", "in_channels": 3}, "none", ("(2, 1, 8, 8)", "in_channels=3", "in_channels = 1")),
        ({"use": "dit", "image_size": 9, "patch_size": 3}, "none", ("8x8", "patch_size", 6, 9, "image_size = 8")),
        ({"use": "unet", "num_classes": 9}, "none", ("num_classes = 9", 10)),
        ({"use": "unet", "num_classes": 10}, "false", ("(2, 1, 8, 8)", "num_classes=10")),
        ({"use": "torch.nn:Conv2d", "kernel_size": 3, "out_channels": 2}, "none", ("(2, 1, 8, 8)",)),
    ],
)
def test_a_model_that_does_not_fit_the_data_is_refused_before_training(config, tmp_path, model, conditional, facts):
    with refused(ConfigError, "model", model["use"], *facts):
        build_loop(config(model, f"diffusion.conditional={conditional}"), tmp_path / "run")


@pytest.mark.parametrize("name", ["unet", "dit"])
@pytest.mark.parametrize("num_classes", [*wide(0), 10])
def test_our_models_train_and_sample_from_a_config(config, tmp_path, name, num_classes):
    unet = {"channels": 8, "head_dim": 8, "num_res_blocks": 1}
    small = unet if name == "unet" else {"hidden_size": 16, "depth": 1}
    model = {"use": name, **small, "gradient_checkpointing": True, "num_classes": num_classes}
    loop = build_loop(config(model), tmp_path / "run")
    assert loop.model.num_classes == loop.hparams["model"]["num_classes"] == num_classes
    assert loop.run() == "done"
    assert loop.sample(SampleRequest(2)).images.shape == (2, 1, 8, 8)


def inputs(num: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(num, 1, 8, 8, generator=generator), torch.tensor([3, 700][:num]), torch.tensor([4, -1][:num])


@pytest.mark.slow
@pytest.mark.parametrize(("model", "num_classes"), [(THEIR_UNET, 0), (THEIR_UNET_OF_TEN, 10), (THEIR_DIT, 10)])
def test_models_of_diffusers_train_and_sample_from_a_config(config, tmp_path, model, num_classes):
    given = config(model)
    try_config(given)
    loop = build_loop(given, tmp_path / "run")
    assert getattr(loop.model, "num_classes", 0) == num_classes
    assert (loop.model.config.in_channels, loop.model.config.sample_size) == (1, 8)
    assert (loop.model.config.out_channels or 1) == 1
    before = {name: value.clone() for name, value in loop.model.state_dict().items()}
    assert loop.run() == "done"
    assert any(not torch.equal(before[name], value) for name, value in loop.model.state_dict().items())
    assert loop.sample(SampleRequest(2)).images.shape == (2, 1, 8, 8)
    theirs = type(loop.model).from_config(loop.model.config)
    assert theirs.state_dict().keys() == loop.model.state_dict().keys() == loop.plugins["ema"].shadow.keys()
    theirs.load_state_dict(loop.model.state_dict())
    x, t, labels = inputs()
    rows = (torch.where(labels < 0, num_classes, labels),) if num_classes else ()
    loop.model.eval()
    expected = theirs.eval()(x, t, *rows).sample
    torch.testing.assert_close(loop.model(x, t, *([labels] if num_classes else [])), expected)
    assert load_config(tmp_path / "run" / "config.toml").resolved() == loop.hparams


@pytest.mark.slow
@pytest.mark.parametrize("model", [THEIR_UNET_OF_TEN, THEIR_DIT])
def test_an_adapted_model_keeps_its_class_and_its_keys(built, model):
    theirs = built(model)
    keys, kind = list(theirs.state_dict()), type(theirs)
    ours = adapt(adapt(theirs))
    assert ours is theirs
    assert (type(ours), list(ours.state_dict())) == (kind, keys)
    assert len(ours._forward_hooks) == len(ours._forward_pre_hooks) == 1
    x, t, labels = inputs()
    expected = ours.eval()(x, t, labels)
    twin = copy.deepcopy(ours)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.zero_()
    assert torch.equal(twin(x, t, labels), expected)
    assert torch.equal(twin(x, t, class_labels=labels), expected)
    with refused(ValueError, "num_classes=10", "labels"):
        twin(x, t)
    with refused(ValueError, "labels", 10, -1, 9):
        twin(x, t, torch.tensor([0, 10]))


@pytest.mark.slow
def test_labels_are_not_dropped_twice(built):
    model = adapt(built(THEIR_DIT))
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    x, t, _ = inputs(1)
    many, labels = x.expand(200, 1, 8, 8), torch.full((200,), 4)
    with torch.no_grad():
        out = model.train()(many, t.expand(200), labels)
        assert torch.allclose(out, out[:1].expand_as(out), atol=1e-5)  # diffusers would drop a tenth of the labels
        assert not torch.allclose(out[:1], model(x, t, torch.tensor([-1])), atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "facts"),
    [
        ({**THEIR_DIT, "out_channels": 2}, ("(2, 2, 8, 8)", "(2, 1, 8, 8)", "out_channels = 1")),
        ({**THEIR_UNET, "num_class_embeds": 1}, ("num_class_embeds=1",)),
        ({**THEIR_UNET, "num_class_embeds": 10}, ("diffusers:UNet2DModel", "num_classes = 9", 10)),
        ({**THEIR_UNET, "class_embed_type": "timestep"}, ("diffusers:UNet2DModel", "(2, 1, 8, 8)", "class_labels")),
        ({"use": "diffusers:UNet2DCondition"}, ("small.toml", "model.use", "'UNet2DCondition'")),
    ],
)
def test_models_of_diffusers_that_cannot_be_used_are_refused(config, tmp_path, model, facts):
    with refused(ConfigError, "model", *facts):
        build_loop(config(model), tmp_path / "run")


@pytest.mark.slow
def test_a_run_starts_from_a_model_that_the_library_saved(config, built, tmp_path):
    built(THEIR_UNET_OF_TEN).save_pretrained(tmp_path / "theirs")
    file = tmp_path / "theirs" / "diffusion_pytorch_model.safetensors"
    given = config(THEIR_UNET_OF_TEN, f"model.start_from={file}")
    with build_loop(given, tmp_path / "run") as loop:
        saved = load_file(file)
        assert all(torch.equal(value, saved[name]) for name, value in loop.model.state_dict().items())
    del saved["conv_in.bias"]
    save_file(saved, file)
    with refused(ConfigError, 1, "conv_in.bias", "start_partial"):
        build_loop(given, tmp_path / "again").run()


@pytest.mark.slow
@pytest.mark.parametrize("model", [THEIR_UNET_OF_TEN, THEIR_DIT])
def test_an_adapted_model_compiles_in_place(built, model):
    net = adapt(built(model)).eval()
    x, t, labels = inputs()
    with torch.no_grad():
        expected = net(x, t, labels)
        net.compile(backend="eager")
        torch.testing.assert_close(net(x, t, labels), expected)


@pytest.mark.slow
def test_an_adapted_model_runs_in_ddp(built, one_process):
    net = adapt(built(THEIR_DIT)).eval()
    assert torch.equal(nn.parallel.DistributedDataParallel(net)(*inputs()), net(*inputs()))


class Theirs(nn.Module):
    """A model of another library, with a method that switches checkpointing on."""

    def __init__(self, in_channels: int, width: int = 4) -> None:
        super().__init__()
        self.layer, self.is_checkpointed = nn.Conv2d(in_channels, in_channels, 1), False

    def enable_gradient_checkpointing(self) -> None:
        self.is_checkpointed = True


def test_checkpointing_by_a_method_becomes_an_argument() -> None:
    make = checkpointable(Theirs)
    assert list(parameters(make)) == ["in_channels", "width", "gradient_checkpointing"]
    assert [make(1).is_checkpointed, make(1, gradient_checkpointing=True).is_checkpointed] == [False, True]
    problems = Problems()
    assert arguments(make, {"gradient_checkpointing": "yes", "width": 8}, "model", problems) == {"width": 8}
    check_one(problems.found, "model.gradient_checkpointing", "'yes'")
    assert all(checkpointable(kind) is kind for kind in (UNet, DiT, Net, torch.relu))


@pytest.mark.slow
def test_models_of_diffusers_take_less_memory_with_gradient_checkpointing(config):
    kept = []
    for given in (False, True):
        loaded = config(THEIR_UNET, f"model.gradient_checkpointing={str(given).lower()}")
        assert loaded.resolved()["model"]["gradient_checkpointing"] is given
        kept.append(estimate_memory(loaded).activations)
    assert kept[1] < kept[0] * 0.6


SMALL = {"sample_size": 8, "in_channels": 4, "num_attention_heads": 4}
CONDITIONAL_UNET = {
    "sample_size": 8,
    "in_channels": 4,
    "out_channels": 4,
    "block_out_channels": (32, 32),
    "layers_per_block": 1,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "cross_attention_dim": 32,
    "norm_num_groups": 8,
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "attention_head_dim": 8,
}
WITH_SIZES = {"addition_embed_type": "text_time", "addition_time_embed_dim": 8}
TEXT = {"encoder_hidden_states": "text"}
MASKED = {**TEXT, "encoder_attention_mask": "mask"}
SIZES = {"added_cond_kwargs.text_embeds": "pooled", "added_cond_kwargs.time_ids": "sizes"}
OF_TEXT = {"cross_attention_dim": 32, "caption_channels": 32, "num_layers": 2, "attention_head_dim": 8}
JOINT = {"joint_attention_dim": 32, "caption_projection_dim": 32, "attention_head_dim": 8, "out_channels": 4}
# Each class with arguments that make a small network, and `diffusion.conditions` for it.
TEXT_NETWORKS: list[tuple[str, dict[str, Any], dict[str, str]]] = [
    ("UNet2DConditionModel", CONDITIONAL_UNET, MASKED),
    (
        "UNet2DConditionModel",
        {**CONDITIONAL_UNET, **WITH_SIZES, "projection_class_embeddings_input_dim": 64},
        {**TEXT, **SIZES},
    ),
    (
        "SD3Transformer2DModel",
        {**SMALL, **JOINT, "num_layers": 2, "pooled_projection_dim": 16},
        {**TEXT, "pooled_projections": "pooled"},
    ),
    (
        "PixArtTransformer2DModel",
        {**SMALL, **OF_TEXT, "patch_size": 2, "out_channels": 4, "use_additional_conditions": False},
        MASKED,
    ),
    (
        "SanaTransformer2DModel",
        {**SMALL, **OF_TEXT, "out_channels": 4, "num_cross_attention_heads": 4, "cross_attention_head_dim": 8},
        MASKED,
    ),
    (
        "AuraFlowTransformer2DModel",
        {**SMALL, **JOINT, "num_mmdit_layers": 1, "num_single_dit_layers": 1, "pos_embed_max_size": 64},
        TEXT,
    ),
    (
        "Lumina2Transformer2DModel",
        {
            **SMALL,
            "patch_size": 2,
            "hidden_size": 32,
            "num_layers": 2,
            "num_refiner_layers": 1,
            "num_kv_heads": 4,
            "axes_dim_rope": (4, 2, 2),
            "axes_lens": (32, 32, 32),
            "cap_feat_dim": 32,
        },
        MASKED,
    ),
]


@pytest.mark.filterwarnings("ignore")  # of layers in diffusers
@pytest.mark.parametrize(("name", "arguments", "conditions"), [TEXT_NETWORKS[0], *wide(*TEXT_NETWORKS[1:])])
def test_networks_of_diffusers_with_a_text_are_trained(
    name: str, arguments: dict[str, Any], conditions: dict[str, str]
) -> None:
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    model = adapt(adapt(getattr(diffusers, name)(**arguments)))
    columns = {"text": torch.randn(4, 7, 32), "mask": torch.ones(4, 7).bool(), "pooled": torch.randn(4, 16)}
    columns["sizes"] = torch.rand(4, 6) * 8
    objective = Diffusion(conditions=conditions, conditional=False, label_dropout=0.5)
    batch = Batch(torch.randn(4, 4, 8, 8), conditions=columns)
    two = objective.named({name: column[:2] for name, column in columns.items()})
    check_forward(model, (4, 8, 8), times=torch.float32, conditions=two, trains=True)
    drawn = objective.draw(batch, torch.Generator())
    objective(model, drawn).loss.backward()
    draws = drawn.draws
    assert all(parameter.grad is None or parameter.grad.isfinite().all() for parameter in model.parameters())
    # The text and the time reach the network, whatever the order of its arguments.
    model.eval()
    x, times = torch.randn(4, 4, 8, 8), objective.process.network_time(draws["timesteps"])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
        same = model(x, times, **objective.named(draws))
        other = {**draws, "text": draws["text"].flip(0)}
        assert not torch.allclose(model(x, times, **objective.named(other)), same)
        assert not torch.allclose(model(x, times.flip(0), **objective.named(draws)), same)


def test_a_call_that_fails_names_what_the_network_got() -> None:
    conditions = {"text": torch.zeros(2, 7, 32), "added": {"size": torch.zeros(2, 6)}}
    with refused(ValueError, "text (2, 7, 32)", "added.size (2, 6)"):
        check_forward(UNet(), (1, 8, 8), conditions=conditions)
