"""Makes the generated parts of docs/*.md anew from the source: `python docs/refresh.py`."""

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hookdiff.choices import parts
from hookdiff.cli.hooks import contract, example, imports
from hookdiff.data.formats import FORMATS
from hookdiff.experiment.reference import Key, keys, summary
from hookdiff.hookspecs import HOOK_NAMES, Hooks
from hookdiff.imports import import_object

_KEYS = re.compile(r"(<!-- keys of (\S+?)(?: without ([\w, ]+))? -->\n).*?(<!-- end -->)", re.DOTALL)
_HOOK = re.compile(r"(<!-- hook (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
_FORMATS = re.compile(r"(<!-- formats -->\n).*?(<!-- end -->)", re.DOTALL)
_IMPORTS = re.compile(r"(<!-- imports -->\n).*?(<!-- end -->)", re.DOTALL)


def markdown(target: Callable[..., Any], without: frozenset[str] = frozenset()) -> str:
    """Return the table of the keys of `target`, and one of each kind of part among them."""
    shown = [key for key in keys(target) if key.name not in without]
    lines = ["| key | default | |", "|---|---|---|", *map(_row, shown)]
    for key in shown:
        if not key.kind:
            continue
        lines += ["", f"`{key.name}` is one of these, or `module:Name`:", "", "| use | option | default | |"]
        lines.append("|---|---|---|---|")
        for use, part in parts(key.kind).items():
            lines += [f"| `{use}` | | | {summary(part)} |", *(f"| {_row(option)}" for option in keys(part))]
    return "\n".join(lines) + "\n"


def _row(key: Key) -> str:
    return f"| `{key.name}` | {f'`{key.default}`' if key.default else ''} | {key.help} |"


def hook(name: str) -> str:
    """Return the heading of the hook `name`, its docstring and its example."""
    _, *arguments = inspect.signature(getattr(Hooks, name)).parameters
    return f"### {name}({', '.join(arguments)})\n\n{contract(name)}\n\n{_python(example(name))}"


def formats() -> str:
    """Return the suffixes of all picture files."""
    return ", ".join(f"`{suffix}`" for one in FORMATS for suffix in one.suffixes) + "\n"


def _python(code: str) -> str:
    return f"```python\n{code}\n```\n"


def refresh(text: str) -> str:
    """Return Markdown `text` with its generated parts made anew.

    They stand before `<!-- end -->`: a table of keys after `<!-- keys of module:Name -->`, which may go on with
    ` without a, b`; a hook after `<!-- hook NAME -->`; the imports of all examples after `<!-- imports -->`; the
    suffixes of pictures after `<!-- formats -->`.
    """

    def table(path: str, without: str | None) -> str:
        names = frozenset(name.strip() for name in (without or "").split(","))
        return "\n" + markdown(import_object(path, "the reference"), names) + "\n"

    text = _KEYS.sub(lambda found: found[1] + table(found[2], found[3]) + found[4], text)
    text = _HOOK.sub(lambda found: found[1] + hook(found[2]) + found[3], text)
    text = _FORMATS.sub(lambda found: f"{found[1]}\n{formats()}\n{found[2]}", text)
    return _IMPORTS.sub(lambda found: found[1] + _python("\n".join(imports(map(example, HOOK_NAMES)))) + found[2], text)


if __name__ == "__main__":
    for page in Path(__file__).parent.glob("*.md"):
        page.write_text(refresh(page.read_text("utf-8")), "utf-8")
