"""Kill a run with SIGKILL at random moments, resume it each time, and compare it with the run that was never stopped.

    python benchmarks/kill.py [--trials 200] [--seed 0] [--jobs 2] [--steps 60]

Each trial repeats `hookdiff run CONFIG --resume` on a small U-Net until it is done. The first process is killed at a
random moment between its start and its expected end; each later one is killed in the same way with a probability of a
half. A quarter of the kills wait for the next checkpoint to get its name and strike within 10 ms, while older ones are
removed: a time too short to be met by chance. The config (see CONFIG) has everything that a run can lose: two workers
that augment with the randomness of python, numpy and torch, balanced classes, dropout, averages, an adaptive clip,
sample images, and a checkpoint every five steps that is written in the background, of which two are kept. A process is
forked from one that has imported everything, which saves seconds; from there on it is what the command line runs, with
workers and threads of its own. The run to compare with is a process that was not forked.

After each kill every folder that a resume would take for a checkpoint must be intact. At the end all files must equal
those of the run that was never stopped, byte for byte: checkpoints (weights, averages, optimizer, all plugins), images
and metrics, except for the time, the machine and the revision of the code. If not, the exit code is 1, and the folders
stay.
"""

import argparse
import importlib
import json
import os
import random
import select
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault(
    "OMP_NUM_THREADS", "1"
)  # before numpy and torch: no thread may be there when processes are forked

import numpy
import torch
from attrs import asdict, define, field
from torch import Tensor

from hookdiff import UserError, cli
from hookdiff.data import digits
from hookdiff.log import MACHINE
from hookdiff.run_dir import EVENTS
from hookdiff_checkpoint import find_checkpoints, read_checkpoint
from hookdiff_checkpoint.folder import MANIFEST

HERE = Path(__file__).resolve().parent
KEPT = 2  # checkpoints
AGAIN = 0.5  # probability that a process which resumes is killed, too
AIMED, SOON = 0.25, 0.01  # probability that a kill waits for the next checkpoint to get its name; seconds after it
PLUGINS = ["lr", "amp", "ema", "clip", "loss", "gradients", "nan", "samples", "checkpoint"]
# Modules that a process imports late; forked processes have them already.
LATE = ["hookdiff.cli.run", "hookdiff.cli.summary", "hookdiff.experiment", "hookdiff.builtin.config_changes"]
LATE += ["torchvision.utils", "PIL.PngImagePlugin", "torch._dynamo", "concurrent.futures.thread"]
CONFIG = """
[run]
steps = {steps}
batch_size = 16
log_every = 4
device = "cpu"
plugins = {plugins}
[data]
source = "kill:Pictures"
store = "none"
workers = 2
flip = true
balanced = true
held_out = 32  # 13 batches an epoch: no multiple of what is saved
[model]
use = "unet"
channels = 8
head_dim = 8
num_res_blocks = 1
dropout = 0.1
num_classes = 10
[optimizer]
use = "adamw"
lr = 1e-3
[sampling]
steps = 4
[plugins.lr]
warmup = 10
[plugins.amp]
precision = "off"
[plugins.ema]
decay = 0.95
std = [0.1]
snapshot_every = 20
[plugins.clip]
rule = {{ use = "adaptive", warmup = 5, factor = 0.9 }}
[plugins.loss]
window = 20
[plugins.samples]
every = 10
num = 4
scale = 1
[plugins.checkpoint]
every = 5
keep_last = {kept}
"""


class Pictures:
    """A map-style set that augments with the randomness of python, numpy and torch."""

    def __init__(self) -> None:
        whole = digits()
        assert whole.labels is not None
        self.images, self.labels = whole.images[:240], whole.labels[:240]

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        picture = self.images[index].roll(random.choice((-1, 0, 1)), 1).roll(int(numpy.random.randint(-1, 2)), 2)
        noise = torch.randint(0, 8, picture.shape, dtype=torch.uint8)
        return picture // 2 + noise, int(self.labels[index])


@define
class Kill:
    """One process that was killed."""

    resumed: bool  # it was not the first process of its trial
    after: float  # seconds since its start
    when: str  # its activity, as far as its files show


@define
class Trial:
    """A run that was killed until it was done."""

    number: int
    kills: list[Kill] = field(factory=list)
    verified: int = 0  # checkpoints, over all kills
    problems: list[str] = field(factory=list)  # unreadable checkpoints, processes that failed
    differences: list[str] = field(factory=list)  # from the run that was never stopped


@define
class Bench:
    """The folder of the runs, and the seconds of the one that was never stopped."""

    folder: Path
    steps: int
    seconds: float = 0.0

    @property
    def config(self) -> Path:
        return self.folder / "kill.toml"

    def words(self, run_dir: Path) -> list[str]:
        return ["run", str(self.config), "--out", str(run_dir), "--resume"]

    def prepare(self) -> None:
        """Train without a stop in a process of its own, then in a forked one for its time, and compare the two."""
        self.config.write_text(CONFIG.format(steps=self.steps, kept=KEPT, plugins=PLUGINS))
        command = [sys.executable, "-c", "from hookdiff.cli import main; main()", *self.words(self.folder / "whole")]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])}
        subprocess.run(command, env=env, check=True, capture_output=True)
        again, began = self.folder / "again", time.monotonic()
        code = wait(self.fork(again), None)
        self.seconds = time.monotonic() - began
        if code != 0 or (found := list(differences(self.folder / "whole", again))):
            what = "\n".join(found) if code == 0 else again.with_suffix(".log").read_text()
            sys.exit(f"the run is not the same twice without any kill:\n{what}")

    def fork(self, run_dir: Path) -> int:
        """Start the command line on `run_dir`, in a process forked from this one, and return its id."""
        sys.stdout.flush()
        if (process := os.fork()) == 0:
            code = 1
            try:
                output = os.open(run_dir.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                for descriptor in (1, 2):
                    os.dup2(output, descriptor)
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                sys.argv = ["hookdiff", *self.words(run_dir)]
                cli.main()
            except SystemExit as ended:
                code = ended.code if isinstance(ended.code, int) else 1
            except BaseException:
                sys.excepthook(*sys.exc_info())
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        return process

    def trial(self, number: int, seed: int) -> Trial:
        draw, trial = random.Random(f"{seed}/{number}"), Trial(number)
        run_dir = self.folder / f"trial-{number}"
        while True:
            before, began = list(whole(run_dir)), time.time()
            resumed = bool(trial.kills)
            is_killed = not resumed or draw.random() < AGAIN
            limit = draw.uniform(0, self.seconds) if is_killed else None
            aimed = (run_dir, draw.uniform(0, SOON)) if draw.random() < AIMED else ()
            code = wait(self.fork(run_dir), limit, *aimed)
            if code == 0 and trial.kills:
                break
            if code == 0:  # it was faster than expected
                shutil.rmtree(run_dir)
                continue
            if code != -signal.SIGKILL:
                last_lines = run_dir.with_suffix(".log").read_text().splitlines()[-3:]
                trial.problems.append(f"a process failed with exit code {code}: {' | '.join(last_lines)}")
                return trial
            after = time.time() - began
            trial.kills.append(Kill(resumed, after, self.moment(run_dir, before, began)))
            trial.verified += self.verify(run_dir, trial.problems)
        trial.verified += self.verify(run_dir, trial.problems)
        trial.differences += differences(self.folder / "whole", run_dir)
        if not trial.problems and not trial.differences:
            shutil.rmtree(run_dir)
        return trial

    def moment(self, run_dir: Path, before: list[Path], began: float) -> str:
        """Return the activity of the process that began at `began` with the checkpoints `before`."""
        if not (run_dir / "config.toml").exists():
            return "before the run had a directory"
        folders = list((run_dir / "checkpoints").glob("*step-*"))
        touched = [path for path in folders if path.stat().st_ctime > began]
        now = list(whole(run_dir))
        new = [path for path in now if path not in before]
        if any(path.suffix == ".partial" for path in touched):
            return "while a checkpoint was written"
        if any(path.suffix == ".removed" for path in touched) or (new and len(now) > KEPT):
            return "while an older checkpoint was removed"
        if not new:
            return "before its first checkpoint"
        return "after its last checkpoint" if max(new).name.endswith(f"-{self.steps:08d}") else "between checkpoints"

    @staticmethod
    def verify(run_dir: Path, problems: list[str]) -> int:
        """Read all that a resume may take for a checkpoint, and return how many there are."""
        found, unreadable = find_checkpoints(run_dir)
        for one in found:
            try:
                read_checkpoint(one.path)
            except UserError as error:
                unreadable.append(error)
        problems += [f"unreadable: {error}" for error in unreadable]
        return len(found)


def wait(process: int, limit: float | None, run_dir: Path | None = None, delay: float = 0.0) -> int:
    """Return the exit code of a process, which is killed after `limit` seconds.

    With `run_dir` it is killed `delay` seconds after the next checkpoint there got its name.
    """
    descriptor = os.pidfd_open(process)

    def over(timeout: float | None) -> bool:
        return bool(select.select([descriptor], [], [], timeout)[0])

    try:
        if not over(limit):
            if run_dir:
                before = set(whole(run_dir))
                while set(whole(run_dir)) <= before and not over(0.0003):
                    pass
                over(delay)
            os.kill(process, signal.SIGKILL)  # a process that has ended keeps its id until it is waited for
    finally:
        os.close(descriptor)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def whole(run_dir: Path) -> Iterator[Path]:
    """Yield the complete checkpoints, which have their final name."""
    return (path.parent for path in sorted((run_dir / "checkpoints").glob(f"step-*/{MANIFEST}")))


def differences(one: Path, other: Path) -> Iterator[str]:
    """Yield a line for each file that differs between the two run directories."""
    left, right = (
        {str(path.relative_to(root)): path for path in sorted(root.rglob("*")) if path.is_file()}
        for root in (one, other)
    )
    for files in (left, right):
        del files[EVENTS]  # which has those of each process
    yield from (f"{name} is missing" for name in left.keys() - right.keys())
    yield from (f"{name} is left over" for name in right.keys() - left.keys())
    for name in sorted(left.keys() & right.keys()):
        if content(left[name]) != content(right[name]):
            yield f"{name} differs"


def content(path: Path) -> Any:
    """Return the contents of a file without the time, the machine and the revision of the code."""
    if path.suffix == ".jsonl":
        return [lasting(json.loads(line)) for line in path.read_text().splitlines()]
    if path.name == MANIFEST:
        manifest = json.loads(path.read_text())
        for name in ("metrics", "texts", "distributions"):
            manifest["parts"][f"plugins/{name}"]["values"].pop("bytes")  # of lines with times in them
        manifest["metrics"] = lasting(manifest["metrics"])
        return {key: value for key, value in manifest.items() if key not in ("sha256", "git")}
    return path.read_bytes()


def lasting(record: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in record.items() if name != "time" and not name.startswith(MACHINE)}


def run_trials(bench: Bench, numbers: range, seed: int, jobs: int) -> list[Trial]:
    """Run the trials in `jobs` processes, which fork those that train."""
    children = []
    for job in range(jobs):
        if (child := os.fork()) == 0:
            code = 1
            try:
                with (bench.folder / f"job-{job}").open("w", buffering=1) as file:
                    for number in numbers[job::jobs]:
                        trial = bench.trial(number, seed)
                        file.write(json.dumps(asdict(trial)) + "\n")
                        for line in (*trial.problems, *trial.differences):
                            print(f"trial {number}: {line}", flush=True)
                code = 0
            except BaseException:
                sys.excepthook(*sys.exc_info())
            finally:
                os._exit(code)
        children.append(child)
    failed = [child for child in children if os.waitpid(child, 0)[1]]
    assert not failed, "a job failed, see above"
    lines = [line for job in range(jobs) for line in (bench.folder / f"job-{job}").read_text().splitlines()]
    trials = [json.loads(line) for line in lines]
    return [Trial(**{**trial, "kills": [Kill(**kill) for kill in trial["kills"]]}) for trial in trials]


def table(trials: list[Trial]) -> Iterator[str]:
    first, later = (
        Counter(kill.when for trial in trials for kill in trial.kills if kill.resumed is resumed)
        for resumed in (False, True)
    )
    bad = Counter(kill.when for trial in trials if trial.problems or trial.differences for kill in trial.kills)
    yield "| killed | the first process | one that resumed | of runs that ended otherwise |"
    yield "|---|---|---|---|"
    for when in sorted(first | later, key=lambda when: -(first[when] + later[when])):
        yield f"| {when} | {first[when]} | {later[when]} | {bad[when]} |"
    yield f"| in all | {first.total()} | {later.total()} | {bad.total()} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--steps", type=int, default=60, help="of each run, a multiple of 5")
    options = parser.parse_args()
    for name in [*LATE, *(f"hookdiff_{plugin}" for plugin in PLUGINS)]:
        importlib.import_module(name)
    digits()
    threads = [task.read_text().strip() for task in Path("/proc/self/task").glob("*/comm")]
    # Arrow's, which pandas brings in: an allocator that knows of forks.
    assert len([name for name in threads if name != "jemalloc_bg_thd"]) == 1, f"a fork would leave {threads} behind"
    folder = Path(tempfile.mkdtemp(prefix="hookdiff-kill-"))
    bench = Bench(folder, options.steps)
    bench.prepare()
    print(f"torch {torch.__version__}; a run of {options.steps} steps takes {bench.seconds:.1f} s", flush=True)
    trials = run_trials(bench, range(options.trials), options.seed, options.jobs)
    same = sum(not trial.problems and not trial.differences for trial in trials)
    unreadable = sum(problem.startswith("unreadable") for trial in trials for problem in trial.problems)
    print("\n".join(table(trials)))
    print(
        f"{same} of {len(trials)} runs ended as the run that was never stopped; {unreadable} checkpoints unreadable of "
        f"{sum(trial.verified for trial in trials)} that were verified; kills of a run: "
        f"{statistics.mean(len(trial.kills) for trial in trials):.2f} in the mean, "
        f"{max(len(trial.kills) for trial in trials)} at most"
    )
    if same < len(trials):
        sys.exit(f"what they left is in {folder}")
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
