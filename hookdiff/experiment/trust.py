"""The dangers in the config of a run, which needs the user's trust, since a stranger may have written it.

Without trust, it imports only installed code (see `hookdiff.options.imports`), opens no URL and no other connection,
hands no options to a library, and writes only in the run directory. Values from the command line are the user's own.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from hookdiff.disk.paths import leads_out
from hookdiff.options.connects import Connects
from hookdiff.options.fields import Handed, Writes
from hookdiff.options.structure import Text, fields_of, marks_of, options_of
from hookdiff.run_dir.config_toml import CONFIG
from hookdiff.run_dir.layout import is_run_dir

CONNECTS = "it would connect to a server: set it yourself with --set"
_ANYWHERE = Path(os.sep, "runs", "NAME")  # stands for a run directory that is not known yet
_URL = re.compile(r"hub:|[\w.+-]+::|.*://", re.DOTALL)  # also names of the hub, and chains of fsspec
_FILE = re.compile(r"file://(?!.*::)", re.DOTALL)  # a URL of this machine


def is_of_run(path: Path) -> bool:
    """Return whether the file `path` is the config of a run: by its name, or by what lies beside it."""
    places = (path, Path(os.path.realpath(path)))
    return any(place.name.casefold() == CONFIG or is_run_dir(place.parent) for place in places)


def dangers(
    target: Callable[..., Any], arguments: Mapping[str, Any], table: object, where: str, run_dir: Path | None
) -> Iterator[tuple[str, str]]:
    """Yield the place of each value that needs the user's trust, and the reason.

    Args:
        target: the class or function that takes the arguments.
        arguments: the checked arguments.
        table: the table that they were read from, in which values of the command line are `Text`.
        where: the place of the table, such as "data".
        run_dir: the run directory. None: the config is the user's own, and the values are those that need trust later,
            when its run is opened.
    """
    writes, handed = marks_of(target, Writes), marks_of(target, Handed)
    values = table if isinstance(table, Mapping) else {}
    for key, mark in marks_of(target, Connects).items():
        is_theirs = key in values if run_dir is None else not isinstance(values.get(key), Text)
        if is_theirs and mark.connects(arguments.get(key)):
            yield f"{where}.{key}", CONNECTS
    for key, value in arguments.items():
        if key not in values:
            continue
        written, place = values[key], f"{where}.{key}"
        strangers = [leaf for leaf in _leaves(written) if run_dir is None or not isinstance(leaf, Text)]
        urls = [leaf for leaf in strangers if isinstance(leaf, str) and _URL.match(leaf)]
        if key in handed and strangers:
            yield place, "these options decide what a library opens"
        elif remote := next((url for url in urls if not _FILE.match(url)), None):
            yield place, f"{remote!r}: {CONNECTS}"
        elif key in writes and strangers and (not (when := writes[key].when) or arguments.get(when)):
            if not _is_inside(str(value), run_dir or _ANYWHERE, writes[key].in_run_dir):
                yield place, f"{str(value)!r} is outside of the run directory, and files would be written there"
        else:
            pairs = zip(value, written, strict=False) if isinstance(written, list) else [(value, written)]
            for part, its_table in pairs:
                inner = options_of(part) if fields_of(type(part)) else {}
                yield from dangers(type(part), inner, its_table, place, run_dir)


def is_users_choice(table: object, target: Callable[..., Any] | None = None) -> bool:
    """Return whether the command line chooses a part, its weights, a download, or a server.

    Args:
        table: the table of the part, in which values of the command line are `Text`.
        target: the class or function that takes its values; some of its options may be marked as `Connects`.
    """
    if not isinstance(table, Mapping):
        return False
    typed = {key: value for key, value in table.items() if isinstance(value, Text)}
    keys = {"use", "source", "features", "download", *(marks_of(target, Connects) if target else ())}
    is_chosen = any(key in keys or key.startswith("weights") or _URL.match(value) for key, value in typed.items())
    return is_chosen or is_users_choice(table.get("features"))


def _leaves(value: object) -> Iterator[object]:
    """Yield the values in tables and lists."""
    inside = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else None
    if inside is None:
        yield value
    else:
        for item in inside:
            yield from _leaves(item)


def _is_inside(text: str, run_dir: Path, starts_there: bool) -> bool:
    """Return whether the path `text`, with all files below it, is `run_dir` or in it once links are followed."""
    path = (run_dir if starts_there else Path()) / os.path.expanduser(text)
    if leads_out(path, run_dir):
        return False
    inner = (Path(folder, name) for folder, *names in os.walk(path) for name in chain(*names))
    return not any(leads_out(each, run_dir) for each in inner)
