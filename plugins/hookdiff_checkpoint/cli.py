"""`hookdiff export`: write the weights of a run for other programs, or a folder that diffusers loads."""

from pathlib import Path

import click

from hookdiff.cli import overwrite_option, run_argument, settings_option, solver_options, trust_option, weights_option


@click.command()
@run_argument("RUN|CHECKPOINT")
@click.argument("out", type=click.Path(path_type=Path), metavar="FILE|DIR")
@click.option(
    "--to",
    default="safetensors",
    show_default=True,
    metavar="NAME",
    shell_complete=lambda *_: _formats(),
    help="safetensors: FILE with the model's keys. diffusers: DIR with model, encoders, scheduler and pipeline. With "
    "the plugin lora: lora, DIR for diffusers; kohya, FILE for other programs.",
)
@weights_option
@solver_options
@settings_option
@overwrite_option
@trust_option
def command(
    run: Path,
    out: Path,
    to: str,
    weights: str | None,
    steps: int | None,
    sampler: str | None,
    settings: tuple[str, ...],
    overwrite: bool,
    trust: bool,
) -> None:
    """Write the weights of the newest checkpoint of RUN, or of one CHECKPOINT in it, to FILE or DIR.

    The data of the run is not needed.

    The weights equal, bit for bit, those with which `hookdiff sample RUN --weights NAME` samples. For diffusers, the
    scheduler makes the steps of the run's sampler, or of the sampler that --steps, --sampler and --set describe. A
    sampler that diffusers does not have is refused.
    """
    from hookdiff import SampleRequest, UserError, evaluating, load_run
    from hookdiff.authors import ExportedRun, ExportFormat
    from hookdiff.cli import chosen_weights
    from hookdiff_checkpoint.export import check_place

    try:
        exporter = ExportFormat.of(to)
    except UserError as error:
        raise UserError(f"--to {to}: {error}") from None
    for setting in settings:
        table = setting.partition(".")[0].strip()
        is_moved = setting.partition("=")[0].strip() == "model.path"
        if not is_moved and table not in ("data", *(["sampling"] if exporter.has_sampler else [])):
            expected = "a key of [data.encode], model.path, or a key of [sampling] with --to diffusers"
            raise UserError(f"--set {setting}: expected {expected}")
    for option, value in (("--steps", steps), ("--sampler", sampler)):
        if not exporter.has_sampler and value is not None:
            raise UserError(f"{option}: add --to diffusers, or leave the option out; {to} has no scheduler")
    check_place(out, exporter, overwrite)
    with load_run(run, settings, trust=trust) as opened, opened.sampling(steps=steps, sampler=sampler):
        loop = opened.loop
        try:
            with chosen_weights(opened, weights) as name, evaluating(loop.model):
                is_changed = loop.sample(SampleRequest(0, weights=opened.in_loop(name))).sampler is not loop.sampler
                usage = exporter.write(ExportedRun(loop, opened.config, opened.step, name), out)
        except OSError as error:
            where = f" ({error.filename})" if error.filename else ""
            raise UserError(f"{out}: cannot be written: {error.strerror or error}{where}") from None
        origin = opened.origin(name)
        plugins = [hook.plugin_name for hook in loop.plugins.order("sample") if hook.plugin_name in loop.plugins]
    click.echo(f"{out}: the {origin}\n  {usage}")
    if is_changed:
        click.echo(f"  hookdiff sample also uses {', '.join(plugins)}; these weights alone give other images")


def _formats() -> list[str]:
    from hookdiff.options import published

    return sorted(published("export"))
