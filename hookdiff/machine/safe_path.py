"""Keeps processes that this process starts from importing from the working directory, which may be a stranger's.

Libraries start processes as `python -c` or `python -m`, which would look there first, even for the standard library.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

_SAFE, _PATH = "PYTHONSAFEPATH", "PYTHONPATH"


def keep_safe_path() -> None:
    """Set the variables of the environment for all processes that start later.

    An empty entry of PYTHONPATH, which also means the working directory, is left out.
    """
    os.environ[_SAFE] = "1"
    if path := os.environ.pop(_PATH, ""):
        os.environ[_PATH] = os.pathsep.join(filter(None, path.split(os.pathsep)))


@contextmanager
def safe_path() -> Iterator[None]:
    """Set the variables as `keep_safe_path` does, for the processes that start in the `with`."""
    before = {name: os.environ.get(name) for name in (_SAFE, _PATH)}
    keep_safe_path()
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
