"""Files, images, locks and paths of a run directory."""

from hookdiff.disk.files import (
    cannot_write,
    check_tensors,
    make_folder,
    new_file,
    new_folder,
    write_file,
    write_tensors,
    writing,
)
from hookdiff.disk.images import as_pictures, check_writable, save_grid, save_image, to_uint8
from hookdiff.disk.lock import lock_run_dir
from hookdiff.disk.paths import CONFIG, run_of
from hookdiff.disk.tree import flatten, unflatten

__all__ = [
    "CONFIG",
    "as_pictures",
    "cannot_write",
    "check_tensors",
    "check_writable",
    "flatten",
    "lock_run_dir",
    "make_folder",
    "new_file",
    "new_folder",
    "run_of",
    "save_grid",
    "save_image",
    "to_uint8",
    "unflatten",
    "write_file",
    "write_tensors",
    "writing",
]
