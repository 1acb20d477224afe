"""Finds the shards that a config names by a path, a glob, a range in braces, a folder, or a list of these."""

import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from glob import glob, has_magic
from pathlib import Path
from typing import Any

from hookdiff import why_missing
from hookdiff.disk import reason
from hookdiff.images import some
from hookdiff_shards.remote import asked, is_url

_MOST = 1_000_000  # most shards of a config
_PACKED = re.compile(r"\.(tar\.\w+|t[gbx]z2?)$", re.IGNORECASE)


def expand(names: str | Sequence[str], options: Mapping[str, Any]) -> list[str]:
    """Return the paths and URLs of all shards that `names` stands for, in order; globs and folders are sorted.

    Raises ValueError for a range of too many shards, and for a glob or a folder without shards.
    """
    paths = [names] if isinstance(names, str) else names
    if not paths or not all(paths):
        raise ValueError("path: is empty; name shards or a folder of shards")
    return [shard for path in paths for shard in (_urls(path, options) if is_url(path) else _files(path))]


def _files(name: str) -> list[str]:
    path = os.path.expanduser(name)
    if os.path.lexists(path):  # the name of a file may contain braces and stars
        return _inside(path)
    paths = []
    for pattern in braces(path):
        if is_url(pattern):  # without this error, a check of the config would miss the URL
            raise ValueError(f"{name}: its braces make the URL {pattern}; write :// outside of them")
        matches = sorted(glob(pattern, recursive=True)) if has_magic(pattern) else [pattern]
        if not matches:
            folder = os.path.dirname(re.split(r"[*?[]", pattern)[0]) or "."
            names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
            why = f"{folder} has {some(names)}" if names else f"{folder} is no folder, or empty"
            raise ValueError(f"{pattern}: no file has such a name; {why}")
        paths += [shard for match in matches for shard in _inside(match)]
    return paths


def _inside(path: str) -> list[str]:
    """Return the shards in the folder `path`, or `path` itself if it is a file."""
    if not os.path.isdir(path):
        return [path]
    names = sorted(os.listdir(path))
    packed = [name for name in names if _PACKED.search(name)]
    shards = [os.path.join(path, name) for name in names if _is_shard(name)]
    if shards and packed:
        raise ValueError(
            f"{path} has compressed shards too ({some(packed)}): unpack them, or leave them out by "
            f"{os.path.join(path, '*.tar')}"
        )
    if shards:
        return shards
    others = Counter("".join(Path(name).suffixes[-2:]) or name for name in names)
    kinds = some([f"{count} {suffix}" for suffix, count in others.most_common()]) or "nothing, it is empty"
    way_out = "; compressed ones must be unpacked" if packed else ""
    raise ValueError(f"{path} has no .tar; found: {kinds}{way_out}")


def _urls(pattern: str, options: Mapping[str, Any]) -> list[str]:
    urls: list[str] = []
    for url in braces(pattern):
        has_stars = any(sign in url for sign in "*[")  # a question mark begins a query
        if not has_stars and _is_shard(url.partition("?")[0]):
            urls.append(url)
            continue
        try:
            if not has_stars and not asked(url, options, lambda system, path: system.isdir(path)):
                urls.append(url)
                continue
            matches = asked(url, options, _matches if has_stars else _in_folder)
        except OSError as error:
            why = "no such folder" if isinstance(error, FileNotFoundError) else f"cannot be listed: {reason(error)}"
            raise ValueError(f"{url}: {why}") from error
        if not matches:
            raise ValueError(f"{url}: {'no file has such a name' if has_stars else 'the folder has no .tar'}")
        urls += matches
    return urls


def _matches(system: Any, path: str) -> list[str]:
    return [system.unstrip_protocol(name) for name in sorted(system.glob(path))]


def _in_folder(system: Any, path: str) -> list[str]:
    return [name for name in _matches(system, f"{path.rstrip('/')}/*.tar") if _is_shard(name)]


def _is_shard(name: str) -> bool:
    return name.lower().endswith(".tar") and not os.path.basename(name).startswith(".")


def braces(text: str) -> list[str]:
    """Return the texts that {000..123} and {a,b} in `text` stand for, as in a shell. Raises ValueError for too many."""
    parts = re.split(r"\{(\d+\.\.\d+|[^{}]*,[^{}]*)\}", text)
    texts = [parts[0]]
    for choices, rest in zip(parts[1::2], parts[2::2], strict=True):
        options, count = _choices(choices)
        if count * len(texts) > _MOST:
            raise ValueError(f"{text}: expected at most {_MOST:,} shards, its braces name more")
        texts = [f"{before}{option}{rest}" for before in texts for option in options]
    return texts


def _choices(text: str) -> tuple[Iterable[str], int]:
    """Return the texts in a pair of braces, and their number."""
    if "," in text:
        options = text.split(",")
        return options, len(options)
    first, last = text.split("..")
    width = max(len(first), len(last)) if "0" in (first[0], last[0]) else 0
    if len(first) > 18 or len(last) > 18:
        raise ValueError(f"{{{text}}}: expected numbers of at most 18 digits")
    low, high = int(first), int(last)
    if low > high:
        raise ValueError(f"{{{text}}}: the range ends before it begins; write the lower number first")
    return [f"{number:0{width}}" for number in range(low, min(high, low + _MOST) + 1)], high - low + 1


def missing(paths: Sequence[str]) -> ValueError:
    """Return the error for shards that do not exist."""
    first = paths[0]
    why = "no such file" if is_url(first) else why_missing(Path(first))
    if len(paths) == 1:
        return ValueError(f"{first}: {why}")
    return ValueError(f"{len(paths):,} shards are missing ({some(paths)}): {why}")
