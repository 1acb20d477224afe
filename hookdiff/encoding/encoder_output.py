"""What encoders return, checked where it enters."""

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
    """Checks what `encoder`, which has the key `where`, returns. All methods raise UserError for what does not fit."""

    where: str
    encoder: Encoder
    # Shape and dtype of the rows that it made before, as they are kept.
    forms: Mapping[str, tuple[tuple[int, ...], str]] = field(factory=dict, init=False)

    def digest(self) -> str:
        """Return the digest of the encoder."""
        try:
            found: object = self.encoder.digest()
        except NoFolder as error:
            raise NoFolder(f"{error} (if it has moved, add --set {self.where}.path=DIR)") from None
        if not isinstance(found, str) or not found:
            raise self.wrong(f"digest() returns {found!r}", "a string that is not empty")
        return found

    def of_texts(self, made: object, num: int) -> Mapping[str, Tensor]:
        """Return the conditions of `num` texts by the ends of their names: n rows each, float, bool or int64."""
        named = isinstance(made, Mapping) and all(isinstance(name, str) and name[:1] in ("", "_") for name in made)
        if not named or not made:
            got = f"the names {[*made]}" if isinstance(made, Mapping) else f"a {type(made).__name__}"
            raise self.wrong(f"encode() returns {got}", 'a dict of tensors with the name "", or ends such as "_mask"')
        return self._checked(made, f"{self.where.rpartition('.')[2]}%s", num, ("bool", "int64"))

    def of_pictures(self, made: Any, num: int) -> Mapping[str, Tensor]:
        """Return mean and perhaps deviation of `num` pictures: n rows each, float."""
        if not isinstance(made, tuple | list) or len(made) != 2:
            raise self.wrong(f"encode() returns a {type(made).__name__}", "a pair of mean and deviation, or None")
        named = {MEAN: made[0]} | ({} if made[1] is None else {STD: made[1]})
        return self._checked(named, "%s", num, ())

    def _checked(self, made: Any, called: str, num: int, others: Sequence[str]) -> Mapping[str, Tensor]:
        forms = {}
        for name, rows in made.items():
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
            way_out = f"the digest {self.encoder.digest()!r} stands for one shape, whatever is encoded"
            raise self.wrong(f"encode() returns rows of {new}", f"{old}, as before: {way_out}")
        if STD in forms and forms[STD] != forms[MEAN]:
            raise self.wrong(f"encode() returns a deviation {forms[STD][0]}", f"{forms[MEAN][0]}, as of the mean")
        self.forms = forms
        return made  # type: ignore[no-any-return]

    def wrong(self, what: str, expected: str) -> UserError:
        """Return the error about `what` the encoder has or returns."""
        return UserError(f"{self.where}: {type(self.encoder).__name__}: {what}, expected {expected}")
