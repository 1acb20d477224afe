"""`hookdiff export`: write the weights of a run for other programs, or a folder that diffusers loads."""

from pathlib import Path

import click

from hookdiff.cli import trust_option


@click.command()
@click.argument("run", type=click.Path(path_type=Path), metavar="RUN|CHECKPOINT")
@click.argument("out", type=click.Path(path_type=Path), metavar="FILE|DIR")
@click.option(
    "--to",
    default="safetensors",
    show_default=True,
    type=click.Choice(["safetensors", "diffusers"]),
    help="safetensors: FILE with the keys of the model. diffusers: DIR with model, scheduler and pipeline.",
)
@click.option("--weights", help="Name of an average, 'model', or a safetensors file; by default an average if any.")
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="sampling.KEY=VALUE",
    help="For diffusers: change the sampler of the run; may be given several times.",
)
@click.option("--overwrite", is_flag=True, help="Replace an earlier export.")
@trust_option
def command(
    run: Path, out: Path, to: str, weights: str | None, settings: tuple[str, ...], overwrite: bool, trust: bool
) -> None:
    """Write the weights of the newest checkpoint of RUN, or of one CHECKPOINT in it, to FILE or DIR.

    The data of the run is not needed.

    They equal the weights with which `hookdiff sample RUN --weights NAME` samples, bit for bit. For diffusers the
    scheduler makes the steps of the run's sampler; a sampler that diffusers does not have is refused.
    """
    from hookdiff import SampleRequest, UnknownWeights, UserError, evaluating, load_run
    from hookdiff_checkpoint.export import about, check_place, write_weights
    from hookdiff_checkpoint.to_diffusers import equivalent_of, write_folder

    for setting in settings:
        if to != "diffusers" or not setting.strip().startswith("sampling."):
            raise UserError(f"--set {setting}: expected a key of [sampling], with --to diffusers")
    check_place(out, to, overwrite)
    with load_run(run, settings, trust=trust) as opened:
        loop = opened.loop
        sampling = equivalent_of(loop) if to == "diffusers" else None
        try:
            with opened.weights(weights) as name, evaluating(loop.model):
                metadata = about(name, opened.step)
                is_helped = loop.sample(SampleRequest(0, weights=opened.in_loop(name))).sampler is not loop.sampler
                if sampling:
                    usage = write_folder(out, loop.model, sampling, loop.feed.shape, metadata)
                else:
                    usage = write_weights(out, loop.model, metadata)
        except UnknownWeights as error:
            raise UserError(f"--weights: {error}, or a file that ends in .safetensors") from None
        except OSError as error:
            where = f" ({error.filename})" if error.filename else ""
            raise UserError(f"{out}: cannot be written: {error.strerror or error}{where}") from None
        origin = f"weights in {name}" if name.endswith(".safetensors") else f"{name} weights of step {opened.step}"
        helpers = [one.plugin_name for one in loop.plugins.order("sample") if one.plugin_name in loop.plugins]
    click.echo(f"{out}: the {origin}\n  {usage}")
    if is_helped:
        click.echo(f"  hookdiff sample also uses {', '.join(helpers)}: the images of these weights alone are others")
