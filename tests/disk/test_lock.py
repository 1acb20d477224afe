from contextlib import ExitStack
from pathlib import Path

from hookdiff.disk.lock import is_locked, lock_run_dir
from hookdiff.errors import UserError
from tests.conftest import refused
from tests.forked import forked


def take(rank: int, path: Path) -> None:
    with ExitStack() as resources, refused(UserError, path, "process", "--out DIR"):
        lock_run_dir(path, resources)
    assert is_locked(path)


def test_another_process_does_not_get_the_lock(tmp_path: Path) -> None:
    with ExitStack() as resources:
        lock_run_dir(tmp_path, resources)
        with forked(tmp_path, 1, take, tmp_path) as (process,):
            code, _, err = process.finish()
        assert (code, err) == (0, "")
    assert not is_locked(tmp_path)
