"""Plants faults one at a time in a copy of the tree, and shows which test notices each.

`python tests/planted_faults.py [NAME...]` tries all faults, or those named. A fault is tried against the test that it
names, if any, then the tests that mirror its module, then the test files that import it: until one fails, and for at
most 60 seconds. Fewer than 50 of the 52 caught is a failure. The tree itself has to pass its tests. A fault that
survives needs a test.
"""

import ast
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from attrs import frozen
from import_graph import files

ROOT = Path(__file__).resolve().parent.parent
SECONDS = 60  # for each fault
_OF_ALL_OPTIONS = Path("tests/experiment/test_refusals.py")  # which imports none of the modules that it tries
CAUGHT = 50  # at least


@frozen
class Fault:
    """A change of the text `old`, which stands once in the file, to `new`."""

    name: str
    file: str
    old: str
    new: str
    test: str = ""  # tried first: where all tests of the module take longer than the time


FAULTS = (
    Fault(
        "machine: ranks agree only if all say so",
        "hookdiff/machine/ranks.py",
        "any(gathered(flag))",
        "all(gathered(flag))",
    ),
    Fault(
        "machine: an expanded buffer that is loaded leaves the tensor that it shows",
        "hookdiff/machine/overlap.py",
        "if torch.equal(filled[places], wanted):",
        "if False:",
    ),
    Fault(
        "machine: dropout is the same on all ranks",
        "hookdiff/machine/randomness.py",
        "derive_seed(self.seed, stream, position, self.rank, part)",
        "derive_seed(self.seed, stream, position, 0, part)",
    ),
    Fault("disk: a written file is not synced", "hookdiff/disk/files.py", "os.fsync(file.fileno())", "file.flush()"),
    Fault(
        "disk: keys are escaped in the wrong order",
        "hookdiff/disk/tree.py",
        'key.replace("~", "~0").replace("/", "~1")',
        'key.replace("/", "~1").replace("~", "~0")',
    ),
    Fault(
        "options: the clock of an interval never starts over",
        "hookdiff/options/every.py",
        "        self._since = time.monotonic()\n        return True",
        "        return True",
    ),
    Fault(
        "options: true passes for a number",
        "hookdiff/options/structure.py",
        "if not fits or (isinstance(value, bool) and kind is not bool):",
        "if not fits:",
    ),
    Fault(
        "terminal: the time left is that of the whole work",
        "hookdiff/terminal/pace.py",
        "/ (self.done - done) * (self.total - self.done)",
        "/ (self.done - done) * self.total",
    ),
    Fault(
        "terminal: the bars to be kept are removed",
        "hookdiff/terminal/bars.py",
        "transient=not is_kept",
        "transient=is_kept",
    ),
    Fault(
        "log: a finding never comes back after a quiet time",
        "hookdiff/log/findings.py",
        "step - last > quiet",
        "last - step > quiet",
    ),
    Fault(
        "log: a mean forgets the counts before a checkpoint",
        "hookdiff/log/log.py",
        "= total, count + len(values)",
        "= total, len(values)",
    ),
    Fault(
        "data: each epoch has the same order",
        "hookdiff/data/feed.py",
        'derive_seed(self.seed, "data", epoch)',
        'derive_seed(self.seed, "data")',
    ),
    Fault(
        "data: all ranks take the draws of the first",
        "hookdiff/data/feed.py",
        "range(rank, total, num_ranks)",
        "range(0, total, num_ranks)",
    ),
    Fault(
        "loss: a saved state sums what waits",
        "plugins/hookdiff_loss/levels.py",
        "        rank_columns = [torch.cat(column).cpu()",
        "        self._sum()\n        rank_columns = [torch.cat(column).cpu()",
    ),
    Fault(
        "data: a batch that replaces a filler counts",
        "hookdiff/data/batch.py",
        "is_filler=other.is_filler, replaced=other",
        "is_filler=self.is_filler, replaced=other",
    ),
    Fault(
        "data: a resumed run does not see that captions have changed",
        "hookdiff/data/marks.py",
        "if self.members != before.members:",
        "if self.files != before.files:",
    ),
    Fault("images: a random crop never reaches the last place", "hookdiff/images/augment.py", "(slack + 1)", "slack"),
    Fault(
        "images: classes have the order of their first images",
        "hookdiff/images/labels.py",
        "tuple(sorted(set(names)))",
        "tuple(dict.fromkeys(names))",
    ),
    Fault(
        "models: frozen modules train after an evaluation",
        "hookdiff/models/weights.py",
        "        for module in training:\n            module.training = True",
        "        model.train()",
    ),
    Fault(
        "models: each batch of samples begins with the first class",
        "hookdiff/models/sample_request.py",
        "tuple(k % num_classes for k in range(self.start, self.start + self.num))",
        "tuple(k % num_classes for k in range(self.num))",
    ),
    Fault(
        "diffusion: the second order of the solver counts twice",
        "hookdiff/diffusion/solvers.py",
        "(h / (2 * h_previous))",
        "(h / h_previous)",
    ),
    Fault(
        "diffusion: times are drawn at much noise by default",
        "hookdiff/diffusion/times.py",
        "default=-0.5,",
        "default=0.5,",
    ),
    Fault(
        "loop: scaled gradients keep their total norm",
        "hookdiff/loop/gradients.py",
        "Pass(last.loss, last.norm * factor)",
        "Pass(last.loss, last.norm)",
    ),
    Fault(
        "loop: a refused step keeps its buffers",
        "hookdiff/loop/loop.py",
        "            self.buffers.put_back()",
        "            pass",
    ),
    Fault(
        "run_dir: a rollback removes the pictures of its checkpoint",
        "hookdiff/run_dir/pictures_png.py",
        "if step > after and",
        "if step >= after and",
    ),
    Fault(
        "run_dir: a killed run counts as stopped",
        "hookdiff/run_dir/history.py",
        'reason in ("error", None)',
        'reason in ("error",)',
    ),
    Fault(
        "authors: a periodic plugin acts twice at the end",
        "hookdiff/authors/periodic.py",
        'if reason == "done" and self._acted_at != loop.progress.step:',
        'if reason == "done":',
    ),
    Fault(
        "authors: rows of later parts are their own neighbours",
        "hookdiff/features/neighbours.py",
        "torch.arange(place.start, place.stop)",
        "torch.arange(len(part))",
    ),
    Fault(
        "builtin: a fixed switch may be flipped, and its value not changed",
        "hookdiff/builtin/config_changes.py",
        "if bool(old) != bool(new)",
        "if bool(old) == bool(new)",
    ),
    Fault(
        "builtin: the outcome of an earlier process stays",
        "hookdiff/builtin/directory.py",
        "            discard(path / OUTCOME)",
        "            pass",
    ),
    Fault(
        "experiment: embeddings decay",
        "hookdiff/experiment/optimizers.py",
        'weight.role in ("embedding", "norm", "vector")',
        'weight.role in ("norm", "vector")',
    ),
    Fault(
        "experiment: a link inside of a folder leads out of the run directory",
        "hookdiff/experiment/trust.py",
        "return not any(leads_out(each, run_dir) for each in inner)",
        "return True",
    ),
    Fault(
        "cli: SIGTERM has the exit code of SIGINT",
        "hookdiff/cli/run.py",
        'return 128 + signals.caught if signals.caught and reason == "signal" else EXIT_CODES[reason]',
        "return EXIT_CODES[reason]",
    ),
    Fault(
        "cli: the summary shows the first values of a metric",
        "hookdiff/cli/summary.py",
        "values[-most:]",
        "values[:most]",
    ),
    Fault("ema: a decay has no warm-up", "plugins/hookdiff_ema/average.py", "min(decay, warmup.highest(n))", "decay"),
    Fault(
        "clip: a spike raises the threshold that follows",
        "plugins/hookdiff_clip/rules.py",
        "self.follow(min(norm, threshold))",
        "self.follow(norm)",
    ),
    Fault(
        "checkpoint: the target of a rollback is removed",
        "plugins/hookdiff_checkpoint/keep.py",
        "at < last or info is scheduled or",
        "at < last or",
        "tests/plugins/test_checkpoint_finite.py::test_a_run_that_was_stopped_before_a_rollback_equals_an_unbroken_one[1-5]",
    ),
    Fault(
        "lr: the rate jumps at the end of the warm-up",
        "plugins/hookdiff_lr/schedules.py",
        "(step - warmup) / max(1, total - warmup)",
        "step / max(1, total)",
    ),
    Fault(
        "samples: the transparent part of a mask is painted",
        "plugins/hookdiff_samples/pictures.py",
        'shape[-1], "black")',
        'shape[-1], "white")',
        "tests/plugins/test_sample_command.py::test_a_mask_lies_on_its_picture_whatever_its_format",
    ),
    Fault(
        "lr: a fall by chance is a fall",
        "plugins/hookdiff_lr/find.py",
        "falls = rises = None\n",
        "falls, rises = 0, None\n",
    ),
    Fault(
        "encoding: captions of the same tokens pass for different ones",
        "hookdiff/encoding/tokens.py",
        "if plain[row] != plain[other]",
        "if plain[row] == plain[other]",
    ),
    Fault(
        "images: UTF-16 without a mark passes for a caption",
        "hookdiff/images/texts.py",
        'if "\\0" in text or 4 *',
        "if 4 *",
    ),
    Fault(
        "fid: pictures are not read as the data of the run",
        "plugins/hookdiff_fid/sets.py",
        "open_set(path, making, transforms=transforms)",
        "open_set(path, making)",
    ),
    Fault(
        "fid: the kernel distance counts a sample with itself",
        "plugins/hookdiff_fid/kid.py",
        "(in_a - own_a) / (n - 1)",
        "in_a / n",
    ),
    Fault(
        "amp: gradients of the modules of plugins stay scaled",
        "plugins/hookdiff_amp/__init__.py",
        "for optimizer in loop.all_optimizers:\n            self.scaler.unscale_",
        "for optimizer in loop.optimizers:\n            self.scaler.unscale_",
    ),
    Fault(
        "nan: the outermost module is blamed for a gradient",
        "plugins/hookdiff_nan/watch.py",
        "self._makers.setdefault(key, place)",
        "self._makers[key] = place",
    ),
    Fault(
        "logged: any end of a run logs the open means",
        "hookdiff/builtin/logged.py",
        'loop.end.reason == "done" and ',
        "",
    ),
    Fault(
        "loss: any rise of the held-out loss is overfitting",
        "plugins/hookdiff_loss/held_out.py",
        "worse = held_out > RISE * self._best and trained_on < self._trained",
        "worse = held_out > RISE * self._best",
    ),
    Fault(
        "stop_early: a value that is a little worse is an improvement",
        "plugins/hookdiff_stop_early/__init__.py",
        "if value < self._best - self.min_delta:",
        "if value < self._best + self.min_delta:",
    ),
    Fault(
        "muon: gradient and momentum are swapped in Nesterov's mix",
        "plugins/hookdiff_muon/optimizer.py",
        'torch._foreach_lerp(gradients, momenta, group["momentum"])',
        'torch._foreach_lerp(momenta, gradients, group["momentum"])',
    ),
    Fault(
        "encoding: float16 may change values by their whole deviation",
        "hookdiff/encoding/soundness.py",
        "_CHANGE = 0.1 ",
        "_CHANGE = 1.0 ",
    ),
    Fault(
        "autoencoder: a scale that config.json leaves out is one",
        "plugins/hookdiff_autoencoder/__init__.py",
        "config.get(key, known[key].default) for key",
        "config.get(key, 1.0 if key == 'scaling_factor' else None) for key",
        "tests/plugins/test_autoencoder.py::test_the_scale_of_a_model_is_that_of_pipelines",
    ),
)


def copy_of_tree(folder: Path) -> dict[str, str]:
    """Copy the files that git knows to `folder`; return the environment in which Python imports the copy."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():  # a link is followed, so that the copy has none
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{folder}{os.pathsep}{folder / 'plugins'}"}
    run = [sys.executable, "-c", "import hookdiff, hookdiff_ema; print(hookdiff.__file__, hookdiff_ema.__file__)"]
    found = subprocess.run(run, cwd=folder, env=environment, check=True, capture_output=True, text=True).stdout.split()
    assert all(Path(file).is_relative_to(folder) for file in found), f"the copy would import {found}"
    return environment


@cache
def homes(folder: Path) -> dict[str, str]:
    """Return where the names of packages come from: "hookdiff.machine.ranks.agree" by "hookdiff.machine.agree"."""
    found = {}
    for package, path in files(folder).items():
        if path.name == "__init__.py":
            stub = path.with_suffix(".pyi")
            for node in ast.parse((stub if stub.exists() else path).read_text("utf-8")).body:
                if isinstance(node, ast.ImportFrom):
                    module = ".".join(filter(None, (package if node.level else "", node.module)))
                    found |= {f"{package}.{one.asname or one.name}": f"{module}.{one.name}" for one in node.names}
    return found


@cache
def imported(test: Path, folder: Path) -> set[str]:
    """Return the modules and names that a test file imports; a name that a package has from a module, by both."""
    found, home = set(), homes(folder)
    for node in ast.walk(ast.parse(test.read_text("utf-8"))):
        names = [one.name for one in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
        for name in (f"{node.module}.{one}" for one in names) if isinstance(node, ast.ImportFrom) else names:
            found.add(name)
            while name in home and home[name] not in found:
                found.add(name := home[name])
    return found


def tests_of(file: str, folder: Path) -> tuple[list[Path], list[Path]]:
    """Return the test files that mirror `file`, its own first, and those that import it, directly and small first."""
    path, tests = Path(file), sorted((folder / "tests").rglob("test_*.py"))
    if path.parts[0] == "plugins":
        name = path.parts[1].removeprefix("hookdiff_")
        mirror = [one for one in tests if one.parent.name == "plugins" and re.match(rf"test_{name}(_|\.py)", one.name)]
    else:
        mirror = [one for one in tests if one == folder / "tests" / Path(*path.parts[1:-1]) / f"test_{path.name}"]
    module = next(name for name, one in files(folder).items() if one == folder / file)
    found = []
    for test in set(tests) - set(mirror):
        is_of_all = test == folder / _OF_ALL_OPTIONS
        if is_of_all or any(f"{name}.".startswith(f"{module}.") for name in imported(test, folder)):
            text = test.read_text("utf-8")
            found.append((module not in text, len(text), test))
    return sorted(mirror, key=lambda one: path.stem not in one.stem), [test for *_, test in sorted(found)]


@contextmanager
def planted(fault: Fault, folder: Path) -> Iterator[None]:
    """Plant the fault during the `with`."""
    path = folder / fault.file
    text = path.read_text("utf-8") if path.exists() else ""
    if (count := text.count(fault.old)) != 1:
        raise SystemExit(f"{fault.name}: {fault.file} has this text {count} times, not once:\n{fault.old}")
    path.write_text(text.replace(fault.old, fault.new), "utf-8")
    try:
        yield
    finally:
        path.write_text(text, "utf-8")


def failing(tests: Sequence[Path | str], folder: Path, environment: Mapping[str, str], until: float) -> str | None:
    """Return the first test that fails, "" if all pass, and None if the time is over."""
    options = ["-x", "-q", "-m", "not slow", "-p", "no:cacheprovider", "--tb=no", "-rfE"]
    run = [sys.executable, "-m", "pytest", *options, *map(str, tests)]
    with subprocess.Popen(
        run,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            return None
        finally:
            with suppress(ProcessLookupError):  # what its tests have started, too
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode in (0, 5):  # 5: all tests are slow
        return ""
    found = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", output, re.MULTILINE)
    return found[1] if found else f"pytest ended with {process.returncode}: {output[-300:]}"


def attempt(fault: Fault, folder: Path, environment: Mapping[str, str]) -> tuple[bool, str]:
    """Return whether a test notices the fault, and a text that says which one."""
    mirror, importers = tests_of(fault.file, folder)
    began = time.monotonic()
    with planted(fault, folder):
        for tests in filter(None, ([fault.test] if fault.test else [], mirror, importers)):
            found = failing(tests, folder, environment, began + SECONDS)
            if found is None:
                return False, f"out of time, of {len(mirror)} + {len(importers)} files"
            if found:
                return True, f"{time.monotonic() - began:3.0f} s  {found}"
    return False, f"survived {len(mirror)} + {len(importers)} files, {time.monotonic() - began:.0f} s"


def main(names: list[str]) -> None:
    """Print a line for each fault, and the number of faults that were caught."""
    chosen = [fault for fault in FAULTS if not names or fault.name in names]
    if unknown := set(names) - {fault.name for fault in FAULTS}:
        raise SystemExit(f"no such fault: {', '.join(sorted(unknown))}")
    caught = 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary).resolve()
        environment = copy_of_tree(folder)
        for fault in chosen:  # before the first of many minutes
            with planted(fault, folder):
                pass
        for fault in chosen:
            is_caught, text = attempt(fault, folder, environment)
            caught += is_caught
            print(f"{'caught' if is_caught else 'MISSED'}  {fault.name:<70}  {text}", flush=True)
    print(f"{caught} of {len(chosen)} faults were caught")
    if caught < min(CAUGHT, len(chosen)):
        raise SystemExit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
