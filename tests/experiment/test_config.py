import contextlib
import math
import re
import string
from importlib.util import find_spec
from pathlib import Path

import attrs
import pytest
import tomli_w
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hookdiff import ConfigError, Every, UserError, experiment
from hookdiff.data import Store, Transforms
from hookdiff.experiment.config import Config, load_config, read_toml
from hookdiff.experiment.discovery import installed

GOOD = {
    "run": {"steps": 20, "batch_size": 16, "plugins": ["ema", "lr"]},
    "data": {"source": "digits"},
    "model": {"use": "unet", "channels": 8, "num_res_blocks": 1, "head_dim": 8},
    "diffusion": {"timesteps": 100},
    "optimizer": {"use": "adamw", "lr": 1e-3},
    "sampling": {"steps": 5},
    "plugins": {"ema": {"decay": 0.9}, "lr": {"warmup": 2}},
}


@pytest.fixture
def path(tmp_path):
    return write(tmp_path / "mine.toml", GOOD)


def write(path, table):
    path.write_text(table if isinstance(table, str) else tomli_w.dumps(table), "utf-8")
    return path


def change(table, dotted, value):
    """Return a copy of `table` with the key at "table.key" set."""
    key, _, rest = dotted.partition(".")
    return {**table, key: change(table.get(key, {}), rest, value) if rest else value}


def problems(path, *args, **kwargs):
    """Return the lines that are told of the config at `path`, after the first, which counts them."""
    with pytest.raises(ConfigError) as caught:
        load_config(path, *args, **kwargs)
    first, *lines = str(caught.value).split("\n")
    assert first == f"{path}: {len(lines)} problem{'s' * (len(lines) > 1)}"
    assert all(line.startswith("  ") for line in lines)
    return [line[2:] for line in lines]


def test_a_good_config_is_read_with_its_types(path):
    config = load_config(path)
    assert (config.run.steps, config.run.epochs, config.run.name) == (20, None, "mine")
    assert config.run.plugins == ("ema", "lr")
    assert list(config.plugins) == ["ema", "lr"]
    assert config.plugins["ema"].arguments == {"decay": 0.9}
    assert config.model.target.__name__ == "UNet"
    assert config.optimizer.arguments == {"lr": 1e-3}


def test_the_smallest_config(tmp_path):
    text = '[run]\nsteps = 1\n[data]\nsource = "digits"\n[model]\nuse = "unet"\n'
    config = load_config(write(tmp_path / "small.toml", text))
    assert config.optimizer.use == "adamw"
    assert config.plugins == {}


def test_numbers_and_times_have_their_types(path):
    config = load_config(path, settings=["run.max_time=1.5 h", "plugins.lr.min_ratio=1"])
    assert config.run.max_time == Every(5400, "seconds")
    assert type(config.plugins["lr"].arguments["min_ratio"]) is float


TABLES = "run, data, model, diffusion, optimizer, sampling, plugins"
SOURCES = "digits, folder, fashion-mnist, torchvision:NAME, huggingface, array"


@pytest.mark.parametrize(
    ("dotted", "value", "expected"),
    [
        ("run.batchsize", 3, "run.batchsize: unknown key; did you mean 'batch_size'?; known: steps, epochs, "),
        ("data.sorce", "x", "data.sorce: unknown key; did you mean 'source'?; known: image_size, resize, "),
        ("model.chanels", 8, "model.chanels: unknown key; did you mean 'channels'?; known: in_channels, "),
        ("plugins.ema.decya", 0.9, "plugins.ema.decya: unknown key; did you mean 'decay'?; known: decay, half_life, "),
        ("modle", {}, f"modle: unknown table; did you mean 'model'?; known: {TABLES}"),
        ("run", 3, "run: expected a table [run], got 3"),
        ("model", ["unet"], "model: expected a table [model], got ['unet']"),
        ("plugins", 3, "plugins: expected a table [plugins], got 3"),
        ("plugins.ema", 3, "plugins.ema: expected a table [plugins.ema], got 3"),
        ("plugins.emma", {}, "plugins.emma: no plugin of that name; did you mean 'ema'?"),
        ("run.plugins", ["emma"], "run.plugins: no plugin named 'emma'; did you mean 'ema'?; installed: aim, "),
        ("run.plugins", ["ema", "ema"], "run.plugins: 'ema' is listed twice"),
        ("run.plugins", ["ema", "hookdiff_ema:EMA"], "run.plugins: 'ema' is listed twice"),
        ("run.plugins", "ema", "run.plugins: expected a list, got 'ema'"),
        ("run.plugins", ["ema", 3], "run.plugins: item 2: expected a string, got 3"),
        ("run.plugins", ["ema", "nowhere:X"], "run.plugins: the plugin 'nowhere:X': cannot import nowhere: No module"),
        ("run.plugins", ["ema", ":X"], "run.plugins: the plugin ':X': cannot import : "),
        ("run.plugins", ["ema", "json:loads"], "run.plugins: the plugin 'json:loads' is a function, expected a class"),
        ("run.seed", -1, "run.seed: must be >= 0: -1"),
        ("run.seed", 2**63, f"run.seed: must be < {2**63}: {2**63}"),
        ("run.steps", 0, "run.steps: must be >= 1: 0"),
        ("run.steps", "many", "run.steps: expected an integer, got 'many'"),
        ("run.epochs", 2, "run: set steps or epochs, not both"),
        ("run.max_time", "2 epochs", "run.max_time: must be a time, as '30 min' or '3 h'"),
        (
            "run.max_time",
            "soon",
            "run.max_time: expected steps (500), epochs ('2 epochs') or time ('15 min'), got 'soon'",
        ),
        ("run.device", 0, "run.device: expected a string, got 0"),
        ("data.workers", -1, "data.workers: must be >= 0: -1"),
        ("data.drop_last", "no", "data.drop_last: expected true or false, got 'no'"),
        (
            "data.source",
            "digit",
            f"data.source: unknown 'digit'; did you mean 'digits'?; known: {SOURCES}, or module:Name",
        ),
        ("data.source", 3, f"data.source: expected a string, got 3; known: {SOURCES}, or module:Name"),
        ("data.source", "folder", "data: folder needs path"),
        ("data.source", "torchvision:MNST", "data.source: torchvision.datasets has no 'MNST'; did you mean 'MNIST'?"),
        ("data.source", "torchvision:MNIST", "data: torchvision:MNIST needs root"),
        ("data.image_size", 1, "data.image_size: must be >= 2: 1"),
        ("data.resize", 32, "data.resize: needs image_size, the side of what is cut out"),
        ("data.flip", 1.5, "data.flip: must be from 0 to 1, or true for a half: 1.5"),
        ("data.flip", "yes", "data.flip: expected true or false or a number, got 'yes'"),
        ("data.color_jitter", [1, 1], "data.color_jitter: expected a list of 4, got 2 items"),
        ("data.color_jitter", [0, 0, 0, 1], "data.color_jitter: must be >= 0, and the fourth, of hue, <= 0.5: [0.0, "),
        ("data.channels", 4, "data.channels: expected one of 1, 3, got 4"),
        (
            "data.background",
            "whit",
            "data.background: must be a colour's name or '#rrggbb', not 'whit'; did you mean '",
        ),
        ("data.store", "ram", "data.store: expected one of 'auto', 'memory', 'disk', 'none', got 'ram'"),
        ("data.held_out", 1.0, "data.held_out: must be a count, or a share from 0 to below 1: 1.0"),
        ("data.root", "here", "data.root: unknown key; known: image_size, "),
        ("model.use", "nowhere:Net", "model.use: nowhere:Net: cannot import nowhere: No module named 'nowhere'"),
        (
            "model.use",
            "torch.nn:Lineer",
            "model.use: torch.nn:Lineer: torch.nn has no 'Lineer'; did you mean 'Linear'?",
        ),
        ("model.use", "math:pi", "model.use: math:pi is a float, expected a class or a function"),
        ("model.use", ":", "model.use: :: cannot import : "),
        ("model.channels", 8.0, "model.channels: expected an integer, got 8.0"),
        ("model.channel_mults", 2, "model.channel_mults: expected a list, got 2"),
        (
            "optimizer.use",
            "adamww",
            "optimizer.use: unknown 'adamww'; did you mean 'adamw'?; known: adadelta, adafactor, ",
        ),
        ("optimizer.lr", "1e-3", "optimizer.lr: expected a number, got '1e-3'"),
        ("optimizer.betas", [0.9], "optimizer.betas: expected a list of 2, got 1 items"),
        (
            "diffusion.schedule",
            "cosin",
            "diffusion.schedule: must be one of linear, scaled_linear, cosine, sigmoid, flow, edm, not 'cosin';",
        ),
        ("sampling.eta", 2, "sampling.eta: must be <= 1: 2.0"),
        ("plugins.ema.decay", 1, "plugins.ema.decay: must be < 1: 1.0"),
        (
            "plugins.lr.schedule",
            "cos",
            "plugins.lr.schedule: expected one of 'constant', 'linear', 'cosine', ",
        ),
    ],
)
def test_one_slip_is_one_problem_with_its_place(tmp_path, dotted, value, expected):
    lines = problems(write(tmp_path / "bad.toml", change(GOOD, dotted, value)))
    if dotted == "run":
        assert lines.pop() == "run: set steps or epochs"
    (line,) = lines
    assert line.startswith(expected)


@pytest.mark.parametrize("table", ["run", "data", "model"])
def test_a_missing_table(tmp_path, table):
    path = write(tmp_path / "bad.toml", {name: rest for name, rest in GOOD.items() if name != table})
    also = ["run: set steps or epochs"] if table == "run" else []
    assert problems(path) == [f"{table}: the table [{table}] is missing", *also]


@pytest.mark.parametrize(("data", "model"), [({}, {}), ({"drop_last": True}, {"channels": 8})])
def test_a_missing_key(tmp_path, data, model):
    path = write(tmp_path / "bad.toml", {**GOOD, "data": data, "model": model})
    assert problems(path) == [
        f"data.source: is missing; known: {SOURCES}, or module:Name",
        "model.use: is missing; known: unet, dit, or module:Name",
    ]


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        ({}, ["run: set steps or epochs"]),
        ({"step": 5}, ["run.step: unknown key; did you mean 'steps'?"]),
        ({"epoch": 5}, ["run.epoch: unknown key; did you mean 'epochs'?"]),
        ({"stepps": 5, "nmae": "x"}, ["run.stepps: unknown key; did you mean 'steps'?", "run.nmae: unknown key"]),
        ({"nmae": "x"}, ["run.nmae: unknown key", "run: set steps or epochs"]),
        ({"steps": "x"}, ["run.steps: expected an integer"]),
        ({"steps": 0}, ["run.steps: must be >= 1: 0"]),
        ({"steps": 1, "epochs": "x"}, ["run.epochs: expected an integer", "run: set steps or epochs, not both"]),
    ],
)
def test_a_run_needs_one_length(tmp_path, run, expected):
    lines = problems(write(tmp_path / "bad.toml", {**GOOD, "run": {"plugins": ["ema", "lr"], **run}}))
    assert len(lines) == len(expected)
    assert all(line.startswith(start) for line, start in zip(lines, expected, strict=True))


def test_all_problems_are_told_at_once(tmp_path):
    bad = GOOD
    for dotted, value in (("run.seed", -1), ("model.chanels", 8), ("optimizer.lr", "x"), ("plugins.ema.decay", 2)):
        bad = change(bad, dotted, value)
    lines = problems(write(tmp_path / "bad.toml", bad), plugins=["no:amp"], settings=["nonsense"])
    assert [line.split(": ")[0] for line in lines] == [
        "--set nonsense",
        "run.seed",
        "--plugins no:amp",
        "model.chanels",
        "optimizer.lr",
        "plugins.ema.decay",
    ]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"[run]\nsteps = \n", r"not TOML: .*line 2"),
        (b"[run\n", r"not TOML: .*line 1"),
        (b"[run]\nsteps = 1\nsteps = 2\n", r"not TOML: .*line 3"),
        (b"x = " + b"[" * 3000, r"not TOML: "),
        (b"x = " + b"9" * 5000, r"not TOML: "),
        (b"[run]\nname = '\xff'\n", r"not UTF-8 at byte 14"),
    ],
)
def test_what_is_no_toml_is_told_with_its_place(tmp_path, content, expected):
    path = tmp_path / "bad.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"^{path}: {expected}"):
        read_toml(path)


def test_a_missing_file_gets_the_nearest(path):
    with pytest.raises(ConfigError, match=r"mien\.toml: no such file; did you mean 'mine\.toml'\?$"):
        load_config(path.with_name("mien.toml"))
    with pytest.raises(ConfigError, match=r"mine\.toml: no such file$"):
        load_config(path.parent / "nowhere" / "mine.toml")


def test_a_directory_is_no_config(tmp_path):
    with pytest.raises(ConfigError, match=rf"^{tmp_path}: cannot be read: Is a directory$"):
        load_config(tmp_path)


def test_conflicts_and_requirements_are_told(tmp_path, monkeypatch):
    (tmp_path / "hd_partners.py").write_text(
        "class Loner:\n    conflicts = ('ema',)\nclass Needy:\n    requires = ('clip',)\n"
        "class Greedy:\n    def __init__(self, must, may=1): ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    path = write(tmp_path / "bad.toml", GOOD)
    (line,) = problems(path, plugins=["hd_partners:Loner"])
    assert line == "run.plugins: the plugin 'loner' does not go together with 'ema'"
    (line,) = problems(path, plugins=["hd_partners:Needy"])
    assert line == "run.plugins: the plugin 'needy' requires 'clip', which this run has not"
    assert problems(path, plugins=["hd_partners:Greedy"]) == ["plugins.greedy: needs must"]
    greedy = load_config(path, ["hd_partners:Greedy"], ["plugins.greedy.must=3"]).plugins["greedy"]
    assert greedy.arguments == {"must": 3}


def test_plugins_are_added_and_taken_away(path):
    assert load_config(path, ["clip", "no:ema", "clip"]).run.plugins == ("lr", "clip")
    assert load_config(path, ["lr"]).run.plugins == ("ema", "lr")
    assert list(load_config(path, ["no:ema", "ema"]).plugins) == ["lr", "ema"]
    assert problems(path, ["no:emma"]) == ["--plugins no:emma: 'emma' is not switched on; did you mean 'ema'?"]


def test_plugins_are_added_to_those_that_are_set(path):
    config = load_config(path, ["clip", "no:lr"], ['run.plugins=["lr", "ema"]'])
    assert config.run.plugins == ("ema", "clip")


def test_the_table_of_a_plugin_that_is_switched_off_may_stay(path):
    assert list(load_config(path, ["no:ema"]).plugins) == ["lr"]


@pytest.mark.parametrize(
    ("setting", "where", "expected"),
    [
        ("run.steps=7", ("run", "steps"), 7),
        ("run.name=7", ("run", "name"), "7"),
        ("run.channels_last=false", ("run", "channels_last"), False),
        (" run.name = two words ", ("run", "name"), "two words"),
        ("run.name=a=b", ("run", "name"), "a=b"),
        ("run.micro_batch=none", ("run", "micro_batch"), None),
    ],
)
def test_a_set_value_has_the_type_of_its_key(path, setting, where, expected):
    value = getattr(getattr(load_config(path, settings=[setting]), where[0]), where[1])
    assert (type(value), value) == (type(expected), expected)


def test_set_reaches_every_table(path):
    config = load_config(path, settings=["model.channel_mults=1,2,4", "plugins.clip.max_norm=2", "data.workers=1"])
    assert config.model.arguments["channel_mults"] == (1, 2, 4)
    assert config.feed == {"workers": 1, "transforms": Transforms(), "store": Store()}
    assert load_config(path, settings=["optimizer.use=sgd"]).optimizer.target.__name__ == "SGD"
    assert load_config(path, settings=["run.steps=none", "run.epochs=2"]).run.epochs == 2


@pytest.mark.parametrize("setting", ["steps=3", "run.steps", "run.=3", ".steps=3", "=", "", "run..steps=3"])
def test_a_setting_needs_a_table_a_key_and_a_value(path, setting):
    assert problems(path, settings=[setting]) == [f"--set {setting}: expected table.key=value"]


def test_a_setting_inside_of_a_value(path):
    assert problems(path, settings=["run.steps.x=3"]) == ["--set run.steps.x=3: steps is no table"]
    assert problems(path, settings=["plugins.ema.decay=2", "run.step=3"]) == [
        "run.step: unknown key; did you mean 'steps'?; known: "
        + ", ".join(attrs.fields_dict(type(load_config(path).run))),
        "plugins.ema.decay: must be < 1: 2.0",
    ]


def same(one, other):
    """Whether two configs configure the same; a NaN is like a NaN."""
    return repr(one.resolved()) == repr(other.resolved()) and one.run == other.run


def test_resolved_is_read_as_the_same_config(tmp_path):
    usable = [name for name, (entry, *_) in sorted(installed().items()) if name != "aim" or find_spec("aim")]
    table = {**GOOD, "run": {**GOOD["run"], "plugins": usable, "max_time": "1000 h"}}
    table["plugins"] = {"checkpoint": {"every": "2 epochs"}, "samples": {"every": "90 s"}, "fid": {"every": 0}}
    config = load_config(write(tmp_path / "first.toml", table))
    again = load_config(write(tmp_path / "second.toml", config.resolved()))
    assert again.resolved() == config.resolved()
    assert again.run == config.run
    assert again.run.name == "first"
    for name, part in config.plugins.items():
        options = [option.name for option in attrs.fields(part.target) if option.init]
        one, other = part.build(), again.plugins[name].build()
        assert [getattr(one, option) for option in options] == [getattr(other, option) for option in options]


names = st.text(string.ascii_lowercase + "_:.", max_size=12)
scalars = (
    st.booleans()
    | st.integers(-5, 70)
    | st.sampled_from([2**31, 2**63, -(2**63), 10**30, math.inf, -math.inf, math.nan, "1 h", "2 epochs", "none"])
    | st.floats()
    | st.text(max_size=8)
    | st.dates()
    | names
)
values = st.recursive(scalars, lambda v: st.lists(v, max_size=3) | st.dictionaries(names, v, max_size=3), max_leaves=6)
known = [(table, key) for table, rest in GOOD.items() for key in rest]
extra = [("run", "epochs"), ("run", "seed"), ("run", "device"), ("model", "channel_mults"), ("model", "dropout")]
extra += [("optimizer", "betas"), ("optimizer", "weight_decay"), ("data", "workers"), ("sampling", "eta")]
extra += [("data", key) for key in ("image_size", "resize", "flip", "color_jitter", "background", "store", "held_out")]
mutations = st.one_of(
    st.tuples(st.just("drop"), st.sampled_from(known)),
    st.tuples(st.just("rename"), st.sampled_from(known), names),
    st.tuples(st.just("replace"), st.sampled_from(known + extra), values),
    st.tuples(st.just("replace"), st.sampled_from([(name,) for name in GOOD]), values),
    st.tuples(st.just("replace"), st.tuples(names), values),
    st.tuples(st.just("replace"), st.tuples(st.sampled_from(list(GOOD)), names), values),
)
COSTLY = [("model", key) for key in ("channels", "channel_mults", "num_res_blocks", "head_dim")] + [
    ("sampling", "steps")
]


def mutated(steps):
    table = {name: dict(rest) for name, rest in GOOD.items()}
    for kind, place, *new in steps:
        *outer, key = place
        inner = table.get(outer[0]) if outer else table
        if not isinstance(inner, dict):
            continue
        if kind == "replace":
            if place in COSTLY and isinstance(new[0], int) and new[0] > 100:  # there are loops of that length
                continue
            inner[key] = new[0]
        elif key in inner:
            old = inner.pop(key)
            if kind == "rename":
                inner[new[0]] = old
    return table


QUICK = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


def load_or_refuse(path, plugins=(), given=()):
    """Load and probe; anything but a Config or a UserError is a bug. What loads must come back as it was."""
    config = None
    with contextlib.suppress(UserError):
        config = load_config(path, plugins, given)
    if config is None:
        return
    assert isinstance(config, Config)
    again = load_config(write(path.with_name("again.toml"), config.resolved()))
    assert same(config, again)
    with contextlib.suppress(UserError):
        experiment.try_config(config)


@given(steps=st.lists(mutations, min_size=1, max_size=4))
@QUICK
def test_a_mutated_config_loads_or_is_refused(tmp_path, steps):
    load_or_refuse(write(tmp_path / "mutated.toml", mutated(steps)))


@given(text=st.text() | st.text("[]=.\"'#{}\n run1ab,", max_size=40))
@QUICK
def test_any_text_is_refused(tmp_path, text):
    path = tmp_path / "text.toml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(UserError, match=r"text\.toml: "):
        load_config(path)


settable = st.sampled_from([f"{table}.{key}" for table, key in known + extra if (table, key) not in COSTLY])


@given(
    given=st.lists(
        st.text(max_size=12) | st.builds("{}={}".format, settable | names, st.text(max_size=8) | scalars), max_size=3
    ),
    plugins=st.lists(st.sampled_from([*installed(), "no:ema", "no:lr", "no:clip"]) | names | st.text(max_size=5)),
)
@QUICK
def test_any_setting_and_any_plugin_name_loads_or_is_refused(tmp_path, given, plugins):
    load_or_refuse(write(tmp_path / "good.toml", GOOD), plugins, given)


@pytest.mark.parametrize(
    "setting",
    [
        "model.channels=9223372036854775808",
        "model.in_channels=9223372036854775807",
        "model.channels=8589934592",
        "model.image_size=7",
        "model.dropout=nan",
        "optimizer.lr=-1",
        "optimizer.lr=nan",
        "optimizer.betas=2,3",
        "optimizer.foreach=true",
        "run.device=nowhere",
        "run.device=cuda:99",
        "run.device=hpu",
        "run.device=meta",
        "run.device=",
        "sampling.steps=101",
        "plugins.lr.schedule=constant",
    ],
)
def test_what_only_building_shows_is_told_with_its_table(path, setting):
    config = load_config(path, settings=[setting, *(["optimizer.fused=true"] if "foreach" in setting else [])])
    table = setting.partition(".")[0]
    if table == "plugins":
        experiment.try_config(config)
    else:
        with pytest.raises(ConfigError, match=rf"^{re.escape(str(path))}: 1 problem\n  {table}[.:]"):
            experiment.try_config(config)


def test_the_name_of_a_config_without_one_is_that_of_its_file(tmp_path):
    assert load_config(write(Path(tmp_path / "my run.toml"), GOOD)).run.name == "my run"
