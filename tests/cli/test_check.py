"""`hookdiff check`."""

import json

import pytest
import tomli
from PIL import Image
from torch import nn

from hookdiff.log.event import as_json
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
    assert tomli.loads(out)["model"] == {
        "use": "dit",
        "patch_size": 2,
        "hidden_size": 1152,
        "depth": 28,
        "text_dim": 0,
        "num_heads": 16,
        "mlp_ratio": 4.0,
        "num_classes": 10,
        "dropout": 0.0,
        "gradient_checkpointing": False,
        "start_partial": False,
        "init": "default",
        "zero_output": False,
    }


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
    assert "[model] # the data gives in_channels, image_size, num_classes\n" in out
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
    problem = "model: image_size=8 is no multiple of patch_size=3; nearest: 6 or 9, or patch_size=2"
    assert check("model.patch_size=3")[0] == 0  # the data will decide the image size
    code, _, err = check("model.patch_size=3", "model.image_size=8")
    assert (code, err) == (2, f"hookdiff: small.toml: 1 problem\n  {problem}\n")
    code, _, err = check("model.patch_size=3", command="run")
    assert (code, err) == (2, f"hookdiff: {problem}\n")


def test_json_has_the_config_of_the_text(hookdiff, check):
    printed = json.loads(output(hookdiff("check", "small.toml", "--json")))
    assert printed["config"] == as_json(tomli.loads(check()[1]))
    assert printed["warnings"] == []
    assert printed["set_by_data"]


def test_an_encoder_without_its_captions_is_refused(check, write_config):
    encode = {"text": {"use": "tests.encoding.test_texts:Bytes"}}
    write_config(data={"source": "folder", "path": "elsewhere", "encode": encode})
    check_refused(check(), "data: encode.text.of", "'text'", "none", "set captions", "caption_column")
    encode["text"]["of"] = "words"
    write_config(data={"source": "folder", "path": "elsewhere", "captions": "txt", "encode": encode})
    check_refused(check(), "data: encode.text.of", "'words'", "has text")
    write_config(data={"source": "folder", "path": "elsewhere", "captions": "txt"})
    check_refused(check(), "data: texts", "no encoder", "'text'")
