"""The pictures in a run directory: `NAME/step-00001000.png`, as the PNG files themselves say."""

import re
from pathlib import Path

from hookdiff.disk.reading import check_kind
from hookdiff.pictures import read_info

_FILE = re.compile(r"step-(\d{8,18})\.png")


def picture_path(run_dir: Path, name: str, step: int) -> Path:
    """Return the path of the picture `name` of `step`."""
    return run_dir.joinpath(*name.split("/"), f"step-{step:08d}.png")


def find_pictures(run_dir: Path) -> dict[str, dict[int, Path]]:
    """Return the files of the pictures that a run has logged: by name, and in it by step, in their order."""
    found: dict[str, dict[int, Path]] = {}
    for path in sorted(run_dir.glob("**/step-*.png")):
        if (match := _FILE.fullmatch(path.name)) and _is_logged(path):
            name = path.parent.relative_to(run_dir).as_posix()
            found.setdefault(name, {})[int(match[1])] = path
    return {name: dict(sorted(pictures.items())) for name, pictures in found.items()}


def newest_picture(run_dir: Path, name: str) -> Path | None:
    """Return the file of the newest picture called `name` that a run has logged, or None.

    Only that file is opened, and those after it that are damaged or are no logged pictures.
    """
    files = picture_path(run_dir, name, 0).parent.glob("step-*.png")
    found = {int(match[1]): path for path in files if (match := _FILE.fullmatch(path.name))}
    return next((path for _, path in sorted(found.items(), reverse=True) if _is_logged(path)), None)


def _is_logged(path: Path) -> bool:
    """Return whether the file says that it is a picture of a run; a user may keep others beside them."""
    from PIL import Image

    try:
        check_kind(path)
        with Image.open(path) as image:
            return "name" in read_info(image)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):  # Pillow's errors for damaged files
        return False
