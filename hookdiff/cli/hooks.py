"""`hookdiff hooks`: print every hook: when it is called, what plugins may change, and an example."""

import ast
import functools
import inspect
import json
from collections.abc import Iterable
from pathlib import Path

import click

from hookdiff.cli.arguments import json_option
from hookdiff.errors import UserError, nearest


@click.command()
@click.argument("names", nargs=-1, metavar="[NAME]...")
@json_option
def command(names: tuple[str, ...], as_json: bool) -> None:
    """Print the hooks called NAME, or all hooks.

    For each hook: its arguments, when it is called, what plugins may change, what it returns, and an example.
    """
    from hookdiff.loop.hookspecs import HOOK_NAMES, HOOKS, Hooks

    for name in names:
        if name not in HOOK_NAMES:
            raise UserError(f"there is no hook {name!r}{nearest(name, HOOK_NAMES)}")
    hooks = []
    for name in names or HOOK_NAMES:
        signature = str(inspect.signature(getattr(Hooks, name))).replace("(self, ", "(").replace("'", "")
        code = example(name)
        texts = {"contract": contract(name), "imports": "\n".join(imports([code])), "example": code}
        hooks.append({"name": name, "signature": signature, "kind": HOOKS[name].kind, **texts})
        if not as_json:
            click.echo(click.style(f"{name}{signature}", bold=True))
            for text in texts.values():
                click.echo("".join(f"    {line}".rstrip() + "\n" for line in text.splitlines()))
    if as_json:
        click.echo(json.dumps(hooks, indent=1))


def contract(hook: str) -> str:
    """Return the docstring of `hook`."""
    from hookdiff.loop.hookspecs import Hooks

    return inspect.getdoc(getattr(Hooks, hook)) or ""


def example(hook: str) -> str:
    """Return the source of the example of `hook`: the class of `hookdiff.testing.examples` whose first method it is."""
    source, module = _examples()
    (definition,) = (
        node
        for node in module.body
        if isinstance(node, ast.ClassDef)
        and next(member.name for member in node.body if isinstance(member, ast.FunctionDef)) == hook
    )
    first = min([definition.lineno, *(decorator.lineno for decorator in definition.decorator_list)])
    return "\n".join(source.splitlines()[first - 1 : definition.end_lineno])


def imports(codes: Iterable[str]) -> list[str]:
    """Return the lines that import the names in these examples."""
    used = {node.id for code in codes for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name)}
    lines = []
    for node in _examples()[1].body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias for alias in node.names if alias.name in used]
            if isinstance(node, ast.ImportFrom) and names:
                lines.append(ast.unparse(ast.ImportFrom(node.module, names, node.level)))
            elif names:
                lines.append(ast.unparse(ast.Import(names)))
    return lines


@functools.cache
def _examples() -> tuple[str, ast.Module]:
    # The file is read and not imported: the import of torch takes long.
    source = Path(__file__).parents[1].joinpath("testing", "examples.py").read_text("utf-8")
    return source, ast.parse(source)
