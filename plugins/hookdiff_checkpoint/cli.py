"""`hookdiff export`: write the weights of a run for other programs, or a folder that diffusers loads."""

from pathlib import Path

import click

from hookdiff.cli.options import trust_option

_HOOKS = ("prepare_model", "restore", "sample", "offer_weights")


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

    They equal the weights with which `hookdiff sample RUN --weights NAME` samples, bit for bit. For diffusers the
    scheduler makes the steps of the run's sampler; a sampler that diffusers does not have is refused.
    """
    from hookdiff import UnknownWeights, UserError, build_loop, evaluating, load_config
    from hookdiff.disk import run_of
    from hookdiff.models import load_into
    from hookdiff_checkpoint.export import about, check_place, write_weights
    from hookdiff_checkpoint.to_diffusers import equivalent_of, write_folder

    source = run_of(run)
    for setting in settings:
        if to != "diffusers" or not setting.strip().startswith("sampling."):
            raise UserError(f"--set {setting}: expected a key of [sampling], with --to diffusers")
    check_place(out, to, overwrite)
    from_file = weights if weights and weights.endswith(".safetensors") else None
    config = load_config(source / "config.toml", settings=settings, trust=trust)
    loop = build_loop(config, source, resume=run, hooks=_HOOKS)
    with loop:
        if from_file:
            load_into(loop.model, Path(from_file), asked_by="--weights")
        sampling = equivalent_of(loop) if to == "diffusers" else None
        try:
            with loop.weights("model" if from_file else weights) as name, evaluating(loop.model):
                metadata = about(loop, from_file)
                if sampling:
                    usage = write_folder(out, loop.model, sampling, loop.feed.shape, metadata)
                else:
                    usage = write_weights(out, loop.model, metadata)
        except UnknownWeights as error:
            raise UserError(f"--weights: {error}, or a file that ends in .safetensors") from None
        except OSError as error:
            where = f" ({error.filename})" if error.filename else ""
            raise UserError(f"{out}: cannot be written: {error.strerror or error}{where}") from None
    origin = f"weights in {from_file}" if from_file else f"{name} weights of step {loop.progress.step}"
    click.echo(f"{out}: the {origin}\n  {usage}")
