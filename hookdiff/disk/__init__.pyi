from .files import (
    Written as Written,
    cannot_write as cannot_write,
    check_tensors as check_tensors,
    discard as discard,
    make_folder as make_folder,
    new_file as new_file,
    new_folder as new_folder,
    partial_of as partial_of,
    write_file as write_file,
    write_tensors as write_tensors,
    writing as writing,
)
from .lock import check_place as check_place, lock_run_dir as lock_run_dir
from .paths import (
    CONFIG as CONFIG,
    check_writable as check_writable,
    folder_in as folder_in,
    no_such_folder as no_such_folder,
    run_of as run_of,
)
from .reading import (
    check_kind as check_kind,
    open_file as open_file,
    open_tensors as open_tensors,
    read_file as read_file,
)
from .stamp import is_intact as is_intact, stamped as stamped
from .tree import flatten as flatten, unflatten as unflatten
