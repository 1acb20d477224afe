"""Parts chosen by name among several classes, each with only its own options.

A config writes `weighting = { use = "min_snr", gamma = 3.0 }`, or `weighting = "min_snr"` if it sets no option; a
script gives the object, `MinSNR(gamma=3.0)`, or the name. `use = "module:Name"` names a class of the user's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from importlib.metadata import EntryPoint
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self, TypeVar

from hookdiff.errors import PluginError, nearest
from hookdiff.options.imports import PARTS, distribution, import_object, installed, own_package

Chosen = TypeVar("Chosen", bound="Choice")


class Choice:
    """The base of every kind of part: noise schedules, loss weightings, samplers, ...

    A kind is a subclass with a name, `kind`, and the classes to choose from, `known`. Each such class inherits from the
    kind and is an attrs class (`@define(frozen=True)`); its fields are the options.
    """

    kind: ClassVar[str]  # such as "weighting"; used in messages and in the names of entry points
    known: ClassVar[Mapping[str, type]] = {}  # by name
    default: ClassVar[str | None] = None  # the name in a table without `use`

    @classmethod
    def of(cls, value: Self | str | Mapping[str, Any]) -> Self:
        """Return `value` if it is a part, or the part made from a name, or from a dict of `use` and options.

        Raises:
            PluginError: for an unknown name.
        """
        if isinstance(value, cls):
            return value
        options = dict(value) if isinstance(value, Mapping) else {"use": value}
        return find(cls, options.pop("use", cls.default))(**options)

    @property
    def use(self) -> str:
        """The name of this choice in a config."""
        return name_of(type(self))

    @classmethod
    def adapted(cls, target: object, use: str) -> type[Self] | None:
        """Return a class of this kind made from `target`, the object at the path `use`; None if it cannot be made."""
        return None


class chosen(Generic[Chosen]):
    """The converter of a field that takes a part or its name: `field(converter=chosen[Weighting])`."""

    if TYPE_CHECKING:  # mypy takes only functions and classes as converters, and no method such as `Weighting.of`

        def __init__(self, value: Chosen | str) -> None: ...

    else:

        def __class_getitem__(cls, kind: type[Choice]) -> Callable[[Any], Choice]:
            return kind.of


def find(kind: type[Chosen], use: object) -> type[Chosen]:
    """Return the class of `kind` called `use`: a built-in name, the name of an entry point, or `module:Name`.

    Raises PluginError if no class or several have this name, or if the class is of another kind.
    """
    check_claims(kind.kind, kind.known, use)
    target = kind.known.get(str(use)) or import_object(path_of(kind.kind, kind.known, use), f"the {kind.kind} {use!r}")
    if isinstance(target, type) and issubclass(target, kind):
        return target
    if adapted := kind.adapted(target, str(use)):
        return adapted
    raise PluginError(f"{use} is no {kind.kind}: let it inherit from {kind.__module__}.{kind.__qualname__}")


def parts(kind: type[Chosen]) -> dict[str, type[Chosen]]:
    """Return the classes of `kind` by name: built-in classes, and classes of entry points that can be imported."""
    members = dict(kind.known)
    for name in published(kind.kind):
        with suppress(PluginError):  # one broken package does not hide the others
            members[name] = find(kind, name)
    return members


def path_of(kind: str, known: Iterable[str], use: object, key: str = "use") -> str:
    """Return the path `module:Name` of `use`, the value of `key`: the name of an entry point "kind.name", or a path.

    Raises PluginError, with the `known` names, if `use` is neither, or if several entry points claim the name.
    """
    name, offered = str(use), published(kind)
    if name not in offered and ":" not in name:
        names = [*known, *offered]
        near = own_package(PARTS, f"{kind}.{name}") or nearest(name, names)
        unknown = f"needs a `{key}`" if use is None else f"unknown {use!r}{near}"
        other = f"; {name} is a plugin: --plugins {name}" if name in installed() else ""
        raise PluginError(f"{unknown}{other}; known: {', '.join(names)}, or module:Name")
    check_claims(kind, (), name)
    return offered[name][0].value if name in offered else name


def check_claims(kind: str, known: Iterable[str], use: object) -> None:
    """Raise PluginError if several entry points claim the name `use`, or if one claims a built-in name of `known`.

    The message names all their distributions.
    """
    claims = [f"{entry.value} of {distribution(entry)}" for entry in published(kind).get(str(use), ())]
    if claims and str(use) in known:
        raise PluginError(
            f"the {kind} {use!r} is built in, and claimed by {' and '.join(claims)}; uninstall it, or use module:Name"
        )
    if len(claims) > 1:
        raise PluginError(f"the {kind} {use!r} is claimed by {' and '.join(claims)}; uninstall one, or use module:Name")


def published(kind: str) -> dict[str, list[EntryPoint]]:
    """Return the entry points that offer parts of `kind`, by name; a name may have several.

    The entry point "weighting.mine" offers the weighting `mine`.
    """
    start = f"{kind}."
    return {name.removeprefix(start): entries for name, entries in installed(PARTS).items() if name.startswith(start)}


def name_of(choice: type[Choice]) -> str:
    """Return the name by which a config chooses the class."""
    for name, known in choice.known.items():
        if known is choice:
            return name
    path = f"{choice.__module__}:{choice.__qualname__}"
    offered = published(choice.kind).items()
    free = (name for name, entries in offered if [entry.value for entry in entries] == [path])
    return next((name for name in free if name not in choice.known), path)
