"""`hookdiff check`: everything that can be known of a config without building."""

from __future__ import annotations

from pathlib import Path

import click

from hookdiff.cli.options import config_argument, override_options


@click.command()
@config_argument
@override_options
def command(config: Path, plugins: tuple[str, ...], settings: tuple[str, ...]) -> None:
    """Check CONFIG and print it with every default; build nothing."""
    import tomli_w

    from hookdiff import experiment
    from hookdiff.config import load_config

    checked = load_config(config, plugins, settings)
    experiment.probe(checked)
    click.echo(tomli_w.dumps(checked.resolved()), nl=False)
