import copy
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from hookdiff import ConfigError, SampleRequest
from hookdiff.experiment.build import build_loop
from hookdiff.experiment.config import load_config
from hookdiff.experiment.memory import estimate_memory
from hookdiff.experiment.probe import try_config
from hookdiff.experiment.structure import Problems, arguments, parameters
from hookdiff.models import DiT, UNet
from hookdiff.models.adapters import adapt, check_contract, checkpointable

CONFIG = """
[run]
steps = 3
batch_size = 8
log_every = 1
device = "cpu"
plugins = ["ema"]
[data]
source = "digits"
[sampling]
steps = 2
"""
THEIR_UNET = """
[model]
use = "diffusers:UNet2DModel"
block_out_channels = [8, 16]
down_block_types = ["DownBlock2D", "AttnDownBlock2D"]
up_block_types = ["AttnUpBlock2D", "UpBlock2D"]
layers_per_block = 1
norm_num_groups = 4
"""
THEIR_DIT = """
[model]
use = "diffusers:DiTTransformer2DModel"
num_attention_heads = 2
attention_head_dim = 8
num_layers = 2
num_embeds_ada_norm = 10
"""


class Net(nn.Module):
    """Maps images to what `answer` makes of them."""

    def __init__(self, answer: Any) -> None:
        super().__init__()
        self.layer = nn.Conv2d(1, 1, 1)
        self.answer = answer

    def forward(self, x: Tensor, timesteps: Tensor) -> Any:
        return self.answer(self.layer(x))


def test_ours_keep_it_and_are_left_alone() -> None:
    for kind in (UNet, DiT):
        for num_classes in (0, 3):
            model = kind(num_classes=num_classes)
            assert adapt(model) is model
            check_contract(model, (1, 8, 8), labels=num_classes > 0)
            check_contract(model, (1, 16, 8), labels=num_classes > 0)
            assert (len(model._forward_hooks), len(model._forward_pre_hooks)) == (0, 0)
            assert model.training


def test_nothing_is_computed_and_nothing_drawn() -> None:
    seen: list[str] = []

    def answer(x: Tensor) -> Tensor:
        seen.append(x.device.type)
        return x

    model = Net(answer)
    norm = model.norm = nn.BatchNorm2d(1)
    before, state = norm.running_mean, torch.get_rng_state()
    check_contract(model, (1, 4, 4))
    assert seen == ["meta"]
    assert torch.equal(state, torch.get_rng_state())
    assert norm.running_mean is before
    assert all(p.device.type == "cpu" and p.grad is None for p in model.parameters())


def test_layers_and_weights_that_are_used_twice_stay_as_they_were() -> None:
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
    check_contract(model, (1, 4, 4))
    assert seen == ["meta"]
    assert list(map(id, model.parameters())) == list(map(id, before))
    assert twin.weight is model.layer.weight


def test_a_model_that_looks_at_values_is_tried_for_real() -> None:
    seen: list[float] = []

    def answer(x: Tensor) -> Tensor:
        seen.append(x.mean().item())
        return x

    check_contract(Net(answer), (1, 4, 4))
    assert len(seen) == 1


def test_the_sample_of_an_output_is_taken() -> None:
    model = Net(lambda x: SimpleNamespace(sample=x))
    check_contract(model, (1, 4, 4))
    x, t = torch.randn(2, 1, 4, 4), torch.tensor([1, 2])
    assert torch.equal(model(x, t), model.layer(x))


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda x: x[:, :, :3], r"returned shape (2, 1, 3, 4) for images of shape (2, 1, 4, 4), expected the same"),
        (lambda x: (x,), "returned a tuple, expected a tensor"),
        (lambda x: x.nonsense, "cannot be called with images of shape (2, 1, 4, 4): 'Tensor' object has no"),
    ],
)
def test_what_does_not_keep_it_is_told(answer: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        check_contract(Net(answer), (1, 4, 4))


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def loaded(model, *given):
        (tmp_path / "small.toml").write_text(CONFIG + model)
        return load_config(tmp_path / "small.toml", (), given)

    return loaded


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            '[model]\nuse = "dit"\nin_channels = 3',
            "model: dit cannot be called with images of shape (2, 1, 8, 8): x has shape (2, 1, 8, 8), expected "
            "(n, 3, h, w): the model was built with in_channels=3; the data says in_channels = 1",
        ),
        (
            '[model]\nuse = "dit"\nimage_size = 9\npatch_size = 3',
            "model: dit cannot be called with images of shape (2, 1, 8, 8): images of 8x8 do not fit, expected "
            "multiples of 3 for patch_size; nearest: 6x6 or 9x9; the data says image_size = 8",
        ),
        ('[model]\nuse = "unet"\nnum_classes = 9', "model: unet has num_classes = 9, the data has 10 classes"),
        (
            '[model]\nuse = "unet"\nnum_classes = 10\n[diffusion]\nconditional = false',
            "model: unet cannot be called with images of shape (2, 1, 8, 8): the model was built with num_classes=10 "
            "and got no labels: ",
        ),
        (
            '[model]\nuse = "torch.nn:Conv2d"\nkernel_size = 3\nout_channels = 2',
            "model: torch.nn:Conv2d cannot be called with images of shape (2, 1, 8, 8): ",
        ),
    ],
)
def test_a_model_that_does_not_fit_the_data_is_told_before_training(config, tmp_path, model, message):
    with pytest.raises(ConfigError) as caught:
        build_loop(config(model), tmp_path / "run")
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("name", ["unet", "dit"])
@pytest.mark.parametrize("num_classes", [0, 10])
def test_ours_train_and_sample_from_a_config(config, tmp_path, name, num_classes):
    small = "channels = 8\nhead_dim = 8\nnum_res_blocks = 1" if name == "unet" else "hidden_size = 16\ndepth = 1"
    model = f'[model]\nuse = "{name}"\n{small}\ngradient_checkpointing = true\nnum_classes = {num_classes}'
    loop = build_loop(config(model), tmp_path / "run")
    assert loop.model.num_classes == num_classes
    assert loop.run() == "done"
    assert loop.sample(SampleRequest(2)).images.shape == (2, 1, 8, 8)
    assert loop.hparams["model"]["num_classes"] == num_classes


def diffusers_config(config, model, *given):
    pytest.importorskip("diffusers")
    return config(model, *given)


def inputs(num: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(num, 1, 8, 8, generator=generator), torch.tensor([3, 700][:num]), torch.tensor([4, -1][:num])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "num_classes"), [(THEIR_UNET, 0), (THEIR_UNET + "num_class_embeds = 11", 10), (THEIR_DIT, 10)]
)
def test_models_of_diffusers_train_and_sample_from_a_config(config, tmp_path, model, num_classes):
    given = diffusers_config(config, model)
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
@pytest.mark.parametrize("model", [THEIR_UNET + "num_class_embeds = 11", THEIR_DIT])
def test_an_adapted_model_stays_itself(config, model):
    diffusers_config(config, model)
    part = config(model).model.given(in_channels=1, out_channels=1, sample_size=8)
    theirs = part.build()
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
    with pytest.raises(ValueError, match=r"num_classes=10 and got no labels"):
        twin(x, t)
    with pytest.raises(ValueError, match=r"labels has 10, expected -1 \(no class\) to 9"):
        twin(x, t, torch.tensor([0, 10]))


@pytest.mark.slow
def test_labels_are_not_dropped_twice(config):
    diffusers_config(config, THEIR_DIT)
    model = adapt(config(THEIR_DIT).model.given(in_channels=1, out_channels=1, sample_size=8).build())
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    x, t, _ = inputs(1)
    many, labels = x.expand(200, 1, 8, 8), torch.full((200,), 4)
    with torch.no_grad():
        out = model.train()(many, t.expand(200), labels)
        assert torch.allclose(out, out[:1].expand_as(out), atol=1e-5)  # it would drop a tenth of them
        assert not torch.allclose(out[:1], model(x, t, torch.tensor([-1])), atol=1e-3)


@pytest.mark.slow
def test_what_cannot_be_used_of_diffusers_is_told(config, tmp_path):
    diffusers_config(config, THEIR_DIT)
    for model, message in (
        (
            THEIR_DIT + "out_channels = 2",
            "model: diffusers:DiTTransformer2DModel returned shape (2, 2, 8, 8) for images of shape (2, 1, 8, 8), "
            "expected the same; the data says out_channels = 1",
        ),
        (THEIR_UNET + "num_class_embeds = 1", "model: num_class_embeds=1 leaves no class, since the last embedding"),
        (THEIR_UNET + "num_class_embeds = 10", "model: diffusers:UNet2DModel has num_classes = 9, the data has 10"),
        (
            THEIR_UNET + 'class_embed_type = "timestep"',
            "model: diffusers:UNet2DModel cannot be called with images of shape (2, 1, 8, 8): class_labels should be",
        ),
        ('[model]\nuse = "diffusers:UNet2DCondition"', None),
    ):
        with pytest.raises(ConfigError) as caught:
            build_loop(config(model), tmp_path / "run")
        assert str(caught.value).startswith(message or f"{tmp_path / 'small.toml'}: 1 problem\n  model.use: ")


@pytest.mark.slow
def test_a_run_starts_from_a_model_that_the_library_saved(config, tmp_path):
    model = THEIR_UNET + "num_class_embeds = 11"
    given = diffusers_config(config, model).model.given(in_channels=1, out_channels=1, sample_size=8)
    given.build().save_pretrained(tmp_path / "theirs")
    file = tmp_path / "theirs" / "diffusion_pytorch_model.safetensors"
    loop = build_loop(config(model, f"model.start_from={file}"), tmp_path / "run")
    with loop:
        saved = load_file(file)
        assert all(torch.equal(value, saved[name]) for name, value in loop.model.state_dict().items())
    del saved["conv_in.bias"]
    save_file(saved, file)
    with pytest.raises(ConfigError, match=r"1 difference\n  missing conv_in\.bias\n  start_partial = true"):
        build_loop(config(model, f"model.start_from={file}"), tmp_path / "again").run()


@pytest.mark.slow
@pytest.mark.parametrize("model", [THEIR_UNET + "num_class_embeds = 11", THEIR_DIT])
def test_an_adapted_model_compiles_in_place(config, model):
    diffusers_config(config, model)
    net = adapt(config(model).model.given(in_channels=1, out_channels=1, sample_size=8).build()).eval()
    x, t, labels = inputs()
    with torch.no_grad():
        expected = net(x, t, labels)
        net.compile(backend="eager")
        torch.testing.assert_close(net(x, t, labels), expected)


@pytest.mark.slow
def test_an_adapted_model_goes_into_ddp(config, tmp_path):
    diffusers_config(config, THEIR_DIT)
    net = adapt(config(THEIR_DIT).model.given(in_channels=1, out_channels=1, sample_size=8).build()).eval()
    x, t, labels = inputs()
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'meet'}", rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(net)
        assert torch.equal(wrapped(x, t, labels), net(x, t, labels))
    finally:
        torch.distributed.destroy_process_group()


class Theirs(nn.Module):
    """A model of another library: checkpointing is switched on by a method."""

    def __init__(self, in_channels: int, width: int = 4) -> None:
        super().__init__()
        self.layer, self.is_checkpointed = nn.Conv2d(in_channels, in_channels, 1), False

    def enable_gradient_checkpointing(self) -> None:
        self.is_checkpointed = True


def test_checkpointing_that_a_method_switches_on_is_an_argument() -> None:
    make = checkpointable(Theirs)
    assert list(parameters(make)) == ["in_channels", "width", "gradient_checkpointing"]
    assert [make(1).is_checkpointed, make(1, gradient_checkpointing=True).is_checkpointed] == [False, True]
    problems = Problems()
    assert arguments(make, {"gradient_checkpointing": "yes", "width": 8}, "model", problems) == {"width": 8}
    assert problems.found == ["model.gradient_checkpointing: expected true or false, got 'yes'"]
    assert all(checkpointable(kind) is kind for kind in (UNet, DiT, Net, torch.relu))


@pytest.mark.slow
def test_models_of_diffusers_take_less_memory_with_gradient_checkpointing(config):
    kept = []
    for given in (False, True):
        loaded = diffusers_config(config, THEIR_UNET, f"model.gradient_checkpointing={str(given).lower()}")
        assert loaded.resolved()["model"]["gradient_checkpointing"] is given
        kept.append(estimate_memory(loaded).activations)
    assert kept[1] < kept[0] * 0.6
