"""Output of the commands. Unprintable characters are escaped. A closed, full or broken stream does not end a run."""

import logging
import os
import sys
from contextlib import suppress
from typing import Any, TextIO

import click

from hookdiff.errors import shown


def _printable(text: str) -> str:
    return "\n".join(map(shown, text.split("\n")))


def say(text: str, err: bool = False) -> None:
    """Print `text`, or nothing if the stream cannot be written."""
    with suppress(OSError, ValueError):  # ValueError: the stream is closed
        click.echo(_printable(text), err=err)


class _Handler(logging.StreamHandler[TextIO]):
    def format(self, record: logging.LogRecord) -> str:
        return _printable(super().format(record))

    def handleError(self, record: logging.LogRecord) -> None:
        """Drop the record, because the error cannot be shown anywhere."""


def log_to_stderr() -> None:
    """Print log messages, and the progress of long work, unless this process has log handlers already."""
    logging.basicConfig(handlers=[_Handler()], format="%(message)s")
    logging.getLogger("hookdiff.terminal.pace").setLevel(logging.INFO)


def open_streams() -> None:
    """Open the null device in place of closed standard streams, so that no file gets their file descriptors."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 it stays open
    stdout: Any = sys.stdout
    if getattr(stdout, "errors", None) in ("strict", "surrogateescape"):
        stdout.reconfigure(errors="backslashreplace")  # names of files need not be UTF-8


def drop_unwritten() -> None:
    """Drop output that cannot be written: Python would try again when it exits, and change the exit code to 120."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except ValueError:  # it is closed
            continue
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
