"""The labels of samples in shards, and the names of their classes."""

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from hookdiff import nearest, shown, why_missing
from hookdiff.disk import read_file, reason
from hookdiff.encoding import ENCODED
from hookdiff.images import check_text, encode, lines_in, normal, some
from hookdiff_shards.remote import asked, is_url

_NAMES = ("classes.json", "classes.txt")
_LARGEST = 1 << 24  # most bytes of a file of names


def read_classes(classes: str | Sequence[str] | None, shard: str, options: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Return the names of the classes: those in `classes`, or in a file that is named or lies beside the first `shard`.

    A .txt has a name on each line, a .json a list of names. None if there are no names. Raises ValueError for a file
    that is missing or has another content.
    """
    if classes is None:
        classes = beside(shard, _NAMES, options)
        if classes is None:
            return None
    if not isinstance(classes, str):
        return tuple(classes)
    content = content_of(classes, options)
    try:
        if classes.lower().endswith(".json"):
            names = json.loads(content.decode("utf-8-sig"))
        elif classes.lower().endswith(".txt"):
            names = lines_in(content)
            check_text("\n".join(names))
        else:
            raise ValueError("name a .txt or a .json with the names of the classes")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{classes}: {reason(error)}") from error
    if not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise ValueError(f"{classes}: write a list of names of classes")
    return tuple(names)


def read_encoded(shard: str, options: Mapping[str, Any]) -> Any:
    """Return the metadata of encoded samples from the file beside the first `shard`; None if there is no such file.

    Raises ValueError for a file that cannot be read.
    """
    if (path := beside(shard, [ENCODED], options)) is None:
        return None
    try:
        return json.loads(content_of(path, options))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {reason(error)}") from error


def beside(shard: str, names: Sequence[str], options: Mapping[str, Any]) -> str | None:
    """Return the first of `names` that lies in the folder of `shard`."""
    folder = shard.partition("?")[0].rpartition("/")[0] if is_url(shard) else os.path.dirname(shard)
    paths = [f"{folder}/{name}" if is_url(shard) else os.path.join(folder, name) for name in names]
    return next((path for path in paths if _exists(path, options)), None)


def content_of(path: str, options: Mapping[str, Any]) -> bytes:
    """Return the bytes of a file on disk or at a URL. Raises ValueError if it cannot be read."""
    try:
        if not is_url(path):
            return read_file(Path(os.path.expanduser(path)))
        content: bytes = asked(path, options, lambda system, inner: system.cat_file(inner, start=0, end=_LARGEST))
        return content
    except FileNotFoundError:
        raise ValueError(f"{path}: {'no such file' if is_url(path) else why_missing(Path(path))}") from None
    except OSError as error:
        raise ValueError(f"{path}: {reason(error)}") from error


def _exists(path: str, options: Mapping[str, Any]) -> bool:
    """Return whether the file exists. For a missing file, some servers answer that the request is forbidden."""
    if not is_url(path):
        return os.path.lexists(path)
    try:
        return bool(asked(path, options, lambda system, inner: system.info(inner)))
    except (FileNotFoundError, PermissionError, ValueError):
        return False


def encode_labels(
    texts: Sequence[bytes], name_of: Callable[[int], str], classes: tuple[str, ...] | None
) -> tuple[Tensor | None, tuple[str, ...] | None, list[str]]:
    """Return labels (n, int64) and the names of the classes; messages name a sample by `name_of(i)`.

    A label is an integer, or the name of a class; with `classes` the name must be one of these. The third value lists
    the problems.
    """
    values: list[str | int] = []
    for index, text in enumerate(texts):
        try:
            value = text.decode().strip()
        except UnicodeDecodeError:
            return None, None, [f"{name_of(index)}: expected a label as text in UTF-8"]
        if not value:
            return None, None, [f"{name_of(index)}: expected a label, but the file is empty"]
        values.append(int(value) if re.fullmatch(r"-1|[0-9]{1,9}", value) else value)
    first = {type(value): index for index, value in reversed([*enumerate(values)])}
    if len(first) > 1:
        examples = " and ".join(f"{name_of(index)} has {shown(values[index])}" for index in sorted(first.values()))
        return None, None, [f"labels must be all integers from -1 or all names; {examples}"]
    try:
        if classes is None or str not in first:
            labels, encoded_classes = encode(values)
            return labels, encoded_classes if classes is None else classes, []
    except ValueError as error:
        return None, None, [str(error)]
    position = {normal(name): number for number, name in enumerate(classes)}
    names = [normal(str(value)) for value in values]
    if strange := sorted(set(names).difference(position)):
        near = nearest(strange[0], classes)
        return None, None, [f"{len(strange)} labels are no names of classes: {some(strange)}{near}"]
    labels, _ = encode([position[name] for name in names])
    return labels, classes, []
