"""Checks the values that encoders return."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import define, field
from torch import Tensor

from hookdiff.encoding.encoded_samples import MEAN, STD
from hookdiff.encoding.encoder import STORED, Encoder
from hookdiff.encoding.model_folder import NoFolder
from hookdiff.errors import UserError


@define(eq=False)
class EncoderOutput:
    """Checks the values that `encoder`, with the key `where`, returns. All methods raise UserError for wrong values."""

    where: str
    encoder: Encoder
    # Shape and dtype in which earlier rows are stored, by column.
    forms: Mapping[str, tuple[tuple[int, ...], str]] = field(factory=dict, init=False)

    def digest(self) -> str:
        """Return the digest of the encoder."""
        try:
            digest: object = self.encoder.digest()
        except NoFolder as error:
            raise NoFolder(f"{error} (if it has moved, add --set {self.where}.path=DIR)") from None
        if not isinstance(digest, str) or not digest:
            raise self.wrong(f"digest() returns {digest!r}", "a string that is not empty")
        return digest

    def of_texts(self, values: object, num: int) -> Mapping[str, Tensor]:
        """Return the conditions of `num` texts, by the ends of their names: n rows each, float, bool or int64."""
        named = isinstance(values, Mapping) and all(isinstance(name, str) and name[:1] in ("", "_") for name in values)
        if not named or not values:
            got = f"the names {[*values]}" if isinstance(values, Mapping) else f"a {type(values).__name__}"
            raise self.wrong(f"encode() returns {got}", 'a dict of tensors with the name "", or ends such as "_mask"')
        return self._checked(values, f"{self.where.rpartition('.')[2]}%s", num, ("bool", "int64"))

    def of_pictures(self, values: Any, num: int) -> Mapping[str, Tensor]:
        """Return mean and, unless it is None, deviation of `num` pictures: n rows each, float."""
        if not isinstance(values, tuple | list) or len(values) != 2:
            raise self.wrong(f"encode() returns a {type(values).__name__}", "a pair of mean and deviation, or None")
        named = {MEAN: values[0]} | ({} if values[1] is None else {STD: values[1]})
        return self._checked(named, "%s", num, ())

    def _checked(self, columns: Any, called: str, num: int, others: Sequence[str]) -> Mapping[str, Tensor]:
        forms = {}
        for name, rows in columns.items():
            got = f"encode() returns {called % name!r} of n = {num} as"
            if not isinstance(rows, Tensor):
                raise self.wrong(f"{got} a {type(rows).__name__}", "a tensor")
            dtype = str(STORED if rows.is_floating_point() else rows.dtype).removeprefix("torch.")
            if rows.shape[:1] != (num,) or 0 in rows.shape[1:]:
                raise self.wrong(f"{got} {tuple(rows.shape)}", "n rows that are not empty")
            if not rows.is_floating_point() and dtype not in others:
                raise self.wrong(f"{got} {dtype}", " or ".join(["a float", *others]))
            forms[name] = tuple(rows.shape[1:]), dtype
        if self.forms and forms != self.forms:
            new, old = (
                ", ".join(f"{called % k!r} {size} {of}" for k, (size, of) in f.items()) for f in (forms, self.forms)
            )
            way_out = f"return one shape for the digest {self.encoder.digest()!r}, whatever is encoded"
            raise self.wrong(f"encode() returns rows of {new}", f"{old}, as before: {way_out}")
        if STD in forms and forms[STD] != forms[MEAN]:
            raise self.wrong(f"encode() returns a deviation {forms[STD][0]}", f"{forms[MEAN][0]}, as of the mean")
        self.forms = forms
        return columns  # type: ignore[no-any-return]

    def wrong(self, what: str, expected: str) -> UserError:
        """Return the error about `what`, an option or a value of the encoder."""
        return UserError(f"{self.where}: {type(self.encoder).__name__}: {what}, expected {expected}")
