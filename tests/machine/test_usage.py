"""What the process may use of the machine."""

import os
import platform
import subprocess
import sys

import pytest

from hookdiff.machine.usage import num_cpus, usual_threads
from tests.forked import python

FREED = """
import os, resource, torch
from hookdiff.machine.usage import keep_memory
keep_memory()
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
tensor = torch.ones(64 * 2**20, dtype=torch.uint8)
before = resident()
del tensor
print(before - resident() < 16 * 2**20)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be told to keep memory")
@pytest.mark.parametrize(("variables", "keeps"), [({}, "True"), ({"MALLOC_MMAP_THRESHOLD_": "65536"}, "False")])
def test_freed_memory_is_kept_unless_the_user_has_tuned_the_allocator(variables: dict[str, str], keeps: str) -> None:
    usual = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    command = [sys.executable, "-c", FREED]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={**usual, **variables})
    assert done.stdout.strip() == keeps


BESIDE = """
import os, threading, torch
from hookdiff.machine.usage import thread_beside

torch.set_num_threads(3)
large, names, is_ready = torch.ones(1 << 20), [], threading.Event()

def tasks():
    large.sum()  # in parallel, where that is allowed
    return len(os.listdir("/proc/self/task"))

ends = threading.Event()
def work(begin):
    begin()
    is_ready.wait()
    names.append((torch.get_num_threads(), tasks() - before))
    ends.wait()

before = tasks() + 1  # with the thread
with thread_beside() as begin:
    thread = threading.Thread(target=work, args=(begin,))
    thread.start()
is_ready.set()
while not names:
    pass
names.append((torch.get_num_threads(), tasks() - before))
ends.set()
thread.join()
another = threading.Thread(target=lambda: names.append(torch.get_num_threads()))
another.start()
another.join()
print(names)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="counts the threads of the process as Linux shows them")
def test_a_thread_beside_the_training_has_no_team_of_threads_and_all_others_keep_theirs() -> None:
    _, out, err = python(BESIDE)
    assert out.strip() == "[(1, 0), (3, 0), 3]", err


def test_the_process_has_cpus_and_threads() -> None:
    assert 1 <= usual_threads() <= num_cpus() <= (os.cpu_count() or 1)
