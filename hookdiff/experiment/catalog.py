"""The plugins, and the parts of every kind, that a config can name on this machine."""

from __future__ import annotations

import inspect
import sys
import typing
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import accumulate
from typing import Any

from attrs import define, field

from hookdiff.authors.export_format import ExportFormat
from hookdiff.diffusion.diffusion import Diffusion
from hookdiff.diffusion.sampling import Sampling
from hookdiff.errors import PluginError, nearest
from hookdiff.experiment.config import SECTIONS
from hookdiff.experiment.discovery import plugin_class
from hookdiff.options.choices import Choice, find, published
from hookdiff.options.help import keys
from hookdiff.options.imports import PARTS, PLUGINS, distribution, installed, own_package
from hookdiff.options.structure import hints_of


@define
class _Command:
    """The kinds of parts that a command names, and no key."""

    to: ExportFormat


_OF_PLUGINS = "plugin"  # the kind of a plugin


@define(frozen=True, eq=False)
class Member:
    """A plugin or a part by its name, or the reason why it cannot be used."""

    kind: str
    name: str
    path: str  # module:Name
    distributions: tuple[str, ...]  # distributions that claim the name, with their versions
    target: Any = None  # the class or function; None if there is an error
    error: str = ""

    @property
    def summary(self) -> str:
        """The first line of the member's documentation, or the reason why the member cannot be used."""
        return f"cannot be used: {self.error}" if self.error else (inspect.getdoc(self.target) or "").partition("\n")[0]

    def facts(self) -> dict[str, Any]:
        """Return the member and its keys as values of JSON."""
        known = {"kind": self.kind, "name": self.name, "path": self.path, "distributions": self.distributions}
        if self.error:
            return {**known, "error": self.error}
        options = [
            {"name": key.name, "default": key.default, "help": key.help, "part": key.kind.kind if key.kind else None}
            for key in keys(self.target)
        ]
        return {**known, "help": inspect.getdoc(self.target) or "", "keys": options}


@define(frozen=True, eq=False)
class PartKind:
    """All plugins, or all parts of one kind."""

    name: str  # as entry points write it before the dot
    find: Callable[[str], Any]  # imports a member by its name, or raises PluginError
    known: Mapping[str, str] = field(factory=dict)  # paths of built-in members, by name
    choice: type[Choice] | None = None  # the class of the kind, if a key of another table chooses it

    def names(self) -> list[str]:
        """Return the names of all members; nothing is imported."""
        offered = installed() if self.name == _OF_PLUGINS else published(self.name)
        return list(dict.fromkeys([*self.known, *offered]))

    def member(self, name: str) -> Member:
        """Import and return the member called `name`, which may also be `module:Name`."""
        offered = (installed() if self.name == _OF_PLUGINS else published(self.name)).get(name, [])
        path = self.known.get(name) or (offered[0].value if offered else name)
        owners = [_owner(path)] if name in self.known else []
        make = partial(Member, self.name, name, path, (*owners, *map(distribution, offered)))
        try:
            return make(self.find(name))
        except Exception as error:  # a broken package must not hide the others
            return make(error=str(error) or type(error).__name__)

    def members(self) -> list[Member]:
        """Import and return all members; a member that cannot be imported has an `error`."""
        return [self.member(name) for name in self.names() if ":" not in name]  # "torchvision:NAME" has any name


def kinds() -> dict[str, PartKind]:
    """Return the plugins and all kinds of parts by name. A kind is known from the keys that choose it."""
    catalog = {_OF_PLUGINS: PartKind(_OF_PLUGINS, plugin_class)}
    catalog |= {section.kind: PartKind(section.kind, section.target, section.known) for section in SECTIONS}
    targets: list[Any] = [Diffusion, Sampling, _Command, *(kind for section in SECTIONS for kind in section.shared)]
    targets += [member.target for kind in catalog.values() for member in kind.members()]
    for target in targets:  # the list grows
        for choice in choices_of(target) if target is not None else ():
            if choice.kind not in catalog:
                known = {name: shortest_path(part) for name, part in choice.known.items()}
                catalog[choice.kind] = PartKind(choice.kind, partial(find, choice), known, choice)
                targets += [member.target for member in catalog[choice.kind].members()]
    return catalog


def choices_of(target: Callable[..., Any]) -> Iterator[type[Choice]]:
    """Yield the kinds of parts that the keys of `target` choose."""
    types = list(hints_of(target).values())
    for hint in types:  # the list grows
        types += typing.get_args(hint)
        if isinstance(hint, type) and issubclass(hint, Choice):
            yield hint


def named(name: str) -> list[Member]:
    """Return the members called `name`: a kind, a member as `kind.name`, a plugin as `module:Class`, or a bare name.

    A kind gives all its members, and a bare name gives the members of this name of all kinds. A name that is both, such
    as the plugin and the kind "loss", gives the members of this name first.

    Raises:
        PluginError: for an unknown name, and for a single member that cannot be used.
    """
    known = kinds()
    group, _, inner = name.partition(".")
    if ":" in name:
        members = [known[_OF_PLUGINS].member(name)]
    elif group in known and inner in known[group].names():
        members = [known[group].member(inner)]
    else:
        members = [kind.member(name) for kind in known.values() if name in kind.names()]
    if name in known:
        return members + known[name].members()
    if not members:
        pairs = [(kind.name, member) for kind in known.values() for member in kind.names()]
        names = [*known, *map(".".join, pairs), *(member for _, member in pairs)]
        near = own_package(PLUGINS, name) or own_package(PARTS, name) or nearest(name, names)
        raise PluginError(f"no plugin, part or kind named {name!r}{near}; kinds: {', '.join(known)}")
    if len(members) == 1 and members[0].error:
        raise PluginError(members[0].error)
    return members


def shortest_path(part: type) -> str:
    """Return the path `module:Name` of the outermost package that has the class, for an import in a script."""
    *outer, _ = packages = list(accumulate(part.__module__.split("."), "{}.{}".format))
    owners = (package for package in outer if getattr(sys.modules.get(package), part.__name__, None) is part)
    return f"{next(owners, packages[-1])}:{part.__qualname__}"


def _owner(path: str) -> str:
    """Return the distribution with the module of `path`, and its version; an empty string if it is not known."""
    package = path.partition(":")[0].partition(".")[0]
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        entries = (
            entry for group in (PLUGINS, PARTS) for same_name in installed(group).values() for entry in same_name
        )
        return next((distribution(entry) for entry in entries if entry.module.partition(".")[0] == package), "")
