"""The settings of the sampler of a Loop."""

from __future__ import annotations

import inspect
from typing import Any

from attrs import asdict

from hookdiff.diffusion.diffusion import Diffusion
from hookdiff.diffusion.guidance import ClassifierFree
from hookdiff.diffusion.sampling import Sampling
from hookdiff.loop.loop import Loop
from hookdiff.models.sample_request import SampleRequest
from hookdiff.models.sampler import Sampler
from hookdiff.options.structure import as_toml

_PARTS = ("sampler", "spacing", "clipping", "guidance")


def sampler_info(loop: Loop, weights: str) -> dict[str, Any]:
    """Return the settings with which `loop` samples with `weights` now, as JSON values for the metadata of a picture.

    The keys are sampler, spacing, clipping, guidance, steps, guidance_scale (of classifier-free guidance), precision
    (unless float32), and options (the other options of each of these parts). Changes by plugins, such as
    `autoguidance`, are included. The result is empty if the sampler is not hookdiff's.
    """
    sampler, objective = loop.sample(SampleRequest(0, weights=weights)).sampler or loop.sampler, loop.objective
    if not (isinstance(sampler, Sampling) and isinstance(objective, Diffusion)):
        return {}
    fitted = sampler.fit(objective)
    choices = asdict(fitted, recurse=False, filter=lambda option, _: option.name in _PARTS)
    parts = {name: as_toml(choice) for name, choice in choices.items()}
    used = {name: part.pop("use") for name, part in parts.items()}
    scale = {"guidance_scale": parts["guidance"].pop("scale")} if isinstance(fitted.guidance, ClassifierFree) else {}
    precision = {"precision": fitted.precision} if fitted.precision != "float32" else {}
    options = {name: part for name, part in parts.items() if part}
    return {**used, "steps": fitted.steps, **scale, **precision, "options": options}


def takes_noise(sampler: Sampler) -> bool:
    """Return whether `sampler` has the argument `noise` of the protocol `Sampler`."""
    known = inspect.signature(sampler.sample).parameters.values()
    return any(parameter.name == "noise" or parameter.kind is parameter.VAR_KEYWORD for parameter in known)
