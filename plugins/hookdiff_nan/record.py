"""The folder of one step: all that is needed to run it again, and its outcome.

It holds no pickle, and gets its name only once it is complete:

    report.txt, report.json                   the report as text and as JSON
    config.toml                               the resolved config of the run
    model.safetensors                         the weights before the step, with the model's own keys
    plugins.safetensors, buffers.safetensors  the state of plugins that take part in a step; all buffers
    batch.safetensors                         the samples, as the data gave them
    data.safetensors                          facts about the data; weights of its samples, if a plugin set them
    step.json                                 progress, machine, versions, digests of inputs and results
"""

import hashlib
import json
import math
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import tomli_w
import torch
from attrs import define
from torch import Tensor

from hookdiff import Batch, Feed, Loop, NonFinite, UserError, nearest
from hookdiff.disk import flatten, new_folder, read_file, unflatten, write_file, write_tensors
from hookdiff.versions import versions
from hookdiff_nan.diagnose import Diagnosis

FORMAT = 1
STEP, CONFIG = "step.json", "config.toml"
_FACTS = ("progress", "machine", "versions", "outcome", "inputs", "indices", "run_dir", "is_first")


@define(frozen=True)
class Record:
    """A step, read from its folder."""

    path: Path
    facts: dict[str, Any]  # of step.json
    parts: dict[str, dict[str, Any]]  # "model", "plugins", "data", "buffers" and "batch", tensors on the CPU

    @property
    def batch(self) -> Batch:
        """The samples of the step, as the data gave them."""
        return Batch(**{name: value for name, value in self.parts["batch"].items() if name != "names"})

    @property
    def names(self) -> dict[int, str]:
        """The names of these samples, by their positions in the data."""
        indices = self.batch.indices
        return {} if indices is None else dict(zip(indices.tolist(), self.parts["batch"]["names"], strict=True))


def kept_in(root: Path) -> set[str]:
    """Return the names of the steps that the folder `root` holds."""
    return {path.name for path in root.glob("step-*-position-*") if path.is_dir()}


def write_record(
    path: Path,
    loop: Loop,
    report: NonFinite,
    found: Diagnosis,
    parts: Mapping[str, Mapping[str, Any]],
    is_first: bool,
) -> None:
    """Write the step of `report`, which has not changed the weights, to the folder `path`, completely or not at all.

    `is_first`: of a process, because compiled code may give other bits once it has met other sizes. Raises OSError if
    `path` cannot be written.
    """
    facts: dict[str, Any] = {
        "format": FORMAT,
        "run_dir": os.path.relpath(loop.run_dir or path, path),
        "progress": loop.progress.state_dict(),
        "is_first": is_first,
        **surroundings(loop),
        **outcome(loop, report.batch),
        "values": {},
        "files": {},
    }
    summary = {
        "step": report.step,
        "position": report.position,
        "epoch": loop.progress.epoch,
        "loss": report.loss,
        "cause": found.cause,
        "text": found.text,
        "module": found.module,
        "parameter": found.parameter,
        "gradients": report.parameters,
        "samples": found.samples,
        "learning_rates": [group["lr"] for optimizer in loop.optimizers for group in optimizer.param_groups],
        "notes": report.notes,
    }
    texts = {"report.txt": f"{report}\n"}
    if loop.hparams:
        texts[CONFIG] = tomli_w.dumps(loop.hparams)
    with new_folder(path) as folder:  # replaces the folder of the same step before a resume
        for name, content in {"model": loop.model.state_dict(), **parts}.items():
            tensors, facts["values"][name] = flatten(content, name)
            file = f"{name}.safetensors"
            facts["files"][file] = write_tensors(folder / file, tensors).sha256
        for file, text in texts.items():
            facts["files"][file] = write_file(folder / file, text.encode()).sha256
        write_file(folder / "report.json", json.dumps(_plain(summary), indent=1, allow_nan=False).encode())
        write_file(folder / STEP, json.dumps(facts, indent=1).encode())


def read_record(path: Path) -> Record:
    """Read the folder `path`.

    Raises UserError if it is not a kept step, if a file is missing or damaged, or if a later version wrote it.
    """
    if not path.is_dir():
        beside = [other.name for other in path.parent.iterdir()] if path.parent.is_dir() else []
        wrong = "is not a folder" if path.exists() else f"no such folder{nearest(path.name, beside)}"
        raise UserError(f"{path}: {wrong}; expected one such as RUN/nan/step-00000123-position-00000123")
    if not (path / STEP).is_file():
        near = sorted(kept_in(path) or kept_in(path / "nan"))
        others = f"; it holds {', '.join(near)}" if near else ""
        raise UserError(f"{path} is not a step kept for replay: it has no {STEP}{others}")
    try:
        facts = json.loads((path / STEP).read_bytes())
        if facts["format"] != FORMAT:
            raise UserError(f"{path}: its format is {facts['format']}; this hookdiff reads {FORMAT}")
        files = {name: _read(path / name, digest) for name, digest in facts["files"].items()}
        parts = {
            name: unflatten(safetensors.torch.load(files[f"{name}.safetensors"]), tree)
            for name, tree in facts["values"].items()
        }
        return Record(path, {name: facts[name] for name in _FACTS}, parts)
    except (ValueError, KeyError, TypeError, AttributeError, safetensors.SafetensorError) as error:
        raise UserError(f"{path / STEP} is damaged: {_damage(error)}") from None


def _damage(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"it is not valid JSON from line {error.lineno}, column {error.colno} on"
    if isinstance(error, UnicodeDecodeError):
        return f"it is not UTF-8 at byte {error.start}"
    return f"it lacks {error}" if isinstance(error, KeyError) else "its content is not as it was written"


def _read(path: Path, digest: str) -> bytes:
    try:
        data = read_file(path)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from None
    if _sha256(data) != digest:
        raise UserError(f"{path} is not as it was written: its SHA-256 differs")
    return data


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
    """Return digests of inputs and results of the current step."""
    per_sample = loop.output.per_sample
    adopted = {name: p.grad for name, p in loop.adopted.named_parameters() if p.grad is not None}
    return {
        "inputs": digest_of(batch),
        "indices": None if batch.indices is None else batch.indices.tolist(),
        "outcome": {
            "loss": [_plain(loop.gradients.loss)],
            "losses of the samples": [] if per_sample is None else _plain(per_sample.tolist()),
            "gradients": {name: digest(value) for name, value in (loop.gradients.named() | adopted).items()},
        },
    }


def batch_state(batch: Batch, feed: Feed) -> dict[str, Any]:
    """Return `batch`, before any draw, as a state, with the names of its samples."""
    names = [] if batch.indices is None else [feed.describe(index) for index in batch.indices.tolist()]
    values = {name: getattr(batch, name) for name in ("inputs", "labels", "indices", "total", "conditions")}
    return {**values, "names": names}


def digest_of(batch: Batch) -> str:
    """Return the digest of the inputs and conditions of `batch`."""
    return "-".join(map(digest, (batch.inputs, *batch.conditions.values())))


def digest(values: Tensor) -> str:
    """Return the SHA-256 of the bytes of `values`; all NaN count as the same."""
    values = values.detach().cpu().contiguous()
    if values.is_floating_point():
        values = values.masked_fill(values.isnan(), math.nan)
    return _sha256(values.reshape(-1).view(torch.uint8).numpy().tobytes())


def _plain(node: Any) -> Any:
    """Return `node` for JSON, which has no NaN and no infinities: they become text."""
    if isinstance(node, dict):
        return {key: _plain(value) for key, value in node.items()}
    if isinstance(node, list):
        return [_plain(value) for value in node]
    return str(node) if isinstance(node, float) and not math.isfinite(node) else node


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
