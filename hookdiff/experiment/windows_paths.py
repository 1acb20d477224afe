"""Finds paths of Windows that TOML reads with escapes, and shows how to write them."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

_STRING = re.compile(r'"+([^"]*\\[^"]*)"*')
_DRIVE = re.compile(r'"+[A-Za-z]:\\(?!\\)')
_ESCAPES = {"\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r", "\x1b": "\\e"}


def spelling_remedy(text: str, error: ValueError) -> str:
    """Return how to write the path at which TOML cannot parse `text`, or "" for another `error`."""
    place = re.search(r"at line (\d+), column (\d+)", str(error))
    if not place:
        return ""
    line, column = text.split("\n")[int(place[1]) - 1], int(place[2])
    is_escape = "hex value" in str(error) or "Unescaped" in str(error) or "Unicode scalar" in str(error)
    strings = [match[1] for match in _STRING.finditer(line) if match.start() < column]
    return _spelled(strings[-1]) if strings and (is_escape or _DRIVE.search(line)) else ""


def misread(table: Mapping[str, Any]) -> list[str]:
    """Return how to write the paths in `table` in which TOML has read the first backslash as an escape."""
    values = (value for value in _texts(table) if re.match(r"[A-Za-z]:[\b\t\n\f\r\x1b]", value))
    return [_spelled("".join(_ESCAPES.get(letter, letter) for letter in value)) for value in values]


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    for inner in value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ():
        yield from _texts(inner)


def _spelled(path: str) -> str:
    server = "\\\\" if path.startswith("\\\\") else ""
    single = server + re.sub(r"\\+", r"\\", path.removeprefix(server))
    doubled = single.replace("\\", "\\\\")
    return f"""a path of Windows is '{single}' or "{doubled}\""""
