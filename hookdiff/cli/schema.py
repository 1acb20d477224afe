"""`hookdiff schema`: write the JSON Schema of a config, with which editors complete and check the config."""

import json
from pathlib import Path

import click

from hookdiff.cli.arguments import check_free, checked_by, overwrite_option
from hookdiff.disk.files import new_file
from hookdiff.disk.paths import check_writable
from hookdiff.errors import UserError
from hookdiff.experiment.toml_file import read_toml

FILE = "hookdiff.schema.json"
_LINE = f"#:schema ./{FILE}\n"


@click.command()
@click.argument("file", type=click.Path(path_type=Path), required=False, metavar="[FILE]")
@click.option(
    "--into",
    type=click.Path(path_type=Path),
    metavar="CONFIG",
    callback=checked_by(read_toml),
    help=f"Write or replace {FILE} beside CONFIG, and add a line to CONFIG that names this file.",
)
@overwrite_option
def command(file: Path | None, into: Path | None, overwrite: bool) -> None:
    """Write the JSON Schema (draft-07) of a config to FILE, or print it.

    The schema has all installed plugins and parts, with the help and the limits of their keys. Write the schema
    again after you install a package with plugins. An editor checks a config with the schema, without running code.
    """
    if file and into:
        raise UserError("give FILE or --into, not both")
    if into:
        add_schema(into)
        click.echo(f"{into}: has the schema {FILE}")
    elif file:
        check_free(file, overwrite)
        _write(file, _text())
        click.echo(f"{file}: the schema of a config")
    else:
        click.echo(_text(), nl=False)


def add_schema(config: Path) -> None:
    """Write the schema beside `config`, and add a first line to `config` that names the schema, if it has none."""
    _write(config.with_name(FILE), _text())
    text = config.read_text("utf-8")
    if not any(line.startswith("#:schema") for line in text.splitlines()):
        _write(config, _LINE + text)


def _text() -> str:
    from hookdiff.cli.completion import write_table
    from hookdiff.cli.json_schema import config_schema

    write_table(anew=True)
    return json.dumps(config_schema(), indent=1) + "\n"


def _write(path: Path, text: str) -> None:
    check_writable(path)
    with new_file(path) as partial:
        partial.write_bytes(text.encode())
