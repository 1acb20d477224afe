import subprocess
import sys

LEAVES = """
import atexit, sys
from hookdiff.machine.joining import leave
kept = type("Kept", (), {"__del__": lambda self: print("cleaned up")})()
atexit.register(print, "at exit")
leave(3)
"""


def test_a_process_that_leaves_is_not_cleaned_up() -> None:
    for code, written in ((LEAVES, "at exit\n"), (LEAVES.replace("leave(3)", "sys.exit(3)"), "at exit\ncleaned up\n")):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (3, written), done.stderr
