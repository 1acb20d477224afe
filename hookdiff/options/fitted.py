"""Parts whose keys depend on the table that names them, such as a network in a folder that the table names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from attrs import define, field

F = TypeVar("F", bound=Callable[..., Any])

_FIT = "hookdiff_fit"  # attribute of a target


@define(frozen=True)
class Elsewhere:
    """Values for other tables of the config, nested as the tables are. The config keeps the values that it sets."""

    facts: Mapping[str, Any] = field(factory=dict)  # a config with another value gets a warning
    defaults: Mapping[str, Any] = field(factory=dict)
    moved: Mapping[str, Any] = field(factory=dict)  # take the place of paths that the config sets
    warnings: tuple[str, ...] = ()  # each begins with a key


@define(frozen=True)
class Fitted:
    """A part with the keys that fit its table."""

    target: Callable[..., Any]  # takes all keys
    values: Mapping[str, Any] = field(factory=dict)  # of keys that the table leaves open
    # From all tables of the config, values of keys that they leave open; may raise UserError.
    elsewhere: Callable[[Mapping[str, Any]], Elsewhere] = field(default=lambda _: Elsewhere())


def fitted_by(fit: Callable[[Mapping[str, Any]], Fitted]) -> Callable[[F], F]:
    """Declare that `fit` gives a part its keys, from the table of the config that names the part.

    `fit` refuses a table that it cannot use, by a UserError. It must not import or run code that the table names.
    """

    def declare(target: F) -> F:
        setattr(target, _FIT, fit)
        return target

    return declare


def is_fitted(target: Callable[..., Any]) -> bool:
    """Return whether the keys of `target` depend on its table, so that it may have any."""
    return hasattr(target, _FIT)


def fit_to(target: Callable[..., Any], table: Mapping[str, Any]) -> Fitted:
    """Return `target` with the keys that fit `table`; a target without `fitted_by` is returned as it is."""
    fit: Callable[[Mapping[str, Any]], Fitted] = getattr(target, _FIT, lambda _: Fitted(target))
    return fit(table)
