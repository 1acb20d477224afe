"""`hookdiff check`: everything that can be known of a config without building."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hookdiff.cli.options import config_argument, override_options

if TYPE_CHECKING:
    from hookdiff.experiment.memory import MemoryEstimate


@click.command()
@config_argument
@override_options
@click.option("--memory", is_flag=True, help="Count what training takes instead; looks at the data for its shape.")
@click.option("--json", "as_json", is_flag=True, help="With --memory: print bytes, as JSON.")
def command(config: Path, plugins: tuple[str, ...], settings: tuple[str, ...], memory: bool, as_json: bool) -> None:
    """Check CONFIG and print it with every default; build nothing."""
    import tomli_w

    from hookdiff import experiment
    from hookdiff.errors import UserError
    from hookdiff.experiment.config import load_config

    if as_json and not memory:
        raise UserError("--json goes with --memory; without it the config is printed, as TOML")
    checked = load_config(config, plugins, settings)
    experiment.try_config(checked)
    if not memory:
        click.echo(tomli_w.dumps(checked.resolved()), nl=False)
        return
    import json

    from attrs import asdict

    from hookdiff.experiment.memory import estimate_memory

    estimate = estimate_memory(checked)
    told = {**asdict(estimate), "total": estimate.total}
    click.echo(json.dumps(told, indent=2) if as_json else "\n".join(_table(estimate)))


def _table(estimate: MemoryEstimate) -> Iterator[str]:
    rows: list[tuple[str, int | None, str]] = [
        ("parameters", estimate.parameters, ""),
        ("buffers", estimate.buffers, ""),
        ("gradients", estimate.gradients, ""),
        ("optimizer", estimate.optimizer, ""),
        *((f"plugins.{name}", size, "") for name, size in estimate.plugins.items()),
        ("data", estimate.data, "where the device holds the whole set"),
        ("batch", estimate.batch, f"{estimate.batch_size} samples and their noise"),
        ("activations", estimate.activations, _activations(estimate)),
        ("together", estimate.total, ""),
        ("peak", estimate.peak, "the most at one time, with what comes and goes"),
        ("device", estimate.available, "there is"),
    ]
    yield f"MiB on {estimate.device}"
    for name, size, note in rows:
        if size is None and name == "optimizer":
            yield f"{name:<20}{'?':>12}"
        elif size:
            yield f"{name:<20}{size / 2**20:>12,.2f}  {note}".rstrip()
    yield from (f"not counted: {note}" for note in estimate.notes)


def _activations(estimate: MemoryEstimate) -> str:
    return f"micro_batch = {estimate.micro_batch}: {estimate.per_sample / 2**20:,.3f} a sample"
