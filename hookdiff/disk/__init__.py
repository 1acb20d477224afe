"""Files, folders and locks: a run writes each file whole or not at all."""

from hookdiff.disk.files import (
    Written,
    cannot_write,
    check_tensors,
    make_folder,
    new_file,
    new_folder,
    sync_folder,
    write_file,
    write_tensors,
)
from hookdiff.disk.images import as_pictures, check_writable, save_grid, to_uint8
from hookdiff.disk.lock import lock_run_dir
from hookdiff.disk.paths import CONFIG, check_run_dir, is_empty, no_such_folder, run_of
from hookdiff.disk.tree import State, flatten, plain, unflatten

__all__ = [
    "CONFIG",
    "State",
    "Written",
    "as_pictures",
    "cannot_write",
    "check_run_dir",
    "check_tensors",
    "check_writable",
    "flatten",
    "is_empty",
    "lock_run_dir",
    "make_folder",
    "new_file",
    "new_folder",
    "no_such_folder",
    "plain",
    "run_of",
    "save_grid",
    "sync_folder",
    "to_uint8",
    "unflatten",
    "write_file",
    "write_tensors",
]
