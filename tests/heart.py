"""The heart of hookdiff: the modules that a Loop on a tensor has loaded after two steps, without plugins and run_dir.

`python tests/heart.py` prints them with their lines, and fails if they are too many. Whoever reads them knows the
trainer, so they are counted, imports inside of functions included.
"""

import json
import subprocess
import sys
from pathlib import Path

MOST_MODULES, MOST_LINES = 36, 5000
SCRIPT = """
import json, sys, torch
from hookdiff import Loop, LoopConfig

net = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(net.parameters())
config = LoopConfig(steps=2, batch_size=4)
Loop(net, optimizer, lambda net, batch: net(batch.inputs).square().mean(), torch.randn(32, 4), config).run()
ours = {name: module.__file__ for name, module in sys.modules.items() if name.partition(".")[0].startswith("hookdiff")}
print(json.dumps(ours))
"""


def heart() -> dict[str, int]:
    """Return the number of lines of each module of the heart, in the order in which they were loaded."""
    run = subprocess.run([sys.executable, "-c", SCRIPT], check=True, capture_output=True, text=True)
    return {name: len(Path(file).read_text("utf-8").splitlines()) for name, file in json.loads(run.stdout).items()}


def main() -> int:
    """Print the heart, and return 1 if it is too large."""
    found = heart()
    for name, lines in found.items():
        print(f"{lines:5}  {name}")
    print(f"{sum(found.values()):5}  lines in {len(found)} modules; at most {MOST_LINES} in {MOST_MODULES}")
    return int(len(found) > MOST_MODULES or sum(found.values()) > MOST_LINES)


if __name__ == "__main__":
    sys.exit(main())
