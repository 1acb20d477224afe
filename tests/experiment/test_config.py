import contextlib
import math
import string
from importlib.util import find_spec
from pathlib import Path

import attrs
import pytest
import tomli_w
from hypothesis import HealthCheck, given, settings, strategies as st

from hookdiff import Config, ConfigError, Every, Feed, UserError, experiment, load_config
from hookdiff.encoding.captions import CaptionKeys
from hookdiff.encoding.encoder import EncoderKeys
from hookdiff.experiment.config import SOURCES
from hookdiff.experiment.toml_file import read_toml
from hookdiff.images import Store, Transforms, Workers
from hookdiff.images.items import ItemKeys
from hookdiff.options.imports import installed
from hookdiff.run_dir.history import History
from tests.conftest import check_facts, check_one, mostly_wide, refused, warnings, wide

GOOD = {
    "run": {"steps": 20, "batch_size": 16, "plugins": ["ema", "lr"]},
    "data": {"source": "digits"},
    "model": {"use": "unet", "channels": 8, "num_res_blocks": 1, "head_dim": 8},
    "diffusion": {"process": {"use": "vp", "schedule": "cosine", "timesteps": 100}},
    "optimizer": {"use": "adamw", "lr": 1e-3},
    "sampling": {"steps": 5},
    "plugins": {"ema": {"decay": 0.9}, "lr": {"warmup": 2}},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return one folder for all configs: in a new one, each would search for plugins anew."""
    return tmp_path_factory.mktemp("configs")


@pytest.fixture
def path(folder):
    return write(folder / "mine.toml", GOOD)


def write(path, table):
    path.write_text(table if isinstance(table, str) else tomli_w.dumps(table), "utf-8")
    return path


def change(table, dotted, value):
    """Return a copy of `table` with the key at "table.key" set."""
    key, _, rest = dotted.partition(".")
    return {**table, key: change(table.get(key, {}), rest, value) if rest else value}


def problems(path, *args, **kwargs):
    """Return the problems of the config at `path`, one line each; the first line of the message counts them."""
    with pytest.raises(ConfigError) as caught:
        load_config(path, *args, **kwargs)
    first, *lines = str(caught.value).split("\n")
    check_facts(first, path, len(lines))
    assert all(line.startswith("  ") for line in lines)
    return [line[2:] for line in lines]


def place(line):
    """Return the key that a line begins with."""
    return line.split(": ")[0]


def test_a_good_config_is_read_with_its_types(path):
    config = load_config(str(path))
    assert (config.run.steps, config.run.epochs, config.run.name) == (20, None, "mine")
    assert list(config.run.plugins) == list(config.plugins) == ["ema", "lr"]
    assert config.plugins["ema"].arguments == {"decay": 0.9}
    assert config.model.target.__name__ == "UNet"
    assert config.optimizer.arguments == {"lr": 1e-3}


def test_three_keys_are_a_whole_config(folder):
    text = '[run]\nsteps = 1\n[data]\nsource = "digits"\n[model]\nuse = "unet"\n'
    config = load_config(write(folder / "small.toml", text))
    assert config.optimizer.use == "muon"
    usual = ("lr", "clip", "amp", "ema", "autoguidance", "nan", "checkpoint", "samples", "progress")
    assert tuple(config.plugins) == usual
    bare = text.replace("steps = 1", "steps = 1\nplugins = []")
    assert load_config(write(folder / "bare.toml", bare)).plugins == {}
    switched = load_config(folder / "small.toml", ["fid", "no:amp", "ema"])
    assert tuple(switched.plugins) == (*(name for name in usual if name != "amp"), "fid")


def test_numbers_and_times_have_their_types(path):
    schedule = ["plugins.lr.schedule.use=cosine", "plugins.lr.schedule.min_ratio=1"]
    config = load_config(path, settings=["run.max_time=1.5 h", *schedule])
    assert config.run.max_time == Every(5400, "seconds")
    assert type(config.plugins["lr"].arguments["schedule"].min_ratio) is float


@pytest.mark.parametrize(
    ("dotted", "value", "facts"),  # facts: the name, the nearest, those that are known
    [
        ("data.sorce", "x", ("'source'", "image_size", "resize")),
        ("modle", {}, ("'model'", *GOOD)),
        ("trust", {}, ("known", *GOOD)),
        ("plugins", 3, ("[plugins]", 3)),
        ("plugins.emma", {}, ("'ema'",)),
        ("run.plugins", ["emma"], ("'emma'", "'ema'", "aim")),
        ("run.plugins", ["ema", "ema"], ("'ema'",)),
        ("run.plugins", ["ema", "hookdiff_ema:EMA"], ("'ema'",)),
        ("run.plugins", "ema", ("'ema'",)),
        ("run.plugins", ["ema", 3], ("item 2", 3)),
        ("run.plugins", ["ema", "nowhere:X"], ("'nowhere:X'",)),
        ("run.plugins", ["ema", ":X"], ("':X'",)),
        ("run.plugins", ["ema", "torch:load"], ("'torch:load'", "function")),
        ("data.source", "digit", ("'digit'", "'digits'", *SOURCES, "module:Name")),
        ("data.source", 3, (3, *SOURCES, "module:Name")),
        *wide(("data.source", "torchvision:MNST", ("'MNST'", "'MNIST'"))),
        ("model.use", "nowhere:Net", ("nowhere:Net",)),
        ("model.use", "torch.nn:Lineer", ("torch.nn:Lineer", "'Lineer'", "'Linear'")),
        ("model.use", "math:pi", ("math:pi", "standard library")),
        ("model.use", "torch:pi", ("torch:pi", "float")),
        ("model.use", ":", ()),
        ("optimizer.use", "adamww", ("'adamww'", "'adamw'", "adadelta", "adafactor")),
    ],
)
def test_a_wrong_name_is_one_problem_with_its_place(folder, dotted, value, facts):
    (line,) = problems(write(folder / "bad.toml", change(GOOD, dotted, value)))
    assert place(line) == dotted
    check_facts(line, *facts)


@pytest.mark.parametrize(
    ("dotted", "value", "table", "facts"),
    [
        ("run.epochs", 2, "run", ("steps", "epochs")),
        ("data.source", "folder", "data", ("folder", "path")),
        ("data.source", "torchvision:MNIST", "data", ("torchvision:MNIST", "root")),
    ],
)
def test_keys_that_need_or_exclude_others_are_reported_at_their_table(folder, dotted, value, table, facts):
    (line,) = problems(write(folder / "bad.toml", change(GOOD, dotted, value)))
    assert place(line) == table
    check_facts(line, *facts)


@pytest.mark.parametrize("table", ["run", "data", "model"])
def test_a_missing_table_is_reported(folder, table):
    path = write(folder / "bad.toml", {name: rest for name, rest in GOOD.items() if name != table})
    lines = problems(path)
    assert {place(line) for line in lines} == {table}
    check_facts(lines, f"[{table}]")


@pytest.mark.parametrize(("data", "model"), [({}, {}), ({"drop_last": True}, {"channels": 8})])
def test_a_missing_key_is_reported(folder, data, model):
    path = write(folder / "bad.toml", {**GOOD, "data": data, "model": model})
    source, use = problems(path)
    check_facts(source, "data.source", *SOURCES, "module:Name")
    check_facts(use, "model.use", "unet", "dit", "module:Name")


@pytest.mark.parametrize(
    ("run", "expected"),  # the place of each problem, and a fact of its line
    [
        ({}, {"run": "steps"}),
        ({"step": 5}, {"run.step": "'steps'"}),
        ({"epoch": 5}, {"run.epoch": "'epochs'"}),
        ({"stepps": 5, "nmae": "x"}, {"run.stepps": "'steps'", "run.nmae": "'name'"}),
        ({"nmae": "x"}, {"run.nmae": "'name'", "run": "steps"}),
        ({"steps": "x"}, {"run.steps": "'x'"}),
        ({"steps": 0}, {"run.steps": 0}),
        ({"steps": 1, "epochs": "x"}, {"run.epochs": "'x'", "run": "steps"}),
    ],
)
def test_a_run_needs_one_length(folder, run, expected):
    lines = problems(write(folder / "bad.toml", {**GOOD, "run": {"plugins": ["ema", "lr"], **run}}))
    assert [place(line) for line in lines] == list(expected)
    for line, fact in zip(lines, expected.values(), strict=True):
        check_facts(line, fact)


def test_golden_message_of_a_config_with_all_kinds_of_problems(folder):
    bad = GOOD
    slips = {"run.seed": -1, "model.use": "dti", "optimizer.lr": "x", "sampling.step": 5, "plugins.ema.decay": 2}
    for dotted, value in slips.items():
        bad = change(bad, dotted, value)
    path = write(folder / "bad.toml", bad)
    with pytest.raises(ConfigError) as caught:
        load_config(path, settings=["nonsense"])
    first, *lines = str(caught.value).split("\n")
    assert first == f"{path}: 6 problems"
    assert lines[:4] == [
        "  --set nonsense: write table.key=value",
        "  run.seed: must be >= 0: -1",
        "  model.use: unknown 'dti'; did you mean 'dit'?; known: dit, pretrained, unet, or module:Name",
        "  optimizer.lr: expected a number, got 'x'",
    ]
    assert lines[4].startswith("  sampling.step: unknown key; did you mean 'steps'?; known: ")
    assert lines[5:] == ["  plugins.ema.decay: must be < 1: 2.0"]


@pytest.mark.parametrize(
    ("content", "facts"),
    [
        (b"[run]\nsteps = \n", ("TOML", "line 2")),
        (b"[run\n", ("TOML", "line 1")),
        (b"[run]\nsteps = 1\nsteps = 2\n", ("TOML", "line 3")),
        (b"x = " + b"[" * 3000, ("TOML",)),
        (b"x = " + b"9" * 5000, ("TOML",)),
        (b"[run]\nname = '\xff'\n", ("UTF-8", 14)),
    ],
)
def test_a_file_that_is_no_toml_is_refused_with_the_place(folder, content, facts):
    path = folder / "bad.toml"
    path.write_bytes(content)
    with refused(ConfigError, path, *facts):
        read_toml(path)


def test_a_missing_file_is_refused_with_the_nearest(path):
    with refused(ConfigError, path.with_name("mien.toml"), "'mine.toml'"):
        load_config(path.with_name("mien.toml"))
    with refused(ConfigError, path.parent / "nowhere" / "mine.toml"):
        load_config(path.parent / "nowhere" / "mine.toml")


def test_a_directory_is_refused(folder):
    with refused(ConfigError, folder, "directory"):
        load_config(folder)


def test_conflicts_and_requirements_are_refused(folder, monkeypatch):
    (folder / "hd_partners.py").write_text(
        "from hookdiff import hookimpl, plugin\n"
        "class Plugin:\n    @hookimpl\n    def on_start(self): ...\n"
        "@plugin(conflicts=('ema',))\nclass Loner(Plugin): ...\n"
        "@plugin(requires=('clip',))\nclass Needy(Plugin): ...\n"
        "class Greedy(Plugin):\n    def __init__(self, must, may=1): ...\n"
    )
    monkeypatch.syspath_prepend(folder)
    path = write(folder / "bad.toml", GOOD)
    for plugin, *facts in (
        ("hd_partners:Loner", "run.plugins", "'loner'", "'ema'"),
        ("hd_partners:Needy", "run.plugins", "'needy'", "'clip'"),
        ("hd_partners:Greedy", "plugins.greedy", "must"),
    ):
        check_one(problems(path, plugins=[plugin]), *facts)
    (folder / "hd_needy_parts.py").write_text(
        "from attrs import define\nfrom hookdiff import plugin\nfrom hookdiff.diffusion import Huber\n"
        "from hookdiff_clip.rules import Norm\nfrom hookdiff_networks import UNet\nneeds = plugin(requires=('fid',))\n"
        "@needs\n@define(frozen=True)\nclass Loss(Huber): ...\n"
        "@needs\n@define\nclass Rule(Norm): ...\n"
        "@needs\nclass Net(UNet): ...\n"
        "from hookdiff.encoding import Encoder\n@needs\n@define(frozen=True)\nclass Code(Encoder):\n"
        "    def digest(self): ...\n    def open(self, device): ...\n"
    )
    for place, use in (
        ("model.use", "hd_needy_parts:Net"),
        ("diffusion.loss", "hd_needy_parts:Loss"),
        ("plugins.clip.rule", "hd_needy_parts:Rule"),
        ("data.encode.image", "hd_needy_parts:Code"),
    ):
        check_one(problems(path, ["clip"], [f"{place}={use}"]), place, f"'{use}'", "'fid'")
        load_config(path, ["clip", "fid"], [f"{place}={use}"])
    greedy = load_config(path, ["hd_partners:Greedy"], ["plugins.greedy.must=3"]).plugins["greedy"]
    assert greedy.arguments == {"must": 3}


@pytest.mark.parametrize(
    ("switches", "expected"),
    [
        (["clip", "no:ema", "clip"], ["lr", "clip"]),
        (["lr"], ["ema", "lr"]),
        (["no:ema", "ema"], ["lr", "ema"]),
        (["no:ema"], ["lr"]),  # its table may stay
    ],
)
@pytest.mark.parametrize("settings", [[], ['run.plugins=["ema", "lr"]']])
def test_plugins_are_added_and_removed(path, switches, settings, expected):
    config = load_config(path, switches, settings)
    assert list(config.run.plugins) == list(config.plugins) == expected


def test_a_plugin_that_is_not_on_cannot_be_removed(path):
    check_one(problems(path, ["no:emma"]), "--plugins no:emma", "'emma'", "'ema'")


def test_an_installed_plugin_that_is_not_on_can_be_switched_off_with_a_warning(path, caplog):
    assert load_config(path, ["no:fid"]).run.plugins == ("ema", "lr")
    check_one(warnings(caplog), "--plugins no:fid", "'fid'")


def test_an_option_of_a_plugin_that_is_not_on_is_warned_of(path, caplog):
    load_config(path, ["ema"], ["plugins.fid.every=10", "plugins.ema.decay=0.9"])
    check_one(caplog.messages, "--set plugins.fid.every=10", "'fid'", "not switched on")


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
    config = load_config(path, settings=["model.channel_mults=1,2,4", "plugins.clip.rule.max_norm=2", "data.workers=1"])
    assert config.model.arguments["channel_mults"] == (1, 2, 4)
    unset = {keys: {} for keys in (Transforms, Store, ItemKeys, Feed, EncoderKeys, CaptionKeys)}
    assert config.data.shared == {**unset, Workers: {"workers": 1}}
    assert load_config(path, settings=["optimizer.use=sgd"]).optimizer.target.__name__ == "SGD"
    assert load_config(path, settings=["run.steps=none", "run.epochs=2"]).run.epochs == 2


@pytest.mark.parametrize("setting", ["steps=3", "run.steps", "run.=3", ".steps=3", "=", "", "run..steps=3"])
def test_a_setting_needs_a_table_a_key_and_a_value(path, setting):
    check_one(problems(path, settings=[setting]), f"--set {setting}", "table.key=value")


def test_a_setting_inside_a_value_is_refused(path):
    check_one(problems(path, settings=["run.steps.x=3"]), "--set run.steps.x=3", "steps")
    step, decay = problems(path, settings=["plugins.ema.decay=2", "run.step=3"])
    check_facts(step, "run.step", "'steps'", ", ".join(attrs.fields_dict(type(load_config(path).run))))
    check_facts(decay, "plugins.ema.decay", 1, 2.0)


def same(one, other):
    """Return whether two configs are equal; here NaN equals NaN."""
    return repr(one.resolved()) == repr(other.resolved()) and one.run == other.run


def test_a_resolved_config_is_read_as_the_same_config(folder):
    usable = [name for name, (entry, *_) in sorted(installed().items()) if name != "aim" or find_spec("aim")]
    usable.remove("fsdp")  # a run has either ddp or fsdp
    table = {**GOOD, "run": {**GOOD["run"], "plugins": usable, "max_time": "1000 h"}}
    table["plugins"] = {"checkpoint": {"every": "2 epochs"}, "samples": {"every": "90 s"}, "fid": {"every": 0}}
    config = load_config(write(folder / "first.toml", table))
    again = load_config(write(folder / "second.toml", config.resolved()))
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
COSTLY = [("model", key) for key in ("channels", "channel_mults", "num_res_blocks", "head_dim")]
COSTLY += [("sampling", "steps")]


def mutated(steps):
    table = {name: dict(rest) for name, rest in GOOD.items()}
    for kind, place, *new in steps:
        *outer, key = place
        inner = table.get(outer[0]) if outer else table
        if not isinstance(inner, dict):
            continue
        if kind == "replace":
            if place in COSTLY and isinstance(new[0], int) and new[0] > 100:  # a large number is slow to build
                continue
            inner[key] = new[0]
        elif key in inner:
            old = inner.pop(key)
            if kind == "rename":
                inner[new[0]] = old
    return table


QUICK = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


def load_or_refuse(path, plugins=(), given=()):
    """Load and probe a config; only a UserError is allowed. A config that loads is the same when read back."""
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
def test_a_mutated_config_loads_or_is_refused(folder, steps):
    load_or_refuse(write(folder / "mutated.toml", mutated(steps)))


@given(text=st.text() | st.text("[]=.\"'#{}\n run1ab,", max_size=40))
@QUICK
def test_random_text_is_refused(folder, text):
    path = folder / "text.toml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    with refused(UserError, path):
        load_config(path)


settable = st.sampled_from([f"{table}.{key}" for table, key in known + extra if (table, key) not in COSTLY])


@pytest.mark.wide
@given(
    given=st.lists(
        st.text(max_size=12) | st.builds("{}={}".format, settable | names, st.text(max_size=8) | scalars), max_size=3
    ),
    plugins=st.lists(st.sampled_from([*installed(), "no:ema", "no:lr", "no:clip"]) | names | st.text(max_size=5)),
)
@QUICK
def test_any_setting_and_any_plugin_name_loads_or_is_refused(folder, given, plugins):
    load_or_refuse(write(folder / "good.toml", GOOD), plugins, given)


@pytest.mark.parametrize(
    "setting",
    mostly_wide(
        6,
        [
            "model.channels=8589934592",
            "model.image_size=7",
            "optimizer.lr=-1",
            "optimizer.foreach=true",
            "run.device=nowhere",
            "sampling.steps=101",
            "plugins.lr.schedule=constant",
            "model.channels=9223372036854775808",
            "model.in_channels=9223372036854775807",
            "model.dropout=nan",
            "optimizer.lr=nan",
            "optimizer.betas=2,3",
        ],
    ),
)
def test_a_problem_that_only_building_finds_is_refused_with_its_table(path, setting):
    config = load_config(path, settings=[setting, *(["optimizer.fused=true"] if "foreach" in setting else [])])
    table = setting.partition(".")[0]
    if table == "plugins":
        experiment.try_config(config)
    else:
        with refused(ConfigError, path, 1) as caught:
            experiment.try_config(config)
        assert place(str(caught.value).split("\n")[1].strip()).partition(".")[0] == table


def test_a_config_without_a_name_is_named_after_its_file(folder):
    assert load_config(write(Path(folder / "my run.toml"), GOOD)).run.name == "my run"


def test_a_byte_order_mark_is_no_part_of_the_config(path):
    plain = load_config(path).resolved()
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert load_config(path).resolved() == plain
    (path.parent / "run").mkdir()
    assert History(path.rename(path.parent / "run" / "config.toml").parent).config["run"]["steps"] == 20


@pytest.mark.parametrize(
    ("line", "single", "doubled"),
    [
        (r'path = "C:\Users\me"', r"'C:\Users\me'", r'"C:\\Users\\me"'),
        (r'path = "C:\data"', r"'C:\data'", r'"C:\\data"'),
        (r'path = "C:\temp\new"', r"'C:\temp\new'", r'"C:\\temp\\new"'),  # valid escapes, which nobody means
        ('path = "D:\\"', "'D:\\'", r'"D:\\"'),
        (r'path = ["C:\\a", "D:\Users"]', r"'D:\Users'", r'"D:\\Users"'),
        (r'path = "\\server\share"', r"'\\server\share'", r'"\\\\server\\share"'),
    ],
)
def test_a_path_of_windows_is_shown_in_both_right_spellings(path, line, single, doubled):
    write(path, f'[data]\nsource = "folder"\n{line}\n')
    with pytest.raises(ConfigError) as caught:
        read_toml(path)
    message = str(caught.value)
    assert str(path) in message
    assert single in message
    assert doubled in message
    for right in (single, doubled):
        write(path, f"[data]\npath = {right}\n")
        assert read_toml(path)["data"]["path"] == single[1:-1]
