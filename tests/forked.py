"""Real processes that begin at once: forked from one that has imported torch and hookdiff, and done no more.

Such an import takes longer than the work of most processes in the tests.
"""

from __future__ import annotations

import atexit
import gc
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from threading import Thread
from types import TracebackType
from typing import IO, Any

from attrs import define, field

PATIENCE = 300  # seconds that a process may take on a busy machine
_ROOT = Path(__file__).parents[1]
_END = struct.Struct("qd")  # what is told of the end of a process: the exit code, and the CPU seconds
_IMPORTED = ["torch._dynamo", "torch.distributed.fsdp", "sklearn.datasets", "hookdiff_networks", "hookdiff_checkpoint"]
_IMPORTED += ["hookdiff.cli.run", "hookdiff.experiment.build", "tests.saved_on_ranks"]


@define
class Forks:
    """How many processes were forked, and the CPU seconds of those that have ended."""

    num: int = 0
    seconds: float = 0.0


forks = Forks()  # of this process


@define
class Process:
    """A process that has begun, with the methods of `subprocess.Popen`."""

    pid: int
    _status: int  # from which its exit code can be read
    stdout: IO[str] | None = None
    stderr: IO[str] | None = None
    returncode: int | None = field(init=False, default=None)

    def poll(self) -> int | None:
        """Return the exit code, or None while the process runs."""
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float = PATIENCE) -> int:
        """Wait for the end; return the exit code, below zero for the signal that has killed the process."""
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            self.returncode, seconds = _END.unpack(os.read(self._status, _END.size))
            os.close(self._status)
            forks.seconds += seconds
        return self.returncode

    def communicate(self, timeout: float = PATIENCE) -> tuple[str, str]:
        """Wait for the end; return what was written to stdout and stderr."""
        deadline, written = time.monotonic() + timeout, ["", ""]

        def read(place: int, stream: IO[str]) -> None:
            with stream:
                written[place] = stream.read()

        readers = [Thread(target=read, args=pair, daemon=True) for pair in enumerate((self.stdout, self.stderr))]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join(deadline - time.monotonic())
            if reader.is_alive():
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
        self.wait(deadline - time.monotonic())
        return written[0], written[1]

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End the process at once."""
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        for stream in (self.stdout, self.stderr):
            if stream is not None:
                stream.close()
        self.wait()


def begin(
    work: Callable[..., None],
    *arguments: object,
    folder: Path,
    environment: Mapping[str, str],
    streams: tuple[int, int, int] | None = None,
    session: bool = True,
) -> Process:
    """Call `work` with `arguments` in a new process.

    Args:
        work: A function of a module.
        *arguments: What can be pickled.
        folder: The working directory.
        environment: All environment variables. Those that Python or a library reads once, when it starts, have no
            effect, except PYTHONPATH.
        streams: The descriptors that become stdin, stdout and stderr; by default nothing and two pipes.
        session: The process begins a session, with its terminal if stdin is one.
    """
    order = pickle.dumps((str(folder), dict(environment), session, pickle.dumps((work, arguments))))
    with ExitStack() as opened:
        pipes: list[IO[str]] = []
        if streams is None:
            (out, its_out), (err, its_err) = os.pipe(), os.pipe()
            pipes = [open(out), open(err)]  # noqa: SIM115 the process closes them
            nothing = opened.enter_context(open(os.devnull))
            streams = (nothing.fileno(), its_out, its_err)
            opened.callback(os.close, its_out)
            opened.callback(os.close, its_err)
        status, its_status = os.pipe()
        opened.callback(os.close, its_status)
        socket.send_fds(_server(), [len(order).to_bytes(8, "little")], [*streams, its_status])
        _server().sendall(order)
    forks.num += 1
    return Process(int(os.read(status, 8)), status, *pipes)


@cache
def _server() -> socket.socket:
    """Start the process from which the others are forked; it ends when the socket is closed that this returns."""
    mine, its = socket.socketpair()
    code = "import sys; sys.path[0] = sys.argv[1]; from tests.forked import serve; serve()"
    with its:
        server = subprocess.Popen(
            [sys.executable, "-c", code, _ROOT, str(its.fileno())],
            cwd=_ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=[its.fileno()],
        )

    def end() -> None:
        mine.shutdown(socket.SHUT_RDWR)  # and not only closed: a worker of this process may have it, too
        server.wait()

    atexit.register(end)
    return mine


def serve() -> None:
    """Fork a process for each order, and return in it, or when there are no more orders."""
    orders = socket.socket(fileno=int(sys.argv[2]))
    for name in _IMPORTED:
        import_module(name)
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # none of them is waited for here
    while True:
        size, streams, *_ = socket.recv_fds(orders, 8, 4)
        if not size:
            return
        order = b""
        while len(order) < int.from_bytes(size, "little"):
            order += orders.recv(1 << 16)
        if os.fork() == 0:
            orders.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            *streams, status = streams
            if (pid := os.fork()) == 0:
                os.close(status)
                _work(streams, *pickle.loads(order))
                return
            for number in streams:
                os.close(number)
            os.write(status, b"%8d" % pid)
            _, code, usage = os.wait4(pid, 0)
            os.write(status, _END.pack(os.waitstatus_to_exitcode(code), usage.ru_utime + usage.ru_stime))
            os._exit(0)
        for number in streams:
            os.close(number)


def _work(streams: list[int], folder: str, environment: dict[str, str], session: bool, work: bytes) -> None:
    for place, number in enumerate(streams):
        os.dup2(number, place)
        os.close(number)
    # Python's own are made for the files that they were when it started.
    sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    if session:
        os.setsid()
        if sys.stdin.isatty():
            _take_terminal()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:] = ["", *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep)), *sys.path[1:]]
    import numpy

    numpy.random.seed()  # each process has other numbers, as if it had imported numpy itself
    function, arguments = pickle.loads(work)
    code: Any = 0
    try:
        function(*arguments)
    except SystemExit as end:
        if isinstance(end.code, str):
            raise
        code = end.code or 0
    # As Python ends, but nothing that was imported is freed, which would take most of a second.
    threading._shutdown()
    atexit._run_exitfuncs()
    with suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code & 0xFF)
    sys.exit(code)


def _take_terminal() -> None:
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # so that Ctrl-C sends SIGINT


def command(
    folder: Path,
    *words: object,
    environment: Mapping[str, str],
    streams: tuple[int, int, int] | None = None,
    fresh: bool = False,
    python: Iterable[str] = (),
) -> Any:
    """Start the command `hookdiff` in `folder`, as `begin` does or, if `fresh`, by a new Python with its words."""
    texts = list(map(str, words))
    if not fresh and os.name != "nt":  # Windows cannot fork
        return begin(run_main, "hookdiff.cli", texts, folder=folder, environment=environment, streams=streams)
    stdin, stdout, stderr = streams or (subprocess.DEVNULL, subprocess.PIPE, subprocess.PIPE)
    return subprocess.Popen(
        [sys.executable, *python, "-c", "from hookdiff.cli import main; main()", *texts],
        cwd=folder,
        env=environment,
        text=True,
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        start_new_session=True,
    )


def python(
    code: str, *words: object, folder: Path | None = None, fresh: bool = False, **environment: str
) -> tuple[int, str, str]:
    """Run Python code in a process that has imported torch, or nothing if `fresh`; return exit code, stdout and stderr.

    In a fresh one `environment` may have variables that Python reads when it starts.
    """
    paths = os.pathsep.join(filter(None, sys.path))
    variables = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **environment}
    folder, texts = folder or Path.cwd(), list(map(str, words))
    if fresh or os.name == "nt":  # which cannot fork
        command = [sys.executable, "-c", code, *texts]
        done = subprocess.run(command, cwd=folder, env=variables, text=True, capture_output=True, timeout=PATIENCE)
        return done.returncode, done.stdout, done.stderr
    with begin(run_code, code, texts, folder=folder, environment=variables) as process:
        try:
            out, err = process.communicate()
        finally:
            process.kill()
    return process.wait(), out, err


def run_python(*words: object, folder: Path, paths: Iterable[object] = (), interpreter: object = sys.executable) -> str:
    """Run a new Python, with `paths` first among those that it imports from; it must succeed. Return its stdout."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    line = list(map(str, (interpreter, *words)))
    done = subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True, timeout=2 * PATIENCE)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_code(code: str, words: list[str]) -> None:
    """Run Python code, as `python -c CODE WORDS...` does."""
    sys.argv = ["-c", *words]
    exec(compile(code, "<string>", "exec"), vars(sys.modules["__main__"]))


def run_main(module: str, words: list[str]) -> None:
    """Call `main` of a module, as if it were called with `words` on the command line."""
    sys.argv = ["-c", *words]
    import_module(module).main()


@contextmanager
def forked(folder: Path, num: int, work: Callable[..., None], *arguments: object) -> Iterator[list[Rank]]:
    """Call `work` with the number of the rank and `arguments` in `num` processes, and kill them when the block ends.

    Nothing watches them: if one dies, the others are not ended. Their output goes to files in `folder`.
    """
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    started: list[Rank] = []
    try:
        for rank in range(num):
            files = folder / f"{rank}.out", folder / f"{rank}.err"
            with open(os.devnull) as nothing, files[0].open("wb") as out, files[1].open("wb") as err:
                streams = (nothing.fileno(), out.fileno(), err.fileno())
                place = {"folder": Path.cwd(), "environment": variables, "streams": streams, "session": False}
                started.append(Rank(begin(work, rank, *arguments, **place), files))
        yield started
    finally:
        for one in started:
            one.process.kill()
            one.process.wait()


@define(frozen=True)
class Rank:
    """One of several processes."""

    process: Process
    files: tuple[Path, Path]  # what it writes to stdout and stderr

    def finish(self) -> tuple[int, str, str]:
        """Wait for the process; return its exit code, stdout and stderr."""
        code = self.process.wait()
        out, err = (path.read_text() for path in self.files)
        return code, out, err
