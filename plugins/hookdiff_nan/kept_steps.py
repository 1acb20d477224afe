"""Finds the folders of kept steps, and checks them."""

from pathlib import Path

from hookdiff import UserError, nearest

STEP = "step.json"
_EXAMPLE = "a folder such as RUN/nan/step-00000123-position-00000123"


def kept_in(root: Path) -> set[str]:
    """Return the names of the steps that the folder `root` holds."""
    return {path.name for path in root.glob("step-*-position-*") if path.is_dir()}


def check_kept(path: Path) -> None:
    """Raise UserError unless `path` is the folder of a kept step."""
    if not path.is_dir():
        beside = [other.name for other in path.parent.iterdir()] if path.parent.is_dir() else []
        wrong = "is not a folder" if path.exists() else f"no such folder{nearest(path.name, beside)}"
        raise UserError(f"{path}: {wrong}; expected {_EXAMPLE}")
    if not (path / STEP).is_file():
        near = sorted(kept_in(path) or kept_in(path / "nan"))
        expected = f"give one of the steps in it: {', '.join(near)}" if near else f"expected {_EXAMPLE}"
        raise UserError(f"{path} is not a step kept for replay, as it has no {STEP}; {expected}")
