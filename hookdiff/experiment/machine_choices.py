"""Fills in the "auto" values of a config by rules, never by timing, so that the same machine gives the same run.

The choices are written to config.toml and the checkpoints. A resumed run takes them from there.
"""

import inspect
import json
import logging
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from attrs import asdict, evolve

from hookdiff.errors import ConfigError, UserError
from hookdiff.experiment.config import Config, RunConfig
from hookdiff.experiment.part import Part
from hookdiff.experiment.toml_file import read_toml
from hookdiff.loop.contract_checks import implements
from hookdiff.loop.counts import AUTO
from hookdiff.loop.registry import Plugins
from hookdiff.machine.usage import keep_memory, num_cpus, usual_threads
from hookdiff.models.adapters import is_of_diffusers
from hookdiff.options.imports import importing
from hookdiff.options.structure import Problems, arguments
from hookdiff.run_dir.config_toml import CONFIG
from hookdiff.run_dir.layout import run_of

logger = logging.getLogger("hookdiff")


def recorded(run_dir: Path, resume: bool | Path) -> dict[str, Any]:
    """Return the tables in config.toml of the run that is resumed. Default: none."""
    place = run_dir if resume is True else resume
    with suppress(UserError):  # checkpoints may be elsewhere, and the file is written anew
        written = read_toml(run_of(place) / CONFIG) if place else {}
        return {name: table for name, table in written.items() if isinstance(table, dict)}
    return {}


def settle(config: Config, device: torch.device, before: Mapping[str, Any]) -> Config:
    """Fill in the "auto" values of the config, and the choices of the run that is resumed.

    `before` is the config of the run that is resumed. Its choices hold on a device of the same kind. Plugins choose by
    the hook `choose`. Keys of [diffusion] and [sampling] give the weights their meaning, so they keep their values if
    the config leaves them out. The memory format of a network that a function makes stays "auto": see `fit_to_model`.
    """
    on_cpu = device.type == "cpu"
    earlier = _fitting(RunConfig, before.get("run"))
    same_kind = isinstance(earlier.get("threads"), int) == on_cpu  # threads are settled only on a CPU
    run: dict[str, Any] = {}
    plugins = dict(config.plugins)
    for name, part in config.plugins.items():
        if not implements(part.target, "choose"):
            continue
        with importing(only_installed=not config.trust):
            known = _fitting(part.target, before.get("plugins", {}).get(name)) if same_kind else {}
        for key, value in Plugins({name: part.build()}).ask(name, "choose", device=device).items():
            if key.startswith("run."):
                run.setdefault(key.removeprefix("run."), value)
            elif part.arguments.get(key, AUTO) == AUTO:
                chosen = known.get(key, AUTO)
                part = evolve(part, arguments={**part.arguments, key: value if chosen == AUTO else chosen})
        plugins[name] = part
    network = config.model.target
    if inspect.isclass(network) or is_of_diffusers(network) or not on_cpu:
        run = {"channels_last": is_channels_last(device, network), **run}
    asked = asdict(config.run, recurse=False)
    run = {key: value for key, value in run.items() if asked[key] == AUTO}
    if same_kind:
        choices = [key for key in ("channels_last", *run) if asked[key] == AUTO]
        run |= {key: earlier[key] for key in choices if earlier.get(key, AUTO) != AUTO}
    if config.run.threads == AUTO:
        run["threads"] = _threads(earlier.get("threads")) if on_cpu else None
    config = evolve(config, run=evolve(config.run, **run), plugins=plugins)
    return _as_before(config, before) if before else config


def is_channels_last(device: torch.device, *network: object) -> bool:
    """Return the memory format for a `network`, given as its classes: whether it is channels_last."""
    # On a GPU the group norms of torch copy each image that is in channels_last: benchmarks/README.md.
    return device.type == "cpu" and not any(map(is_of_diffusers, network))


def filled_in(config: Config, settled: Config, before: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that `settle` has filled in, by key, except those that the resumed run, `before`, had."""
    asked, chosen = asdict(config.run, recurse=False), asdict(settled.run, recurse=False)
    values = {f"run.{key}": chosen[key] for key in ("channels_last", "threads") if asked[key] == AUTO}
    known = {f"run.{key}": value for key, value in before.get("run", {}).items()}
    for name, part in settled.plugins.items():
        options, earlier = config.plugins[name].arguments, before.get("plugins", {}).get(name, {})
        values |= {f"{part.where}.{key}": value for key, value in part.arguments.items() if value != options.get(key)}
        known |= {f"{part.where}.{key}": value for key, value in earlier.items()} if isinstance(earlier, dict) else {}
    return {key: value for key, value in values.items() if value not in (None, known.get(key))}


def _as_before(config: Config, before: Mapping[str, Any]) -> Config:
    usual, process = config.resolved(), before.get("diffusion", {}).get("process", {})
    if isinstance(process, dict) and process.get("use") not in (None, usual["diffusion"]["process"]["use"]):
        return config  # the plugin `Changes` refuses another process
    completed = evolve(
        config,
        diffusion=_completed(config.diffusion, before.get("diffusion", {}), config.trust),
        sampling=_completed(config.sampling, before.get("sampling", {}), config.trust),
    )
    now = completed.resolved()
    for table in ("diffusion", "sampling"):
        # The data decides a key with the default None, in this run as in the earlier one.
        differing = [key for key, value in now[table].items() if usual[table].get(key) not in (None, value)]
        if differing:
            written = ", ".join(f"{table}.{key} = {json.dumps(now[table][key])}" for key in differing)
            logger.info("kept from the run, as the config does not set it: %s", written)
    return completed


def _threads(before: int | None) -> int:
    """Return the number of threads of the earlier run, if this machine has as many; else the default."""
    usual = usual_threads()
    if before is None or before == usual:
        return usual
    if "OMP_NUM_THREADS" not in os.environ and before <= num_cpus():
        return before
    text = "run.threads: %d here, %d before: the run goes on, but not bit for bit, as rounding depends on the threads"
    logger.warning(text, usual, before)
    return usual


def prepare_process(config: Config, device: torch.device) -> None:
    """Set the number of threads of this process; on a CPU keep freed memory for the next step."""
    threads = config.run.threads
    if isinstance(threads, int):
        if threads > num_cpus():
            text = 'run.threads: %d, but this process has %d CPUs: a step may take a hundred times as long; use "auto"'
            logger.warning(text, threads, num_cpus())
        torch.set_num_threads(threads)
    if device.type == "cpu":
        keep_memory()


def _fitting(target: Callable[..., Any], table: Any) -> dict[str, Any]:
    """Return the keys and values of a recorded `table` that `target` still accepts."""
    fitting = dict[str, Any]()
    for key, value in table.items() if isinstance(table, dict) else ():
        problems = Problems()
        checked = arguments(target, {key: value}, "", problems)
        if not problems.found:
            fitting |= checked
    return fitting


def _completed(part: Part, before: Mapping[str, Any], trust: bool) -> Part:
    """Return the part with the values of the earlier run for the keys that it does not set.

    Raises ConfigError if these values name code that is not installed, unless `trust` is true.
    """
    left_out = {key: value for key, value in before.items() if part.accepts(key)}
    problems = Problems()
    # Checked with the keys that it sets, since options depend on each other: "epsilon" needs another process.
    with importing(only_installed=not trust) as imports:
        known = arguments(part.target, {**part.arguments, **left_out}, part.where, problems)
    if imports.uninstalled and not trust:
        raise ConfigError(f"the earlier run has {'; '.join(problems.found)}")
    if problems.found:  # a key that this version no longer has
        return part
    return part.given(**{key: known[key] for key in left_out})
