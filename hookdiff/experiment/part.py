"""A thing to build: what a table of the config names, with its checked arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from attrs import define, evolve, field

from hookdiff.errors import ConfigError
from hookdiff.experiment.structure import parameters, resolved


@define(frozen=True, eq=False)
class Part:
    """A thing to build, and the checked arguments that a table gives it."""

    where: str  # the table
    use: str
    target: Callable[..., Any]
    arguments: Mapping[str, Any] = field(factory=dict)

    def accepts(self, name: str) -> bool:
        """Whether the target has an argument `name` that the table leaves open."""
        return name in parameters(self.target) and name not in self.arguments

    def given(self, **extra: Any) -> Part:
        """Return the same part with those of the `extra` arguments that it accepts."""
        taken = {name: value for name, value in extra.items() if self.accepts(name)}
        return evolve(self, arguments={**self.arguments, **taken})

    def build(self, *first: Any) -> Any:
        """Make the thing; what it raises because of its arguments becomes a ConfigError that names the table."""
        try:
            return self.target(*first, **self.arguments)
        except (ArithmeticError, OSError, RuntimeError, TypeError, ValueError) as error:
            raise ConfigError(f"{self.where}: {error}") from error

    def resolved(self) -> dict[str, Any]:
        """Return the arguments, defaults included, as TOML values."""
        return resolved(self.target, self.arguments)
