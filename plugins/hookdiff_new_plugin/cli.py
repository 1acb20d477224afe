"""`hookdiff new-plugin`: write a package for a plugin or a part, to begin with."""

from pathlib import Path

import click

from hookdiff import UserError
from hookdiff_new_plugin.kinds import KINDS, classes_in, write
from hookdiff_new_plugin.names import check_name


@click.command()
@click.argument("name")
@click.argument("folder", metavar="[DIR]", type=click.Path(path_type=Path), required=False)
@click.option(
    "--kind", type=click.Choice(list(KINDS)), default="plugin", show_default=True, help="What the package has."
)
def command(name: str, folder: Path | None, kind: str) -> None:
    """Write the package hookdiff-NAME to DIR, by default a folder of that name, which must not exist.

    The package has a small plugin of the --kind, or a part, with its entry point, tests, README, the workflow of its
    tests, and a config in which it acts. All of it works as it is: change it to what you need.
    """
    check_name(name, classes=classes_in(kind))
    folder = folder or Path(f"hookdiff-{name.replace('_', '-')}")
    if folder.exists() or folder.is_symlink():
        raise UserError(f"{folder} exists: hookdiff new-plugin {name} DIR writes another folder")
    write(kind, name, folder)
    click.echo(f"{folder}: the {kind} {name!r}")
    click.echo(f"  cd {folder}\n  pip install -e '.[test]'\n  pytest\n  hookdiff run example.toml")
