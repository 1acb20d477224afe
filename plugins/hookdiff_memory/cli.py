"""`hookdiff memory`: print the memory that training a config takes."""

import json
from pathlib import Path

import click

from hookdiff.cli import config_argument, json_option, override_options


@click.command()
@config_argument
@override_options
@json_option
def command(config: Path, plugins: tuple[str, ...], settings: tuple[str, ...], trust: bool, as_json: bool) -> None:
    """Print the memory that training CONFIG takes.

    Samples are read only to find their shape. Nothing is trained, and no file is written.
    """
    from attrs import asdict

    from hookdiff import load_config
    from hookdiff.experiment import try_config
    from hookdiff_memory.estimate import estimate_memory

    checked = load_config(config, plugins, settings, trust=trust)
    try_config(checked)
    estimate = estimate_memory(checked)
    values = {**asdict(estimate), "total": estimate.total}
    if as_json:
        click.echo(json.dumps(values, indent=2))
        return
    notes = {
        "data": "the whole data set, held on the device",
        "batch": f"{estimate.batch_size} samples and their noise",
        "activations": f"micro_batch = {estimate.micro_batch}, {estimate.per_sample / 2**20:,.3f} for each sample",
        "peak": "the most at one time: "
        + ("with temporary tensors" if estimate.peak > estimate.total else "activations are freed as gradients come"),
        "available": "memory of the device",
    }
    sizes = {name: values[name] for name in ("parameters", "buffers", "gradients", "optimizer")}
    sizes |= {f"plugins.{name}": size for name, size in estimate.plugins.items()}
    sizes |= {name: values[name] for name in ("data", "batch", "activations", "total", "peak", "available")}
    click.echo(f"MiB on {estimate.device}")
    for name, size in sizes.items():
        if size is None and name == "optimizer":
            click.echo(f"{name:<20}{'?':>12}")
        elif size:
            click.echo(f"{name:<20}{size / 2**20:>12,.2f}  {notes.get(name, '')}".rstrip())
    for note in estimate.notes:
        click.echo(f"not counted: {note}")
