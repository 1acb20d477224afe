"""torch's compiler."""

import os
import subprocess
import sys

TRY = "import torch; from hookdiff.models import try_compiler; try_compiler(torch.device('cpu'))"


def test_the_processes_of_the_compiler_import_nothing_of_the_working_directory(tmp_path):
    """With -P the first process looks there for nothing itself, as the command; the processes that it starts would."""
    for module in ("ctypes", "json", "random", "sitecustomize", "subprocess", "torch"):
        (tmp_path / f"{module}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write({module!r})")
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}  # else some are not started
    subprocess.run([sys.executable, "-P", "-c", TRY], cwd=tmp_path, env=environment, check=True)
    assert not (tmp_path / "ran").exists()
