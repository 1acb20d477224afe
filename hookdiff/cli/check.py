"""`hookdiff check`: check a config, and print it with every default."""

from pathlib import Path

import click

from hookdiff.cli.options import config_argument, override_options


@click.command()
@config_argument
@override_options
def command(config: Path, plugins: tuple[str, ...], settings: tuple[str, ...]) -> None:
    """Check CONFIG, and print it with every default.

    The data is not read, and no file is written.
    """
    import tomli_w

    from hookdiff.experiment import load_config, try_config

    checked = load_config(config, plugins, settings)
    try_config(checked)
    click.echo(tomli_w.dumps(checked.resolved()), nl=False)
