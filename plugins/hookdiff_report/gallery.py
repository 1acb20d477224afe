"""The pictures of a run as WebP images within a budget of bytes."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
from attrs import frozen

from hookdiff.disk import read_file
from hookdiff.log import panel_layouts, read_info
from hookdiff.run_dir import read_picture
from hookdiff_report.run import ReportedRun
from hookdiff_report.words import shortened

if TYPE_CHECKING:
    from PIL.Image import Image

BUDGET = 8 << 20  # characters of all pictures of a report, in base64
_LEVELS = ((82, 1200), (76, 900), (70, 720), (64, 560), (56, 440), (48, 320))  # quality, and the longer side in pixels
_ENOUGH = 60  # steps; the quality is not reduced to show more
_MOST_STEPS, _MOST_NAMES, _MOST_PANELS = 200, 16, 8
_APART = 16  # pixels between the images of two panels, unless names stand beside the rows
_CAPTIONS = {
    "samples": "Images that the network generates. Each has the same noise at every step, so only the network changes.",
    "samples/denoising": "A few images on their way from noise, on the left, to the finished image, on the right.",
    "samples/interpolation": "Each row goes from one noise to another; neighbours should look alike.",
    "diversity": "The generated images that are most like a training image, each beside that image.",
}
TITLES = {
    "samples": "Samples",
    "samples/denoising": "From noise to image",
    "samples/interpolation": "Between noises",
    "diversity": "Closest training images",
}
_FILMSTRIP = "samples/filmstrip.png"
_FILMS = {
    _FILMSTRIP: "Each row follows one noise through the training, from the first step to the last.",
    "samples/training.webp": "The training as an animation",
    "samples/training.gif": "The training as an animation",
    "samples/denoising.webp": "From noise to image, as an animation",
    "samples/denoising.gif": "From noise to image, as an animation",
}
_ABOUT = {"sampler": "sampler {}", "steps": "{} steps", "guidance_scale": "guidance {}", "seed": "seed {}"}


@frozen
class Strip:
    """The pictures of one logged name by step, in panels such as the average and the weights themselves."""

    title: str  # the name; with several runs, also the run
    steps: Sequence[int]
    panels: Sequence[str]  # titles; a picture without panels has one, perhaps ""
    sources: Sequence[Sequence[str]]  # by panel and step, data URIs; "" if a step has no such panel
    about: str  # sampler, steps, guidance and seed of the images
    num: int  # steps with pictures in the run


@frozen
class Group:
    """The strips of one name, one for each run, side by side."""

    name: str
    caption: str
    strips: Sequence[Strip]

    @property
    def panels(self) -> list[str]:
        """The titles of the panels to choose from; a strip with one panel always shows this panel."""
        strips = [strip for strip in self.strips if len(strip.panels) > 1]
        return list(dict.fromkeys(panel for strip in strips for panel in strip.panels))


@frozen
class Film:
    """The filmstrip or an animation, which show all steps at once."""

    name: str  # name of its file
    caption: str
    source: str  # empty if it is too large
    is_moving: bool


def pictures(runs: Sequence[ReportedRun]) -> tuple[list[Group], list[Film], int]:
    """Return the pictures of the runs by step, the films of a single run, and the number of names that are left out.

    With several runs, fewer steps of each are shown.
    """
    films = list(_films(runs[0])) if len(runs) == 1 else []
    left = BUDGET - sum(len(film.source) for film in films)
    names = sorted({name for run in runs for name in run.history.pictures}, key=lambda name: (name != "samples", name))
    wanted = [(name, run) for name in names[:_MOST_NAMES] for run in runs if name in run.history.pictures]
    strips: dict[str, list[Strip]] = {}
    for place, (name, run) in enumerate(wanted):
        weights = [4 if other == "samples" else 1 for other, _ in wanted[place:]]
        title, files = name if len(runs) == 1 else run.label, run.history.pictures[name]
        most = max(1, _MOST_STEPS // len(runs))
        if strip := _strip(title, files, most, left * weights[0] // sum(weights)):
            left -= sum(len(source) for sources in strip.sources for source in sources)
            strips.setdefault(name, []).append(strip)
    groups = [Group(name, _CAPTIONS.get(name, ""), strips_of_name) for name, strips_of_name in strips.items()]
    return groups, films, len(names) - len(groups)


def _films(run: ReportedRun) -> Iterator[Film]:
    left = BUDGET // 2  # the sliders need the rest
    for name, caption in _FILMS.items():
        path, is_moving = run.history.run_dir / name, name != _FILMSTRIP
        image = None if is_moving else read_picture(path)
        source = _encoded(image, 82, 1600) if image else _animation(path, left) if is_moving else None
        if source is not None:
            left -= len(source)
            yield Film(name, caption, source, is_moving)


def _animation(path: Path, most: int) -> str | None:
    """Return the file as a data URI; "" above `most` characters, None for a damaged file or one of another format."""
    import PIL.Image

    kind = path.suffix[1:]
    try:
        if path.stat().st_size * 4 / 3 > most:  # in base64
            return ""
        data = read_file(path)
        with PIL.Image.open(io.BytesIO(data), formats=[kind]) as image:
            image.verify()
    except Exception:  # Pillow raises many kinds for damaged files
        return None
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def _strip(title: str, files: Mapping[int, Path], most: int, share: int) -> Strip | None:
    """Return up to `most` pictures that fit into `share` characters: the last, the first, and then the others."""
    steps = evenly(list(files), most)
    for quality, side in _LEVELS:
        probes = [_length(_panels(files[step], quality, side)) for step in evenly(steps, 5)]
        if share * len(probes) >= sum(probes) * min(len(steps), _ENOUGH):
            break
    chosen: dict[int, dict[str, str]] = {}
    for step in spread(steps):
        panels = _panels(files[step], quality, side)
        share -= _length(panels)
        if share < 0:
            break
        if panels:
            chosen[step] = panels
    if not chosen:
        return None
    chosen = dict(sorted(chosen.items()))
    if len(set().union(*chosen.values())) > 1:  # beside panels, a picture without a title shows the weights themselves
        chosen = {
            step: {title or "model": source for title, source in panels.items()} for step, panels in chosen.items()
        }
    titles = list(dict.fromkeys(panel for panels in reversed(chosen.values()) for panel in panels))  # the newest first
    sources = [[panels.get(panel, "") for panels in chosen.values()] for panel in titles]
    last = read_picture(files[list(chosen)[-1]])
    info = read_info(last) if last else {}
    return Strip(title, list(chosen), titles, sources, _about(info), len(files))


def _length(panels: Mapping[str, str]) -> int:
    return sum(map(len, panels.values()))


def evenly(steps: Sequence[int], most: int) -> list[int]:
    """Return at most `most` of the steps at nearly equal distances, the first and the last among them."""
    places = numpy.linspace(len(steps) - 1, 0, min(most, len(steps)))
    return [steps[round(place)] for place in places[::-1]]


def spread(steps: Sequence[int]) -> list[int]:
    """Return the steps in an order whose first steps are spread over all: the ends, the middle, ..."""
    inner = sorted(range(1, len(steps) - 1), key=lambda place: f"{place:032b}"[::-1])  # van der Corput's sequence
    return [steps[place] for place in dict.fromkeys([len(steps) - 1, 0, *inner])]


def _panels(path: Path, quality: int, side: int) -> dict[str, str]:
    """Return the panels of a picture by title, as data URIs; {} for a picture that cannot be opened."""
    image = read_picture(path)
    if image is None:
        return {}
    cut = {title: image.crop(box) for title, box in _boxes(image)} or {_weights(image): image}
    return {title: _encoded(panel, quality, side) for title, panel in cut.items()}


def _weights(image: Image) -> str:
    """Return the name of the weights of the whole picture; "" if the file names none or several."""
    match read_info(image).get("weights"):
        case [str(name)] | str(name):
            return shortened(name, 60)
    return ""


def _boxes(image: Image) -> Iterator[tuple[str, tuple[int, int, int, int]]]:
    """Yield the title and the box of each panel, with the names beside its rows; nothing for a single panel."""
    boxes = []
    for place in list(panel_layouts(read_info(image)))[:_MOST_PANELS]:
        if place.is_inside(image.size):
            boxes.append((shortened(place.title, 60), place.whole))
    if len(boxes) == 1 or len(dict(boxes)) < len(boxes):  # panels with equal titles would hide each other
        return
    for title, (left, top, right, bottom) in boxes:
        others = [box[2] for _, box in boxes if box[2] <= left and box[1] < bottom and top < box[3]]
        begin = max(others, default=-_APART) + _APART
        yield title, (begin if left - begin > _APART else left, top, right, bottom)


def _encoded(image: Image, quality: int, side: int) -> str:
    file = io.BytesIO()
    image = image.convert("RGB")
    image.thumbnail((side, side))
    image.save(file, "WEBP", quality=quality)
    return f"data:image/webp;base64,{base64.b64encode(file.getvalue()).decode()}"


def _about(info: Mapping[str, Any]) -> str:
    """Return the sampler, steps, guidance and seed that the file names."""
    known = {key: info[key] for key in _ABOUT if isinstance(info.get(key), str | int | float)}
    texts = {key: f"{value:g}" if isinstance(value, float) else str(value) for key, value in known.items()}
    return ", ".join(_ABOUT[key].format(shortened(text, 60)) for key, text in texts.items())
