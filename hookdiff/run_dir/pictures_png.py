"""NAME/step-00001000.png: the logged pictures, each with its name and step in a text chunk."""

from __future__ import annotations

import os
import re
import struct
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from hookdiff.disk.files import copy_file, discard
from hookdiff.disk.reading import check_kind
from hookdiff.log.picture import Picture, read_info
from hookdiff.run_dir.checkpoints import CHECKPOINTS
from hookdiff.run_dir.config_toml import CONFIG
from hookdiff.run_dir.metrics_jsonl import METRICS

if TYPE_CHECKING:
    from PIL.Image import Image

_MOST_PIXELS = 1 << 26  # of a picture; larger pictures are not read
_FILE = re.compile(r"step-(\d{8,18})\.png")


def picture_path(run_dir: Path, name: str, step: int) -> Path:
    """Return the path of the picture `name` of `step`."""
    return run_dir.joinpath(*name.split("/"), f"step-{step:08d}.png")


def write_picture(run_dir: Path, name: str, step: int, picture: Picture) -> None:
    """Write the picture `name` of `step`, with name and step in its metadata; raise OSError if that fails."""
    picture.with_info(name=name, step=step).save(picture_path(run_dir, name, step))


def remove_pictures(run_dir: Path, after: int) -> None:
    """Remove the pictures of steps later than `after`; errors are ignored."""
    for pictures in find_pictures(run_dir, after).values():
        for path in pictures.values():
            discard(path)


def copy_pictures(source: Path, run_dir: Path, until: int) -> None:
    """Copy the pictures of the run `source` up to the step `until`, unless `run_dir` has them."""
    for name, pictures in find_pictures(source).items():
        for step, path in pictures.items():
            copied = picture_path(run_dir, name, step)
            if step <= until and not copied.exists():
                copy_file(path, copied)


def find_pictures(run_dir: Path, after: int = -1) -> dict[str, dict[int, Path]]:
    """Return the files of the logged pictures of steps later than `after`, sorted by name, then by step.

    Pictures of runs inside this run directory are left out, and so are copies under other names.
    """
    pictures: dict[str, dict[int, Path]] = {}
    for root, folders, files in os.walk(run_dir):  # it skips a folder that is removed meanwhile
        folder = Path(root)
        is_top = folder == run_dir
        if not is_top and not {CONFIG, METRICS}.isdisjoint(files):  # another run
            folders.clear()
            continue
        # The folder of checkpoints holds no pictures, and changes while it is looked through.
        folders[:] = sorted(name for name in folders if name[0] != "." and not (is_top and name == CHECKPOINTS))
        name = folder.relative_to(run_dir).as_posix()
        logged = {step: path for step, path in _by_step(folder, files).items() if step > after and _is(path, name)}
        if logged:
            pictures[name] = logged
    return dict(sorted(pictures.items()))


def picture_files(run_dir: Path, name: str) -> dict[int, Path]:
    """Return the files in the folder of the pictures called `name`, by step, in their order.

    No file is opened, so files may be damaged, or be a user's own.
    """
    folder = picture_path(run_dir, name, 0).parent
    return next((_by_step(folder, files) for _, _, files in os.walk(folder)), {})


def newest_picture(run_dir: Path, name: str) -> Path | None:
    """Return the file of the newest picture called `name` that a run has logged, or None.

    The files are opened, the newest first, until one is a logged picture.
    """
    files = picture_files(run_dir, name)
    return next((path for path in reversed(files.values()) if _is(path, name)), None)


def read_picture(path: Path, pixels: bool = True) -> Image | None:
    """Return the picture in a PNG file, or None if it is damaged, too large, of another kind, or gone.

    `pixels=False` reads only its size and metadata.
    """
    from PIL import Image

    damage = (ValueError, SyntaxError, LookupError, EOFError, struct.error, zlib.error)  # as Pillow reports it
    try:
        check_kind(path)
        with Image.open(path, formats=["PNG"]) as picture:
            if picture.width * picture.height > _MOST_PIXELS:
                return None
            if pixels:
                picture.load()
            return picture
    except (OSError, Image.DecompressionBombError, *damage):
        return None


def _by_step(folder: Path, files: Iterable[str]) -> dict[int, Path]:
    paths = {int(match[1]): folder / name for name in files if (match := _FILE.fullmatch(name))}
    return dict(sorted(paths.items()))


def _is(path: Path, name: str) -> bool:
    """Return whether the metadata of the file has the `name`; a user may keep other pictures in the folder."""
    picture = read_picture(path, pixels=False)
    return picture is not None and read_info(picture).get("name") == name
