"""`hookdiff hooks`: the contract, from the specs' own docstrings."""

from __future__ import annotations

import inspect

import click


@click.command()
@click.argument("names", nargs=-1)
def command(names: tuple[str, ...]) -> None:
    """Print the contract of all hooks, or of NAMES."""
    from hookdiff.errors import UserError, nearest
    from hookdiff.hookspecs import HOOK_NAMES, Hooks

    for name in names:
        if name not in HOOK_NAMES:
            raise UserError(f"there is no hook {name!r}{nearest(name, HOOK_NAMES)}")
    for name in names or HOOK_NAMES:
        spec = getattr(Hooks, name)
        signature = str(inspect.signature(spec)).replace("(self, ", "(").replace("'", "")
        click.echo(click.style(f"{name}{signature}", bold=True))
        click.echo("".join(f"    {line}".rstrip() + "\n" for line in (inspect.getdoc(spec) or "").splitlines()))
