"""Plants faults one at a time in a copy of the tree, and shows which test notices each.

`python tests/planted_faults.py [NAME...]` tries all faults of `faults.py`, or those named, one on each core. A fault is
tried against the test that it names, if any, then the tests that mirror its module, then the test files that import it:
first those of `make test`, until one fails, for at most 60 seconds; then those of `make test-wide`. `make test` must
notice 105 of the 110 faults, and both all of them. The tree itself has to pass its tests. A fault that survives needs a
test.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import Queue

from faults import FAULTS, Fault
from tests_of import tests_of

ROOT = Path(__file__).resolve().parent.parent
TIERS = {"first": "not slow and not wide", "wide": "wide and not slow"}  # the marks of `make test` and `make test-wide`
SECONDS = 60  # for each fault and tier
FIRST = 105  # faults that the first tier has to notice; both tiers notice all


def copy_of_tree(folder: Path) -> dict[str, str]:
    """Copy the files that git knows to `folder`; return the environment in which Python imports the copy."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():  # a link is followed, so that the copy has none
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{folder}{os.pathsep}{folder / 'plugins'}"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # pytest takes seconds to compile all tests
    run = [sys.executable, "-c", "import hookdiff, hookdiff_ema; print(hookdiff.__file__, hookdiff_ema.__file__)"]
    found = subprocess.run(run, cwd=folder, env=environment, check=True, capture_output=True, text=True).stdout.split()
    assert all(Path(file).is_relative_to(folder) for file in found), f"the copy would import {found}"
    return environment


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


def failing(
    tests: Sequence[Path | str], marks: str, folder: Path, environment: Mapping[str, str], until: float
) -> str | None:
    """Return the first test with these marks that fails, "" if all pass, and None if the time is over."""
    options = ["-x", "-q", "-m", marks, "-p", "no:cacheprovider", "--tb=no", "-rfE"]
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
    if process.returncode in (0, 5):  # 5: no test has the marks
        return ""
    if process.returncode > 2:  # 1: a test fails, 2: a file cannot be imported
        raise SystemExit(f"pytest ended with {process.returncode}: {output[-300:]}")
    found = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", output, re.MULTILINE)
    return found[1] if found else output.splitlines()[-1]


def attempt(fault: Fault, folder: Path, environment: Mapping[str, str]) -> tuple[str, str]:
    """Return the name of the tier that notices the fault, or "", and a text that says which test does."""
    mirror, importers = tests_of(fault.file, folder)
    named, text, began = [fault.test] if fault.test else [], "", time.monotonic()
    with planted(fault, folder):
        for tier, marks in TIERS.items():
            until = time.monotonic() + SECONDS
            for tests in filter(None, (named, mirror, importers)):
                found = failing(tests, marks, folder, environment, until)
                if found:
                    return tier, f"{time.monotonic() - began:3.0f} s  {found}"
                if found is None:
                    text = "out of time, "
                    break
    return "", f"{text}{len(mirror)} + {len(importers)} files"


def main(names: list[str]) -> None:
    """Print a line for each fault, and how many faults were noticed."""
    chosen = [fault for fault in FAULTS if not names or fault.name in names]
    if unknown := set(names) - {fault.name for fault in FAULTS}:
        raise SystemExit(f"no such fault: {', '.join(sorted(unknown))}")
    num = os.cpu_count() or 1
    copies: Queue[tuple[Path, dict[str, str]]] = Queue()

    def attempt_in_a_copy(fault: Fault) -> tuple[str, str]:
        folder, environment = copies.get()
        try:
            return attempt(fault, folder, environment)
        finally:
            copies.put((folder, environment))

    noticed: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as temporary:
        for number in range(num):
            folder = Path(temporary).resolve() / str(number)
            copies.put((folder, copy_of_tree(folder)))
        for fault in chosen:  # before the first of many minutes
            with planted(fault, folder):
                pass
        with ThreadPoolExecutor(num) as pool:
            for fault, (tier, text) in zip(chosen, pool.map(attempt_in_a_copy, chosen), strict=True):
                noticed[tier] += 1
                print(f"{tier or 'MISSED':<6}  {fault.name:<76}  {text}", flush=True)
    first, all_tiers = noticed[next(iter(TIERS))], len(chosen) - noticed[""]
    print(f"{first} of {len(chosen)} faults were noticed by the first tier, {all_tiers} by both")
    if first < min(FIRST, len(chosen)) or all_tiers < len(chosen):
        raise SystemExit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
