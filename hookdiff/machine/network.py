"""Refuses connections while a stranger's config, or anything else without a reason to connect, is built."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from threading import Lock
from typing import Any

from hookdiff.errors import UserError

_CONNECTING = ("socket.getaddrinfo", "socket.gethostbyname", "socket.connect", "socket.sendto", "socket.sendmsg")
_lock = Lock()
_reasons: list[str] = []  # why no connection is made, for each open `no_connections`
_needs: list[None] = []  # an entry for each open `connections`


def is_closed() -> bool:
    """Return whether connections are refused now."""
    return bool(_reasons) and not _needs


@contextmanager
def no_connections(reason: str) -> Iterator[None]:
    """Refuse all connections that Python code of this process begins in the `with`, in other threads too.

    Other threads are included, since libraries connect from threads of their own. Sockets that have the name of a file
    on this machine stay open. `reason` is for the message.

    Raises:
        UserError: for an attempt, with the host; a library may catch it, and go on without the connection.
    """
    _listen()
    with _held(_reasons, reason):
        yield


@contextmanager
def connections() -> Iterator[None]:
    """Permit connections in the `with`, also within `no_connections`: to a server that the config or the user names."""
    with _held(_needs, None):
        yield


@contextmanager
def _held(held: list[Any], value: Any) -> Iterator[None]:
    with _lock:
        held.append(value)
    try:
        yield
    finally:
        with _lock:
            held.remove(value)


@cache
def _listen() -> None:
    sys.addaudithook(_heard)  # it stays for the life of the process


def _heard(event: str, arguments: tuple[Any, ...]) -> None:
    if _reasons and event in _CONNECTING and is_closed():
        address = arguments[0 if event.startswith("socket.get") else 1]
        host = address[0] if isinstance(address, tuple) else address
        if event.startswith("socket.get") or isinstance(address, tuple):  # else it is the name of a file
            host = host.decode("utf-8", "replace") if isinstance(host, bytes) else host
            raise UserError(f"would connect to {host}: {_reasons[-1]}")
