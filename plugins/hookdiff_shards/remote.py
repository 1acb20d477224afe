"""Shards at any URL that fsspec reads in parts, such as https://, s3:// or gs://. Only a URL imports fsspec."""

import logging
import re
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from hookdiff import StorageError, UserError, nearest
from hookdiff.disk import reason
from hookdiff.machine import connections

logger = logging.getLogger("hookdiff")

Result = TypeVar("Result")

_WAITS = (1, 4, 16)  # seconds before each further attempt
_SILENCE = 30  # seconds for which a server may send nothing
_MISSING, _REFUSED, _LATER, _BEYOND = (404, 410), (401, 403), (408, 425, 429), 416  # HTTP status codes
_MISTAKES = (ValueError, TypeError, LookupError, AttributeError)  # another attempt would fail too
# Metadata from servers that changes with the content, by its names in the file systems of fsspec.
_MARKS = (
    *("ETag", "etag", "generation", "blob_id", "md5Hash", "Content-MD5"),
    *("Last-Modified", "LastModified", "last_modified", "updated"),
)
_TIMES = ("mtime", "modified", "modify", "created")
# File systems that wrap another URL. Some run a template in a file, unpickle files of a folder, or write to any folder.
_WRAPPERS = (
    *("zip", "tar", "libarchive", "dir", "reference", "generic", "dask", "async_wrapper", "asyncwrapper"),
    *("cached", "blockcache", "filecache", "simplecache"),
)
_OVERRIDES = ("protocol", "fo", "fs", "target_protocol", "target_options")  # options that replace the URL


def is_url(path: str) -> bool:
    """Return whether `path` is for fsspec: "protocol://path"."""
    return "://" in path


def file_system(url: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    """Return the file system of `url` for this thread and process, and the path in it.

    fsspec keeps one file system for each thread, and none after a fork. Raises UserError for a package that is missing,
    and ValueError for an unknown protocol.
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
    if replaced := next((key for key in options if key in (*_OVERRIDES, *known)), None):
        raise ValueError(f"storage_options: {replaced!r} would open another URL than {url}; give that URL")
    if protocol in ("http", "https"):
        options = {"client_kwargs": _patience(), **options}
    try:
        system, path = fsspec.core.url_to_fs(url, **options)
    except ImportError as error:  # its message names the package
        raise UserError(f"{url}: {error}; for http, pip install 'hookdiff[shards]'") from None
    except (TypeError, ValueError) as error:  # options that this file system does not take
        raise ValueError(f"{url}: cannot be opened with these storage_options: {reason(error)}") from error
    return system, path


def _patience() -> dict[str, Any]:
    """Return options of aiohttp that limit the silence of a server; the default of aiohttp limits the whole answer."""
    try:
        from aiohttp import ClientTimeout
    except ImportError:  # fsspec reports that aiohttp is missing
        return {}
    return {"timeout": ClientTimeout(total=None, sock_connect=_SILENCE, sock_read=_SILENCE)}


def asked(url: str, options: Mapping[str, Any], call: Callable[[Any, str], Result]) -> Result:
    """Return `call(file system, path)` for `url`. A server that fails is asked again up to three times, with a warning.

    Raises FileNotFoundError if the server has no such file, PermissionError if it refuses it, ValueError for a wrong
    URL or option, and StorageError if all attempts fail.
    """
    waits = iter(_WAITS)
    while True:
        try:
            return call(*file_system(url, options))
        except Exception as error:  # may come from any library
            cause = _own_cause(error)
            why = "it has sent nothing in time" if isinstance(cause, TimeoutError) else reason(cause)
            status = getattr(cause, "status", None) or 0  # the HTTP status code
            if status in _MISSING:
                raise FileNotFoundError(url) from error
            if status in _REFUSED:
                raise PermissionError(why) from error
            if status == _BEYOND:
                raise ValueError(f"{url}: the file has become shorter; start again") from error
            if isinstance(cause, _MISTAKES) or (400 <= status < 500 and status not in _LATER):
                raise ValueError(why if why.startswith(url) else f"{url}: {why}") from error
            if isinstance(cause, (FileNotFoundError, PermissionError, UserError)):
                raise cause from None
            if (wait := next(waits, None)) is None:
                raise StorageError(f"{url}: the server fails: {why}; start again once it answers") from error
            logger.warning("data: %s: %s; the next attempt is in %d s", url, why, wait)
        time.sleep(wait)


def _own_cause(error: Exception) -> Exception:
    """Return the error that made the reading fail: for http, fsspec reports each failure as a missing file."""
    cause = error.__cause__
    is_failure = isinstance(cause, OSError) or type(cause).__module__.startswith("aiohttp")
    return cause if isinstance(error, FileNotFoundError) and isinstance(cause, Exception) and is_failure else error


def state_of(url: str, options: Mapping[str, Any]) -> tuple[int, str]:
    """Return the size of the file at `url`, and a text that changes with its content; "" if the server gives none.

    Raises as `asked` does, and ValueError if the file cannot be read in parts.
    """
    about: dict[str, Any] = asked(url, options, lambda system, path: system.info(path))
    if about.get("type") == "directory":
        raise ValueError(f"{url}: is a folder, expected a .tar")
    if not isinstance(size := about.get("size"), int):
        raise ValueError(f"{url}: the server does not give the file's size, needed to read parts; download the file")
    # A time is used only if there is no other mark: some servers give the time of the request.
    marks = [f"{name} {about[name]}" for name in _MARKS if about.get(name)]
    return size, ", ".join(marks or [f"{name} {about[name]}" for name in _TIMES if about.get(name)])


def check_parts(url: str, options: Mapping[str, Any]) -> None:
    """Raise ValueError if the server of `url` sends only whole files, or as `asked` does. No whole file is read."""
    if not re.match("https?://", url):
        return

    def second_byte(system: Any, path: str) -> bytes:
        with system.open(path, cache_type="none") as file:
            file.seek(1)
            content: bytes = file.read(1)
            return content

    try:
        asked(url, options, second_byte)
    except ValueError as error:
        raise ValueError(f"{url}: the server gives no parts of files (ranges of bytes); download the shards") from error


def read_range(url: str, options: Mapping[str, Any], start: int, size: int) -> bytes:
    """Return `size` bytes of the file at `url`, fewer at its end. Raises StorageError if that fails."""
    try:
        with connections():  # the server is permitted, since the source could be made
            content: bytes = asked(
                url, options, lambda system, path: system.cat_file(path, start=start, end=start + size)
            )
    except FileNotFoundError:
        raise StorageError(f"{url}: the server no longer has this file; put it back") from None
    except (PermissionError, ValueError) as error:
        why = reason(error).removeprefix(f"{url}: ")
        raise StorageError(f"{url}: the server no longer gives this file: {why}") from error
    if len(content) > size:
        raise StorageError(f"{url}: the server has sent {len(content)} bytes instead of {size}")
    return content
