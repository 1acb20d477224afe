"""Hashes of weight files, kept by path, size and times: large files are not read in each start."""

import hashlib
import json
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from hookdiff.disk.files import new_file, write_file
from hookdiff.disk.paths import user_cache
from hookdiff.disk.reading import open_file, read_file
from hookdiff.errors import StorageError

_FILE = "digests.json"
_STEP = 2.0  # seconds, at least one step of a file system's clock: a second change in one step changes no time


def digest_of(files: Iterable[Path], *texts: str) -> str:
    """Return a hash of the names and the content of `files`, and of `texts`: 32 characters.

    Raises:
        OSError: if a file cannot be read.
    """
    kept = _kept()
    known = dict(kept)
    parts = []
    for path in files:
        key = _key(path)
        if (digest := known.get(key)) is None:
            digest = _sha256(path)
            if key == _key(path) and path.stat().st_ctime < time.time() - _STEP:
                known[key] = digest
        parts.append(f"{path.name} {digest}")
    if known != kept:
        with suppress(OSError, StorageError), new_file(user_cache() / _FILE) as partial:
            write_file(partial, json.dumps(known).encode())
    return hashlib.sha256(repr((parts, texts)).encode()).hexdigest()[:32]


def _key(path: Path) -> str:
    about = path.stat()  # the time of the last change of its data can be set, that of its inode cannot
    return f"{path.resolve()} {about.st_size} {about.st_mtime_ns} {about.st_ctime_ns}"


def _kept() -> dict[str, str]:
    with suppress(OSError, ValueError, RecursionError):
        found = json.loads(read_file(user_cache() / _FILE))
        return {str(key): str(value) for key, value in found.items()} if isinstance(found, dict) else {}
    return {}


def _sha256(path: Path) -> str:
    found = hashlib.sha256()
    with open_file(path) as file:
        while part := file.read(1 << 24):
            found.update(part)
    return found.hexdigest()
