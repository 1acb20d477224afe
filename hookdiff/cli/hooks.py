"""`hookdiff hooks`: print every hook: when it is called, and what plugins may change."""

import inspect

import click

from hookdiff.errors import UserError, nearest


@click.command()
@click.argument("names", nargs=-1, metavar="[NAME]...")
def command(names: tuple[str, ...]) -> None:
    """Print the hooks called NAME, or all hooks.

    For each hook: its arguments, when it is called, what plugins may change, and what it returns.
    """
    from hookdiff.hookspecs import HOOK_NAMES, Hooks

    for name in names:
        if name not in HOOK_NAMES:
            raise UserError(f"there is no hook {name!r}{nearest(name, HOOK_NAMES)}")
    for name in names or HOOK_NAMES:
        spec = getattr(Hooks, name)
        signature = str(inspect.signature(spec)).replace("(self, ", "(").replace("'", "")
        click.echo(click.style(f"{name}{signature}", bold=True))
        click.echo("".join(f"    {line}".rstrip() + "\n" for line in (inspect.getdoc(spec) or "").splitlines()))
