"""Hashes of weight files, cached by path, size and times, so that large files are not read at each start."""

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
_STEP = 2.0  # seconds, longer than a tick of a file system's clock: two changes in one tick get the same time


def digest_of(files: Iterable[Path], *texts: str) -> str:
    """Return a hash of the names and the content of `files`, and of `texts`: 32 characters.

    Raises:
        OSError: if a file cannot be read.
    """
    before = _known_digests()
    known = dict(before)
    parts = []
    for path in files:
        key = _key(path)
        if (digest := known.get(key)) is None:
            digest = _sha256(path)
            if key == _key(path) and path.stat().st_ctime < time.time() - _STEP:
                known[key] = digest
        parts.append(f"{path.name} {digest}")
    if known != before:
        with suppress(OSError, StorageError), new_file(user_cache() / _FILE) as partial:
            write_file(partial, json.dumps(known).encode())
    return hashlib.sha256(repr((parts, texts)).encode()).hexdigest()[:32]


def _key(path: Path) -> str:
    about = path.stat()  # programs can set the time of the content, but not the time of the inode
    return f"{path.resolve()} {about.st_size} {about.st_mtime_ns} {about.st_ctime_ns}"


def _known_digests() -> dict[str, str]:
    with suppress(OSError, ValueError, RecursionError):
        digests = json.loads(read_file(user_cache() / _FILE))
        return {str(key): str(value) for key, value in digests.items()} if isinstance(digests, dict) else {}
    return {}


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open_file(path) as file:
        while part := file.read(1 << 24):
            digest.update(part)
    return digest.hexdigest()
