"""Makes the generated parts of docs/**/*.md anew from the source: `python docs/refresh.py`."""

import ast
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import tomli

from hookdiff.cli import COMMANDS, group
from hookdiff.cli.hooks import contract, example, imports
from hookdiff.experiment.catalog import kinds, shortest_path
from hookdiff.images import PICTURE_FORMATS
from hookdiff.loop import HOOK_NAMES, Hooks
from hookdiff.options import argument_texts, import_line, import_object
from hookdiff.options.help import markdown

ROOT = Path(__file__).parents[1]
_KEYS = re.compile(r"(<!-- keys of (\S+?)(?: without ([\w, ]+))? -->\n).*?(<!-- end -->)", re.DOTALL)
_SIGNATURE = re.compile(r"(<!-- signature of (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
_HOOK = re.compile(r"(<!-- hook (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
_FORMATS = re.compile(r"(<!-- formats -->\n).*?(<!-- end -->)", re.DOTALL)
_FACES = re.compile(r"(<!-- faces -->\n).*?(<!-- end -->)", re.DOTALL)
_PART_KINDS = re.compile(r"(<!-- part kinds -->\n).*?(<!-- end -->)", re.DOTALL)
_PACKAGES = re.compile(r"(<!-- packages -->\n).*?(<!-- end -->)", re.DOTALL)
_COMMANDS = re.compile(r"(<!-- commands -->\n).*?(<!-- end -->)", re.DOTALL)
_IMPORTS = re.compile(r"(<!-- imports -->\n).*?(<!-- end -->)", re.DOTALL)


def signature(target: Callable[..., Any]) -> str:
    """Return the signature of `target`, one argument per line, and the table of its arguments."""
    name, texts = target.__name__, argument_texts(target)
    taken = inspect.signature(target).parameters.values()
    lines, is_keyword = [f"{name}("], False
    for parameter in taken:
        if parameter.kind is parameter.KEYWORD_ONLY and not is_keyword:
            lines, is_keyword = [*lines, "    *,"], True
        default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
        lines.append(f"    {parameter.name}: {parameter.annotation}{default},")
    rows = [f"| `{parameter.name}` | {texts[parameter.name]} |" for parameter in taken]
    return "\n".join(["```", *lines, ")", "```", "", "| argument | |", "|---|---|", *rows]) + "\n"


def hook(name: str) -> str:
    """Return the heading of the hook `name`, its docstring and its example."""
    _, *arguments = inspect.signature(getattr(Hooks, name)).parameters
    return f"### {name}({', '.join(arguments)})\n\n{contract(name)}\n\n{_python(example(name))}"


def formats() -> str:
    """Return the suffixes of all picture files."""
    return ", ".join(f"`{suffix}`" for kind in PICTURE_FORMATS for suffix in kind.suffixes) + "\n"


def faces() -> str:
    """Return the table of the public modules beside `hookdiff` itself: their first sentence, and their names."""
    lines = ["| module | content | names |", "|---|---|---|"]
    for stub in sorted((ROOT / "hookdiff").glob("*/__init__.pyi")):
        text, _, _ = _docstring(stub.with_suffix(".py")).partition("\n")
        names = [alias.name for node in ast.parse(stub.read_text("utf-8")).body for alias in node.names]  # type: ignore[attr-defined]
        shown = ", ".join(f"`{name}`" for name in sorted(names, key=str.lower))
        lines.append(f"| `hookdiff.{stub.parent.name}` | {text.removesuffix('.')} | {shown} |")
    return "\n".join(lines) + "\n"


def packages() -> str:
    """Return the number of packages in plugins/, and a table of their kinds, by entry points, and first sentences.

    A kind is followed by the names that the package has of it, unless that is its own name. Plugins come first.
    """
    groups = _entry_points()
    entries = [("plugin", *entry) for entry in groups["hookdiff.plugins"].items()]
    entries += [("command", *entry) for entry in groups["hookdiff.commands"].items()]
    entries += [(*name.split(".", 1), target) for name, target in groups["hookdiff.parts"].items()]
    parts: dict[str, dict[str, list[str]]] = {}  # names by kind by package
    for kind, name, target in entries:
        parts.setdefault(re.split("[.:]", target)[0], {}).setdefault(kind, []).append(name)
    count = f"There are {len(parts)} packages; {len(groups['hookdiff.plugins'])} of them have a plugin."
    lines = [count, "", "| package | what it is | |", "|---|---|---|"]
    for package, by_kind in sorted(parts.items(), key=lambda row: ("plugin" not in row[1], next(iter(row[1])), row[0])):
        short = package.removeprefix("hookdiff_")
        what = (kind + f" `{'`, `'.join(names)}`" * (names != [short]) for kind, names in by_kind.items())
        text, _, _ = _docstring(ROOT / "plugins" / package / "__init__.py").partition("\n")
        lines.append(f"| `{package}` | {', '.join(what)} | {text.removesuffix('.')} |")
    return "\n".join(lines) + "\n"


def commands() -> str:
    """Return the help of each command of this project: first those of the core."""
    outer = click.Context(group, info_name="hookdiff", **group.context_settings)
    names = (*COMMANDS, *sorted(_entry_points()["hookdiff.commands"]))
    return "\n".join(section for name in names for section in _helps(outer, name))


def _helps(outer: click.Context, name: str) -> Iterator[str]:
    """Yield the section of the command `name`, and the sections of its commands."""
    assert isinstance(outer.command, click.Group)
    command = outer.command.get_command(outer, name)
    assert command is not None
    context = click.Context(command, info_name=name, parent=outer)
    usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
    records = (option.get_help_record(context) for option in command.params if isinstance(option, click.Option))
    rows = [f"| `{_in_cell(names)}` | {_in_cell(text)} |" for names, text in filter(None, records)]
    table = ["| option | |", "|---|---|", *rows, ""] if rows else []
    text = inspect.cleandoc(command.help or "")
    yield "\n".join([f"## {context.command_path}", "", "```", usage, "```", "", text, "", *table])
    for inner in command.list_commands(context) if isinstance(command, click.Group) else ():
        yield from _helps(context, inner)


def _in_cell(text: str) -> str:
    return text.replace("|", r"\|")


def part_kinds() -> str:
    """Return the table of the kinds of parts: their base classes, and the methods that a part must define."""
    lines = ["| kind | derives from | defines |", "|---|---|---|"]
    for name, kind in sorted(kinds().items()):
        if base := kind.choice:
            needed = ((method, getattr(base, method)) for method in sorted(base.__abstractmethods__))
            defined = (f"`{method}{_arguments(of)}`: {_first_paragraph(of)}" for method, of in needed)
            lines.append(f"| `{name}` | `{shortest_path(base).replace(':', '.')}` | {'<br>'.join(defined)} |")
    return "\n".join(lines) + "\n"


def _arguments(method: object) -> str:
    if isinstance(method, property):
        return ""
    _, *names = inspect.signature(method).parameters  # type: ignore[arg-type]
    return f"({', '.join(names)})"


def _first_paragraph(target: object) -> str:
    return (inspect.getdoc(target) or "").partition("\n\n")[0].replace("\n", " ")


def _entry_points() -> dict[str, dict[str, str]]:
    project = tomli.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    groups: dict[str, dict[str, str]] = project["entry-points"]
    return groups


def _docstring(path: Path) -> str:
    return ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""


def _python(code: str) -> str:
    return f"```python\n{code}\n```\n"


def refresh(text: str) -> str:
    """Return Markdown `text` with its generated parts made anew.

    They stand before `<!-- end -->`: a table of keys after `<!-- keys of module:Name -->`, which may go on with
    ` without a, b`, and of a plugin also the import of its class; a signature after `<!-- signature of module:Name
    -->`; a hook after `<!-- hook NAME -->`; the imports of all examples after `<!-- imports -->`; the suffixes of
    pictures after `<!-- formats -->`; the public modules after `<!-- faces -->`; the packages of plugins/ after
    `<!-- packages -->`; the kinds of parts after `<!-- part kinds -->`; the commands after `<!-- commands -->`.
    """

    def table(path: str, without: str | None) -> str:
        names = frozenset(name.strip() for name in (without or "").split(","))
        made = markdown(import_object(path, "the reference"), names)
        line = f"In a script: `{import_line(path)}`\n" if path in plugins else ""
        return "\n" + line + "\n" * (bool(line) and bool(made.strip())) + made.lstrip("\n") + "\n"

    plugins = set(_entry_points()["hookdiff.plugins"].values())
    text = _KEYS.sub(lambda match: match[1] + table(match[2], match[3]) + match[4], text)
    text = _SIGNATURE.sub(
        lambda match: f"{match[1]}\n{signature(import_object(match[2], 'the reference'))}\n{match[3]}", text
    )
    text = _HOOK.sub(lambda match: match[1] + hook(match[2]) + match[3], text)
    text = _FORMATS.sub(lambda match: f"{match[1]}\n{formats()}\n{match[2]}", text)
    text = _FACES.sub(lambda match: f"{match[1]}\n{faces()}\n{match[2]}", text)
    text = _PART_KINDS.sub(lambda match: f"{match[1]}\n{part_kinds()}\n{match[2]}", text)
    text = _COMMANDS.sub(lambda match: f"{match[1]}\n{commands()}\n{match[2]}", text)
    text = _PACKAGES.sub(lambda match: f"{match[1]}\n{packages()}\n{match[2]}", text)
    return _IMPORTS.sub(lambda match: match[1] + _python("\n".join(imports(map(example, HOOK_NAMES)))) + match[2], text)


if __name__ == "__main__":
    for page in (ROOT / "docs").rglob("*.md"):
        page.write_text(refresh(page.read_text("utf-8")), "utf-8")
