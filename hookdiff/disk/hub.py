"""Names of the Hugging Face hub in place of paths of weights: `hub:ORG/NAME@REVISION/INSIDE`.

A revision that is no commit is replaced by its commit when a config is read, before any part sees the name: the keys of
a network may come from its folder, and what a run writes must name the same weights later. A name with a commit asks
the network nothing if its files are in the cache.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from attrs import frozen

from hookdiff.errors import UserError

logger = logging.getLogger("hookdiff")

_START = "hub:"
_NAME = re.compile(r"hub:([\w.-]+/[\w.-]+)(?:@(refs/(?:pr|convert)/\w+|\w[\w.-]*))?((?:/\w[\w.-]*)*)", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")
# The keys whose names are replaced. All others, such as data.path, take no name of the hub.
_KEYS = re.compile(r"(model|data\.encode\.[^.]+|plugins\.[^.]+)\.(path|start_from)")
_SMALL = ("*.json", "*.txt", "*.model")  # configs, indices and the files of tokenizers
_WEIGHTS, _INDEX = ".safetensors", "model_index.json"
_PARTS = ("unet", "transformer", "vae", "vqvae", "text_encoder*")  # the folders of a pipeline with weights that we read
_TOKENIZERS = "tokenizer*"  # folders that a text encoder looks for beside its own
_VARIANTS = ("*.fp16.*", "*.fp16-*", "*.bf16.*", "*.bf16-*", "*.non_ema.*", "*.non_ema-*")


@frozen
class _Name:
    text: str
    repo: str
    revision: str | None
    inside: str  # a folder or a file, "" for the whole

    @classmethod
    def of(cls, text: str, asked_by: str) -> _Name:
        if not (match := _NAME.fullmatch(text)):
            raise UserError(f"{asked_by}: {text!r}: write hub:ORG/NAME, hub:ORG/NAME@REVISION or these with /FOLDER")
        return cls(text, match[1], match[2], match[3].lstrip("/"))

    @property
    def is_commit(self) -> bool:
        return bool(_COMMIT.fullmatch(self.revision or ""))

    def at(self, commit: str) -> str:
        return f"{_START}{self.repo}@{commit}" + f"/{self.inside}" * bool(self.inside)

    def small(self) -> list[str]:
        """Return patterns of the files that say which weights there are."""
        if self.inside.endswith((_WEIGHTS, ".json")):
            return [self.inside]
        folders = (f"{self.inside}/", f"{_TOKENIZERS}/") if self.inside else ("",)
        return [folder + pattern for folder in folders for pattern in _SMALL]

    def weights(self, snapshot: Path) -> tuple[list[str], list[str]]:
        """Return patterns of the weights to fetch, and of those to leave out, by the small files in `snapshot`."""
        if self.inside.endswith(_WEIGHTS):
            return [self.inside], []
        folder = self.inside.rpartition("/")[0] if self.inside.endswith(".json") else self.inside
        start = f"{folder}/" if folder else ""
        if (snapshot / folder / _INDEX).is_file():
            return [f"{start}{part}/*{_WEIGHTS}" for part in _PARTS], []
        return [f"{start}*{_WEIGHTS}"], [f"{start}*/*"]


def local_path(path: str, asked_by: str) -> Path:
    """Return the path on this machine of weights or of their folder.

    Args:
        path: a path, which may begin with "~", or a name of the hub. Its files are fetched unless they are in the cache
            of huggingface_hub. These are safetensors, JSON and the files of tokenizers: no pickle, and no code.
        asked_by: the key or the option that names `path`.

    Raises:
        UserError: for a name of the hub that is wrong, or cannot be fetched.
    """
    if not is_hub_name(path):
        return Path(path).expanduser()
    name = _Name.of(path, asked_by)
    return _snapshot(name, asked_by) / name.inside


def is_hub_name(path: object) -> bool:
    """Return whether `path` is meant as a name of the hub."""
    return isinstance(path, str) and path.startswith(_START)


def pin_names(tables: Mapping[str, Any], refusal: Callable[[str], str]) -> Iterator[tuple[str, str]]:
    """Replace each name of the hub in the tables of a config by the name with its commit, whose files are fetched.

    Args:
        tables: the tables, which change.
        refusal: returns why a name may not be fetched; "" if it may.

    Yields:
        The key of each name that is refused or cannot be fetched, and the reason.
    """
    for table, key, place in _names(tables, ""):
        text = table[key]
        if reason := refusal(text):
            yield place, f"{text!r}: {reason}"
            continue
        try:
            name = _Name.of(text, place)
            if not name.is_commit:  # else it may be of weights that are not needed again, as `start_from` of a run
                table[key] = type(text)(name.at(_snapshot(name, place).name))
        except UserError as error:
            yield place, str(error).removeprefix(f"{place}: ")


def _names(table: Any, where: str) -> Iterator[tuple[Any, str, str]]:
    for key, value in table.items() if isinstance(table, dict) else ():
        place = f"{where}{key}"
        if is_hub_name(value) and _KEYS.fullmatch(place):
            yield table, key, place
        yield from _names(value, f"{place}.")


def _snapshot(name: _Name, asked_by: str) -> Path:
    """Return the folder of the cache for the commit; its name is the commit."""
    try:
        from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError
    except ImportError:
        raise UserError(f"{asked_by}: {name.text} needs a package: pip install 'hookdiff[diffusers]'") from None
    if name.is_commit:
        try:
            snapshot, is_whole = _fetch(name, local_files_only=True)
        except LocalEntryNotFoundError:
            is_whole = False
        if is_whole:
            return snapshot
    logger.info("%s: %s: fetching safetensors, JSON and the files of tokenizers from the hub", asked_by, name.text)
    try:
        return _fetch(name)[0]
    except UserError:  # connections are refused
        raise
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        raise UserError(
            f"{asked_by}: {name.text}: the hub has no such repository or revision, or shows it after `hf auth login`"
        ) from error
    except Exception as error:  # of huggingface_hub, of its client for HTTP, or of the disk
        lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        revision = f" --revision {name.revision}" if name.revision else ""
        raise UserError(
            f"{asked_by}: {name.text} is not on this machine, and cannot be fetched: {lines[0]}; where the hub can be "
            f"reached: hf download {name.repo}{revision}"
        ) from error


def _fetch(name: _Name, **options: Any) -> tuple[Path, bool]:
    """Return the folder of the snapshot, and whether it has weights.

    Small files come first, since they say which weights are read. Variants come only if there are no other weights.
    """
    from huggingface_hub import snapshot_download

    get = partial(snapshot_download, name.repo, **options)
    for variants in (_VARIANTS, ()):
        snapshot = Path(get(revision=name.revision, allow_patterns=name.small(), ignore_patterns=[*variants]))
        wanted, others = name.weights(snapshot)
        get(revision=snapshot.name, allow_patterns=wanted, ignore_patterns=[*others, *variants])
        if is_whole := any(next(snapshot.glob(pattern), None) for pattern in wanted):
            break
    return snapshot, is_whole
