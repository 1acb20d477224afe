"""Shards by URL: any that fsspec reads in parts, such as https://, s3:// or gs://. It is imported for a URL alone."""

import logging
import re
import time
from collections.abc import Mapping
from typing import Any

from hookdiff.data.source import reason
from hookdiff.errors import UserError, nearest

logger = logging.getLogger("hookdiff")

_WAITS = (1, 4, 16)  # seconds before each further attempt
_FINAL = (FileNotFoundError, PermissionError, UserError, ValueError)  # another attempt would fail too
# What servers say about the content, by the names that the file systems of fsspec have for it.
_MARKS = (
    *("ETag", "etag", "generation", "blob_id", "md5Hash", "Content-MD5"),
    *("Last-Modified", "LastModified", "last_modified", "updated"),
)
_TIMES = ("mtime", "modified", "modify", "created")
# They read what another file says: some run a template in it, or unpickle what lies in a folder.
_WRAPPERS = ("reference", "cached", "blockcache", "filecache", "simplecache", "dir", "generic", "dask")


def is_url(path: str) -> bool:
    """Return whether `path` is for fsspec: "protocol://path"."""
    return "://" in path


def file_system(url: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    """Return the file system of `url` for this thread and process, and the path in it.

    fsspec keeps one for each thread, and none over a fork. Raises UserError for a package that is missing, and
    ValueError for an unknown protocol.
    """
    try:
        import fsspec
    except ImportError:
        raise UserError(f"{url}: a URL needs the package fsspec: pip install 'hookdiff[shards]'") from None
    protocol = re.split("::|://", url)[0]
    if "::" in url or protocol in _WRAPPERS:
        raise ValueError(f"{url}: {protocol} is about the files of another URL; give that URL")
    if protocol not in (known := [*fsspec.available_protocols(), *fsspec.registry]):
        raise ValueError(f"{url}: fsspec knows no {protocol!r}{nearest(protocol, known)}")
    try:
        system, path = fsspec.core.url_to_fs(url, **options)
    except ImportError as error:  # its message names the package
        raise UserError(f"{url}: {error}; for http, pip install 'hookdiff[shards]'") from None
    except (TypeError, ValueError) as error:  # options that this file system does not take
        raise ValueError(f"{url}: cannot be opened with these storage_options: {reason(error)}") from error
    return system, path


def state_of(url: str, options: Mapping[str, Any]) -> tuple[int, str]:
    """Return the size of the file at `url`, and a text that changes with its content.

    Raises FileNotFoundError, and ValueError if the file cannot be read in parts.
    """
    system, path = file_system(url, options)
    try:
        about = system.info(path)
    except FileNotFoundError:
        raise
    except Exception as error:  # of any library for any kind of server
        raise ValueError(f"{url}: cannot be read: {reason(error)}") from error
    if about.get("type") == "directory":
        raise ValueError(f"{url}: is a folder, expected a .tar")
    if not isinstance(size := about.get("size"), int):
        raise ValueError(f"{url}: the server does not say its size, so that it cannot be read in parts")
    # A time alone may be that of this request.
    marks = [f"{name} {about[name]}" for name in _MARKS if about.get(name)]
    return size, ", ".join(marks or [f"{name} {about[name]}" for name in _TIMES if about.get(name)])


def read_range(url: str, options: Mapping[str, Any], start: int, size: int) -> bytes:
    """Return `size` bytes of the file at `url`, fewer at its end.

    A server that fails is asked again, up to three times, with a warning. Raises OSError and ValueError with the
    reason.
    """
    for wait in (*_WAITS, None):
        try:
            system, path = file_system(url, options)
            found: bytes = system.cat_file(path, start=start, end=start + size)
            break
        except _FINAL:
            raise
        except Exception as error:  # of any library for any kind of server
            if wait is None:
                raise OSError(f"the server fails: {reason(error)}") from error
            logger.warning("data: %s: %s; the next attempt is in %d s", url, reason(error), wait)
            time.sleep(wait)
    if len(found) > size:
        raise ValueError(f"the server has sent {len(found)} bytes instead of {size}: it does not read in parts")
    return found
