"""Reads the captions beside images, and checks the text encoder for them."""

import json
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from attrs import evolve

from hookdiff import UserError
from hookdiff.disk import read_file
from hookdiff.encoding import Encoder, why_no_folder
from hookdiff_init.look import Pictures, Texts, read_captions

_MULTIPLE = 8  # the length is a multiple of this, to leave room for prompts that are longer than the captions
_AT_ONCE = 1024  # texts
_WIDTHS = ("hidden_size", "d_model", "dim")  # key in config.json for the width of a token, by kind of model


def check_encoder(encoder: Path) -> None:
    """Raise UserError unless `encoder` is a folder with a text encoder of transformers."""
    if why := why_no_folder(str(encoder), "config.json", "text encoder of transformers", lambda t: bool(_widths(t))):
        raise UserError(f"--text-encoder: {why}")


def with_captions(pictures: Pictures, encoder: Path) -> Pictures:
    """Return `pictures` with the captions beside them, which replace the classes.

    Raises UserError if most images have no caption, a caption cannot be read, or `encoder` holds no text encoder.
    """
    if pictures.path is None:
        raise UserError("--text-encoder: the digits have no captions; name a folder of images")
    if not pictures.are_captioned:
        most = f"{pictures.captioned:,} of {pictures.num:,} images in {pictures.path} have a .txt of their name"
        raise UserError(f"--text-encoder: {most}, expected half of them at least")
    if find_spec("transformers") is None:
        raise UserError("--text-encoder needs a package: pip install 'hookdiff[text]'")
    check_encoder(encoder)
    width = _width(encoder)
    captions = read_captions(pictures)
    longest = _longest(encoder, captions.different)
    texts = Texts(str(encoder), width, _length(encoder, longest), longest)
    return evolve(pictures.without_classes(), captions=captions, texts=texts)


def _width(encoder: Path) -> int:
    """Return the number of features of a token from the text encoder in a folder."""
    file = encoder / "config.json"
    try:
        (width, *_) = _widths(json.loads(read_file(file)))
    except (OSError, ValueError, TypeError, AttributeError):
        expected = f"expected a text encoder of transformers, with {' or '.join(_WIDTHS)} in {file.name}"
        raise UserError(f"--text-encoder {encoder}: {expected}") from None
    return int(width)


def _opened(encoder: Path, **options: Any) -> Any:
    return Encoder.of({"use": "text", "path": str(encoder), **options})


def _longest(encoder: Path, texts: Sequence[str]) -> int:
    """Return the number of tokens of the longest of `texts`."""
    network = _opened(encoder).open(torch.device("cpu"))
    parts = (texts[start : start + _AT_ONCE] for start in range(0, len(texts), _AT_ONCE))
    return max((int(length) for part in parts for length in network.lengths(part)), default=1)


def _length(encoder: Path, longest: int) -> int:
    """Return a length that holds a caption of `longest` tokens, but at most the encoder's length."""

    def is_taken(length: int) -> bool:
        try:
            return bool(_opened(encoder, length=length).limit)
        except UserError:
            return False

    most = -(-longest // _MULTIPLE) * _MULTIPLE
    return next(length for length in range(most, 0, -1) if is_taken(length))


def _widths(config: Mapping[str, Any]) -> list[int]:
    inner = config.get("text_config")
    config = {**config, **(inner if isinstance(inner, Mapping) else {})}
    return [config[key] for key in _WIDTHS if isinstance(config.get(key), int)]
