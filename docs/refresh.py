"""Makes the tables of keys in docs/*.md anew from the classes: `python docs/refresh.py`."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hookdiff.choices import import_object
from hookdiff.experiment.reference import Key, keys, summary

_BLOCK = re.compile(r"(<!-- keys of (\S+?)(?: without ([\w, ]+))? -->\n).*?(<!-- end -->)", re.DOTALL)


def markdown(target: Callable[..., Any], without: frozenset[str] = frozenset()) -> str:
    """Return the table of the keys of `target`, and one of each kind of part among them."""
    shown = [key for key in keys(target) if key.name not in without]
    lines = ["| key | default | |", "|---|---|---|", *map(_row, shown)]
    for key in shown:
        if not key.kind:
            continue
        lines += ["", f"`{key.name}` is one of these, or `module:Name`:", "", "| use | option | default | |"]
        lines.append("|---|---|---|---|")
        for use, part in key.kind.known.items():
            lines += [f"| `{use}` | | | {summary(part)} |", *(f"| {_row(option)}" for option in keys(part))]
    return "\n".join(lines) + "\n"


def _row(key: Key) -> str:
    return f"| `{key.name}` | {f'`{key.default}`' if key.default else ''} | {key.help} |"


def refresh(text: str) -> str:
    """Return Markdown `text` with its tables made anew.

    A table stands between `<!-- keys of module:Name -->`, which may go on with ` without a, b`, and `<!-- end -->`.
    """

    def made(block: re.Match[str]) -> str:
        begin, path, without, end = block.groups()
        names = frozenset(name.strip() for name in (without or "").split(","))
        return f"{begin}\n{markdown(import_object(path, 'the reference'), names)}\n{end}"

    return _BLOCK.sub(made, text)


if __name__ == "__main__":
    for page in Path(__file__).parent.glob("*.md"):
        page.write_text(refresh(page.read_text("utf-8")), "utf-8")
