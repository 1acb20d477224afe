"""Explains why the `path` of an encoder is no folder of its model, and suggests a folder nearby."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hookdiff.disk.paths import why_missing
from hookdiff.disk.reading import read_file

_INDEX = "model_index.json"  # of a pipeline of diffusers
# The address of the hub, the owner, the model and a path inside it. The address may have lost a slash in a path.
_ADDRESS = r"(https?:/+(?:www\.)?(?:huggingface\.co|hf\.co)/|hf:/+)?"
_HUB = re.compile(rf"{_ADDRESS}([a-z0-9][\w.-]*)(?:/([\w.-]+))?(/.*)?", re.IGNORECASE)
_OF_FILES = (".safetensors", ".json", ".bin", ".pt", ".pth", ".ckpt")
_MOST = 1_000  # entries of a folder that are looked at


def why_no_folder(value: str, name: str, what: str, fits: Callable[[Mapping[str, Any]], bool]) -> str:
    """Return why `value` is no folder with the JSON file `name`, and a remedy; "" if it is such a folder.

    Args:
        value: the option `path` of an encoder. For a name of the Hugging Face hub, the remedy is a download.
        name: the file that such a folder has, such as "config.json".
        what: what such a folder holds, in words.
        fits: whether the table in such a file names a known class. The remedy names folders nearby with such a table.
    """
    path = Path(value).expanduser()
    if path.is_dir():
        if (path / name).is_file():
            return ""
        whole = " but a whole pipeline" if name != _INDEX and (path / _INDEX).is_file() else ""
        return f"{value} has no {name}, so it is no {what}{whole}{_nearest(path, name, fits)}"
    if path.exists():
        way_out = _nearest(path.parent, name, fits) or f", with {name} in it"
        article = "an" if what[0] in "aeiou" else "a"
        return f"{value} is a file, expected the folder of {article} {what}{way_out}"
    why = why_missing(path)
    return f"{value}: {why}{_download(value, 'did you mean' in why)}"


def _nearest(folder: Path, name: str, fits: Callable[[Mapping[str, Any]], bool]) -> str:
    """Return "; did you mean path = ...?" for folders in or around `folder` that have a fitting file `name`."""
    near = [folder, *folder.glob("snapshots/*"), *sorted(folder.glob("*"))[:_MOST], folder.parent]
    fitting = [path for path in near if _fits(path / name, fits)]
    return f"; did you mean {' or '.join(f'path = {str(path)!r}' for path in fitting)}?" if fitting else ""


def _fits(file: Path, fits: Callable[[Mapping[str, Any]], bool]) -> bool:
    try:
        table = json.loads(read_file(file))
        return isinstance(table, dict) and fits(table)
    except (OSError, ValueError, RecursionError):
        return False


def _download(value: str, is_near: bool) -> str:
    """Return how to download `value` if it may be a name of the hub; `is_near`: a folder here has a similar name."""
    match = _HUB.fullmatch(value)
    if not match or Path(value).suffix in _OF_FILES:
        return ""
    address, owner, model, inner = match.groups()
    if not address and (Path(owner).exists() or (is_near and not model)):
        return ""
    name, place = f"{owner}/{model}" if model else owner, model or owner
    inner = "" if address else inner or ""
    fetched = f"set path = {f'hub:{name}{inner}'!r}, or " if model else ""
    return (
        f"; nothing is downloaded by a plain name: if it is one of the Hugging Face hub, {fetched}run "
        f"`hf download {name} --local-dir {place}` and set path = {place + inner!r}"
    )
