"""`hookdiff profile`: show where the time of a step goes, and what would make it faster."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hookdiff.cli import check_output, config_argument, json_option, override_options, overwrite_option
from hookdiff.terminal import rate

if TYPE_CHECKING:
    from hookdiff_profile.steps import Profile
    from hookdiff_profile.trials import Outcome

_SHOWN = 3  # changes to try first
_SMALL = 0.001  # parts below this share of a step have no row of their own


@click.command()
@config_argument
@override_options
@click.option(
    "--steps", default=20, show_default=True, type=click.IntRange(2), metavar="N", help="Steps of each measurement."
)
@click.option(
    "--trace", type=click.Path(path_type=Path), metavar="FILE", help="Write a Chrome trace, .json or .json.gz."
)
@overwrite_option
@click.option("--try/--no-try", "tries", default=True, help="Measure changes too; compiling takes a minute or more.")
@json_option
def command(
    config: Path,
    plugins: tuple[str, ...],
    settings: tuple[str, ...],
    trust: bool,
    steps: int,
    trace: Path | None,
    overwrite: bool,
    tries: bool,
    as_json: bool,
) -> None:
    """Show where the time of a step of CONFIG goes, and which changes would make it faster.

    Trains for some steps in a temporary directory. Then hookdiff measures changes of the config, each in turns with
    CONFIG: precision, memory format, batch size, workers, compilation. A faster change may need another learning rate.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler writes to stderr, even that there is no GPU

    from attrs import asdict

    from hookdiff import UserError, load_config
    from hookdiff_profile.steps import measure
    from hookdiff_profile.trials import tried

    if trace is not None:
        check_output(trace, overwrite)
    checked = load_config(config, plugins, settings, trust=trust)
    try:
        profile = measure(checked, steps, trace)
    except OSError as error:
        raise UserError(f"{error.filename or trace}: {error.strerror or error}") from None
    if not as_json:
        click.echo(f"{checked.run.name}: {table(profile)}")
        if trace:
            click.echo(f"{trace}: open it at https://ui.perfetto.dev")
    outcomes = list(tried(config, plugins, settings, steps, trust)) if tries else []
    if as_json:
        click.echo(json.dumps({**asdict(profile), "changes": [_facts(outcome) for outcome in outcomes]}))
    elif tries:
        click.echo(advice(outcomes))


def table(profile: Profile) -> str:
    """Return the parts of a step as lines of text."""
    speed = rate(profile.images / profile.seconds)
    lines = [f"{profile.seconds * 1000:.1f} ms a step of {profile.images:,} images on {profile.device}, {speed}"]
    length = "" if profile.length is None else f" of {profile.length:,}"
    longer = ", since the config has too few for the measurement" if profile.is_longer else ""
    lines.append(f"  counted from step {profile.first + 1:,}{length}, after the warm-up of the rate{longer}")
    if profile.busy is not None:
        lines.append(f"  the GPU computes {profile.busy:.0%} of the time")
    total = sum(profile.parts.values())
    if profile.device == "cpu" and not 0.7 < total / profile.seconds < 1.5:  # on a GPU each part waits for the device
        busy = "do other processes use this machine?"
        lines.append(f"  its parts, measured after that, had {total * 1000:.1f} ms: {busy}")
    lines.append(f"  {'part':<40}{'ms':>10}{'share':>8}")
    rows = [(part, time) for part, time in profile.parts.items() if time >= _SMALL * total]
    if rest := len(profile.parts) - len(rows):
        rows.append((f"{rest} more, below {_SMALL:.1%} each", total - sum(time for _, time in rows)))
    lines += [f"  {part:<40}{time * 1000:>10.2f}{time / total:>8.1%}" for part, time in rows]
    return "\n".join(lines)


def advice(outcomes: list[Outcome]) -> str:
    """Return the changes to try first, and all that were measured, as lines of text."""
    from hookdiff_profile.trials import WORTH

    measured = sorted((each for each in outcomes if each.ratio), key=lambda each: -(each.ratio or 0))
    best = [each for each in measured if (each.ratio or 0) >= WORTH][:_SHOWN]
    lines = ["try first, with the speed over the present speed:" if best else "nothing that was tried is faster:"]
    lines += [f"  {each.ratio:.2f}  {each.change}" for each in best or measured]
    if best and (rest := [f"{each.change} {each.ratio:.2f}" for each in measured if each not in best]):
        lines.append(f"  also measured: {', '.join(rest)}")
    lines += [f"  not measured: {each.change}: {each.why}" for each in outcomes if not each.ratio]
    return "\n".join(lines)


def _facts(outcome: Outcome) -> dict[str, object]:
    change = outcome.change
    return {"plugins": change.plugins, "settings": change.settings, "ratio": outcome.ratio, "why": outcome.why}
