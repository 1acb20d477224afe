"""Folders of transformers: their weights, in safetensors, and tokenizers, opened without the network or their code."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from hookdiff import UserError
from hookdiff.authors import why_no_folder
from hookdiff.disk import read_file
from hookdiff.machine import no_connections

_OF_TOKENIZER = ("tokenizer.json", "vocab.json", "merges.txt", "vocab.txt", "spiece.model", "sentencepiece.bpe.model")
_BESIDE = ("tokenizer_config.json", "special_tokens_map.json")
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def config_in(
    folder: Path | str, name: str, what: str, fits: Callable[[Mapping[str, Any]], bool] = lambda _: True
) -> dict[str, Any]:
    """Read the JSON file `name`, which makes `folder` `what`; another folder is named if its file `fits`.

    Raises:
        UserError: if there is none, or it holds no table.
    """
    if why := why_no_folder(str(folder), name, what, fits):
        raise UserError(f"data.encode: {why}")
    file = Path(folder).expanduser() / name
    try:
        return dict(json.loads(read_file(file)))
    except (ValueError, TypeError, RecursionError):
        raise UserError(f"data.encode: {file} is no table in JSON") from None


def weights_in(folder: Path) -> list[Path]:
    """Return the files of weights.

    Raises:
        UserError: if there are none in safetensors.
    """
    if found := sorted(folder.glob("*.safetensors")):
        return found
    pickled = [path.name for pattern in _PICKLES for path in folder.glob(pattern)]
    found_instead = f"; {pickled[0]} is a pickle, which may run code: save it as safetensors" if pickled else ""
    raise UserError(f"data.encode: {folder} has no weights in safetensors{found_instead}")


def has_tokenizer(folder: Path) -> bool:
    """Return whether there is a tokenizer in `folder`."""
    return any((folder / name).is_file() for name in _OF_TOKENIZER)


def tokenizer_files(folder: Path) -> list[Path]:
    """Return all files of a tokenizer that are there."""
    return [folder / name for name in (*_OF_TOKENIZER, *_BESIDE) if (folder / name).is_file()]


def network_in(folder: Path, kind: str, device: torch.device, precision: str) -> Any:
    """Load the network of the class `kind` of transformers, frozen.

    Raises:
        UserError: if it cannot be loaded.
    """
    network = _loaded(folder, kind, use_safetensors=True)
    network = network.to(device, torch.bfloat16 if precision == "bf16" else torch.float32)
    return network.eval().requires_grad_(False)


def tokenizer_in(folder: Path, kind: str) -> Any:
    """Load the tokenizer of the class `kind` of transformers.

    Raises:
        UserError: if it cannot be loaded, or cannot fill texts.
    """
    tokenizer = _loaded(folder, kind, trust_remote_code=False)
    if tokenizer.pad_token_id is None:
        raise UserError(f"data.encode: the tokenizer in {folder} has no token to fill captions with (pad_token)")
    return tokenizer


def _loaded(folder: Path, kind: str, **options: Any) -> Any:
    try:
        import transformers

        with _without_bars(transformers.utils.logging), no_connections(f"{folder} has all that is read"):
            return getattr(transformers, kind).from_pretrained(str(folder), local_files_only=True, **options)
    except Exception as error:  # of any type, for a file that does not fit
        raise UserError(f"data.encode: {folder} cannot be loaded: {reason_of(error)}") from error


@contextmanager
def _without_bars(bars: Any) -> Iterator[None]:
    """Let transformers draw no bar, which would stand in the lines of a run."""
    was_drawn = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        yield
    finally:
        if was_drawn:
            bars.enable_progress_bar()


def reason_of(error: Exception) -> str:
    """Return the first line of an error, or its type."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def lengths_of(tokenizer: Any, texts: list[str]) -> list[int]:
    """Return the number of tokens of each text, those that would be cut included."""
    return [len(one) for one in tokenizer(texts, verbose=False)["input_ids"]]


def tokens_of(tokenizer: Any, texts: list[str], length: int) -> list[list[int | None]]:
    """Return the tokens of each text, cut at `length`, None for an unknown one."""
    rows = tokenizer(texts, truncation=True, max_length=length, verbose=False)["input_ids"]
    unknown, blank = tokenizer.unk_token_id, tokenizer.convert_tokens_to_ids("\u2581")
    blank = None if blank == unknown else blank  # it stands before each unknown word of sentencepiece
    return [[None if token == unknown else token for token in row if token != blank] for row in rows]
