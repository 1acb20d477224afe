"""Names of the Hugging Face hub in a config, against a server on this machine."""

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
import tomli
import tomli_w

from hookdiff import UserError, load_config
from hookdiff.disk import local_path
from tests.conftest import Command, Succeed, check_refused, finish, refused, serving

constants = pytest.importorskip("huggingface_hub.constants", reason="needs hookdiff[diffusers]")

COMMIT, OLD = "0123456789abcdef" * 2 + "01234567", "f" * 40
CODE = ("vae/diffusion_pytorch_model.bin", "unet/model.ckpt", "model.py", "unet/old.pt", "README.md")  # never fetched
NETWORK = ("config.json", "diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.fp16.safetensors")
PIPELINE = (
    *("model_index.json", "sd-pruned.safetensors", "safety_checker/model.safetensors"),
    *(f"{part}/{name}" for part in ("unet", "vae") for name in NETWORK),
    *("text_encoder/config.json", "text_encoder/model.safetensors", "tokenizer/merges.txt", "tokenizer/vocab.json"),
)
SMALL = {name for name in PIPELINE if name.endswith(("json", "txt"))}
FILES = {
    "org/sd": (*PIPELINE, *CODE),
    "org/vae": (*NETWORK, *CODE, "other/x.safetensors"),
    "org/half": ("config.json", "model.fp16.safetensors"),
    "org/lora": ("a.safetensors", "b.safetensors"),
    "org/shards": ("model.safetensors.index.json", "model-00001-of-00001.safetensors", "unet/x.safetensors"),
}
UNET, VAE = (f"{part}/{NETWORK[1]}" for part in ("unet", "vae"))
TEXT = "text_encoder/model.safetensors"


class Hub:
    """The repositories of the server, each with a commit for `main` and for the tag `v1`, and what it was asked for."""

    def __init__(self) -> None:
        self.repos = {repo: dict.fromkeys(names, b"{}") for repo, names in FILES.items()}
        self.asked: list[str] = []
        self.is_up = True

    def answer(self, url: str) -> tuple[int, bytes, dict[str, str]]:
        """Return status, body and headers."""
        self.asked.append(url)
        path = unquote(urlsplit(url).path)
        match = re.fullmatch(r"(?:/api/models)?/(\w+/[\w-]+)/(revision|tree|resolve)/(\w+)(?:/(.+))?", path)
        files = self.repos.get(match[1]) if match and self.is_up else None
        if match is None or files is None:
            return (404, b"{}", {"X-Error-Code": "RepoNotFound"}) if self.is_up else (503, b"{}", {})
        commit = {"main": COMMIT, "v1": OLD}.get(match[3], match[3])
        if commit not in (COMMIT, OLD):
            return 404, b"{}", {"X-Error-Code": "RevisionNotFound"}
        if match[2] == "revision":
            siblings = [{"rfilename": name} for name in files]
            return 200, json.dumps({"id": match[1], "sha": commit, "siblings": siblings}).encode(), {}
        if match[2] == "tree":
            hashes = {name: hashlib.sha1(body).hexdigest() for name, body in files.items()}
            rows = [{"type": "file", "path": k, "size": len(v), "oid": hashes[k]} for k, v in files.items()]
            return 200, json.dumps(rows).encode(), {}
        body = files[match[4]]
        return 200, body, {"ETag": f'"{hashlib.sha1(body).hexdigest()}"', "X-Repo-Commit": commit}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """The server, for this process, with an empty cache in `cache` of the working directory."""
    monkeypatch.chdir(tmp_path)
    served = Hub()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body, headers = served.answer(self.path)
            self.send_response(status)
            for key, value in {**headers, "Content-Length": str(len(body)), "Content-Type": "application/json"}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, *_: Any) -> None:
            pass

    with serving(Handler) as address:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://{address}")
        template = f"http://{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        yield served


def fetched(snapshot: Path) -> set[str]:
    return {path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("name", "inside", "files"),
    [
        ("hub:org/sd", "", SMALL | {UNET, VAE, TEXT}),
        ("hub:org/sd@v1", "", SMALL | {UNET, VAE, TEXT}),
        (f"hub:org/sd@{COMMIT}", "", SMALL | {UNET, VAE, TEXT}),
        ("hub:org/sd/vae", "vae", {"vae/config.json", VAE, "tokenizer/merges.txt", "tokenizer/vocab.json"}),
        ("hub:org/vae", "", {*NETWORK[:2]}),
        ("hub:org/half", "", {"config.json", "model.fp16.safetensors"}),  # there are no others
        ("hub:org/lora@main/b.safetensors", "b.safetensors", {"b.safetensors"}),
        ("hub:org/shards", "", {*FILES["org/shards"][:2]}),
        ("hub:org/shards/model.safetensors.index.json", FILES["org/shards"][0], {*FILES["org/shards"][:2]}),
    ],
)
def test_what_is_read_is_fetched_once(hub: Hub, name: str, inside: str, files: set[str]) -> None:
    commit = OLD if "@v1" in name else COMMIT
    path = local_path(name, "model.path")
    snapshot = next(Path("cache").glob("*/snapshots/*")).resolve()
    assert (path, snapshot.name) == (snapshot / inside, commit)
    assert fetched(snapshot) == files
    hub.asked.clear()
    repo, _, rest = name.partition("hub:")[2].partition("/")[2].partition("/")
    pinned = f"hub:org/{repo.partition('@')[0]}@{commit}" + f"/{rest}" * bool(rest)
    assert local_path(pinned, "model.path") == path
    assert hub.asked == []
    hub.is_up = False
    assert local_path(name, "model.path") == path  # huggingface_hub knows the last commit of a branch


def test_what_is_missing_in_the_cache_is_fetched(hub: Hub) -> None:
    local_path(f"hub:org/sd@{COMMIT}/vae", "model.path")
    snapshot = local_path(f"hub:org/sd@{COMMIT}", "model.path")
    assert fetched(snapshot) == SMALL | {UNET, VAE, TEXT}
    (snapshot / UNET).unlink()
    # As left by another program, which had no use for weights; earlier versions keep no list of files.
    shutil.rmtree(snapshot.parent.parent / "trees", ignore_errors=True)
    for each in (VAE, TEXT):
        (snapshot / each).unlink()
    assert fetched(local_path(f"hub:org/sd@{COMMIT}", "model.path")) == SMALL | {UNET, VAE, TEXT}


@pytest.mark.parametrize(
    ("name", "is_up", "facts"),
    [
        ("hub:sd", True, ("hub:ORG/NAME",)),
        ("hub:org/sd/../x", True, ("hub:ORG/NAME",)),
        ("hub:org/sd/vae@main", True, ("hub:ORG/NAME",)),
        ("hub:org/none", True, ("hub:org/none", "no such repository", "hf auth login")),
        ("hub:org/sd@v9", True, ("hub:org/sd@v9", "no such", "revision")),
        ("hub:org/sd", False, ("hf download org/sd",)),
        ("hub:org/sd@v1/vae", False, ("hf download org/sd --revision v1",)),
        (f"hub:org/sd@{COMMIT}", False, (f"hf download org/sd --revision {COMMIT}",)),
    ],
)
def test_what_cannot_be_fetched_is_refused_in_one_line(
    hub: Hub, name: str, is_up: bool, facts: tuple[str, ...]
) -> None:
    hub.is_up = is_up
    with refused(UserError, "model.path", *facts) as caught:
        local_path(name, "model.path")
    assert "\n" not in str(caught.value)


def test_without_a_network_the_command_is_named(start: Callable[..., Any], tmp_path: Path) -> None:
    Path(tmp_path / "c.toml").write_text(
        '[run]\nsteps = 1\n[data]\nsource = "digits"\n[model]\nuse = "pretrained"\npath = "hub:org/sd@v1"\n'
    )
    places = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path / "home")}
    process = start(tmp_path, "check", "c.toml", **places)
    check_refused(finish(process), "model.path", "hf download org/sd --revision v1")


RUN: dict[str, Any] = {
    "run": {"steps": 2, "batch_size": 4, "device": "cpu", "plugins": ["checkpoint"]},
    "data": {"source": "folder", "path": "pictures", "caption": "a red disc", "cache_dir": "run/cache"},
    "model": {"use": "pretrained", "path": "hub:org/sd"},
}


@pytest.fixture
def whole(hub: Hub) -> Hub:
    """The server with a whole pipeline, and pictures and a config in the working directory."""
    pytest.importorskip("diffusers", reason="needs hookdiff[diffusers]")
    pytest.importorskip("transformers", reason="needs hookdiff[text]")
    from tests.whole_pipelines import SD, save_pictures, save_whole

    save_whole(SD, Path("base"))
    save_pictures(Path("pictures"))
    hub.repos["org/sd"] = {name: (Path("base") / name).read_bytes() for name in fetched(Path("base"))}
    shutil.rmtree("base")
    Path("c.toml").write_text(tomli_w.dumps(RUN))
    return hub


def test_a_run_names_its_commit_and_a_stranger_s_run_needs_trust(
    whole: Hub, succeed: Succeed, hookdiff: Command, another_user: Callable[[], None]
) -> None:
    succeed("run", "c.toml", "--out", "run")
    table = tomli.loads(Path("run/config.toml").read_text())
    assert table["model"]["path"] == f"hub:org/sd@{COMMIT}"
    assert table["data"]["encode"]["image"]["path"] == f"hub:org/sd@{COMMIT}/vae"
    assert table["data"]["encode"]["text"]["path"] == f"hub:org/sd@{COMMIT}"
    whole.asked.clear()
    succeed("resume", "run", "--steps", "3")
    assert whole.asked == []
    another_user()
    check_refused(hookdiff("check", "run/config.toml"), "model.path", "data.encode.image.path", "--trust")
    shutil.rmtree("cache")
    check_refused(hookdiff("resume", "run", "--steps", "4"), "model.path", "data.encode.image.path", "--trust")
    assert whole.asked == []
    succeed("resume", "run", "--steps", "4", "--trust")
    assert whole.asked


def test_init_takes_a_name(whole: Hub, succeed: Succeed) -> None:
    succeed("init", "pictures", "--from", "hub:org/sd", "--out", "d.toml")
    assert tomli.loads(Path("d.toml").read_text())["model"]["path"] == "hub:org/sd"


KEYS = ("model.path", "model.start_from", "data.encode.image.path", "data.encode.text.path", "plugins.lora.start_from")


@pytest.mark.parametrize("key", KEYS)
def test_a_stranger_fetches_nothing(hub: Hub, key: str) -> None:
    *path, last = key.split(".")
    table: Any = {"run": {"steps": 1, "plugins": []}, "data": {"source": "digits"}, "model": {"use": "unet"}}
    inner = table
    for name in path:
        inner = inner.setdefault(name, {})
    inner[last] = "hub:org/none"
    Path("own.toml").write_text(tomli_w.dumps(table))
    with refused(UserError, key, "hub:org/none", "hf auth login"):  # a config of the user's own does
        load_config("own.toml")
    assert hub.asked
    hub.asked.clear()
    Path("run").mkdir()
    Path("run/config.toml").write_text(tomli_w.dumps(table))
    with refused(UserError, key, "hub:org/none", "--set", "--trust"):
        load_config("run/config.toml")
    inner[last] = "x"
    Path("run/config.toml").write_text(tomli_w.dumps(table))
    assert hub.asked == []
    with refused(UserError, key, "hub:org/none", "hf auth login"):
        load_config("run/config.toml", settings=[f"{key}=hub:org/none"])
    assert hub.asked


def test_data_are_no_name_of_the_hub(hub: Hub, hookdiff: Command) -> None:
    Path("c.toml").write_text(
        tomli_w.dumps({**RUN, "data": {"source": "folder", "path": "hub:org/sd"}, "model": {"use": "unet"}})
    )
    check_refused(hookdiff("run", "c.toml"), "data", "hub:org/sd")
    assert hub.asked == []
