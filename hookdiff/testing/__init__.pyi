from .calls import Calls as Calls
from .companions import COMPANIONS as COMPANIONS
from .compare import (
    Difference as Difference,
    ValueKey as ValueKey,
    all_differences as all_differences,
    assert_same as assert_same,
    is_digest as is_digest,
    leaves as leaves,
    unescaped as unescaped,
    weights as weights,
)
from .contract import assert_keeps_contract as assert_keeps_contract
from .convergence import assert_converges as assert_converges
from .rank_checks import assert_trains_on_ranks as assert_trains_on_ranks
from .record import snapshot as snapshot
from .run_checks import (
    assert_any_order as assert_any_order,
    assert_removable as assert_removable,
    assert_resumes as assert_resumes,
)
from .sink_checks import assert_tracks as assert_tracks
from .threads import OutOfStep as OutOfStep, on_ranks as on_ranks
from .toy import ToyObjective as ToyObjective, ToySampler as ToySampler, toy_loop as toy_loop, toy_model as toy_model
from .transfers import CountTransfers as CountTransfers
