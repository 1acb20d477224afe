"""`hookdiff check`: check a config, and print it with every default."""

import json
from contextlib import suppress
from pathlib import Path

import click

from hookdiff.cli.arguments import config_argument, json_option, override_options


@click.command()
@config_argument
@override_options
@json_option
def command(config: Path, plugins: tuple[str, ...], settings: tuple[str, ...], trust: bool, as_json: bool) -> None:
    """Check CONFIG, and print it with every default.

    Of a folder of pictures, only the file names are read, so model arguments that depend on the data are left out. If
    the config has encoders, all captions and the headers of the pictures are read, the first sample is encoded, and all
    plugins start on trial. A comment shows how the model is called. No file of a run is written. With --json: an object
    with the config, the keys that depend on the data, the call of the model, and warnings; NaN and infinity are null.
    """
    import tomli_w

    from hookdiff.errors import ConfigError, shown
    from hookdiff.experiment.build import set_by_data, unused_classes
    from hookdiff.experiment.config import load_config
    from hookdiff.experiment.probe import try_config, try_data
    from hookdiff.images.folder import Folder
    from hookdiff.log.event import as_json as as_strict

    checked = load_config(config, plugins, settings, trust=trust)
    call = try_config(checked)
    try_data(checked)
    warnings = []
    if checked.data.target is Folder:
        with suppress(ConfigError):  # the folder may be on another machine
            classes = checked.data.build().classes
            if warning := unused_classes(checked, len(classes or ())):
                warnings.append(warning)
    table = checked.resolved()
    left_out = set_by_data(checked)
    for name in left_out:
        table["model"].pop(name, None)
    if as_json:
        facts = {"config": table, "set_by_data": left_out, "call": call, "warnings": warnings}
        click.echo(json.dumps(as_strict(facts), indent=1))
        return
    for warning in warnings:
        click.echo(warning, err=True)
    head = "[model]"  # with comments, which tomli_w does not write
    if left_out:
        head += f" # the data gives {', '.join(left_out)}"
    if call:
        head += f"\n# {shown(call)}"
    click.echo(tomli_w.dumps(table).replace("\n[model]\n", f"\n{head}\n", 1), nl=False)
