"""The heart of hookdiff: the modules that a Loop on a tensor has loaded after two steps, without plugins and run_dir.

`python tests/heart.py` prints them with their lines, and fails if they are too many. Whoever reads them knows the
trainer, so they are counted, imports inside of functions included. Lines are counted with their length, so that a heart
with fewer lines is no heart with longer ones.
"""

import ast
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

MOST_MODULES, MOST_LINES, MOST_STATEMENTS = 36, 4950, 3045
MOST_CHARACTERS = 50.7  # in a line without its indentation; blank lines are not counted
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


def heart(run: Callable[[str], str]) -> dict[str, str]:
    """Return the text of each module of the heart, in the order in which a process of `run` loads them."""
    return {name: Path(file).read_text("utf-8") for name, file in json.loads(run(SCRIPT)).items()}


def over(texts: Mapping[str, str]) -> list[str]:
    """Print how large the modules of these `texts` are, and return what is over its limit."""
    for name, text in texts.items():
        print(f"{len(text.splitlines()):5}  {name}")
    lines = [line.strip() for text in texts.values() for line in text.splitlines()]
    nodes = [node for text in texts.values() for node in ast.walk(ast.parse(text))]
    sizes = {
        "modules": (len(texts), MOST_MODULES),
        "lines": (len(lines), MOST_LINES),
        "statements": (sum(isinstance(node, ast.stmt) for node in nodes), MOST_STATEMENTS),
        "characters in a line": (round(sum(map(len, lines)) / sum(map(bool, lines)), 1), MOST_CHARACTERS),
    }
    for what, (size, most) in sizes.items():
        print(f"{size:5}  {what}; at most {most}")
    return [what for what, (size, most) in sizes.items() if size > most]


if __name__ == "__main__":
    sys.exit(bool(over(heart(lambda code: subprocess.check_output([sys.executable, "-c", code], text=True)))))
