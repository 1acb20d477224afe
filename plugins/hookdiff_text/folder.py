"""Loads networks and tokenizers from folders of transformers, without the internet and without code of the folders."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from inspect import signature
from pathlib import Path
from typing import Any

import torch

from hookdiff import UserError
from hookdiff.disk import INDEX, Weights
from hookdiff.encoding import (
    file_in,
    files_in,
    load_network,
    load_seen,
    refused_as,
    table_in,
    weights_in,
    without_places,
)

CONFIG = "config.json"
USUAL = "model.safetensors"
_WEIGHTS = "transformers_weights"  # a key of config.json: the name of the file with the weights
_OF_TOKENIZER = (
    *("tokenizer.json", "vocab.json", "merges.txt", "vocab.txt", "spiece.model", "sentencepiece.bpe.model"),
    *("tokenizer.model", "spm.model"),
)
_SETTINGS, _VERSIONS = "tokenizer_config.json", "fast_tokenizer_files"
_TABLES = (_SETTINGS, "special_tokens_map.json", CONFIG)
_POOLER = "add_pooling_layer"  # an argument of some models of transformers
_SHOWN = 60  # characters of a caption in a message
_VERSION = re.compile(r"tokenizer\.[\w.-]+\.json")  # a tokenizer for one version of transformers


def network_weights(folder: Path, config: Mapping[str, Any]) -> Weights:
    """Return the weights of the network with this `config`.

    Raises:
        UserError: if the folder has no weights in safetensors.
    """
    if (named := config.get(_WEIGHTS)) is None:
        return weights_in(folder, (USUAL, USUAL.removesuffix(".safetensors") + INDEX))
    is_file = isinstance(named, str) and Path(named).name == named and named.endswith((".safetensors", INDEX))
    if not is_file or file_in(folder, named) is None:
        raise UserError(
            f"data.encode: {folder / CONFIG}: {_WEIGHTS} = {named!r}, expected the name of a file in this folder, of "
            f"weights in safetensors or of their index (*{INDEX})"
        )
    return weights_in(folder, (named,))


def has_tokenizer(folder: Path) -> bool:
    """Return whether there is a tokenizer in `folder`.

    Raises:
        UserError: if a file of a tokenizer is a pipe or a folder.
    """
    return bool(files_in(folder, _OF_TOKENIZER))


def tokenizer_files(folder: Path) -> list[Path]:
    """Return the files of the tokenizer in `folder`; `tokenizer_in` opens no other files."""
    settings = table_in(folder, _SETTINGS, "tokenizer") if file_in(folder, _SETTINGS) else {}
    names = (*_OF_TOKENIZER, "added_tokens.json", *_TABLES, *_versions(settings))
    return [*files_in(folder, names).values()]


def _versions(settings: Mapping[str, Any]) -> list[str]:
    """Return the names of tokenizer files that are for one version of transformers."""
    named = settings.get(_VERSIONS)
    names = [name for name in named if isinstance(name, str)] if isinstance(named, list) else []
    return [name for name in names if name == _OF_TOKENIZER[0] or _VERSION.fullmatch(name)]


def network_in(folder: Path, kind: str, device: torch.device, precision: str) -> Any:
    """Load the network of the class `kind` of transformers, frozen.

    Raises:
        UserError: if it cannot be loaded.
    """
    config = table_in(folder, CONFIG, "model of transformers")
    weights = network_weights(folder, config)
    with _quiet() as transformers:
        network_class, options = getattr(transformers, kind), {}
        # Models trained only to predict words have no pooler, the layer that gives one vector for a caption.
        if _POOLER in signature(network_class).parameters and not any("pooler." in name for name in weights.shapes):
            options[_POOLER] = False
        network = load_network(network_class, folder, config, weights, USUAL, **options)
    network.name_or_path = network.config.name_or_path = str(folder)
    network = network.to(device, torch.bfloat16 if precision == "bf16" else torch.float32)
    return network.eval().requires_grad_(False)


def tokenizer_in(folder: Path, kind: str) -> Any:
    """Load the tokenizer of the class `kind` of transformers.

    Raises:
        UserError: if it cannot be loaded, or has no padding token.
    """
    files = {path.name: path for path in tokenizer_files(folder)}
    seen: dict[str, Any] = dict(files)
    for name in {*_TABLES} & {*files}:
        table = table_in(folder, name, "tokenizer")
        versions = [version for version in _versions(table) if version in files]
        seen[name] = {**without_places(table), **({_VERSIONS: versions} if versions else {})}
    with _quiet() as transformers:
        tokenizer = load_seen(getattr(transformers, kind), folder, seen, trust_remote_code=False)
    tokenizer.name_or_path = str(folder)
    if getattr(tokenizer, "vocab_file", None):  # some tokenizers copy this file when they are saved
        tokenizer.vocab_file = str(folder / Path(tokenizer.vocab_file).name)
    if tokenizer.pad_token_id is None:
        raise UserError(f"data.encode: set pad_token in {folder / _SETTINGS}: captions are padded with this token")
    return tokenizer


@contextmanager
def _quiet() -> Iterator[Any]:
    """Yield the library transformers without progress bars and reports, which would mix with the lines of a run."""
    import transformers

    logging: Any = transformers.utils.logging
    was_drawn, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield transformers
    finally:
        logging.set_verbosity(level)
        if was_drawn:
            logging.enable_progress_bar()


def tokenized(tokenizer: Any, texts: list[str], **options: Any) -> Any:
    """Return the tokens of `texts`, as `tokenizer` returns them.

    Raises:
        UserError: if the tokenizer cannot take the texts, for example without a token for unknown words.
    """
    example = f"captions such as {texts[0][:_SHOWN]!r}" if texts else "captions"
    with refused_as(f"the tokenizer in {tokenizer.name_or_path} cannot take {example}"):
        return tokenizer(texts, **options)


def check_tokens(network: Any, tokenizer: Any, tokens: Any) -> None:
    """Raise UserError if `network` has no embedding for one of `tokens`, a list of lists."""
    num = network.get_input_embeddings().num_embeddings
    if (largest := max((max(row, default=0) for row in tokens), default=0)) >= num:
        raise UserError(
            f"data.encode: the tokenizer in {tokenizer.name_or_path} gives token {largest}, but the network in "
            f"{network.name_or_path} has {num}: use the tokenizer that was saved with this network"
        )


def count_in(table: Mapping[str, Any], key: str, where: Path) -> int | None:
    """Return the number at a key of the config `where`; None if the config has no such key.

    Raises:
        UserError: if the value is not a whole number of at least 1.
    """
    if (count := table.get(key)) is not None and (type(count) is not int or count < 1):
        raise UserError(f"data.encode: {where}: {key} = {count!r}, expected a whole number of at least 1")
    return count


def lengths_of(tokenizer: Any, texts: list[str]) -> list[int]:
    """Return the number of tokens of each text before truncation."""
    return [len(row) for row in tokenized(tokenizer, texts, verbose=False)["input_ids"]]


def tokens_of(tokenizer: Any, texts: list[str], length: int) -> list[list[int | None]]:
    """Return the tokens of each text, truncated to `length` tokens. None stands for an unknown token."""
    rows = tokenized(tokenizer, texts, truncation=True, max_length=length, verbose=False)["input_ids"]
    unknown, blank = tokenizer.unk_token_id, tokenizer.convert_tokens_to_ids("\u2581")
    blank = None if blank == unknown else blank  # sentencepiece puts a blank before each unknown word
    return [[None if token == unknown else token for token in row if token != blank] for row in rows]
