"""`hookdiff new-plugin`: write a package with a small plugin or part, as a start."""

from pathlib import Path

import click

from hookdiff import UserError
from hookdiff_new_plugin.kinds import KINDS, classes_in, write
from hookdiff_new_plugin.names import check_name


@click.command()
@click.argument("name")
@click.argument("folder", metavar="[DIR]", type=click.Path(path_type=Path), required=False)
@click.option(
    "--kind", type=click.Choice(list(KINDS)), default="plugin", show_default=True, help="What the package contains."
)
def command(name: str, folder: Path | None, kind: str) -> None:
    """Write the package hookdiff-NAME to DIR, a folder that must not exist. Without DIR, the folder is hookdiff-NAME.

    The package has a small plugin or part of the --kind, an entry point, tests, a README, a workflow that runs the
    tests, and a config that uses the plugin or part. Everything works as it is: change it to what you need.
    """
    check_name(name, classes=classes_in(kind))
    folder = folder or Path(f"hookdiff-{name.replace('_', '-')}")
    if folder.exists() or folder.is_symlink():
        raise UserError(f"{folder} exists: name another folder, as in hookdiff new-plugin {name} DIR")
    write(kind, name, folder)
    click.echo(f"{folder}: the {kind} {name!r}")
    click.echo(f"  cd {folder}\n  pip install -e '.[test]'\n  pytest\n  hookdiff run example.toml")
