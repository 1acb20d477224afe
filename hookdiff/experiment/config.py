"""Reads a TOML file into a checked `Config`; all its problems are reported at once, each with its place.

Nothing is built here: a table names a class or function by its key `use` (or `source`), and holds its arguments.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any, Literal

from attrs import Attribute, asdict, define, evolve, field
from attrs.validators import ge

from hookdiff.builtin.start_from import Start
from hookdiff.data.feed import Feed
from hookdiff.data.vision import vision
from hookdiff.diffusion.clipping import NoClipping
from hookdiff.diffusion.diffusion import Diffusion
from hookdiff.diffusion.sampling import Sampling
from hookdiff.disk.hub import pin_names
from hookdiff.disk.lock import confine
from hookdiff.disk.reading import only_files
from hookdiff.encoding.captions import CaptionKeys
from hookdiff.encoding.encoder import INPUTS, EncoderKeys
from hookdiff.errors import ConfigError, PluginError, UserError, nearest
from hookdiff.experiment.discovery import LeftOut, is_needed, plugin_class, plugin_name
from hookdiff.experiment.filled import fill
from hookdiff.experiment.import_folders import search
from hookdiff.experiment.optimizers import OPTIMIZERS, Groups
from hookdiff.experiment.own_runs import is_remembered, remember
from hookdiff.experiment.part import Part
from hookdiff.experiment.part_requirements import MODEL, OPTIMIZER, SOURCE, PartRequirement
from hookdiff.experiment.toml_file import read_with_bytes
from hookdiff.experiment.trust import CONNECTS, dangers, is_of_run, is_users_choice
from hookdiff.images.items import ItemKeys
from hookdiff.images.loader import Workers
from hookdiff.images.store import Store
from hookdiff.images.transforms import Transforms
from hookdiff.loop.counts import AUTO, LoopConfig
from hookdiff.loop.registry import check_partners, partner_problem
from hookdiff.models.adapters import checkpointable, no_weights
from hookdiff.models.attention_forms import Form
from hookdiff.models.init import Initialisation
from hookdiff.options.choices import Choice, check_claims, path_of
from hookdiff.options.default_names import DEFAULT_OPTIMIZER, DEFAULT_PLUGINS
from hookdiff.options.fields import Fixed, about, between, is_below
from hookdiff.options.fitted import Fitted, fit_to
from hookdiff.options.imports import TRUST, import_object, importing, installed
from hookdiff.options.structure import (
    Problems,
    Text,
    arguments,
    as_toml,
    described,
    marks_of,
    missing,
    options_of,
    parameters,
)
from hookdiff.run_dir.layout import is_run_dir

logger = logging.getLogger("hookdiff")


def _unless_auto(validator: Callable[[Any, Attribute[Any], Any], Any]) -> Callable[[Any, Attribute[Any], Any], Any]:
    return lambda instance, key, value: value in (None, AUTO) or validator(instance, key, value)


@define(frozen=True, kw_only=True)
class RunConfig(LoopConfig):
    """The table [run]: the keys of the Loop, and further keys of a run."""

    # A Loop needs a number; a plugin finds it for "auto" when the run starts.
    micro_batch: int | Literal["auto"] | None = field(  # type: ignore[assignment]
        default=None,
        validator=_unless_auto(ge(1)),
        metadata=about('samples that go through the network at a time; default: all; "auto": as many as fit in memory'),
    )
    name: str = field(
        validator=is_below,
        metadata=about("name of the run directory `runs/NAME`; default: the name of the config file"),
    )
    device: str = field(
        default="auto",
        metadata=about('"cpu", "cuda", "cuda:1", "mps"; "auto": the first of cuda, mps and cpu that is available'),
    )
    channels_last: bool | Literal["auto"] = field(
        default=AUTO,
        metadata=about(
            'use the memory format channels_last for convolutions; "auto": where it is faster, which is on a CPU '
            "in float32, and not for a network of diffusers"
        ),
    )
    attention: Form = field(
        default="by_layer",
        metadata=about(
            'form of attention: "kernel" of torch, "product" of matrices, or "by_layer": in each layer the '
            "faster form for its tokens, channels and precision"
        ),
    )
    threads: int | Literal["auto"] | None = field(
        default=AUTO,
        validator=_unless_auto(between(1, 1024)),  # with more threads a library ends the process
        metadata=about(
            'threads of the CPU, on which rounding depends; "auto": as many as torch and the container allow; a '
            "resumed run keeps its number, unless the variable OMP_NUM_THREADS is set"
        ),
    )
    plugins: tuple[str, ...] = field(
        default=DEFAULT_PLUGINS,
        metadata=about("names of entry points, or `module:Class`, in the order in which they are called; `[]`: none"),
    )
    import_from: str | tuple[str, ...] | None = field(
        default=None,
        metadata=about(
            "folder, or folders, to import `module:Name` from; default: the folder of the config. What the command "
            "line names is first looked for in the working directory. A run directory needs --trust for this"
        ),
    )


@define(frozen=True)
class Section:
    """A table that names a target (a class or function), and holds its arguments and keys that all targets share.

    A key that is both belongs to the target.
    """

    table: str
    known: Mapping[str, str]  # paths of targets, by name
    shared: tuple[type, ...]  # classes that define the shared keys
    expected: PartRequirement
    key: str = "use"  # the key that names the target
    default: str | None = None
    find: Callable[[str, str], Any] = import_object
    adapt: Callable[[Any], Any] = lambda target: target
    preset: Callable[[Any], Mapping[str, Any]] = lambda target: {}  # default arguments of the table

    @property
    def kind(self) -> str:
        """The kind of the part, as entry points write it: "source", "model" or "optimizer"."""
        return self.table if self.key == "use" else self.key

    def choose(self, table: Mapping[str, Any], problems: Problems) -> Fitted | None:
        """Return the target that `table` names, with its keys. On failure add the reason to `problems`."""
        try:
            target = self.target(table.get(self.key, self.default))
        except UserError as error:
            problems.add(f"{self.table}.{self.key}", error)
            return None
        with self._placed(problems), only_files():
            return fit_to(target, table)
        return None

    def fill(self, tables: dict[str, Any], chosen: Fitted, problems: Problems) -> list[str]:
        """Let the part set the open keys of other tables, and return these keys."""
        with self._placed(problems), only_files():
            return fill(tables, chosen.elsewhere(tables), f"[{self.table}]")
        return []

    def read(self, table: Mapping[str, Any], chosen: Fitted | None, problems: Problems) -> Part | None:
        """Return the part with the arguments in `table`; None if there is no target."""
        of_target = parameters(chosen.target) if chosen else {}
        shared, others = {}, [self.key]
        for kind in self.shared:
            keys = [key for key in described(kind) if key not in of_target]
            shared[kind] = arguments(kind, {k: v for k, v in table.items() if k in keys}, self.table, problems)
            others += keys
        if chosen is None:
            return None
        target, rest = chosen.target, {key: value for key, value in table.items() if key not in others}
        preset = {**self.preset(target), **chosen.values}
        values = {**preset, **arguments(target, rest, self.table, problems, others)}
        return Part(self.table, str(table.get(self.key, self.default)), target, values, self.key, shared)

    @contextmanager
    def _placed(self, problems: Problems) -> Iterator[None]:
        """Add a UserError to `problems`, with the key that it names, or with the table."""
        try:
            yield
        except UserError as error:
            place, _, reason = str(error).partition(": ")
            is_placed = place.replace(".", "").replace("_", "").isalnum() and "." in place
            problems.add(*((place, reason) if is_placed else (self.table, error)))

    def target(self, use: Any) -> Any:
        """Import and return the class or function `use`, a name or `module:Name`. Raises UserError if unfit."""
        check_claims(self.kind, self.known, use)
        path = self.known.get(str(use)) or path_of(self.kind, self.known, use, self.key)
        target = self.find(path, str(use))
        self.expected.check(path, target)
        return self.adapt(target)


def _import_source(path: str, purpose: str) -> Any:
    module, _, name = path.partition(":")  # a set of torchvision may also be named by its module
    return vision(name) if module.partition(".")[0] == "torchvision" else import_object(path, purpose)


SOURCES = {
    "digits": "hookdiff.data:digits",
    "folder": "hookdiff.images:Folder",
    "fashion-mnist": "hookdiff.data:fashion_mnist",
    "torchvision:NAME": "torchvision:NAME",
}
_NAMED_KEYS = ("data.source", "model.use")  # keys that the config of every run has, unless a script made it
SECTIONS = (
    Section(
        "data",
        SOURCES,
        (Transforms, Store, Workers, ItemKeys, Feed, EncoderKeys, CaptionKeys),
        SOURCE,
        key="source",
        find=_import_source,
    ),
    Section("model", {}, (Start, Initialisation), MODEL, adapt=checkpointable, preset=no_weights),
    Section("optimizer", OPTIMIZERS, (Groups,), OPTIMIZER, default=DEFAULT_OPTIMIZER),
)


@define(frozen=True, eq=False)
class Config:
    """A whole, checked config."""

    path: Path
    run: RunConfig
    data: Part
    model: Part
    diffusion: Part
    optimizer: Part
    sampling: Part
    plugins: Mapping[str, Part]  # the plugins of the run, in order
    trust: bool = False  # whether the user trusts the code and the values of the config
    is_own: bool = False  # whether the user wrote the config, or trusts its run
    given: Mapping[str, Any] = field(factory=dict)  # the tables of the file, with the settings of the command line
    filled: tuple[str, ...] = ()  # keys that a part has set, such as "diffusion.process"
    needs_trust: tuple[str, ...] = ()  # code that is not installed, and keys, that need the user's trust

    def resolved(self) -> dict[str, Any]:
        """Return the config with every default written out, so that it gives the same run again."""
        diffusion = self.diffusion.build()  # some defaults follow from the process
        return {
            "run": as_toml(self.run),
            "data": self.data.resolved(),
            "model": self.model.resolved(),
            "diffusion": as_toml(diffusion),
            "optimizer": self.optimizer.resolved(),
            "sampling": as_toml(self.sampling.build().fit(diffusion)),
            "plugins": {name: part.resolved() for name, part in self.plugins.items()},
        }

    def defaults(self) -> dict[str, Any]:
        """Return the resolved config of a file that names the same parts and plugins, and sets no other key."""
        parts = asdict(self, recurse=False, filter=lambda _, value: isinstance(value, Part))
        plugins = {name: part.bare() for name, part in self.plugins.items()}
        bare = {name: part.bare() for name, part in parts.items()}
        return evolve(self, run=RunConfig(name=self.run.name), plugins=plugins, **bare).resolved()

    def fixed(self) -> dict[str, str]:
        """Return the keys that model and optimizer mark as `Fixed`, with the reasons."""
        parts = (self.model, self.optimizer)
        marks = {f"{part.where}.{key}": mark for part in parts for key, mark in marks_of(part.target, Fixed).items()}
        return {key: mark.reason for key, mark in marks.items()}


def load_config(
    path: str | Path,
    plugins: Iterable[str] = (),
    settings: Iterable[str] = (),
    *,
    trust: bool = False,
    without: Collection[str] = (),
    hooks: Collection[str] | None = None,
) -> Config:
    """Read and check the config at `path`. Modules are imported, and nothing in them is called.

    A file called config.toml, or beside the files of a run, is the config of a run, which may be a stranger's. Without
    `trust` it imports only torch, torchvision, diffusers, hookdiff and the plugins and parts of installed packages. It
    opens no URL and no other connection, hands no options to a library, and writes only in the run directory. Any other
    config may run any code. Modules that `plugins` and `settings` name are first looked for in the working directory.
    No folder in a run directory is searched without `trust`. A run that this user has made, or has once
    trusted, is trusted while neither its place nor a byte of its config changes.

    Args:
        path: the file.
        plugins: names to add, or `no:NAME` to remove one.
        settings: keys to set, as `table.key=value`.
        trust: whether the user trusts the config of a run.
        without: tables that are not read, such as "data"; their parts are not imported and cannot be built.
        hooks: leave out the plugins that implement none of these hooks; packages that they need may be missing.

    Raises:
        ConfigError: lists every problem.
    """
    path, asked = Path(path), trust
    (table, data), problems, settings = read_with_bytes(path), Problems(), sorted(settings, key=_use_before_options)
    plugins = tuple(plugins)
    if is_run_dir(path.parent) and (lacking := [key for key in _NAMED_KEYS if not _has_key(table, key)]):
        raise ConfigError(
            f"{path} has no {' and no '.join(lacking)}: a script made the run, and only the script can make its network"
            f"\n  To make images there: with Loop(..., run_dir={str(path.parent)!r}, resume=True) as loop: "
            "loop.sample(SampleRequest(16)).images"
        )
    for setting in settings:
        _set(table, setting, problems)
    if is_of_run(path):
        confine(path.parent)
        trust = trust or is_remembered(path, data)
    given = deepcopy(table)
    is_strangers = is_of_run(path) and not trust
    if unfetched := [*pin_names(table, lambda name: _why_not_fetched(name, is_strangers))]:
        for place, reason in unfetched:
            problems.add(place, reason)
        problems.refuse(path)  # a part may have its keys from its folder
    where = None if is_strangers else search(table, path, (*plugins, *settings), asked=asked, trust=trust)
    with importing(only_installed=is_strangers, where=where) as imports:
        config = _checked_config(table, path, plugins, problems, without, hooks, path.parent if is_strangers else None)
    if hooks is None:
        _warn_of_unused(settings, config)
    needs_trust = (*imports.uninstalled, *config.needs_trust)
    if is_of_run(path) and trust and os.environ.get("RANK", "0") == "0":
        remember(path, data, bool(needs_trust))
    return evolve(config, trust=trust, is_own=not is_strangers, given=given, needs_trust=needs_trust)


def _why_not_fetched(name: str, is_strangers: bool) -> str:
    return f"{CONNECTS}; {TRUST}" if is_strangers and not isinstance(name, Text) else ""


def make_plugin(
    given: str, config: Mapping[str, Any], settings: Iterable[str] = (), *, run_dir: Path | None = None
) -> object:
    """Return the plugin `given`, an installed name or `module:Class`, with its options from the `config` of a run.

    `settings` are further options, as "key=value". Only `given`, the user's choice, is imported. Parts in the
    options of the run must be installed, and files may be written only in `run_dir`. Without `run_dir` the plugin must
    not be used to write.

    Raises:
        PluginError: if there is no such plugin.
        ConfigError: for options that do not fit the plugin.
    """
    name, problems = plugin_name(given), Problems()
    where, kind = f"plugins.{name}", plugin_class(given)
    tables = config.get("plugins", {})
    known = tables.get(name, {}) if isinstance(tables, dict) else {}
    table = {name: dict(known) if isinstance(known, dict) else {}}
    for setting in settings:
        _set(table, f"{name}.{setting}", problems)
    with importing(only_installed=True):
        part = Part(where, given, kind, arguments(kind, table[name], where, problems))
    if run_dir is not None:
        for place, reason in dangers(kind, part.arguments, table[name], where, run_dir):
            problems.add(place, f"{reason}: give another with --set {place.removeprefix(f'{where}.')}=VALUE")
    problems.refuse(Path(where))
    return part.build()


def _use_before_options(setting: str) -> tuple[bool, int]:
    """Sort settings of `use` first, outer before inner, because a new `use` drops the options of the old one."""
    key = setting.partition("=")[0].strip()
    return (False, key.count(".")) if key.endswith(".use") else (True, 0)


def _set(table: dict[str, Any], setting: str, problems: Problems) -> None:
    key, equals, value = setting.partition("=")
    *path, last = key.strip().split(".")
    if not equals or not path or not all((*path, last)):
        problems.add(f"--set {setting}", "write table.key=value")
        return
    for depth, name in enumerate(path):
        inner = table.setdefault(name, {})
        if isinstance(inner, str) and depth:
            inner = table[name] = {"use": str(inner)}  # turn a bare name into a table, to add an option
        if not isinstance(inner, dict):
            problems.add(f"--set {setting}", f"{name} is no table, so it has no keys to set")
            return
        table = inner
    is_part = len(path) > (2 if path[0] == "plugins" else 1)
    if last == "use" and is_part and table.get("use") != value.strip():
        table.clear()  # the options belonged to the old choice
    table[last] = Text(value.strip())


def _warn_of_unused(settings: Iterable[str], config: Config) -> None:
    """Warn of settings for plugins that are not switched on."""
    for setting in settings:
        table, name = f"{setting.partition('=')[0].strip()}.".split(".")[:2]
        if table == "plugins" and name not in config.plugins:
            logger.warning("--set %s: the plugin %r is not switched on; add it to run.plugins", setting, name)


def _switched(listed: tuple[str, ...], name: str, problems: Problems) -> tuple[str, ...]:
    if not name.startswith("no:"):
        return listed if name in listed else (*listed, name)
    if name[3:] not in listed and name[3:] in installed():
        logger.warning("--plugins %s: the plugin %r is not switched on", name, name[3:])
    elif name[3:] not in listed:
        problems.add(f"--plugins {name}", f"{name[3:]!r} is not switched on{nearest(name[3:], listed)}")
    return tuple(other for other in listed if other != name[3:])


def _checked_config(
    table: dict[str, Any],
    path: Path,
    switches: Iterable[str],
    problems: Problems,
    without: Collection[str],
    hooks: Collection[str] | None,
    strangers: Path | None,
) -> Config:
    """Return the checked config. `strangers`: the run directory of the config, unless the user trusts it."""
    tables = _tables(table, problems)
    run_table = tables.get("run", {})
    run = arguments(RunConfig, {"name": path.stem, **run_table}, "run", problems)
    _check_length(run_table, run, problems)
    if "plugins" not in run_table:
        run["plugins"] = DEFAULT_PLUGINS
    if "plugins" in run:
        for name in switches:
            run["plugins"] = _switched(run["plugins"], name, problems)
    named = [each for each in SECTIONS if each.table in tables and each.table not in without]
    chosen = [(section, section.choose(tables[section.table], problems)) for section in named]
    filled = [key for section, part in chosen if part for key in section.fill(tables, part, problems)]
    parts: dict[str, Any] = {
        section.table: section.read(tables[section.table], part, problems) for section, part in chosen
    }
    parts |= {name: Part(name, "", partial(_not_read, name)) for name in without}
    if "data" in without:  # to make images, latents are decoded and start images are read
        parts["data"] = evolve(parts["data"], shared=_data_without_source(tables.get("data", {}), problems))
    if "data" not in without and (data := parts.get("data")) and (lacking := missing(data.target, tables["data"])):
        problems.add("data", f"{data.use} needs {', '.join(lacking)}")
    for name, target in {"diffusion": Diffusion, "sampling": Sampling}.items():
        parts[name] = Part(name, "", target, arguments(target, tables.get(name, {}), name, problems))
    if INPUTS in (parts["data"].shared.get(EncoderKeys, {}).get("encode") or {} if parts.get("data") else {}):
        clipping = parts["sampling"].arguments.get("clipping")
        if clipping is not None and clipping.clips:
            problems.add(
                "sampling.clipping", f'"{clipping.use}" is for pictures, and latents have other values; use "none"'
            )
        parts["sampling"] = parts["sampling"].given(clipping=NoClipping())
    plugins = _plugins(run.get("plugins", ()), tables.get("plugins", {}), problems, hooks)
    if strangers:
        for name, part in parts.items():
            parts[name] = part and evolve(part, is_strangers=not is_users_choice(tables.get(name), part.target))
        for name, part in plugins.items():
            theirs = part.use not in switches and not is_users_choice(tables.get("plugins", {}).get(name), part.target)
            plugins[name] = evolve(part, is_strangers=theirs)
    for place, use, kind in _named_parts(filter(None, (*parts.values(), *plugins.values()))):
        if problem := partner_problem(kind, plugins):
            problems.add(place, f"{use!r} {problem}")
    risks = [
        danger for part in (*parts.values(), *plugins.values()) if part for danger in _dangers(part, tables, strangers)
    ]
    for place, reason in risks if strangers else ():
        problems.add(place, f"{reason}; {TRUST}")
    problems.refuse(path)
    needs = tuple(place for place, _ in risks)
    return Config(path=path, run=RunConfig(**run), plugins=plugins, needs_trust=needs, filled=tuple(filled), **parts)


def _data_without_source(table: Mapping[str, Any], problems: Problems) -> dict[type, dict[str, Any]]:
    """Return the arguments of `EncoderKeys` and `Transforms` in the table [data] of a source that is not imported."""
    encode = {key: value for key, value in table.items() if key in ("encode", "time_ids")}
    fitting = dict[str, Any]()
    for key in described(Transforms):
        if key in table:
            values = arguments(Transforms, {**fitting, key: table[key]}, "data", refused := Problems())
            if not refused.found:
                fitting = values
            elif isinstance(table[key], Text):  # else it may be a key of the source, with other values
                problems.found += refused.found
    return {EncoderKeys: arguments(EncoderKeys, encode, "data", problems), Transforms: fitting}


def _named_parts(parts: Iterable[Part]) -> Iterator[tuple[str, str, object]]:
    """Yield the place, the name and the class of each part that is named by `use` or as an option."""
    waiting: list[tuple[str, Any]] = []
    for part in parts:
        if part.key:
            yield f"{part.where}.{part.key}", part.use, part.target
        tables = part.arguments, *part.shared.values()
        waiting += [(f"{part.where}.{key}", value) for table in tables for key, value in table.items()]
    for place, value in waiting:  # the list grows
        if isinstance(value, Choice):
            yield place, value.use, type(value)
            waiting += [(f"{place}.{name}", each) for name, each in options_of(value).items()]
        elif isinstance(value, list | tuple):
            waiting += [(place, each) for each in value]
        elif isinstance(value, Mapping):
            waiting += [(f"{place}.{key}", each) for key, each in value.items()]


def _dangers(part: Part, tables: Mapping[str, Any], run_dir: Path | None) -> Iterator[tuple[str, str]]:
    """Yield the place and the reason of each value of the part that a config needs trust for; see `dangers`."""
    table: Any = tables
    for name in part.where.split(".", 1):  # "data", or "plugins.NAME"
        table = table.get(name, {})
    targets: list[tuple[Callable[..., Any], Mapping[str, Any]]] = [(part.target, part.arguments), *part.shared.items()]
    for target, values in targets:
        yield from dangers(target, values, table, part.where, run_dir)


def _has_key(config: Mapping[str, Any], key: str) -> bool:
    table, _, name = key.partition(".")
    return isinstance(config.get(table), Mapping) and name in config[table]


def _not_read(name: str) -> None:
    raise UserError(f"[{name}] of the run was not read, because it is not needed to make images")


def _tables(config: Mapping[str, Any], problems: Problems) -> dict[str, dict[str, Any]]:
    """Return the tables of `config` by name; report missing tables, and values that are no tables."""
    # The path is no table, nor is a field with a default, such as `trust`.
    _, *members = signature(Config).parameters.values()
    needed, known = ("run", "data", "model"), [each.name for each in members if each.default is each.empty]
    for name in (name for name in config if name not in known):
        problems.add(name, f"unknown table{nearest(name, known)}; known: {', '.join(known)}")
    tables = {name: config.get(name, {}) for name in known if name in config or name not in needed}
    for name in (name for name in needed if name not in tables):
        problems.add(name, f"the table [{name}] is missing")
    for name in [name for name, table in tables.items() if not isinstance(table, dict)]:
        problems.add(name, f"expected a table [{name}], got {tables.pop(name)!r}")
    return tables


def _check_length(table: Mapping[str, Any], checked: Mapping[str, Any], problems: Problems) -> None:
    """Refuse a run with no length or two. A wrong or misspelt key is reported already, and counts as set."""
    known, lengths = parameters(RunConfig), ("steps", "epochs")
    chosen = [key for key in lengths if key in table and checked.get(key, table[key]) is not None]
    if len(chosen) == 2:
        problems.add("run", "set steps or epochs, not both")
    elif not chosen and not any(nearest(key, lengths) for key in table if key not in known):
        problems.add("run", "set steps or epochs")


def _plugins(
    names: Iterable[str], tables: Mapping[str, Any], problems: Problems, hooks: Collection[str] | None
) -> dict[str, Part]:
    parts: dict[str, Part] = {}
    kinds: dict[str, type] = {}
    for path in names:
        name = plugin_name(path)
        where = f"plugins.{name}"
        try:
            if name in kinds:
                raise PluginError(f"{name!r} is listed twice; remove one")
            kind = kinds[name] = plugin_class(path, hooks)
        except PluginError as error:
            problems.add("run.plugins", error)
            continue
        if not is_needed(kind, hooks):
            parts[name] = Part(where, path, LeftOut)
            continue
        table = tables.get(name, {})
        if not isinstance(table, dict):
            problems.add(where, f"expected a table [{where}], got {table!r}")
            continue
        parts[name] = Part(where, path, kind, arguments(kind, table, where, problems))
        if lacking := missing(kind, table):
            problems.add(where, f"needs {', '.join(lacking)}")
    for name in tables:
        # A plugin that is switched off may keep its table; a table that no plugin reads is a mistake.
        if name not in kinds and name not in map(plugin_name, names) and name not in installed():
            problems.add(f"plugins.{name}", f"no plugin of that name{nearest(name, (*kinds, *installed()))}")
    try:
        check_partners(kinds)
    except PluginError as error:
        problems.add("run.plugins", error)
    return parts
