"""Samples in shards by URL, with real file systems of fsspec and a server on this machine."""

import os
import re
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from threading import Event
from typing import Any, ClassVar

import pytest

from hookdiff import StorageError
from hookdiff.images import Store, Transforms, feed_of
from hookdiff_shards import shards
from tests.conftest import as_list, refused, serving, warnings
from tests.plugins.test_shards import assert_same_batches, is_picture, labelled, sample, taken, write

fsspec: Any = pytest.importorskip("fsspec")


@pytest.fixture
def made(here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to a folder with 24 pictures in the shards set/0.tar to set/2.tar, which memory://set has too."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(here / "cache"))
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    for number in range(3):
        path = write(here / "set" / f"{number}.tar", labelled(range(8 * number, 8 * number + 8)))
        memory.pipe(f"/set/{number}.tar", path.read_bytes())
    memory.pipe("/set/classes.txt", b"x\ny\nz\n")
    return here


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("path", ["memory://set", "memory://set/{0..2}.tar", "memory://set/*.tar", "file://{here}/set"])
def test_shards_by_url_give_the_batches_of_the_files(made: Path, path: str, workers: int) -> None:
    source, here = shards(path.replace("{here}", str(made))), shards("set")
    assert as_list(source.labels) == as_list(here.labels) == [k % 3 for k in range(24)]
    options = Transforms(image_size=8, flip=True)
    ours = feed_of(source, options, Store(store="none"), workers=workers)
    assert_same_batches(taken(ours), taken(feed_of(here, options, Store(store="none"))))


def test_names_of_classes_are_found_beside_the_shards(made: Path) -> None:
    assert shards("memory://set").classes == ("x", "y", "z")
    assert shards("set", classes="memory://set/classes.txt").classes == ("x", "y", "z")
    with refused(ValueError, "memory://set/names.txt", "no such file"):
        shards("set", classes="memory://set/names.txt")


@pytest.mark.parametrize(
    ("path", "facts"),
    [
        ("memory://set/{0..4}.tar", [2, "memory://set/3.tar", "memory://set/4.tar"]),
        ("memory://set/7.tar", ["memory://set/7.tar", "no such file"]),
        ("memory://set/*.tra", ["memory://set/*.tra"]),
        ("memory://empty", ["memory://empty", ".tar"]),
        ("memory://set/classes.txt", ["memory://set/classes.txt", "truncated"]),
        ("simplecache::memory://set/0.tar", ["simplecache::memory://set/0.tar", "another URL"]),
        ("reference://set/0.tar", ["reference://set/0.tar", "another URL"]),
        ("memroy://set/0.tar", ["'memroy'", "'memory'"]),
    ],
)
def test_urls_without_shards_are_refused(made: Path, path: str, facts: list[Any]) -> None:
    fsspec.filesystem("memory").makedirs("/empty", exist_ok=True)
    with refused(ValueError, *facts):
        shards(path)


def test_options_that_the_file_system_needs_are_named(made: Path) -> None:
    with refused(ValueError, "storage_options", "github://set/0.tar", "'org'"):
        shards("github://set/0.tar", storage_options={"repository": "x"})


def test_a_shard_that_is_written_again_is_indexed_again(made: Path) -> None:
    before = shards("memory://set/0.tar").fingerprint()
    fsspec.filesystem("memory").pipe("/set/0.tar", write(made / "new.tar", sample(7)).read_bytes())
    data = shards("memory://set/0.tar")
    assert (len(data), data.fingerprint() == before) == (1, False)


class Counted(fsspec.get_filesystem_class("memory")):  # type: ignore[misc]
    """The files in memory by another protocol, with the number of reads."""

    protocol, reads = "counted", 0

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return f"/{path.removeprefix(f'{cls.protocol}://').lstrip('/')}"

    def cat_file(self, *args: Any, **options: Any) -> bytes:
        type(self).reads += 1
        content: bytes = super().cat_file(*args, **options)
        return content


class Flaky(Counted):
    """Fails at each first and second read, and for good after `left` reads."""

    protocol, left = "flaky", 1000

    def cat_file(self, *args: Any, **options: Any) -> bytes:
        content = super().cat_file(*args, **options)
        if self.reads % 3 or self.reads > self.left:
            raise ConnectionResetError("the line is broken")
        return content


@pytest.fixture
def flaky(made: Path, monkeypatch: pytest.MonkeyPatch) -> type[Flaky]:
    """Let flaky:// be such a file system, and no attempt wait."""
    fsspec.register_implementation("flaky", Flaky, clobber=True)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    Flaky.reads, Flaky.left = 0, 1000
    return Flaky


def test_a_server_that_fails_is_asked_again(flaky: type[Flaky], caplog: pytest.LogCaptureFixture) -> None:
    data = shards("flaky://set/0.tar", label="none")
    assert is_picture(data, 5)
    assert len(warnings(caplog)) == 4
    assert all("flaky://set/0.tar" in line and "broken" in line for line in warnings(caplog))
    flaky.left = 0
    with refused(StorageError, "flaky://set/0.tar", "the server fails", "broken"):
        feed_of(data, store=Store(store="memory"))


def test_a_shard_that_is_replaced_ends_the_run(made: Path) -> None:
    data = shards("memory://set/0.tar")
    others = write(made / "others.tar", labelled(range(8, 16)))
    assert others.stat().st_size == (made / "set" / "0.tar").stat().st_size
    fsspec.filesystem("memory").pipe("/set/0.tar", others.read_bytes())
    feed = feed_of(data, store=Store(store="none", unreadable="skip"))
    with refused(StorageError, "memory://set/0.tar", "changed"):
        taken(feed)
    fsspec.filesystem("memory").pipe("/set/0.tar", others.read_bytes()[:1000])
    with refused(StorageError, "memory://set/0.tar", "shorter"):
        taken(feed)


# A server on this machine


class Server(BaseHTTPRequestHandler):
    """Serves the files of the working directory, in parts if these are asked for."""

    protocol_version = "HTTP/1.1"
    gives_parts, has_marks = True, True
    asked: ClassVar[list[str]] = []
    says: ClassVar[dict[str, int]] = {}  # what it answers by path, instead of the file; 0: nothing

    def do_HEAD(self) -> None:
        self.answer(has_body=False)

    def do_GET(self) -> None:
        self.answer(has_body=True)

    def answer(self, has_body: bool) -> None:
        path = Path(self.path.lstrip("/").partition("?")[0])
        type(self).asked.append(self.path)
        if (status := self.says.get(str(path))) is not None:
            if status:
                self.send_error(status)
            else:
                Event().wait(2)
                self.close_connection = True
            return
        content = path.read_bytes() if path.is_file() else b""
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        part = content
        if asked and self.gives_parts and int(asked[1]) >= max(len(content), 1):
            self.send_error(416)
            return
        if asked and self.gives_parts and path.is_file():
            part = content[int(asked[1]) : int(asked[2]) + 1 if asked[2] else None]
        self.send_response(404 if not path.is_file() else 206 if part is not content else 200)
        self.send_header("Content-Length", str(len(part)))
        if self.gives_parts:
            self.send_header("Accept-Ranges", "bytes")
        if path.is_file() and self.has_marks:
            self.send_header("ETag", f'"{os.stat(path).st_mtime_ns}"')
        if part is not content and asked:
            self.send_header("Content-Range", f"bytes {asked[1]}-{int(asked[1]) + len(part) - 1}/{len(content)}")
        self.end_headers()
        if has_body:
            self.wfile.write(part)

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


@pytest.fixture
def server(made: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Serve the folder, and return its URL."""
    pytest.importorskip("aiohttp")
    for name, value in {"gives_parts": True, "has_marks": True, "says": {}, "asked": []}.items():
        monkeypatch.setattr(Server, name, value)
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # no attempt waits
    with serving(Server) as address:
        yield f"http://{address}"


@pytest.mark.parametrize("workers", [0, 2])
def test_shards_are_read_by_http(server: str, workers: int) -> None:
    ours = feed_of(shards(f"{server}/set/{{0..2}}.tar"), store=Store(store="none"), workers=workers)
    assert_same_batches(taken(ours), taken(feed_of(shards("set"), store=Store(store="none"))))


def test_nothing_beyond_the_end_is_asked_for(server: str) -> None:
    whole = write(Path("set/cut.tar"), {**sample(0), "0000.txt": b""}).read_bytes()
    assert len(shards(f"{server}/set/cut.tar")) == 1
    Path("set/cut.tar").write_bytes(whole[:1536])  # two headers and the picture between them, and no end mark
    with refused(ValueError, f"{server}/set/cut.tar", "cut"):
        shards(f"{server}/set/cut.tar")


def test_a_change_on_the_server_is_seen(server: str) -> None:
    url = f"{server}/set/0.tar?token=x"
    before = shards(url).fingerprint()
    assert shards(url).fingerprint() == before
    status = os.stat("set/0.tar")
    os.utime("set/0.tar", ns=(status.st_atime_ns, status.st_mtime_ns + 10**9))
    assert shards(url).fingerprint() != before


def test_an_index_is_made_anew_where_no_change_could_be_seen(server: str) -> None:
    Server.has_marks = False
    url, others = f"{server}/set/0.tar", labelled(range(8, 16))
    assert shards(url).name(0).endswith("[0000]")
    write(Path("set/0.tar"), others)
    assert shards(url).name(0).endswith("[0008]")


def test_a_server_that_gives_no_parts_is_refused(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Server, "gives_parts", False)
    with refused(ValueError, f"{server}/set/0.tar", "parts"):
        shards(f"{server}/set/{{0..2}}.tar")
    assert not any("1.tar" in path for path in Server.asked)
    with refused(ValueError, f"{server}/set/9.tar", "no such file"):
        shards(f"{server}/set/9.tar")


@pytest.mark.parametrize(
    ("status", "kind", "facts"),
    [
        (404, ValueError, ["no such file"]),
        (403, ValueError, [403]),
        (400, ValueError, [400]),
        (503, StorageError, ["the server fails", 503]),
        (0, StorageError, ["the server fails", "nothing"]),
    ],
)
def test_servers_that_refuse_or_fail(server: str, status: int, kind: type[Exception], facts: list[Any]) -> None:
    from aiohttp import ClientTimeout

    # Half a second is much for the answers that come, and little for one that never does.
    options = {"client_kwargs": {"timeout": ClientTimeout(sock_read=0.5)}} if status == 0 else None
    data = shards(f"{server}/set/0.tar", storage_options=options)
    Server.says["set/0.tar"] = status
    with refused(kind, f"{server}/set/0.tar", *facts):
        shards(f"{server}/set/0.tar", storage_options=options)
    with refused(StorageError, f"{server}/set/0.tar", "" if status == 404 else facts[-1]):
        data.load(3)  # type: ignore[union-attr]


def test_a_server_that_is_down_is_not_taken_for_a_missing_file(server: str) -> None:
    with serving(Server) as closed:
        pass
    with refused(StorageError, f"{closed}/set/0.tar", "the server fails"):
        shards(f"http://{closed}/set/0.tar")
    with refused(StorageError, f"{closed}/classes.txt", "the server fails"):
        shards(f"{server}/set/0.tar", classes=f"http://{closed}/classes.txt")


def test_names_beside_the_shards_that_are_forbidden_are_taken_for_missing(server: str) -> None:
    Server.says.update({"set/classes.json": 409, "set/classes.txt": 403})
    assert shards(f"{server}/set/0.tar").classes is None
    Server.says.clear()
    Path("set/classes.txt").write_text("x\ny\nz\n")
    assert shards(f"{server}/set/0.tar").classes == ("x", "y", "z")
    Server.says["set/classes.txt"] = 403
    with refused(ValueError, f"{server}/set/classes.txt", 403):
        shards(f"{server}/set/0.tar", classes=f"{server}/set/classes.txt")


def test_a_shard_without_bytes_is_named_as_empty(server: str) -> None:
    Path("set/nothing.tar").write_bytes(b"")
    with refused(ValueError, f"{server}/set/nothing.tar", "empty"):
        shards(f"{server}/set/nothing.tar")
