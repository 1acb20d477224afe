"""Errors that a user can fix: one clear message, exit code 2, no traceback."""

import difflib
from collections.abc import Iterable, Sequence


class UserError(Exception):
    """A mistake in the input; the message names the place and the way out."""

    exit_code = 2


class ConfigError(UserError):
    """A config that cannot be run; the message lists every problem found in it."""


class PluginError(UserError):
    """A plugin that cannot be found, imported, or registered."""


class NoCheckpoint(UserError):
    """A run cannot be resumed because there is no checkpoint."""


class StorageError(UserError):
    """The disk or a server failed, though the input was right."""

    exit_code = 1


class OnAnotherRank(UserError):
    """An error of another process of the same run, which shows it, and its exit code."""

    def __init__(self, message: str, exit_code: int = 2) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class HookError(RuntimeError):
    """A plugin broke the contract of a hook."""


class UnknownWeights(UserError):
    """No weights of the run have the requested `name`; `known` are the names that exist."""

    def __init__(self, name: str, known: Sequence[str]) -> None:
        super().__init__(name)
        self.name, self.known = name, known

    def __str__(self) -> str:
        return f"no weights of this run are named {self.name!r}{nearest(self.name, self.known)}; known: " + ", ".join(
            sorted(self.known, key=lambda known: -difflib.SequenceMatcher(None, self.name, known).ratio())
        )


def shown(path: object) -> str:
    """Return the text of a path for people, with control characters, line ends and bytes that are not UTF-8 escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(path))


def nearest(name: str, known: Iterable[str]) -> str:
    """Return "; did you mean 'x'?" for the closest of `known`, or an empty string."""
    word = name.casefold()

    def closeness(other: str) -> tuple[float, bool, int, str]:
        text = other.casefold()  # at equal shares "bf16" is nearer to "bfloat16" than "float32" is
        shared = difflib.SequenceMatcher(None, text, word).ratio()
        return shared, text[:1] == word[:1], -abs(len(text) - len(word)), other

    best = max(known, key=closeness, default="")
    return f"; did you mean {best!r}?" if best and closeness(best)[0] >= 0.5 else ""


def listed(names: Sequence[object], most: int) -> str:
    """Return the first `most` of `names` with commas, and the number of the others."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(str, names[:most])) + more
