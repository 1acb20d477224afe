"""The pictures of a run as WebP images within a budget of bytes."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import frozen

from hookdiff.disk import open_file
from hookdiff.pictures import Place, places, read_info
from hookdiff_report.facts import Run, count, number
from hookdiff_report.timeline import shortened

if TYPE_CHECKING:
    from PIL.Image import Image

BUDGET = 8 << 20  # letters of all pictures of a report, in base64
_LEVELS = ((82, 1200), (75, 900), (65, 640), (55, 480), (45, 320))  # quality, and the longer side in pixels
_ENOUGH = 24  # steps that are shown before their quality is reduced
_MOST_STEPS, _MOST_NAMES, _MOST_PANELS = 200, 16, 8
_MOST_PIXELS = 1 << 26  # of a picture that is opened
_CAPTIONS = {
    "samples": "Images that the network generates. Each has the same noise at every step, so only the network changes.",
    "samples/denoising": "A few images on their way from noise, on the left, to the finished image, on the right.",
    "samples/interpolation": "Each row goes from one noise to another; neighbours should look alike.",
    "diversity": "The generated images that are most like a training image, each beside that image.",
}
_ALSO = (
    ("samples/filmstrip.png", "Each row follows one noise through the training, from the first step to the last."),
    ("samples/training.webp", "The training as an animation."),
    ("samples/training.gif", "The training as an animation."),
    ("samples/denoising.webp", "From noise to image, as an animation."),
    ("samples/denoising.gif", "From noise to image, as an animation."),
)


@frozen
class Strip:
    """Pictures of a name by step, for each panel, such as the average and the weights themselves."""

    title: str  # the name, and of several runs the run
    steps: Sequence[int]
    panels: Sequence[str]  # titles; one empty title for whole pictures
    sources: Sequence[Sequence[str]]  # by panel and step, data URIs; "" for a panel that a step lacks
    size: tuple[int, int]  # of the last picture
    about: str  # how the images were made
    num: int  # steps that the run has


@frozen
class Group:
    """All strips of a name, beside each other."""

    name: str
    caption: str
    strips: Sequence[Strip]

    @property
    def panels(self) -> list[str]:
        """The titles of the panels of all strips."""
        return list(dict.fromkeys(panel for strip in self.strips for panel in strip.panels))


@frozen
class Still:
    """A picture without steps."""

    title: str
    caption: str
    source: str
    is_moving: bool


class Budget:
    """The letters that are left for pictures."""

    def __init__(self, letters: int) -> None:
        self.left = letters

    def take(self, sources: Sequence[str]) -> None:
        """Count what was used."""
        self.left -= sum(map(len, sources))


def groups(runs: Sequence[Run], budget: Budget) -> list[Group]:
    """Return the pictures of the runs: all steps of one run, the last ones of several."""
    names = sorted({name for run in runs for name in run.history.pictures}, key=lambda name: (name != "samples", name))
    names = names[:_MOST_NAMES]
    wanted = [(name, run) for name in names for run in runs if name in run.history.pictures]
    found: dict[str, list[Strip]] = {}
    for place, (name, run) in enumerate(wanted):
        rest = wanted[place:]
        weights = [4 if other == "samples" else 1 for other, _ in rest]
        share = int(budget.left * weights[0] / sum(weights))
        pictures = run.history.pictures[name]
        steps = list(pictures) if len(runs) == 1 else list(pictures)[-1:]
        title = name if len(runs) == 1 else run.label
        if strip := _strip(title, {step: pictures[step] for step in steps}, share):
            budget.take([source for sources in strip.sources for source in sources])
            found.setdefault(name, []).append(strip)
    return [Group(name, _CAPTIONS.get(name, ""), strips) for name, strips in found.items()]


def stills(run: Run, budget: Budget) -> list[Still]:
    """Return the filmstrip and the animations that the plugin `samples` has made."""
    found = []
    for name, caption in _ALSO:
        source = _animation(run.history.run_dir / name) if not name.endswith(".png") else _film(run, name)
        if source and len(source) <= budget.left:
            budget.take([source])
            found.append(Still("Filmstrip", caption, source, not name.endswith(".png")))
    return found


def _film(run: Run, name: str) -> str:
    image = _opened(run.history.run_dir / name)
    return _encoded(image, 82, 1600) if image else ""


def _animation(path: Path) -> str:
    """Return the file as it is, if it is the animation that its name says."""
    import PIL.Image

    kind = path.suffix[1:]
    try:
        with open_file(path) as file:
            data = file.readall() if file.seek(0, 2) <= BUDGET and file.seek(0) == 0 else b""
        with PIL.Image.open(io.BytesIO(data), formats=[kind.upper()]) as image:
            image.verify()
    except Exception:  # Pillow raises many kinds for damaged files
        return ""
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def _strip(title: str, pictures: Mapping[int, Path], share: int) -> Strip | None:
    """Return as many of the pictures as fit into `share` letters, the first and the last among them."""
    steps = [step for step in pictures if _opened(pictures[step])] if len(pictures) < 3 else list(pictures)
    if not steps:
        return None
    probes = evenly(steps, 3)  # noise, at the beginning, takes more bytes than images
    for quality, side in _LEVELS:
        each = max((_length(_cut(pictures[step], quality, side)) for step in probes), default=0)
        fitting = share // each if each else 0
        if fitting >= min(len(steps), _ENOUGH):
            break
    fitting = min(fitting, _MOST_STEPS)
    while fitting:
        cut = {step: _cut(pictures[step], quality, side) for step in evenly(steps, fitting)}
        cut = {step: panels for step, panels in cut.items() if panels}
        if cut and sum(map(_length, cut.values())) <= share:
            return _made(title, pictures, cut, len(pictures))
        fitting = fitting * 3 // 4 if cut else 0
    return None


def _made(title: str, pictures: Mapping[int, Path], cut: Mapping[int, Mapping[str, str]], num: int) -> Strip:
    panels = list(dict.fromkeys(panel for sources in cut.values() for panel in sources))
    sources = [[sources.get(panel, "") for sources in cut.values()] for panel in panels]
    last = _opened(pictures[list(cut)[-1]])
    assert last
    return Strip(title, list(cut), panels, sources, last.size, _about(read_info(last)), num)


def _length(panels: Mapping[str, str]) -> int:
    return sum(map(len, panels.values()))


def evenly(steps: Sequence[int], most: int) -> list[int]:
    """Return at most `most` of the steps at nearly equal distances, the first and the last among them."""
    if most < 2 or len(steps) < 2:
        return list(steps[-1:])
    last = min(most, len(steps)) - 1
    return [steps[round(k * (len(steps) - 1) / last)] for k in range(last + 1)]


def _cut(path: Path, quality: int, side: int) -> dict[str, str]:
    """Return the panels of a picture by title, as data URIs; {} for a picture that cannot be opened."""
    image = _opened(path)
    if image is None:
        return {}
    found = {title: image.crop(box) for title, box in _boxes(image)} or {"": image}
    return {title: _encoded(panel, quality, side) for title, panel in found.items()}


def _boxes(image: Image) -> Iterator[tuple[str, tuple[int, int, int, int]]]:
    """Yield title and place of each panel, with the names that are beside and above its images."""
    found = []
    for place in list(places(read_info(image)))[:_MOST_PANELS]:
        if box := _inside(place, image):
            found.append((shortened(str(place.title), 60), box))
    if len(found) < 2 or len({title for title, _ in found}) < len(found):
        return
    for title, (left, top, right, bottom) in found:
        others = [box for _, box in found if box[2] <= left and box[1] < bottom and top < box[3]]
        yield title, (max((box[2] for box in others), default=0), top, right, bottom)


def _inside(place: Place, image: Image) -> tuple[int, int, int, int] | None:
    """Return the place of all images of a panel, or None if it is not within the picture."""
    try:
        left, top, right, bottom = map(int, place.whole)
    except (TypeError, ValueError, ArithmeticError):  # the file may say anything
        return None
    fits = 0 <= left < right <= image.width and 0 <= top < bottom <= image.height
    return (left, top, right, bottom) if fits else None


def _opened(path: Path) -> Image | None:
    """Return the picture at `path`, or None if it is damaged, too large, or no PNG."""
    import PIL.Image

    try:
        with open_file(path) as file, PIL.Image.open(file, formats=["PNG"]) as image:
            if image.width * image.height > _MOST_PIXELS:
                return None
            image.load()
            return image.copy()
    except Exception:  # Pillow raises many kinds for damaged files, and one for pictures that are too large
        return None


def _encoded(image: Image, quality: int, side: int) -> str:
    import PIL.Image

    image = image.convert("RGB")
    if max(image.size) > side:
        scale = side / max(image.size)
        size = max(1, round(image.width * scale)), max(1, round(image.height * scale))
        image = image.resize(size, PIL.Image.Resampling.LANCZOS)
    file = io.BytesIO()
    image.save(file, "WEBP", quality=quality, method=4)
    return f"data:image/webp;base64,{base64.b64encode(file.getvalue()).decode()}"


def _about(info: Mapping[str, Any]) -> str:
    """Return how the images were made, as far as the file says."""
    parts = []
    if isinstance(info.get("sampler"), str):
        parts.append(f"sampler {shortened(info['sampler'], 60)}")
    for key, text in (("steps", "{} steps"), ("guidance_scale", "guidance {}"), ("seed", "seed {}")):
        value = info.get(key)
        if isinstance(value, int | float) and not isinstance(value, bool):
            parts.append(text.format(count(value) if isinstance(value, int) else number(value)))
    return ", ".join(parts)
