from .background_group import BackgroundGroup as BackgroundGroup
from .dtensor import (
    counts as counts,
    fill_ as fill_,
    is_sharded as is_sharded,
    is_unsupported as is_unsupported,
    local as local,
    local_parts as local_parts,
    norms as norms,
    place as place,
    total as total,
    whole as whole,
)
from .fitting import fits_in_memory as fits_in_memory, free_memory as free_memory, memory_in_use as memory_in_use
from .network import connections as connections, is_closed as is_closed, no_connections as no_connections
from .overlap import is_overlapping as is_overlapping
from .randomness import derive_seed as derive_seed
from .ranks import (
    agree as agree,
    first_rank_does as first_rank_does,
    first_rank_says as first_rank_says,
    gathered as gathered,
    gathered_or_raised as gathered_or_raised,
    num_ranks as num_ranks,
    rank as rank,
    stacked as stacked,
    summed as summed,
)
from .safe_path import keep_safe_path as keep_safe_path, safe_path as safe_path
from .usage import keep_memory as keep_memory, num_cpus as num_cpus, thread_beside as thread_beside
