"""`hookdiff check`."""

import json
import re
from pathlib import Path

import pytest
import tomli
from PIL import Image
from safetensors.torch import load_file
from torch import nn

from hookdiff.diffusion import VP, Diffusion, Linear, Sampling
from hookdiff.experiment.config import RunConfig
from hookdiff.log.event import as_json
from hookdiff.options.help import keys
from hookdiff_checkpoint import Checkpoint
from hookdiff_ema import EMA
from tests.conftest import check_facts, check_refused, mostly_wide, output, pixels

DIT = {"use": "dit", "num_classes": 10}


@pytest.fixture
def check(hookdiff, write_config, tmp_path, monkeypatch):
    """Return a function that checks a DiT config with settings, and returns exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    write_config(run={"steps": 1}, model=DIT)

    def checked(*settings, command="check"):
        return hookdiff(command, "small.toml", *(word for setting in settings for word in ("--set", setting)))

    return checked


def test_a_config_with_a_dit_is_printed_with_every_default(check):
    code, out, err = check("model.hidden_size=1152", "model.depth=28", "model.num_heads=16")  # no weights are allocated
    assert (code, err) == (0, "")
    sizes = {"patch_size": 2, "hidden_size": 1152, "depth": 28, "text_dim": 0, "num_heads": 16, "mlp_ratio": 4.0}
    off = dict.fromkeys(("gradient_checkpointing", "start_partial", "zero_output"), False)
    assert tomli.loads(out)["model"] == {**DIT, **sizes, **off, "dropout": 0.0, "init": "default"}


class TimeSecond(nn.Conv2d):
    def __init__(self, channels: int = 3) -> None:
        super().__init__(channels, channels, 1)

    def forward(self, x, t, context, mask=None):
        return super().forward(x)


class TextSecond(TimeSecond):
    def forward(self, sample, context, size=None, timestep=None):
        return nn.Conv2d.forward(self, sample)


class WithDict(TimeSecond):
    num_classes = 2

    def forward(self, sample, times, classes, context=None, added=None):
        return nn.Conv2d.forward(self, sample)


class WithAny(TimeSecond):
    def forward(self, *given, **others):
        return nn.Conv2d.forward(self, given[0])


class Hooked(TimeSecond):
    def __init__(self) -> None:
        super().__init__()
        self.register_forward_pre_hook(lambda _, args, named: (args, {"context": named["text"]}), with_kwargs=True)


class Unmade(TimeSecond):
    def __init__(self, in_channels: int) -> None:
        super().__init__(in_channels)


CONTEXT = {"context": "text"}
CALLS = [  # a network, its conditions, and how it is called: or why it is refused
    (TimeSecond, CONTEXT, "forward(x = {}, t = {}, context = text)"),
    (TimeSecond, ["mask", "context"], "forward(x = {}, t = {}, mask = mask, context = context)"),
    (TextSecond, CONTEXT, "forward(sample = {}, timestep = {}, context = text)"),
    (
        WithDict,
        {**CONTEXT, "added.pooled": "pooled", "added.size": "size"},
        "forward(sample = {}, times = {}, classes = labels, context = text, added.pooled = pooled, added.size = size)",
    ),
    (WithAny, CONTEXT, "forward({}, {}, context = text)"),
    (Hooked, ["text"], "forward({}, {}, text = text)"),
    (Unmade, CONTEXT, "forward(x = {}, t = {}, context = text)"),
    (TimeSecond, {"contxt": "text"}, ["'context'; did you mean 'context'?"]),
    (TextSecond, {**CONTEXT, "sizes": "size"}, ["context = text, sizes = size", "'sizes'; did you mean 'size'?"]),
    (TextSecond, [], ["{}, {}", "'context'"]),
    (WithDict, {"extra.size": "size"}, ["labels, extra.size = size", "'extra'"]),
]


@pytest.mark.parametrize(
    ("network", "conditions", "expected"), [*mostly_wide(4, CALLS[:7]), *mostly_wide(2, CALLS[7:])]
)
def test_a_network_is_checked_for_its_arguments(hookdiff, write_config, tmp_path, network, conditions, expected):
    config = write_config(
        run={"steps": 1},
        data={"source": "digits", "image_size": 16, "channels": 3},
        model={"use": f"{__name__}:{network.__name__}"},
        diffusion={"conditions": conditions, "process": "vp"},
    )
    words = "images 3 x 16 x 16", "times int64"
    if isinstance(expected, str):
        out = output(hookdiff("check", config))
        assert f"\n# {expected.format(*words)}\n" in out
        assert tomli.loads(out)["diffusion"]["conditions"] == conditions
        assert json.loads(output(hookdiff("check", config, "--json")))["call"] == expected.format(*words)
        return
    for command in ("check", "run"):
        facts = [fact.format(*words) for fact in expected]
        check_refused(hookdiff(command, config), f"model: {__name__}:{network.__name__} cannot be called", *facts)


def test_the_printed_config_makes_the_same_run(hookdiff, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for k in range(8):
        path = tmp_path / "images" / "ab"[k % 2] / f"{k}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels(k, 16)).save(path)
    table = '[run]\nsteps = 1\nbatch_size = 4\n[data]\nsource = "folder"\npath = "images"\nimage_size = 16\n'
    (tmp_path / "short.toml").write_text(table + '[model]\nuse = "unet"\nchannels = 8\nhead_dim = 8\n')
    out = output(hookdiff("check", "short.toml", "--set", "diffusion.conditional=true"))
    assert all(f"\n# {key}: the data gives it\n" in out for key in ("in_channels", "image_size", "num_classes"))
    (tmp_path / "long.toml").write_text(out)
    assert hookdiff("run", "long.toml")[0] == 0
    model = tomli.loads((tmp_path / "runs" / "short" / "config.toml").read_text())["model"]
    assert (model["in_channels"], model["image_size"], model["num_classes"]) == (3, 16, 2)


@pytest.mark.parametrize(
    ("setting", "place", "facts"),
    [
        ("model.num_heads=3", "model", ("num_heads=3", "hidden_size=128", 2)),
        ("model.patch_size=0", "model", ("patch_size=0", 1)),
        ("model.start_from=gone.safetensors", "model.start_from", ("gone.safetensors",)),
    ],
)
def test_a_wrong_argument_is_reported_in_one_line(check, setting, place, facts):
    code, out, err = check(setting)
    assert (code, out) == (2, "")
    first, line = err.splitlines()
    check_facts(first, "small.toml", 1)
    assert line.startswith(f"  {place}: ")
    check_facts(line, *facts)


def test_golden_message_of_a_network_that_does_not_fit_its_images(check):
    problem = "model: image_size=8 is no multiple of patch_size=3; nearest: image_size=6 or 9, or patch_size=2"
    assert check("model.patch_size=3")[0] == 0  # the data will decide the image size
    code, _, err = check("model.patch_size=3", "model.image_size=8")
    assert (code, err) == (2, f"hookdiff: small.toml: 1 problem\n  {problem}\n")
    code, _, err = check("model.patch_size=3", command="run")
    assert (code, err) == (2, f"hookdiff: {problem}\n")


@pytest.mark.parametrize("table", [(), ("diffusion",), ("plugins.ema",), ("ema.warmup",), ("sampling.guidance",)])
def test_json_has_the_config_of_the_text(hookdiff, check, table):
    printed = json.loads(output(hookdiff("check", "small.toml", *table, "--plugins", "ema", "--json")))
    text = output(hookdiff("check", "small.toml", *table, "--plugins", "ema"))
    assert printed["config"] == as_json(tomli.loads(text))
    assert printed["warnings"] == []
    assert printed["set_by_data"]


@pytest.mark.parametrize(
    ("table", "target", "is_set"),
    [
        ("run", RunConfig, ["batch_size", "device", "plugins", "steps"]),
        ("diffusion", Diffusion, ["conditional"]),
        ("diffusion.process", VP, ["use"]),
        ("diffusion.process.schedule", Linear, ["beta_end", "use"]),
        ("sampling", Sampling, ["steps"]),
        ("plugins.checkpoint", Checkpoint, []),
        ("ema", EMA, ["std"]),
    ],
)
def test_a_table_has_each_key_and_marks_those_that_are_set(hookdiff, check, write_config, table, target, is_set):
    schedule = {"use": "linear", "beta_end": 0.03}
    write_config(model=DIT, diffusion={"process": {"use": "vp", "schedule": schedule}, "conditional": True})
    words = "--plugins", "checkpoint,ema", "--set", "plugins.ema.std=0.05,0.1"
    out = output(hookdiff("check", "small.toml", table, *words))
    _, own, *inner = f"\n{out}".split("\n[")
    found = re.findall(r"^(?:# (?!forward)(\w+): \S|(\w+) = )", own, re.M)
    names = ["".join(pair) for pair in found] + [part.partition("]")[0].rpartition(".")[2] for part in inner]
    assert {key.name for key in keys(target)} <= set(names)
    assert sorted(re.findall(r"^(\w+) = .*  # set$", own, re.M)) == is_set


FIRST_LINES = [  # settings, what the first lines have
    ([], ["10 classes", "none of them", "6 steps of 16 samples, 0.0536 epochs of 1,787 samples"]),
    (["model.num_classes=0"], ["no problem"]),
    (["run.steps=none", "run.epochs=2"], ["2 epochs of 1,787 samples, 224 steps of 16 samples"]),
    (["run.steps=none", "run.epochs=2", "data.drop_last=true"], ["2 epochs of 1,787 samples, 222 steps of 16 samples"]),
    (["run.batch_size=1800", "data.drop_last=true"], ["no step", "only 1,787"]),
    (["data.source=folder", "data.path=gone"], ["if the pictures have 3 channels", "6 steps of 16 samples", "'gone'"]),
]


@pytest.mark.parametrize(("settings", "facts"), FIRST_LINES)
def test_the_first_lines_have_the_network_and_the_length(check, write_config, settings, facts):
    model = {"use": "unet", "channels": 8, "num_res_blocks": 1, "head_dim": 8}
    write_config(data={"source": "digits", "held_out": 10, "drop_last": False}, model=model)
    first = output(check(*settings)).partition("\n\n")[0]
    assert all(line.startswith("# ") for line in first.splitlines())
    check_facts(first, *facts)


def test_the_weights_and_the_time_are_those_of_an_earlier_run(hookdiff, check, write_config):
    write_config(run={"log_every": 1})
    assert "time: " not in check()[1]
    assert hookdiff("run", "small.toml", "--plugins", "checkpoint")[0] == 0
    facts = json.loads(output(hookdiff("check", "small.toml", "--json")))
    (file,) = Path("runs/small/checkpoints").glob("*/model.safetensors")
    assert facts["num_weights"] == sum(tensor.numel() for tensor in load_file(file).values())
    assert facts["step_seconds"] > 0
    assert "time: " in check()[1]
    assert "time: " not in check("model.channels=16")[1]


def test_a_table_that_is_not_there_is_refused(hookdiff, check):
    for wrong, near in (("difusion", "'diffusion'"), ("emma", "'ema'"), ("plugins.ema.decay", "'plugins.ema")):
        check_refused(hookdiff("check", "small.toml", wrong, "--plugins", "ema"), f"'{wrong}'", f"did you mean {near}")


def test_an_encoder_without_its_captions_is_refused(check, write_config):
    encode = {"text": {"use": "tests.encoding.test_texts:Bytes"}}
    write_config(data={"source": "folder", "path": "elsewhere", "encode": encode})
    check_refused(check(), "data: encode.text.of", "'text'", "none", "set captions", "caption_column")
    encode["text"]["of"] = "words"
    write_config(data={"source": "folder", "path": "elsewhere", "captions": "txt", "encode": encode})
    check_refused(check(), "data: encode.text.of", "'words'", "has text")
    write_config(data={"source": "folder", "path": "elsewhere", "captions": "txt"})
    check_refused(check(), "data: texts", "no encoder", "'text'")
