"""A part to build: the class or function that a table of the config names, with its checked arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, TypeVar

from attrs import define, evolve, field

from hookdiff.disk.reading import only_files
from hookdiff.errors import ConfigError, UserError
from hookdiff.machine.network import no_connections
from hookdiff.options.imports import TRUST
from hookdiff.options.structure import described, parameters, resolved

Shared = TypeVar("Shared")


@define(frozen=True, eq=False)
class Part:
    """A class or function to call, and the checked arguments that a table of the config gives it."""

    where: str  # the table
    use: str
    target: Callable[..., Any]
    arguments: Mapping[str, Any] = field(factory=dict)
    key: str = ""  # the key of the table that holds `use`
    shared: Mapping[type, Mapping[str, Any]] = field(factory=dict)  # arguments of other classes in the same table
    is_strangers: bool = False  # whether a config that is not trusted chose the part, which then may not connect

    def accepts(self, name: str) -> bool:
        """Return whether the target has an argument `name` that the table does not set."""
        return name in parameters(self.target) and name not in self.arguments

    def given(self, **extra: Any) -> Part:
        """Return the same part with the `extra` arguments that it accepts."""
        taken = {name: value for name, value in extra.items() if self.accepts(name)}
        return evolve(self, arguments={**self.arguments, **taken})

    def build(self, *first: Any) -> Any:
        """Call the target; an error because of its arguments becomes a ConfigError that names the table or the key."""
        try:
            with only_files(), no_connections(TRUST) if self.is_strangers else nullcontext():
                return self.target(*first, **self.arguments)
        except UserError as error:
            if not self.is_strangers or str(error).startswith(f"{self.where}"):
                raise
            raise ConfigError(f"{self.where}: {error}") from error
        except (ArithmeticError, MemoryError, OSError, RuntimeError, TypeError, ValueError) as error:
            text = str(error) or type(error).__name__
            # An error that begins with a path or a name is one of the key that has this value.
            named = [key for key, value in self.arguments.items() if text.startswith((f"{value}: ", f"{value} "))]
            raise ConfigError(f"{'.'.join([self.where, *named[:1]])}: {text}") from error

    def of(self, kind: type[Shared]) -> Shared:
        """Make an object of the class `kind`, which has keys in the same table."""
        return kind(**self.shared.get(kind, {}))

    def bare(self) -> Part:
        """Return the same part without arguments."""
        return evolve(self, arguments={}, shared={kind: {} for kind in self.shared})

    def resolved(self) -> dict[str, Any]:
        """Return the table with its defaults, as TOML values."""
        table = {self.key: self.use} if self.key else {}
        table |= resolved(self.target, self.arguments)
        of_target = parameters(self.target)
        for kind, values in self.shared.items():
            keys = [key for key in described(kind) if key not in of_target]
            table |= {key: value for key, value in resolved(kind, values).items() if key in keys}
        return table
