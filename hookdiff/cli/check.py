"""`hookdiff check`: check a config, and print it with every default."""

import json
from pathlib import Path

import click

from hookdiff.cli.options import config_argument, override_options
from hookdiff.errors import UserError


@click.command()
@config_argument
@override_options
@click.option("--memory", is_flag=True, help="Print the memory that training needs; reads samples for their shape.")
@click.option("--json", "as_json", is_flag=True, help="With --memory: print the bytes as JSON.")
def command(config: Path, plugins: tuple[str, ...], settings: tuple[str, ...], memory: bool, as_json: bool) -> None:
    """Check CONFIG, and print it with every default.

    No data is read except with --memory, and no file is written.
    """
    import tomli_w
    from attrs import asdict

    from hookdiff import experiment
    from hookdiff.experiment.config import load_config

    if as_json and not memory:
        raise UserError("--json needs --memory; without it the config is printed as TOML")
    checked = load_config(config, plugins, settings)
    experiment.try_config(checked)
    if not memory:
        click.echo(tomli_w.dumps(checked.resolved()), nl=False)
        return
    from hookdiff.experiment.memory import estimate_memory

    estimate = estimate_memory(checked)
    if as_json:
        click.echo(json.dumps({**asdict(estimate), "total": estimate.total}, indent=2))
        return
    notes = {
        "data": "the whole data set, held on the device",
        "batch": f"{estimate.batch_size} samples and their noise",
        "activations": f"micro_batch = {estimate.micro_batch}, {estimate.per_sample / 2**20:,.3f} for each sample",
        "peak": "the most in use at one time, with temporary tensors",
        "available": "memory of the device",
    }
    sizes = {name: getattr(estimate, name) for name in ("parameters", "buffers", "gradients", "optimizer")}
    sizes |= {f"plugins.{name}": size for name, size in estimate.plugins.items()}
    sizes |= {name: getattr(estimate, name) for name in ("data", "batch", "activations", "total", "peak", "available")}
    click.echo(f"MiB on {estimate.device}")
    for name, size in sizes.items():
        if size is None and name == "optimizer":
            click.echo(f"{name:<20}{'?':>12}")
        elif size:
            click.echo(f"{name:<20}{size / 2**20:>12,.2f}  {notes.get(name, '')}".rstrip())
    for note in estimate.notes:
        click.echo(f"not counted: {note}")
