from .files import (
    Written as Written,
    cannot_write as cannot_write,
    copy_file as copy_file,
    discard as discard,
    make_folder as make_folder,
    new_file as new_file,
    new_folder as new_folder,
    open_own as open_own,
    own_files as own_files,
    write_file as write_file,
    writing as writing,
)
from .hub import is_hub_name as is_hub_name, local_path as local_path
from .lock import check_place as check_place, confine as confine, lock_run_dir as lock_run_dir
from .paths import (
    check_writable as check_writable,
    folder_in as folder_in,
    no_such_folder as no_such_folder,
    partial_of as partial_of,
    user_cache as user_cache,
)
from .reading import (
    check_kind as check_kind,
    only_files as only_files,
    open_file as open_file,
    read_file as read_file,
    reason as reason,
)
from .sharded import INDEX as INDEX, Weights as Weights, read_weights as read_weights
from .stamped_json import is_intact as is_intact, stamped as stamped
from .tensors import check_tensors as check_tensors, open_tensors as open_tensors, write_tensors as write_tensors
from .tree import flatten as flatten, unflatten as unflatten
