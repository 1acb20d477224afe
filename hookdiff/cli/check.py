"""`hookdiff check`: check a config, and print it with every key."""

import json
from pathlib import Path

import click

from hookdiff.cli.arguments import config_argument, json_option, override_options


@click.command()
@config_argument
@click.argument("table", required=False, metavar="[TABLE]")
@override_options
@json_option
def command(
    config: Path, table: str | None, plugins: tuple[str, ...], settings: tuple[str, ...], trust: bool, as_json: bool
) -> None:
    """Check CONFIG, and print it with every key, or only its table TABLE, such as plugins.ema.

    The first lines have the number of weights of the network, the length of the run in steps and epochs, and the time
    if the directory of the run has an earlier run with the same network, data and batches.

    The comment "set" marks the keys that CONFIG or the command line sets; the others have their defaults. A key without
    a value is a comment with its help. Of a folder of pictures, only the file names are read, so model arguments that
    depend on the data are left out. If the config has encoders, all captions and the headers of the pictures are read,
    the first sample is encoded, and all plugins start on trial. A comment shows how the model is called. No file of a
    run is written. With --json: an object with the config, the keys that depend on the data, the call of the model,
    warnings, the number of weights, the number of samples to train on, and the seconds of a step; what is not known is
    null, and so are NaN and infinity.
    """
    from hookdiff.cli.config_facts import data_facts, first_lines, num_weights, step_seconds
    from hookdiff.cli.config_text import chosen_tables, nested, tables_of, toml_lines
    from hookdiff.errors import shown
    from hookdiff.experiment.build import set_by_data, unused_classes
    from hookdiff.experiment.config import load_config
    from hookdiff.experiment.probe import try_config, try_data
    from hookdiff.log.event import as_json as as_strict

    checked = load_config(config, plugins, settings, trust=trust)
    call = try_config(checked)
    data = data_facts(checked, try_data(checked))
    warning = unused_classes(checked, data.num_classes)
    weights = num_weights(checked, data)
    resolved = checked.resolved()
    left_out = set_by_data(checked)
    for name in left_out:
        resolved["model"].pop(name, None)
    seconds = step_seconds(resolved, Path("runs") / checked.run.name)
    warnings = [warning] if warning else []
    tables = tables_of(checked, resolved, left_out)
    if table is not None:
        tables = chosen_tables(tables, table)
    if as_json:
        printed = resolved if table is None else nested(tables[0], resolved)
        facts: dict[str, object] = {"config": printed, "set_by_data": left_out, "call": call, "warnings": warnings}
        facts |= {"num_weights": weights, "num_samples": data.num_samples, "step_seconds": seconds}
        click.echo(json.dumps(as_strict(facts), indent=1))
        return
    for line in first_lines(checked, data, warnings, weights, seconds):
        click.echo(f"# {shown(line)}")
    click.echo("\n".join(toml_lines(tables, checked, plugins=bool(plugins), call=call)))
