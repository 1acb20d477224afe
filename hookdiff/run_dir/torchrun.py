""".torchrun: the name of a torchrun job. When torchrun restarts the job, it recognizes its run by this name."""

from pathlib import Path

from hookdiff.disk.files import discard, new_file, write_file

_JOB = ".torchrun"


def write_job(run_dir: Path, name: str) -> None:
    """Write the `name` of the torchrun job of this process; for "", remove the file."""
    discard(run_dir / _JOB)
    if name:
        with new_file(run_dir / _JOB) as partial:
            write_file(partial, name.encode())


def is_job(run_dir: Path, name: str) -> bool:
    """Return whether the job of this `name` has trained the run."""
    path = run_dir / _JOB
    return path.is_file() and path.read_text("utf-8") == name
