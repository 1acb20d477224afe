"""The conditions of samples: members of the tar beside the picture and its label."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from attrs import define

from hookdiff import StorageError, nearest, shown
from hookdiff.data import array_in
from hookdiff.disk import reason
from hookdiff.images import Unreadable, open_picture, parse_json, refuse
from hookdiff_shards.index import Index, is_picture
from hookdiff_shards.samples import Samples, extension_of, is_array

_TEXTS = ("cls", "index", "inx", "id", "txt")  # extensions of texts that may hold a number
_TAKEN = ("image", "inputs", "label")  # names with another meaning in a sample


@define(frozen=True)
class Condition:
    """A condition: the extension of its member in the tar, and for a JSON member perhaps the key of a value."""

    extension: str
    key: str = ""

    @property
    def format(self) -> str:
        return self.extension.rpartition(".")[2]

    def read(self, content: bytes) -> Any:
        """Return the value of the member with these bytes; raises any error for broken bytes."""
        if is_picture(self.extension):
            return _opened(content)
        if self.format == "npy":
            return array_in(content)
        if self.format != "json":
            return _number(content)
        value = parse_json(content)
        if not self.key:
            return value
        if not isinstance(value, dict) or self.key not in value:
            known = nearest(self.key, value) if isinstance(value, dict) else ""
            raise ValueError(f"there is no key {self.key!r}{known}")
        return value[self.key]


def parse(table: Mapping[str, str]) -> dict[str, Condition]:
    """Return the conditions that a config names. Raises ValueError for an extension that is not read."""
    conditions = {}
    for name, text in table.items():
        condition = conditions[name] = member_of(text, f"conditions.{name}")
        known = ("npy", "json", *_TEXTS)
        if name in _TAKEN:
            raise ValueError(f"conditions: {name!r} has another meaning in a sample; choose another name")
        if not is_picture(condition.extension) and condition.format not in known:
            unknown = f".{shown(condition.format)} is not read{nearest(condition.format, known)}"
            raise ValueError(f"conditions.{name}: {unknown}; expected a picture or {', '.join(known)}")
    return conditions


def member_of(text: str, option: str) -> Condition:
    """Return the member that `text` names. Raises ValueError for a pickle, and for a key of a file that is not JSON."""
    extension, _, key = text.partition(":")
    member = Condition(extension_of(extension, option), key)
    if key and member.format != "json":
        raise ValueError(f"{option}: {text!r}: leave out the key; only .json has keys")
    return member


class Items(Samples):
    """Pictures or arrays in shards, with their conditions.

    Raises:
        UserError: if there are any problems.
    """

    def __init__(
        self, conditions: Mapping[str, Condition], files: Any, indices: Sequence[Index], *options: Any
    ) -> None:
        super().__init__(files, indices, *options)
        self.conditions = dict(conditions)
        self.columns = [self.column(indices, [each.extension]) for each in self.conditions.values()]
        self.refuse_lacking(self.pictures, f".{self.image}" if self.image else "picture")
        for column, condition in zip(self.columns, self.conditions.values(), strict=True):
            self.refuse_lacking(column, f".{condition.extension}")
        refuse(self.problems)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return a sample as a `Source` does. Raises Unreadable for a sample that cannot be read."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        name = self.describe(index)
        try:
            picture, *others = self.members(index, [self.pictures, *self.columns])
            item = {"image": torch.from_numpy(array_in(picture)) if is_array(self.image) else _opened(picture)}
            for key, condition, content in zip(self.conditions, self.conditions.values(), others, strict=True):
                name = self.name(index, condition.extension)
                item[key] = condition.read(content)
        except StorageError:
            raise
        except Exception as error:  # a decoder may raise any error on broken bytes
            raise Unreadable(f"{shown(name)}: {reason(error)}") from error
        return item


def _opened(content: bytes) -> Any:
    return open_picture(io.BytesIO(content))


def _number(content: bytes) -> int | float:
    try:
        value = json.loads(content)
    except ValueError:
        value = None
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        text = shown(content[:30].decode(errors="replace"))
        raise ValueError(f"{text!r} is no number; store conditions as numbers, such as tokens in .npy")
    return value
