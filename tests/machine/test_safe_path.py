"""The Python processes that a run starts import nothing of the working directory."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy
import pytest
from PIL import Image

from tests.conftest import write_small

START = "import multiprocessing; multiprocessing.set_start_method('forkserver')\n"
# Also resource_tracker starts, and aim starts `python -m alembic`.
STARTS = {
    "command": f"{START}from hookdiff.cli import main; main()",
    "script": f"{START}from hookdiff import build_loop, load_config; build_loop(load_config(CONFIG), RUN).run()",
}


@pytest.mark.parametrize("start", STARTS)
def test_processes_import_nothing_of_the_working_directory(tmp_path: Path, start: str) -> None:
    """With -P the first process itself looks there for nothing, and with -E not into PYTHONPATH."""
    here, config, run = tmp_path / "here", tmp_path / "own.toml", tmp_path / "run"
    here.mkdir()
    for module in {*sys.stdlib_module_names, "sitecustomize", "torch", "numpy", "hookdiff", "aim", "alembic"}:
        (here / f"{module}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write('{module} ')")
    for index in range(4):
        (tmp_path / "pictures").mkdir(exist_ok=True)
        Image.fromarray(numpy.full((8, 8, 3), index, numpy.uint8)).save(tmp_path / "pictures" / f"{index}.png")
    data = {"source": "folder", "path": str(tmp_path / "pictures"), "image_size": 8, "workers": 1, "store": "none"}
    plugins = ["report", "checkpoint", *(["aim"] if find_spec("aim") else [])]
    patient = {"report": {"timeout": 250}}  # its process has a low priority
    write_small(config, data=data, run={"steps": 1, "batch_size": 2, "plugins": plugins}, plugins=patient)
    code = STARTS[start].replace("CONFIG", repr(str(config))).replace("RUN", repr(str(run)))
    command = [sys.executable, "-E", "-P", "-c", code, "run", str(config), "--out", str(run)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep + os.environ.get("PYTHONPATH", "")}
    done = subprocess.run(command, cwd=here, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert (run / "report.html").exists()
    assert not (tmp_path / "ran").exists(), (tmp_path / "ran").read_text()
