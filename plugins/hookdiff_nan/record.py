"""The folder of a kept step, from which the step can be run again to compare the results.

It holds no pickle, and gets its name only once it is complete:

    report.txt, report.json                   the report as text and as JSON
    config.toml                               the resolved config of the run
    model.safetensors                         the weights before the step, with the model's own keys
    plugins.safetensors, buffers.safetensors  the state of plugins that take part in a step; all buffers
    batch.safetensors                         the samples, as the data gave them
    data.safetensors                          metadata of the data; weights of samples, if a plugin set them
    step.json                                 progress, machine, versions, digests of inputs and results
"""

import hashlib
import json
import math
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import safetensors
import safetensors.torch
import tomli_w
import torch
from attrs import define
from torch import Tensor

from hookdiff import Batch, Feed, Loop, NonFinite, UserError
from hookdiff.disk import flatten, is_intact, new_folder, read_file, stamped, unflatten, write_file, write_tensors
from hookdiff.machine import gathered, num_ranks, whole
from hookdiff.options import Problems, structured, versions
from hookdiff_nan.diagnose import Diagnosis
from hookdiff_nan.kept_steps import STEP, check_kept
from hookdiff_nan.step_values import KeptBatch, StepFacts

T = TypeVar("T")
# Errors that are raised for tensors and values that do not fit each other.
_UNFIT = (AttributeError, LookupError, RecursionError, RuntimeError, TypeError, ValueError)

FORMAT = 2
CONFIG, REPORT = "config.toml", "report.txt"
PARTS = ("model", "data", "plugins", "buffers", "batch")


@define(frozen=True)
class Record:
    """A step, read from its folder."""

    path: Path
    facts: StepFacts
    parts: dict[str, dict[str, Any]]  # the state of each of `PARTS` except "batch", on the CPU
    batch: KeptBatch


def write_record(
    path: Path,
    loop: Loop,
    report: NonFinite,
    diagnosis: Diagnosis,
    parts: Mapping[str, Mapping[str, Any]],
    results: Mapping[str, Any],
    is_first: bool,
) -> None:
    """Write the step of `report`, which has not changed the weights, to the folder `path`, completely or not at all.

    `parts` are the states of all `PARTS`, `results` the return value of `outcome`. `is_first`: the step is the first of
    its process; compiled code may give other bits after other batch sizes. Raises OSError if `path` cannot be written.
    """
    facts: dict[str, Any] = {
        "format": FORMAT,
        "progress": loop.progress.state_dict(),
        "is_first": is_first,
        **surroundings(loop),
        **results,
        "values": {},
        "files": {},
    }
    summary = {
        "step": report.step,
        "position": report.position,
        "epoch": loop.progress.epoch,
        "loss": report.loss,
        "cause": diagnosis.cause,
        "text": diagnosis.text,
        "module": diagnosis.module,
        "parameter": diagnosis.parameter,
        "gradients": report.parameters,
        "samples": diagnosis.samples,
        "learning_rates": [float(group["lr"]) for optimizer in loop.optimizers for group in optimizer.param_groups],
        "notes": report.notes,
    }
    texts = {REPORT: f"{report}\n"}
    if loop.hparams:
        texts[CONFIG] = tomli_w.dumps(loop.hparams)
    with new_folder(path) as folder:  # replaces the folder that this step left before a resume
        for name, content in parts.items():
            tensors, facts["values"][name] = flatten(content, name)
            file = f"{name}.safetensors"
            facts["files"][file] = write_tensors(folder / file, tensors).sha256
        for file, text in texts.items():
            facts["files"][file] = write_file(folder / file, text.encode()).sha256
        write_file(folder / "report.json", json.dumps(_plain(summary), indent=1, allow_nan=False).encode())
        write_file(folder / STEP, stamped(facts))


def read_record(path: Path) -> Record:
    """Read the folder `path`.

    Raises UserError if it is not a kept step, if a file is missing or damaged, or if a later version wrote it.
    """
    check_kept(path)
    data = _read(path / STEP)
    if is_intact(data) is False:
        raise _damaged(path / STEP, "its SHA-256 differs")
    try:
        facts = _structured(dict[str, Any], json.loads(data), path / STEP)
    except (ValueError, RecursionError) as error:
        raise _damaged(path / STEP, f"it is no JSON: {error}") from None
    facts.pop("sha256", None)
    if facts.pop("format", None) != FORMAT:
        raise UserError(f"{path / STEP} has another format than {FORMAT}; replay it with the hookdiff that kept it")
    if is_intact(data) is None:
        raise _damaged(path / STEP, "it has no SHA-256 of itself")
    known = _structured(StepFacts, facts, path / STEP)
    expected = {*(f"{name}.safetensors" for name in PARTS), REPORT}
    if known.files.keys() - {CONFIG} != expected or known.values.keys() != set(PARTS):
        raise UserError(f"{path / STEP}: files and values must be those of {', '.join(PARTS)}, {REPORT} and {CONFIG}")
    files = {name: _read(path / name, sha256) for name, sha256 in known.files.items()}
    parts = {name: _state(path / f"{name}.safetensors", files, known.values[name]) for name in PARTS}
    batch = _structured(KeptBatch, parts.pop("batch"), path / "batch.safetensors")
    parts["plugins"] = _structured(dict[str, dict[str, Any]], parts["plugins"], path / "plugins.safetensors")
    return Record(path, known, parts, batch)


def _structured(kind: type[T], values: Any, path: Path) -> T:
    try:
        return structured(kind, values)
    except Problems as error:
        raise _damaged(path, error) from None


def _damaged(path: Path, why: object) -> UserError:
    return UserError(f"{path} is damaged: {why}; replay another step")


def _read(path: Path, sha256: str = "") -> bytes:
    if path.is_symlink():
        raise UserError(f"{path} is a link; put the file itself in its place")
    try:
        data = read_file(path)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from None
    if sha256 and _sha256(data) != sha256:
        raise _damaged(path, "its SHA-256 differs")
    return data


def _state(path: Path, files: Mapping[str, bytes], tree: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return unflatten(safetensors.torch.load(files[path.name]), tree)
    except (safetensors.SafetensorError, *_UNFIT) as error:
        raise _damaged(path, f"{type(error).__name__}: {error}") from None


def surroundings(loop: Loop) -> dict[str, Any]:
    """Return the versions and the machine, because both can change the bits of a step."""
    name = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    if loop.device.type == "cuda":
        name = torch.cuda.get_device_name(loop.device)
    return {
        "versions": versions(loop.plugins.values()),
        "machine": {
            "device": loop.device.type,
            "name": name,
            "ranks": loop.num_ranks,
            "threads": torch.get_num_threads(),
            "matmul_precision": torch.get_float32_matmul_precision(),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
        },
    }


def outcome(loop: Loop, batch: Batch) -> dict[str, Any]:
    """Return digests of inputs and results of the current step, over all ranks. All ranks must call this."""
    per_sample = loop.output.per_sample
    adopted = {name: p.grad for name, p in loop.adopted.named_parameters() if p.grad is not None}
    per_sample = None if per_sample is None else in_order(per_sample, batch)
    return {
        "inputs": digest_of(batch),
        "results": {
            "loss": _plain(loop.gradients.loss),
            "per_sample": [] if per_sample is None else _plain(per_sample.tolist()),
            "gradients": {name: digest(whole(g)) for name, g in (loop.gradients.named() | adopted).items()},
        },
    }


def batch_state(batch: Batch, feed: Feed) -> dict[str, Any]:
    """Return the samples of the step of `batch`, before any random draw, as a state with their names.

    These are the samples of all ranks, so that one process can run the step again. All ranks must call this.
    """
    columns = {"inputs": batch.inputs, "labels": batch.labels, "indices": batch.indices}
    values = {name: None if column is None else in_order(column, batch) for name, column in columns.items()}
    conditions = {name: in_order(column, batch) for name, column in batch.conditions.items()}
    indices = [] if values["indices"] is None else values["indices"].tolist()
    return {**values, "total": batch.total, "conditions": conditions, "names": [feed.describe(i) for i in indices]}


def in_order(column: Tensor, batch: Batch) -> Tensor:
    """Return `column` (a row for each sample of this rank's `batch`) of all ranks, in the order of the samples."""
    if num_ranks() == 1:
        return column
    samples = column[:0] if batch.is_filler else column
    parts = gathered((list(batch.rows[: len(samples)]), samples.cpu()))
    order = torch.tensor([row for rows, _ in parts for row in rows]).argsort()
    return torch.cat([part for _, part in parts])[order]


def digest_of(batch: Batch) -> str:
    """Return the digest of the inputs and conditions of the step of `batch`; all ranks must call this."""
    return "-".join(digest(in_order(column, batch)) for column in (batch.inputs, *batch.conditions.values()))


def digest(values: Tensor) -> str:
    """Return the SHA-256 of the bytes of `values`; all NaN count as the same."""
    values = values.detach().cpu().contiguous()
    if values.is_floating_point():
        values = values.masked_fill(values.isnan(), math.nan)
    return _sha256(values.reshape(-1).view(torch.uint8).numpy().tobytes())


def _plain(node: Any) -> Any:
    """Return `node` in a form for JSON: NaN and infinities, which JSON does not have, become text."""
    if isinstance(node, dict):
        return {key: _plain(value) for key, value in node.items()}
    if isinstance(node, list):
        return [_plain(value) for value in node]
    return str(node) if isinstance(node, float) and not math.isfinite(node) else node


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
