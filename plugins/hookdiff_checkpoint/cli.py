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
    type=click.Choice(["safetensors", "diffusers"]),
    help="safetensors: FILE with the model's keys. diffusers: DIR with model, encoders, scheduler and pipeline.",
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
    from hookdiff.cli import chosen_weights
    from hookdiff_checkpoint.export import about, check_place, write_weights
    from hookdiff_checkpoint.scheduler import equivalent_of
    from hookdiff_checkpoint.to_diffusers import write_folder

    for setting in settings:
        table = setting.partition(".")[0].strip()
        if table != "data" and (table != "sampling" or to != "diffusers"):
            raise UserError(f"--set {setting}: expected a key of [data.encode], or of [sampling] with --to diffusers")
    for option, value in (("--steps", steps), ("--sampler", sampler)):
        if to != "diffusers" and value is not None:
            raise UserError(f"{option}: add --to diffusers, or leave the option out; {to} has no scheduler")
    check_place(out, to, overwrite)
    with load_run(run, settings, trust=trust) as opened, opened.sampling(steps=steps, sampler=sampler):
        loop = opened.loop
        sampling = equivalent_of(loop) if to == "diffusers" else None
        try:
            with chosen_weights(opened, weights) as name, evaluating(loop.model):
                metadata = about(name, opened.step)
                is_changed = loop.sample(SampleRequest(0, weights=opened.in_loop(name))).sampler is not loop.sampler
                if sampling:
                    usage = write_folder(out, loop, sampling, metadata)
                else:
                    usage = write_weights(out, loop.model, metadata)
        except OSError as error:
            where = f" ({error.filename})" if error.filename else ""
            raise UserError(f"{out}: cannot be written: {error.strerror or error}{where}") from None
        origin = opened.origin(name)
        plugins = [hook.plugin_name for hook in loop.plugins.order("sample") if hook.plugin_name in loop.plugins]
    click.echo(f"{out}: the {origin}\n  {usage}")
    if is_changed:
        click.echo(f"  hookdiff sample also uses {', '.join(plugins)}; these weights alone give other images")
