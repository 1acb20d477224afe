"""A command on a pseudo terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import sys
import termios
import threading
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.conftest import PATIENCE, wait_until
from tests.forked import command

_CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    """Runs the command line in `folder` on a terminal of its own, until the end of the `with`."""

    def __init__(
        self, folder: Path, *words: object, columns: int = 80, lines: int = 24, fresh: bool = False, **environment: str
    ) -> None:
        self._master, slave = pty.openpty()
        self._written = b""
        self.resize(columns, lines)
        kept = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR")}
        usual = {"TERM": "xterm-256color", "COLORTERM": "truecolor", "PYTHONPATH": os.pathsep.join(sys.path)}
        variables, streams = {**kept, **usual, **environment}, (slave, slave, slave)
        self.process = command(folder, *words, environment=variables, streams=streams, fresh=fresh)
        os.close(slave)
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()
        os.close(self._master)

    def _read(self) -> None:
        while True:
            try:
                self._written += os.read(self._master, 1 << 16)
            except OSError:  # the end of a terminal
                return

    def resize(self, columns: int, lines: int) -> None:
        """Give the terminal another size."""
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def press(self, keys: bytes) -> None:
        """Press keys."""
        os.write(self._master, keys)

    @property
    def written(self) -> str:
        """All that the command has written, with the codes of the terminal."""
        return self._written.decode(errors="replace")

    @property
    def screen(self) -> str:
        """What was written since the last return to the upper left corner, without codes."""
        return _CODES.sub("", self.written.rpartition("\x1b[H")[2]).replace("\r", "")

    def wait_for(self, *texts: str) -> None:
        """Wait until the screen has all these texts."""
        wait_until(lambda: all(text in self.screen for text in texts) or self.process.poll() is not None)
        assert all(text in self.screen for text in texts), self.written

    def finish(self) -> tuple[int, str]:
        """Wait for the end of the command; return its exit code and what it left on the terminal, without codes."""
        code = self.process.wait(PATIENCE)
        self._reader.join()
        return code, _CODES.sub("", self.written.rpartition("\x1b[?1049l")[2]).replace("\r", "")


def shown(folder: Path, *words: object, **options: Any) -> tuple[str, str]:
    """Run a command that has to succeed; return what it left on the terminal, and all that it wrote with the codes."""
    with Terminal(folder, *words, **options) as terminal:
        code, left = terminal.finish()
    assert code == 0, left
    return left, terminal.written
