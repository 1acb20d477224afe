"""The shape of each sample, for the processes that load samples."""

from collections.abc import Sequence
from typing import Any

from attrs import define


@define(frozen=True, eq=False)
class ShapeOf:
    """The shape of each sample, as arrays of numpy: sending a tensor to a worker takes a file descriptor."""

    shapes: tuple[tuple[int, ...], ...]
    numbers: Any = None  # n, int16; None: all samples have the only shape
    originals: Any = None  # height and width of each picture: n 2; None: they cannot change

    def __call__(self, index: int) -> tuple[int, ...]:
        return self.shapes[0 if self.numbers is None else int(self.numbers[index])]

    def check(self, index: int, sides: Sequence[int]) -> None:
        """Raise ValueError unless the picture of an item still has these `sides` (height, width)."""
        if self.originals is not None and tuple(sides) != tuple(self.originals[index].tolist()):
            before, now = (f"{width} x {height}" for height, width in (self.originals[index].tolist(), sides))
            raise ValueError(f"its picture is {now}, and was {before} before; with buckets it must keep its size")
