"""The place of each image in a picture of many images."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from attrs import asdict, define, field
from attrs.validators import ge, gt, instance_of, lt

Box = tuple[int, int, int, int]  # left, top, right and bottom, in pixels; right and bottom are outside


_LARGEST = 1 << 24  # pixels or images
_COUNT = [instance_of(int), ge(0), lt(_LARGEST)]
_SIZE = [instance_of(int), gt(0), lt(_LARGEST)]


@define(frozen=True)
class PanelLayout:
    """The place of the images of a panel in its picture, in pixels.

    Raises:
        TypeError or ValueError: for values that are not valid, such as those of a damaged file.
    """

    title: str = field(validator=instance_of(str))
    left: int = field(validator=_COUNT)  # of the first image
    top: int = field(validator=_COUNT)
    width: int = field(validator=_SIZE)  # of each image
    height: int = field(validator=_SIZE)
    right: int = field(validator=_COUNT)  # from one image to the next in its row
    down: int = field(validator=_COUNT)  # from one row to the next
    columns: int = field(validator=_SIZE)
    num: int = field(validator=_SIZE)  # images

    def box(self, number: int) -> Box:
        """Return the place of image `number`."""
        row, column = divmod(number, self.columns)
        left, top = self.left + column * self.right, self.top + row * self.down
        return left, top, left + self.width, top + self.height

    @property
    def whole(self) -> Box:
        """The place of all images."""
        boxes = [self.box(0), self.box(self.columns - 1), self.box(self.num - 1)]
        return boxes[0][0], boxes[0][1], max(box[2] for box in boxes), max(box[3] for box in boxes)

    def is_inside(self, size: tuple[int, int]) -> bool:
        """Return whether all images are inside a picture of this width and height."""
        _, _, right, bottom = self.whole
        return right <= size[0] and bottom <= size[1]

    def to_info(self) -> dict[str, Any]:
        """Return the layout as values of JSON, for the info of a `Picture`."""
        return asdict(self)


def panel_layouts(info: Mapping[str, Any]) -> Iterator[PanelLayout]:
    """Yield the layouts of the panels in the info of a picture made by `sheet`; other pictures have none."""
    panels = info.get("panels")
    for panel in panels if isinstance(panels, list) else ():
        try:
            yield PanelLayout(**panel)
        except (TypeError, ValueError):  # it is damaged, or of another version of hookdiff
            continue
