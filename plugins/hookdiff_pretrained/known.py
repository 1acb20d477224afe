"""What the folder of a pipeline says about the other tables of a config: process, prediction, sampling, encoders."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from attrs import evolve

from hookdiff import UserError
from hookdiff.diffusion import VP, Process
from hookdiff.disk import is_hub_name
from hookdiff.encoding import TextEncoder, file_in, table_in
from hookdiff.options import Elsewhere
from hookdiff_pretrained.folder import KEY, PIPELINE
from hookdiff_pretrained.scheduler import Scheduler

_AUTOENCODERS = ("vae", "vqvae")  # folders of a pipeline
_SCHEDULER = "scheduler/scheduler_config.json"


def known_in(pipeline: Path, base: str, config: Mapping[str, Any]) -> Elsewhere:
    """Return what the folder `pipeline` says about other tables, for a `config` that may set some of them.

    `base` stands for the folder in these tables: its path, or a name of the hub.

    Raises:
        UserError: for a file in the folder that cannot be read.
    """
    diffusion, data = _table(config, "diffusion"), _table(config, "data")
    facts: dict[str, Any] = {}
    defaults: dict[str, Any] = {}
    warnings: tuple[str, ...] = ()
    if file_in(pipeline, _SCHEDULER, KEY):
        scheduler = Scheduler.of(table_in(pipeline, _SCHEDULER, "scheduler of diffusers", asked_by=KEY))
        process = {"process": scheduler.process} if scheduler.process else {}
        if not process and "process" not in diffusion:
            where = pipeline / _SCHEDULER
            raise UserError(f"diffusion.process: the betas in {where} are of no schedule of hookdiff; set a process")
        differs = "process" in diffusion and not _are_same(diffusion["process"], scheduler.process)
        if "process" in diffusion and not differs:  # written in another way
            process = {}
        facts["diffusion"] = {**process, "prediction": scheduler.prediction}
        if not differs:
            defaults["sampling"], warnings = dict(scheduler.sampling), scheduler.warnings
    encode: dict[str, Any] = {}
    folder = next((pipeline / name for name in _AUTOENCODERS if (pipeline / name).is_dir()), None)
    if folder is not None:
        defaults.get("sampling", {}).pop("clipping", None)  # latents are never clipped
        encode["image"] = {"use": "autoencoder", "path": type(base)(f"{base}/{folder.name}")}
        facts["data"] = {"encode": {"image": {"scale": "model"}}}
    if "conditions" not in diffusion and not _other_texts(_table(data, "encode")):
        place = _table(_table(data, "encode"), "text").get("path", pipeline)
        try:
            keywords = TextEncoder.of({"use": "pipeline", "path": str(place)}).keywords
        except (UserError, ValueError, TypeError) as error:  # reported where [data] is read, if the config names it
            kind = table_in(pipeline, PIPELINE, "pipeline", asked_by=KEY).get("_class_name")
            if _has_texts(pipeline):
                warnings += (f"{KEY}: the text side of the {kind} in {pipeline} cannot be used: {error}",)
        else:
            encode["text"] = {"use": "pipeline", "path": base}
            defaults["diffusion"] = {"conditions": {keyword: f"text{end}" for end, keyword in keywords.items()}}
    defaults["data"] = {"encode": encode}
    parts = {**encode, "text": {"use": "pipeline", "path": base}}
    return Elsewhere(facts, defaults, _moved(_table(data, "encode"), parts), warnings)


def _moved(given: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, Any]:
    """Return the paths of this pipeline for encoders of the config whose folders are not there.

    The config of a run has the paths of the pipeline when it began. Other encoders are refused by their hash.
    """
    encode = {}
    for name, own in ours.items():
        table = _table(given, name)
        path = table.get("path")
        is_here = not isinstance(path, str) or is_hub_name(path) or Path(path).expanduser().exists()
        if not is_here and table.get("use") == own["use"]:
            encode[name] = {"path": own["path"]}
    return {"data": {"encode": encode}} if encode else {}


def _table(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    table = config.get(key)
    return table if isinstance(table, Mapping) else {}


def _other_texts(encode: Mapping[str, Any]) -> bool:
    """Return whether the config encodes texts in its own way."""
    own = encode.get("text")
    use = own.get("use", "pipeline") if isinstance(own, Mapping) else own
    return bool(encode.keys() - {"image", "text"}) or use not in (None, "pipeline")


def _has_texts(pipeline: Path) -> bool:
    return (pipeline / "text_encoder").is_dir()


def _are_same(given: Any, known: Any) -> bool:
    """Return whether two processes, as a config gives them, have the same rates."""
    if known is None:  # the folder has no process that hookdiff knows
        return True
    try:
        ours, theirs = Process.of(given), Process.of(known)
    except (UserError, ValueError, TypeError):  # reported where [diffusion] is read
        return True
    if isinstance(ours, VP) and isinstance(theirs, VP):
        tables = ours.tables.alphas_cumprod, theirs.tables.alphas_cumprod
        return len(tables[0]) == len(tables[1]) and torch.allclose(*tables, rtol=1e-4)
    return ours == theirs


def with_half(known: Elsewhere, config: Mapping[str, Any]) -> Elsewhere:
    """Return `known` with what weights in bf16 need: a network that computes in bf16, in training and in samples.

    Raises:
        UserError: if the config says otherwise.
    """
    for table, key, given in (
        ("plugins.amp", "precision", _table(_table(config, "plugins"), "amp").get("precision", "bf16")),
        ("sampling", "precision", _table(config, "sampling").get("precision", "bf16")),
    ):
        if given != "bf16":
            raise UserError(f'{table}.{key}: {given!r} does not fit model.precision = "bf16"; use "bf16"')
    plugins = {"amp": {"precision": "bf16"}}
    return evolve(
        known,
        defaults={
            **known.defaults,
            "plugins": plugins,
            "sampling": {**known.defaults.get("sampling", {}), "precision": "bf16"},
        },
    )
