"""The runs that need no `--trust`, because this user made or trusted them: each has a file in the user's app folder.

The name of the file is a hash of the path, the file system and the bytes of config.toml, so that a run that was copied,
moved or edited is not trusted.
"""

import hashlib
import logging
import os
from pathlib import Path

logger = logging.getLogger("hookdiff")


def remember(path: Path, data: bytes, asks: bool = True) -> None:
    """Remember that the user trusts the config at `path`, with the content `data`.

    If the folder cannot be written, this is logged, as a warning if the run `asks` for trust.
    """
    try:
        place = _place(path, data)
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.path.lexists(place):
            return
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        with os.fdopen(os.open(place, flags, 0o600), "wb") as file:
            file.write(os.fsencode(os.path.realpath(path)) + b"\n")  # for people
    except FileExistsError:  # another process has just remembered it
        pass
    except OSError as error:
        level = logging.WARNING if asks else logging.DEBUG
        logger.log(level, "%s: the run will ask for --trust again: %s", path.parent, error)


def is_remembered(path: Path, data: bytes) -> bool:
    """Return whether the config at `path`, with the content `data`, was remembered by this user."""
    try:
        status = os.lstat(_place(path, data))
    except OSError:
        return False
    return os.name == "nt" or status.st_uid == os.geteuid()


def _place(path: Path, data: bytes) -> Path:
    import click

    folder = Path(os.path.realpath(path.parent))
    key = b"\0".join((os.fsencode(folder / path.name), str(os.stat(folder).st_dev).encode(), data))
    return Path(click.get_app_dir("hookdiff"), "runs", hashlib.sha256(key).hexdigest())
