"""Files, images, locks and paths of a run directory."""

from hookdiff.disk.files import (
    cannot_write,
    check_tensors,
    discard,
    make_folder,
    new_file,
    new_folder,
    write_file,
    write_tensors,
    writing,
)
from hookdiff.disk.images import as_pictures, check_writable, save_grid, save_image, to_uint8
from hookdiff.disk.lock import check_place, lock_run_dir
from hookdiff.disk.paths import CONFIG, run_of
from hookdiff.disk.reading import check_kind, open_file, open_tensors, read_file
from hookdiff.disk.tree import flatten, unflatten

__all__ = [
    "CONFIG",
    "as_pictures",
    "cannot_write",
    "check_kind",
    "check_place",
    "check_tensors",
    "check_writable",
    "discard",
    "flatten",
    "lock_run_dir",
    "make_folder",
    "new_file",
    "new_folder",
    "open_file",
    "open_tensors",
    "read_file",
    "run_of",
    "save_grid",
    "save_image",
    "to_uint8",
    "unflatten",
    "write_file",
    "write_tensors",
    "writing",
]
