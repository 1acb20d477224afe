"""Without trust, the config of a run opens no URL of its choice, hands no options on, and writes nowhere else."""

import os
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, ClassVar

import numpy
import pytest
import tomli
import tomli_w

from hookdiff import ConfigError, build_loop, load_config
from hookdiff.experiment.config import make_plugin
from hookdiff.experiment.trust import dangers
from hookdiff.images.store import Store
from hookdiff.log.picture import Picture
from hookdiff.testing import examples, toy_loop
from hookdiff_huggingface import HuggingFace
from hookdiff_shards import shards
from tests.conftest import SMALL, check_facts, check_refused, mostly_wide, refused, serving, write_small
from tests.hostile.mutations import listing

pytest.importorskip("fsspec")
pytest.importorskip("aiohttp")


class Counting(BaseHTTPRequestHandler):
    """Answers every request with the same bytes, and notes it."""

    asked: ClassVar[list[tuple[str, Any]]] = []

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self.asked.append((self.path, self.headers))
        self.send_response(200)
        self.send_header("Content-Length", "4")
        self.end_headers()
        self.wfile.write(b"evil" if self.command == "GET" else b"")

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Serve the file evil.pth, and return its address."""
    monkeypatch.setattr(Counting, "asked", [])
    with serving(Counting) as address:
        yield address


@pytest.fixture
def run(here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to the home of a user, and return a run of a stranger in it; evil.pth in "own" is a file of the user."""
    for name in ("own", "run/checkpoints"):
        (here / name).mkdir(parents=True)
    (here / "own" / "evil.pth").write_text("own")
    (here / "run" / "link").symlink_to(here / "own")
    monkeypatch.setenv("HOME", str(here))
    return here / "run"


CACHE = {"cache_storage": "own", "same_names": True}
EVIL = "http://HOST/evil.pth"
# Path and options of shards; each of them would write the stranger's bytes over own/evil.pth, or open what it likes.
OPENED: list[tuple[Any, dict[str, Any]]] = [
    ("zip://train.tar", {"fo": f"filecache::{EVIL}", "target_options": {"filecache": CACHE}}),
    ("http://HOST/x.tar", {"protocol": "zip", "fo": f"filecache::{EVIL}", "target_options": {"filecache": CACHE}}),
    ("http://HOST/x.tar", {"protocol": "filecache", "target_protocol": "http", "fo": "http://HOST/evil.pth", **CACHE}),
    ("http://HOST/x.tar", {"filecache": CACHE}),
    ("filecache://HOST/evil.pth", {"target_protocol": "http", **CACHE}),
    (f"filecache::{EVIL}", {"filecache": CACHE}),
    (f"simplecache::{EVIL}", {"simplecache": CACHE}),
    (["own/0.tar", f"blockcache::{EVIL}"], {"blockcache": CACHE}),
    ("tar://x.tar", {"fo": EVIL}),
    ("libarchive://x.tar", {"fo": EVIL}),
    ("dir://x.tar", {"path": "own", "target_protocol": "file"}),
    ("reference://x.tar", {"fo": EVIL}),
    ("generic://x.tar", {}),
    ("dask://x.tar", {"target_protocol": "file"}),
    ("async_wrapper://x.tar", {"target_protocol": "file"}),
    ("zip:/{/x.tar,/y.tar}", {"fo": EVIL}),
    ("{zip,tar}://x.tar", {"fo": EVIL}),
]
# Of these, the user may give some himself.
REMOTE: list[tuple[Any, dict[str, Any]]] = [
    ("http://HOST/x.tar", {"client_kwargs": {"headers": {"X-Token": "1"}}}),
    ("s3://bucket/x.tar", {"client_kwargs": {"endpoint_url": "http://HOST"}}),
    ("s3://bucket/x.tar", {"endpoint_url": "http://HOST"}),
    ("ftp://HOST/x.tar", {}),
    ("memory://x.tar", {}),
    ("github://org:repo@/x.tar", {}),
]


def written(run: Path, server: str, path: Any, options: dict[str, Any]) -> Path:
    """Write the config of the run, with the server in place of HOST."""
    data = {"source": "shards", "path": path, **({"storage_options": options} if options else {})}
    config = run / "config.toml"
    config.write_text(tomli_w.dumps({**SMALL, "data": data}).replace("HOST", server))
    return config


@pytest.mark.parametrize("command", mostly_wide(2, ["run", "resume", "data", "doctor", "check", "memory", "profile"]))
def test_a_run_opens_nothing_of_its_choice(run: Path, server: str, hookdiff: Callable[..., Any], command: str) -> None:
    config, before = written(run, server, *OPENED[0]), listing(run.parent)
    result = hookdiff(command, run if command in ("doctor", "resume") else config)
    check_refused(result, config, "data.storage_options", "--trust")
    assert (Counting.asked, listing(run.parent)) == ([], before)


@pytest.mark.parametrize(("path", "options"), [*mostly_wide(3, OPENED), *mostly_wide(4, REMOTE)])
def test_options_and_urls_need_trust(run: Path, server: str, path: Any, options: dict[str, Any]) -> None:
    with refused(ConfigError, "data.storage_options" if options else "data.path", "--trust"):
        load_config(written(run, server, path, options))
    if not str(path).startswith(("http://", "s3://", "zip:/{")):  # the last makes its URL later, and is refused then
        with refused(ConfigError, "data.path", "--trust"):
            load_config(written(run, server, path, {}))


@pytest.mark.parametrize(("path", "options"), mostly_wide(6, OPENED))
def test_nobody_opens_one_url_by_another(run: Path, server: str, path: Any, options: dict[str, Any]) -> None:
    before = listing(run.parent)
    given = tomli.loads(tomli_w.dumps({"path": path, "options": options}).replace("HOST", server))
    with pytest.raises(ValueError, match=r"URL|storage_options|own/0\.tar"):
        shards(given["path"], storage_options=given["options"])
    assert ([path for path, _ in Counting.asked if "evil" in path], listing(run.parent)) == ([], before)


def test_headers_of_the_user_reach_the_server(run: Path, server: str) -> None:
    with pytest.raises(ValueError, match=r"x\.tar"):
        shards(f"http://{server}/x.tar", storage_options={"headers": {"X-Token": "1"}})
    assert {headers["X-Token"] for _, headers in Counting.asked} == {"1"}


SERVERS = ["http://h/x.tar", "https://h/x.tar", "s3://b/x.tar", "gs://b/x.tar", "az://b/x.tar", "hf://datasets/a/b/x"]
HERE = ["x.tar", "file://x.tar"]


def test_urls_need_trust_unless_the_user_sets_them(run: Path) -> None:
    for path in [*HERE, HERE]:
        config = load_config(write_small(run / "config.toml", data={"source": "shards", "path": path}))
        assert config.data.arguments["path"] == path
        assert config.data.is_strangers
        assert config.needs_trust == ()
    of_hub = {"source": "huggingface", "path": "a/b"}
    for data in (*({"source": "shards", "path": path} for path in [*SERVERS, [*HERE, *SERVERS]]), of_hub):
        path = write_small(run / "config.toml", data=data)
        with refused(ConfigError, "data.path", "--set", "--trust"):
            load_config(path)
        assert load_config(path, trust=True).needs_trust == ("data.path",)
        assert load_config(write_small(run.parent / "own.toml", data=data)).needs_trust == ("data.path",)
        if isinstance(data["path"], str):
            assert not load_config(path, settings=[f"data.path={data['path']}"]).data.is_strangers  # it may connect
    stranger = write_small(run / "config.toml", data={"source": "shards", "path": "x.tar"})
    own = ["data.path=ftp://h/x.tar", "data.storage_options.client_kwargs.endpoint_url=http://h", "data.index_dir=own"]
    config = load_config(stranger, settings=own)
    assert config.data.arguments["storage_options"] == {"client_kwargs": {"endpoint_url": "http://h"}}
    mixed = {"source": "shards", "path": "x.tar", "storage_options": {"fo": "y"}}
    with refused(ConfigError, "data.storage_options", "--trust"):
        load_config(write_small(stranger, data=mixed), settings=own)
    assert load_config(stranger, trust=True).needs_trust == ("data.storage_options",)


# The tables of a config that write to FOLDER, and the key that names it.
WRITING: list[tuple[str, dict[str, Any]]] = [
    ("data.cache_dir", {"data": {"source": "digits", "store": "disk", "cache_dir": "FOLDER"}}),
    ("data.index_dir", {"data": {"source": "shards", "path": "x.tar", "index_dir": "FOLDER"}}),
    ("data.root", {"data": {"source": "fashion-mnist", "root": "FOLDER", "download": True}}),
    *(
        ("data.root", {"data": {"source": source, "root": "FOLDER", "download": True}})
        for source in (
            "torchvision:CIFAR10",
            "torchvision.datasets:FashionMNIST",
            "torchvision.datasets.mnist:FashionMNIST",
        )
    ),
    *(
        ("data.root", {"data": {"source": f"torchvision:{name}", "root": "FOLDER", **keys}})
        for name, keys in {"PhotoTour": {"name": "notredame"}, "ImageNet": {}, "Cityscapes": {}, "SEMEION": {}}.items()
    ),
    *(
        ("data.root", {"data": {"source": f"torchvision:{name}", "root": "FOLDER"}})
        for name in ("Caltech101", "Caltech256", "INaturalist")
    ),
    ("plugins.tensorboard.dir", {"run": {"plugins": ["tensorboard"]}, "plugins": {"tensorboard": {"dir": "FOLDER"}}}),
    ("plugins.wandb.dir", {"run": {"plugins": ["wandb"]}, "plugins": {"wandb": {"dir": "FOLDER"}}}),
    ("plugins.aim.repo", {"run": {"plugins": ["aim"]}, "plugins": {"aim": {"repo": "FOLDER"}}}),
    (
        "plugins.mirror.folder",
        {"run": {"plugins": ["hookdiff.testing.examples:Mirror"]}, "plugins": {"mirror": {"folder": "FOLDER"}}},
    ),
]


def filled(value: Any, folder: str) -> Any:
    """Return the tables with `folder` in place of FOLDER."""
    if isinstance(value, dict):
        return {key: filled(item, folder) for key, item in value.items()}
    return folder if value == "FOLDER" else value


@pytest.mark.parametrize(("key", "tables"), [*mostly_wide(4, WRITING[:-4]), *mostly_wide(1, WRITING[-4:])])
def test_a_run_writes_only_in_its_own_directory(run: Path, key: str, tables: dict[str, Any]) -> None:
    for plugin in set(tables.get("plugins", ())) & {"tensorboard", "wandb", "aim"}:
        pytest.importorskip(plugin)
    path = write_small(run / "config.toml", **filled(tables, "own"))
    with refused(ConfigError, key, "'own'", "run directory", "--trust"):
        load_config(path)
    assert load_config(path, trust=True).needs_trust == (key,)
    load_config(path, settings=[f"{key}=own"])  # the user's own choice
    if "download" in tables.get("data", {}):
        load_config(path, settings=["data.download=false"])
    assert load_config(write_small(path, **filled(tables, "run/x"))).data
    own = write_small(run.parent / "own.toml", **filled(tables, "own"))
    assert load_config(own).needs_trust == (key,)  # which the advice to resume it names


def test_folders_are_compared_by_where_they_are(run: Path) -> None:
    def refused_for(folder: str) -> list[str]:
        return [place for place, _ in dangers(Store, {"cache_dir": folder}, {"cache_dir": folder}, "data", run)]

    outside = ["own", str(run.parent / "own"), "~/own", "run/../own", "run/link", "run/link/x", ".", "", "/", "runs"]
    assert [folder for folder in outside if not refused_for(folder)] == []
    inside = ["run/x", str(run / "x"), "~/run/x", "own/../run/x"]
    assert [folder for folder in inside if refused_for(folder)] == []
    (run / "x" / "y").mkdir(parents=True)
    (run / "x" / "y" / "up").symlink_to("..")
    assert [folder for folder in inside if refused_for(folder)] == []
    (run / "x" / "y" / "file").symlink_to(run.parent / "own" / "evil.pth")  # which a download would write over
    assert [folder for folder in (*inside, "run") if not refused_for(folder)] == []
    for link in (run / "link", run / "x" / "y" / "file"):
        link.unlink()
    assert not refused_for("run")


def test_a_tracker_of_a_server_needs_trust(run: Path) -> None:
    pytest.importorskip("aim")
    tables = {"run": {"plugins": ["aim"]}, "plugins": {"aim": {"repo": "aim://evil:53800"}}}
    path = write_small(run / "config.toml", **tables)
    with refused(ConfigError, "plugins.aim.repo", "aim://evil:53800", "--trust"):
        load_config(path)
    with refused(ConfigError, "plugins.aim.repo", "aim://evil:53800", "--set repo=VALUE"):
        make_plugin("aim", tables, run_dir=run)
    assert make_plugin("aim", tables, ["repo=own"], run_dir=run)


def test_plugins_of_hookdiff_follow_no_link_out_of_the_run(run: Path) -> None:
    """Each file that an example writes, and a tracker's folder, is a link of the stranger to what the user has."""
    names = ["Latest", "ImageArrays", "ErrorFile", "EpochFiles"]
    for file in ("latest.json", "grid.npy", "error-0.txt", "epoch-1.safetensors"):
        (run / file).symlink_to(run.parent / "own" / "evil.pth")
    plugins = {name: getattr(examples, name)() for name in names}

    def train() -> None:
        with toy_loop(plugins, epochs=1, run_dir=run, log_every=1) as loop:
            for _ in loop.steps():
                loop.log.images({"grid": Picture(numpy.zeros((4, 6), numpy.uint8))})
            assert 1 / 0

    with pytest.raises(ZeroDivisionError):
        train()
    assert [path.is_symlink() for path in run.iterdir() if path.suffix] == [False] * 4
    assert (run.parent / "own" / "evil.pth").read_text() == "own"
    tables = {"run": {"plugins": ["hookdiff.testing.examples:LastRun"]}, "plugins": {"lastrun": {"file": "last.csv"}}}
    with refused(ConfigError, "plugins.lastrun.file", "--trust"):
        load_config(write_small(run / "config.toml", **tables))


@pytest.mark.parametrize("url", ["reference://train.parquet::http://HOST/x.json", "simplecache::http://HOST/x.parquet"])
def test_the_readme_of_a_data_set_opens_only_plain_urls(run: Path, server: str, url: str) -> None:
    pytest.importorskip("datasets")
    url = url.replace("HOST", server)
    (run / "README.md").write_text(f"---\nconfigs:\n- config_name: default\n  data_files: {url!r}\n---\n")
    with refused(ValueError, "README", url):
        HuggingFace(str(run))
    assert Counting.asked == []


@pytest.mark.parametrize("tracker", mostly_wide(1, ["tensorboard", "wandb"]))
def test_a_tracker_follows_no_link_out_of_the_run(run: Path, hookdiff: Callable[..., Any], tracker: str) -> None:
    pytest.importorskip(tracker)
    (run.parent / "own" / "events.out.tfevents.hookdiff.1.v2").write_text("own")
    write_small(run / "config.toml")
    (run / "metrics.jsonl").write_text('{"step": 1, "time": 1.0, "loss": 0.5}\n')
    (run / tracker).symlink_to(run.parent / "own")
    before = listing(run.parent / "own")
    check_refused(hookdiff("mirror", run, "--to", tracker, "--set", "timeout=300"), run / tracker, run.parent / "own")
    assert listing(run.parent / "own") == before


CODE = "import os\nclass Net: pass\nos.mkdir('canary')\n"
MARKS = ["checkpoints", "metrics.jsonl", "events.jsonl", "outcome.json", ".lock"]
COMMANDS = {
    **{name: [name] for name in ("run", "check", "data", "memory", "profile", "lr", "doctor")},
    "plugins": ["plugins", "--order"],
    "selftest": ["selftest", "resume"],
}


@pytest.mark.parametrize("command", mostly_wide(1, COMMANDS))
def test_the_config_of_a_run_imports_nothing_without_trust(
    run: Path, hookdiff: Callable[..., Any], user_module: Callable[..., None], command: str
) -> None:
    user_module(f"hd_strange_{command}", CODE)
    write = partial(write_small, model={"use": f"hd_strange_{command}:Net"})
    (run.parent / "linked.toml").symlink_to(run / "config.toml")
    (run.parent / "empty").mkdir()
    for path in (run / "config.toml", run / "other.toml", run.parent / "linked.toml", Path("empty/Config.TOML")):
        result = hookdiff(*COMMANDS[command], write(path))
        check_refused(result, path.name, "model.use", f"hd_strange_{command}:Net", "--trust")
        assert not Path("canary").exists()
    _, _, err = hookdiff(*COMMANDS[command], path, "--trust")
    check_facts(err, "model.use", f"hd_strange_{command}:Net", "torch.nn.Module")  # it is imported, and does not fit
    assert Path("canary").exists()


@pytest.mark.parametrize("mark", mostly_wide(2, MARKS))
def test_a_config_is_a_runs_by_what_lies_beside_it(tmp_path: Path, user_module: Callable[..., None], mark: str) -> None:
    user_module("hd_own", "from torch import nn\nclass Net(nn.Identity): pass\n")
    path = write_small(tmp_path / "mine.toml", model={"use": "hd_own:Net"})
    assert load_config(path).needs_trust == ("hd_own:Net",)
    (tmp_path / mark).mkdir()
    with refused(ConfigError, "hd_own:Net", "--trust"):
        load_config(path)
    assert load_config(path, trust=True).trust


def test_a_run_that_is_resumed_by_an_own_config_imports_nothing(
    run: Path, user_module: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    user_module("hd_strange", CODE)
    write_small(
        run / "config.toml", sampling={"sampler": "hd_strange:Net"}, plugins={"ema": {"warmup": "hd_strange:Net"}}
    )
    own = load_config(write_small(run.parent / "own.toml", sampling={"steps": 2}, run={"plugins": ["ema"]}))
    with refused(ConfigError, "sampling.sampler", "hd_strange:Net", "--trust"):
        build_loop(own, run, resume=True)
    assert not os.path.exists("canary")
