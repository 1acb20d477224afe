"""Draws samples in half-block characters, each with an upper and a lower pixel."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hookdiff import shown
from hookdiff.disk import check_kind
from hookdiff.log import panel_layouts, read_info

if TYPE_CHECKING:
    from PIL.Image import Image
    from rich.text import Text

_SMALL, _LARGE = 14, 20  # least width of a sample in pixels, with little and with much room
_WIDE = 60  # columns from which there is much room
_MOST_PIXELS = 50_000_000


def half_blocks(path: Path, width: int, height: int) -> list[Text]:
    """Return a title and at most `height` - 1 lines of `width` columns with the first samples in a picture.

    If the file has the positions of its samples, only as many are shown as are large enough to see; otherwise the whole
    picture is shown. For a file that cannot be read, the title gives the reason.
    """
    from PIL import Image
    from rich.text import Text

    try:
        check_kind(path)
        with Image.open(path) as image:
            if math.prod(image.size) > _MOST_PIXELS:
                raise ValueError("it is too large")
            info = read_info(image)
            picture, title = _scaled(image, info, width, 2 * (height - 1))
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:  # Pillow's, for damaged files
        return [Text(shown(f"samples: {path.name} cannot be read: {error}"), "dim", no_wrap=True, overflow="ellipsis")]
    step = info.get("step")
    parts = ["samples", f"step {step:,}" if isinstance(step, int) else path.stem, title]
    heading = Text(shown(", ".join(filter(None, parts))), "bold", no_wrap=True, overflow="ellipsis")
    return [heading, *_lines(picture)]


def _scaled(image: Image, info: dict[str, Any], width: int, height: int) -> tuple[Image, str]:
    """Return a picture of at most `width` x `height` pixels, transparent where it shows no sample, and its title."""
    from PIL import Image

    place = next((place for place in panel_layouts(info) if place.is_inside(image.size)), None)
    if place is None:
        image = image.convert("RGBA")
        image.thumbnail((width, height))
        return image, ""
    across = (width + 1) // max(1, min(place.columns, width // (_LARGE if width >= _WIDE else _SMALL))) - 1
    down = max(1, round(across * place.height / place.width))
    rows = max(1, min(-(-place.num // place.columns), round((height + 1) / (down + 1))))
    down = min(down, (height + 1) // rows - 1)
    across = max(1, min(across, round(down * place.width / place.height)))
    columns = max(1, min(place.columns, (width + 1) // (across + 1)))
    picture = Image.new("RGBA", (columns * (across + 1) - 1, rows * (down + 1) - 1))
    for row in range(rows):
        for column in range(columns):
            number = row * place.columns + column
            if number < place.num:
                sample = image.crop(place.box(number)).convert("RGBA").resize((across, down), Image.Resampling.BOX)
                picture.paste(sample, (column * (across + 1), row * (down + 1)))
    return picture, place.title


def _lines(picture: Image) -> list[Text]:
    from rich.color import Color
    from rich.style import Style
    from rich.text import Text

    width, height = picture.size
    pixels: Any = picture.load()
    lines = []
    for top in range(0, height, 2):
        line = Text()
        for x in range(width):
            upper, lower = pixels[x, top], pixels[x, top + 1] if top + 1 < height else (0, 0, 0, 0)
            above, below = (Color.from_rgb(*pixel[:3]) if pixel[3] > 127 else None for pixel in (upper, lower))
            if above:
                line.append("\u2580", Style(color=above, bgcolor=below))
            else:
                line.append("\u2584" if below else " ", Style(color=below))
        lines.append(line)
    return lines
