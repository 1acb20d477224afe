"""The folders in which `module:Name` is looked for, beside the installed packages.

A name in a config is looked for in `run.import_from`, by default the folder of the config. A name of the command line
is first looked for where the shell stands. A run directory, and any folder below one, may hold a stranger's modules.
"""

import os
import re
import sys
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hookdiff.options.structure import Text
from hookdiff.run_dir.config_toml import CONFIG
from hookdiff.run_dir.layout import is_run_dir

Where = Callable[[str], str]
_MODULE = re.compile(r"(?<![\w.])(\w+)(?:\.\w+)*:\w")  # `module:Name`, and the outermost package of the module


def search(table: dict[str, Any], path: Path, given: Iterable[str], *, asked: bool, trust: bool) -> Where:
    """Let Python import from the folders of the config at `path`, and record them in `table`, for config.toml.

    Returns a function that says, as the end of a message, where a module was looked for.

    Args:
        table: the config, in which values of the command line are `Text`.
        path: the file of the config. If it is of a run, the user trusts the run.
        given: names and settings of the command line. Python imports from the working directory only if they name a
            module that is there and nowhere else.
        asked: whether the command line has `--trust`; else it can name no folder of a run.
        trust: whether the user trusts the config; else it can name no folder of a run.
    """
    run, beside = table.get("run"), path.parent
    written = run.get("import_from") if isinstance(run, dict) else None
    texts = written if isinstance(written, list) else [] if written is None else [written]
    if not isinstance(run, dict) or not all(isinstance(text, str) and "\0" not in text for text in texts):
        return lambda module: ""  # refused with the other problems of the config
    modules = frozenset(name for text in given if not text.startswith("no:") for name in _MODULE.findall(text))
    here = Path.cwd() if modules or isinstance(written, Text) else None
    typed = [here] if here and any(_is_in(here, module) for module in modules) else []
    if here and isinstance(written, Text):
        typed.append(folder if (folder := here / written).is_dir() else beside / written)
        texts = []
    own = [beside / text for text in texts] or [beside] * (not is_run_dir(beside))
    run_dir = os.path.realpath(beside) if is_run_dir(beside) else None
    folders = {os.path.realpath(each): asked or not _is_of_run(each) for each in typed}
    for place, each in ((os.path.realpath(each), each) for each in own):
        folders[place] = folders.get(place, False) or (place != run_dir and (trust or not _is_of_run(each)))
    searched = [folder for folder, is_allowed in folders.items() if is_allowed]
    sys.path += [folder for folder in searched if folder not in sys.path]
    run.pop("import_from", None)
    if searched:
        run["import_from"] = searched[0] if len(searched) == 1 else searched
    refused = ", ".join(folder for folder in folders if folder not in searched)

    def where(module: str) -> str:
        first = [str(here)] if module in modules and folders.get(str(here), True) else []
        looked = ", then in ".join(dict.fromkeys([*first, *searched]))
        no_trust = f"; not in {refused}, of a run: if you trust it, add --trust" * bool(refused)
        return f"; looked in {looked}" * bool(looked) + no_trust

    return where


def _is_in(folder: Path, module: str) -> bool:
    """Return whether `module` is in the folder, and nowhere else where Python looks."""
    if not (folder / f"{module}.py").is_file() and not (folder / module).is_dir():
        return False
    try:
        spec = find_spec(module)
    except ValueError:  # such as for `__main__`
        return False
    return spec is None or bool(spec.origin and Path(spec.origin).is_relative_to(folder))


def _is_of_run(folder: Path) -> bool:
    """Return whether the folder is a run directory or below one, by its name or after links."""
    places = {Path(os.path.abspath(folder)), Path(os.path.realpath(folder))}
    above = (each for place in places for each in place.parents)
    return any(map(is_run_dir, places)) or any(is_run_dir(each) and (each / CONFIG).is_file() for each in above)
