"""A TOML file becomes a checked `Config`; every problem in it is told at once, each with its place.

Nothing is built here: a table with a `use` (or `source`) key names what it configures and holds its arguments.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import tomli
from attrs import Attribute, asdict, define, evolve, field
from attrs.validators import ge

from hookdiff.builtin.start import Start
from hookdiff.choices import import_object
from hookdiff.data import Feed, Store, Transforms
from hookdiff.data.vision import vision
from hookdiff.diffusion import Diffusion, Sampling
from hookdiff.errors import ConfigError, PluginError, UserError, nearest
from hookdiff.experiment.discovery import installed, plugin_class, plugin_name
from hookdiff.experiment.optimizers import OPTIMIZERS, UNFIT, Groups, unfit
from hookdiff.experiment.part import Part
from hookdiff.experiment.structure import Problems, Text, arguments, as_toml, missing, parameters, resolved
from hookdiff.models.adapters import checkpointable
from hookdiff.models.init import Initialisation
from hookdiff.plugins import check_partners
from hookdiff.progress import AUTO, LoopConfig

SOURCES = {
    "digits": "hookdiff.data:digits",
    "folder": "hookdiff.data:Folder",
    "fashion-mnist": "hookdiff.data:fashion_mnist",
    "torchvision:NAME": "torchvision:NAME",
    "huggingface": "hookdiff.data:HuggingFace",
    "array": "hookdiff.data:Arrays",
}
MODELS = {"unet": "hookdiff.models:UNet", "dit": "hookdiff.models:DiT"}
START_KEYS = tuple(parameters(Start))
FEED_KEYS = ("held_out", "balanced", "drop_last", "workers", "prefetch")


def _is_size(instance: object, attribute: Attribute[Any], value: Any) -> None:
    if value not in (None, AUTO):
        ge(1)(instance, attribute, value)


@define(frozen=True, kw_only=True)
class RunConfig(LoopConfig):
    """The table [run]: the loop's keys, and what surrounds it."""

    # A Loop has a number; "auto" is tried out when it starts.
    micro_batch: int | Literal["auto"] | None = field(default=None, validator=_is_size)  # type: ignore[assignment]
    name: str = "run"  # of the run directory, runs/NAME
    device: str = "auto"  # "cpu", "cuda", "cuda:1", "mps"; auto takes the first that is there
    channels_last: bool = True  # memory layout of convolutions: a sixth faster on a CPU, more on a GPU under amp
    plugins: tuple[str, ...] = ()
    import_from: str | None = None  # a folder to import modules from, relative to that of the config, its default


@define(frozen=True, eq=False)
class Config:
    """A whole, checked config."""

    path: Path
    run: RunConfig
    data: Part
    feed: Mapping[str, Any]  # arguments of Feed, besides the source
    model: Part
    optimizer: Part
    diffusion: Part
    sampling: Part
    plugins: Mapping[str, Part]  # those that are switched on, in order
    start: Mapping[str, Any] = field(factory=dict)  # of the table [model]: the weights to start from
    initial: Initialisation = field(factory=Initialisation)  # of the table [model] too
    groups: Groups = field(factory=Groups)  # of the table [optimizer]: what all classes share

    def resolved(self) -> dict[str, Any]:
        """Return the config with every default written out; running it again gives the same run."""
        diffusion = self.diffusion.build()  # what is left out follows from the process
        return {
            "run": as_toml(self.run),
            "data": {"source": self.data.use, **self.data.resolved(), **_feed_table(self.feed, self.data)},
            "model": {
                "use": self.model.use,
                **self.model.resolved(),
                **_start_table(self.start),
                **resolved(Initialisation, asdict(self.initial)),
            },
            "diffusion": as_toml(diffusion),
            "optimizer": {
                "use": self.optimizer.use,
                **resolved(Groups, asdict(self.groups)),
                **self.optimizer.resolved(),
            },
            "sampling": as_toml(self.sampling.build().fit(diffusion)),
            "plugins": {name: part.resolved() for name, part in self.plugins.items()},
        }

    def defaults(self) -> dict[str, Any]:
        """Return what the config would be if it said no more than what is used, and for which plugins."""
        parts = ("data", "model", "diffusion", "optimizer", "sampling")
        return evolve(
            self,
            run=RunConfig(),
            feed={"transforms": Transforms(), "store": Store()},
            start={},
            initial=Initialisation(),
            groups=Groups(),
            plugins={name: evolve(part, arguments={}) for name, part in self.plugins.items()},
            **{name: evolve(getattr(self, name), arguments={}) for name in parts},
        ).resolved()


def load_config(path: Path, plugins: Iterable[str] = (), settings: Iterable[str] = ()) -> Config:
    """Read and check the config at `path`.

    `plugins` are names to add, or to take away as `no:NAME`; `settings` are `table.key=value`. Raises ConfigError
    that lists every problem.
    """
    table = read_toml(path)
    problems = Problems()
    for setting in sorted(settings, key=_set_order):
        _set(table, setting, problems)
    _make_importable(table, path)
    config = _check(table, path, plugins, problems)
    if problems.found or config is None:
        raise refusal(path, problems.found)
    return config


def _make_importable(table: dict[str, Any], path: Path) -> None:
    """Let `module:Name` find modules beside the config; the folder is recorded, so that a run's own config does too."""
    run = table.get("run")
    if isinstance(run, dict) and isinstance(run.setdefault("import_from", ""), str):
        folder = run["import_from"] = str((path.parent / run["import_from"]).resolve())
        if folder not in sys.path:
            sys.path.append(folder)


def refusal(path: Path, found: Sequence[str]) -> ConfigError:
    """Return the error that lists all that was `found` to be wrong with the config at `path`."""
    count = f"{len(found)} problem" + ("s" if len(found) > 1 else "")
    return ConfigError(f"{path}: {count}\n" + "\n".join(f"  {line}" for line in found))


def read_toml(path: Path) -> dict[str, Any]:
    """Parse the file at `path`; raises ConfigError with the line of what is no TOML."""
    try:
        return tomli.loads(path.read_text("utf-8"))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 at byte {error.start}") from None
    except (ValueError, RecursionError) as error:  # of tomli, or of Python for a number too long or a nest too deep
        raise ConfigError(f"{path}: not TOML: {error}") from None
    except FileNotFoundError:
        near = nearest(path.name, [p.name for p in path.parent.glob("*.toml")]) if path.parent.is_dir() else ""
        raise ConfigError(f"{path}: no such file{near}") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None


def _set_order(setting: str) -> tuple[bool, int]:
    """Sort a new `use` first, since it drops the options of the old one, and the outer before the inner."""
    key = setting.partition("=")[0].strip()
    return (False, key.count(".")) if key.endswith(".use") else (True, 0)


def _set(table: dict[str, Any], setting: str, problems: Problems) -> None:
    key, equals, value = setting.partition("=")
    *path, last = key.strip().split(".")
    if not equals or not path or not all((*path, last)):
        problems.add(f"--set {setting}", "expected table.key=value")
        return
    for depth, name in enumerate(path):
        inner = table.setdefault(name, {})
        if isinstance(inner, str) and depth:
            inner = table[name] = {"use": str(inner)}  # a bare name, which gets an option
        if not isinstance(inner, dict):
            problems.add(f"--set {setting}", f"{name} is no table")
            return
        table = inner
    is_part = len(path) > (2 if path[0] == "plugins" else 1)
    if last == "use" and is_part and table.get("use") != value.strip():
        table.clear()  # the options were those of another
    table[last] = Text(value.strip())


def _switch(listed: tuple[str, ...], name: str, problems: Problems) -> tuple[str, ...]:
    if not name.startswith("no:"):
        return listed if name in listed else (*listed, name)
    if name[3:] not in listed:
        problems.add(f"--plugins {name}", f"{name[3:]!r} is not switched on{nearest(name[3:], listed)}")
    return tuple(other for other in listed if other != name[3:])


def _check(table: dict[str, Any], path: Path, switches: Iterable[str], problems: Problems) -> Config | None:
    known = ("run", "data", "model", "diffusion", "optimizer", "sampling", "plugins")
    for name in table:
        if name not in known:
            problems.add(name, f"unknown table{nearest(name, known)}; known: {', '.join(known)}")
    tables: dict[str, dict[str, Any]] = {}
    for name in known:
        tables[name] = table.get(name, {})
        if not isinstance(tables[name], dict):
            problems.add(name, f"expected a table [{name}], got {tables[name]!r}")
            tables[name] = {}
        elif name in ("run", "data", "model") and name not in table:
            problems.add(name, f"the table [{name}] is missing")

    run = arguments(RunConfig, {"name": path.stem, **tables["run"]}, "run", problems)
    _check_length(tables["run"], run, problems)
    if "plugins" in run or "plugins" not in tables["run"]:
        for name in switches:
            run["plugins"] = _switch(run.get("plugins", ()), name, problems)
    data, feed = _data(tables["data"], problems)
    start = arguments(Start, {k: v for k, v in tables["model"].items() if k in START_KEYS}, "model", problems)
    model, initial = _shared("model", tables["model"], Initialisation, MODELS, problems, START_KEYS, _import_model)
    table = {"use": "adamw", **tables["optimizer"]}
    optimizers = OPTIMIZERS | {name: path for name, path in UNFIT.items() if name == table["use"]}
    optimizer, groups = _shared("optimizer", table, Groups, optimizers, problems)
    if optimizer and (reason := unfit(optimizer.target)):
        problems.add("optimizer.use", f"{optimizer.use!r} cannot train here: {reason}")
    diffusion = Part("diffusion", "", Diffusion, arguments(Diffusion, tables["diffusion"], "diffusion", problems))
    sampling = Part("sampling", "", Sampling, arguments(Sampling, tables["sampling"], "sampling", problems))
    plugins = _plugins(run.get("plugins", ()), tables["plugins"], problems)
    if problems.found or data is None or model is None or optimizer is None:
        return None
    shared: dict[str, Any] = {"start": start, "initial": Initialisation(**initial), "groups": Groups(**groups)}
    return Config(path, RunConfig(**run), data, feed, model, optimizer, diffusion, sampling, plugins, **shared)


def _shared(
    where: str,
    table: Mapping[str, Any],
    shared: type,
    known: Mapping[str, str],
    problems: Problems,
    others: Iterable[str] = (),
    import_target: Callable[[str, str], Any] = import_object,
) -> tuple[Part | None, dict[str, Any]]:
    """Check a table of a part whose keys of `shared` are read here whatever the part; `others` have been read."""
    keys = (*others, *parameters(shared))
    checked = arguments(shared, {k: v for k, v in table.items() if k in parameters(shared)}, where, problems)
    rest = {key: value for key, value in table.items() if key not in keys}
    return _part(where, "use", rest, known, problems, import_target, keys), checked


def _check_length(table: Mapping[str, Any], checked: Mapping[str, Any], problems: Problems) -> None:
    """Tell of a run with no length or two. A key that is wrong or misspelt has been told, and counts as set."""
    known, lengths = parameters(RunConfig), ("steps", "epochs")
    given = [key for key in lengths if key in table and checked.get(key, table[key]) is not None]
    if len(given) == 2:
        problems.add("run", "set steps or epochs, not both")
    elif not given and not any(nearest(key, lengths) for key in table if key not in known):
        problems.add("run", "set steps or epochs")


def _data(table: Mapping[str, Any], problems: Problems) -> tuple[Part | None, dict[str, Any]]:
    """Check the table [data]: a key that the source takes is the source's, the others are shared by all sources."""
    before = len(problems.found)
    use = {key: value for key, value in table.items() if key == "source"}
    data = _part("data", "source", use, SOURCES, problems, _import_source)
    own = parameters(data.target) if data else {}
    shared = {Transforms: parameters(Transforms), Store: parameters(Store), Feed: FEED_KEYS}
    known = [*own, *(key for keys in shared.values() for key in keys if key not in own)]
    for key in table:
        if data and key != "source" and key not in known:
            near = nearest(key, ["source", *known])
            problems.add(f"data.{key}", f"unknown key{near}; known: {', '.join(known)}")
    checked = {
        kind: arguments(kind, {k: v for k, v in table.items() if k in keys and k not in own}, "data", problems)
        for kind, keys in shared.items()
    }
    if data:
        given = {key: value for key, value in table.items() if key in own}
        data = evolve(data, arguments=arguments(data.target, given, "data", problems))
        if lacking := missing(data.target, given):
            problems.add("data", f"{data.use} needs {', '.join(lacking)}")
    if len(problems.found) > before:
        return None, {}
    options = {"transforms": Transforms(**checked[Transforms]), "store": Store(**checked[Store])}
    return data, {**options, **checked[Feed]}


def _import_source(path: str, what: str) -> Any:
    module, _, name = path.partition(":")
    return vision(name) if module == "torchvision" else import_object(path, what)


def _import_model(path: str, what: str) -> Any:
    return checkpointable(import_object(path, what))


def _part(
    where: str,
    key: str,
    table: Mapping[str, Any],
    known: Mapping[str, str],
    problems: Problems,
    import_target: Callable[[str, str], Any] = import_object,
    beside: Iterable[str] = (),
) -> Part | None:
    """Check a table whose `key` names what it configures: one of `known`, or `module:Name`."""
    use = table.get(key)
    if not isinstance(use, str):
        if not any(line.startswith(f"{where}: ") for line in problems.found):  # the table itself may be missing
            got = "is missing" if use is None else f"expected a string, got {use!r}"
            problems.add(f"{where}.{key}", f"{got}; known: {', '.join(known)}, or module:Name")
        return None
    path = known.get(use, use)
    if ":" not in path:
        names = ", ".join(known)
        problems.add(f"{where}.{key}", f"unknown {use!r}{nearest(use, known)}; known: {names}, or module:Name")
        return None
    try:
        target = import_target(path, use)
    except UserError as error:
        problems.add(f"{where}.{key}", str(error))
        return None
    if not callable(target):
        problems.add(f"{where}.{key}", f"{path} is a {type(target).__name__}, expected a class or a function")
        return None
    rest = {name: value for name, value in table.items() if name != key}
    return Part(where, str(use), target, arguments(target, rest, where, problems, beside))


def _plugins(names: Iterable[str], tables: Mapping[str, Any], problems: Problems) -> dict[str, Part]:
    parts: dict[str, Part] = {}
    for given in names:
        name = plugin_name(given)
        where = f"plugins.{name}"
        if name in parts:
            problems.add("run.plugins", f"{name!r} is listed twice")
            continue
        try:
            kind = plugin_class(given)
        except PluginError as error:
            problems.add("run.plugins", str(error))
            continue
        table = tables.get(name, {})
        if not isinstance(table, dict):
            problems.add(where, f"expected a table [{where}], got {table!r}")
            continue
        parts[name] = Part(where, given, kind, arguments(kind, table, where, problems))
        if lacking := missing(kind, table):
            problems.add(where, f"needs {', '.join(lacking)}")
    for name in tables:
        # A table of a plugin that is switched off may stay; one that no plugin could ever read is a slip.
        if name not in parts and name not in map(plugin_name, names) and name not in installed():
            problems.add(f"plugins.{name}", f"no plugin of that name{nearest(name, (*parts, *installed()))}")
    try:
        check_partners({name: part.target for name, part in parts.items() if isinstance(part.target, type)})
    except PluginError as error:
        problems.add("run.plugins", str(error))
    return parts


def _feed_table(given: Mapping[str, Any], data: Part) -> dict[str, Any]:
    own = parameters(data.target)
    feed = {name: value for name, value in resolved(Feed, given).items() if name in FEED_KEYS}
    shared = [given["transforms"], given["store"]]
    table = {**{k: v for part in shared for k, v in resolved(type(part), asdict(part)).items()}, **feed}
    return {name: value for name, value in table.items() if name not in own}


def _start_table(given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if given.get("start_from")}
