"""The config of a scheduler of diffusers, in the words of a config of hookdiff."""

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import diffusers
import torch
from attrs import define, field

from hookdiff.diffusion import Process
from hookdiff_pretrained.folder import KEY

_SCHEDULES = {"linear": "linear", "scaled_linear": "scaled_linear", "squaredcos_cap_v2": "cosine", "sigmoid": "sigmoid"}
# The samplers of schedulers that are reproduced. Euler's method is DDIM for a process of timesteps.
_SAMPLERS = {
    "DDIMScheduler": "ddim",
    "DDPMScheduler": "ddpm",
    "EulerDiscreteScheduler": "euler",
    "DPMSolverMultistepScheduler": "dpmpp_2m",
    "FlowMatchEulerDiscreteScheduler": "euler",
    "EDMEulerScheduler": "euler",
}
# Options with which a scheduler makes other steps.
_OTHERWISE = (
    "use_karras_sigmas",
    "use_exponential_sigmas",
    "use_beta_sigmas",
    "use_lu_lambdas",
    "use_dynamic_shifting",
)
_INSTEAD = "ddim"


@define(frozen=True)
class Scheduler:
    """What a scheduler says: process and prediction of the training, and how it samples."""

    process: Mapping[str, Any] | None  # None if hookdiff has no such process
    prediction: str
    sampling: Mapping[str, Any] = field(factory=dict)
    warnings: tuple[str, ...] = ()  # what of the scheduler is not reproduced

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "Scheduler":
        """Read the config of a scheduler of diffusers."""
        kind = str(config.get("_class_name"))
        config = {**_defaults(kind), **config}
        warnings = tuple(f"{KEY}: {text}" for text in _not_reproduced(kind, config))
        if kind.startswith("EDM"):
            return cls(_edm(config), "edm", {"sampler": "euler", "spacing": _karras(config)}, warnings)
        if kind.startswith("FlowMatch") or config.get("prediction_type") == "flow_prediction":
            shift = float(config.get("shift", config.get("flow_shift")) or 1.0)
            timesteps = float(config.get("num_train_timesteps") or 1000)
            flow = {"use": "flow", "shift": shift, "time_scale": timesteps}
            sampling = {"sampler": _SAMPLERS.get(kind, "euler"), "spacing": {"use": "shifted", "shift": shift}}
            return cls(flow, "flow_prediction", sampling, warnings)
        return cls(
            _with_timesteps(config), str(config.get("prediction_type", "epsilon")), _steps(kind, config), warnings
        )


def _not_reproduced(kind: str, config: Mapping[str, Any]) -> Iterator[str]:
    if kind not in _SAMPLERS:
        yield f"the steps of {kind} are not reproduced; samples use another sampler, see [sampling]"
    for option in _OTHERWISE:
        if config.get(option):
            yield f"{kind}: {option} is not reproduced; samples use the spacing in [sampling]"
    if config.get("timestep_spacing") == "linspace":
        yield f'{kind}: timestep_spacing = "linspace" is not reproduced; samples use "trailing"'


def _with_timesteps(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the process of timesteps; None if its betas are of no schedule."""
    rescales = bool(config.get("rescale_betas_zero_snr"))
    betas, name = config.get("trained_betas"), _SCHEDULES.get(str(config.get("beta_schedule")))
    if betas is None:
        ends = {key: config[key] for key in ("beta_start", "beta_end") if key in config}
        return _process(name, ends, config.get("num_train_timesteps"), rescales) if name else None
    wanted = (1 - torch.tensor(betas, dtype=torch.float64)).cumprod(0)
    ends = {"beta_start": betas[0], "beta_end": betas[-1]}
    for name in ("scaled_linear", "linear", "cosine", "sigmoid"):
        for options, rescaled in ((ends, False), ({}, False), ({}, True)):
            process = _process(name, options, len(betas), rescaled)
            try:
                made: Any = Process.of(process)
            except ValueError:  # these ends do not fit the schedule
                continue
            if torch.allclose(made.tables.alphas_cumprod, wanted, rtol=1e-4, atol=1e-7):
                return process
    return None


def _process(name: str, ends: Mapping[str, float], timesteps: Any, rescales: bool) -> dict[str, Any]:
    schedule = {"use": name, **({} if name == "cosine" else ends)}
    return {"use": "vp", "schedule": schedule, "timesteps": timesteps, "rescale_betas_zero_snr": rescales}


def _steps(kind: str, config: Mapping[str, Any]) -> dict[str, Any]:
    name, options = _SAMPLERS.get(kind, _INSTEAD), dict[str, Any]()
    if name == "ddim" and config.get("set_alpha_to_one") is False:
        options["final"] = "first"
    if name == "ddpm" and config.get("variance_type") in ("fixed_small", "fixed_large"):
        options["variance"] = config["variance_type"]
    leads = config.get("timestep_spacing") == "leading"
    spacing: Any = {"use": "leading", "offset": config.get("steps_offset", 0)} if leads else "trailing"
    clipping: Any = "clamp" if config.get("clip_sample") else "none"
    if config.get("thresholding"):
        clipping = {"use": "dynamic", "ratio": config.get("dynamic_thresholding_ratio")}
    return {"sampler": {"use": name, **options}, "spacing": spacing, "clipping": clipping}


def _edm(config: Mapping[str, Any]) -> dict[str, Any]:
    return {"use": "edm", "sigma_min": config.get("sigma_min"), "sigma_max": config.get("sigma_max"), "time_scale": 1.0}


def _karras(config: Mapping[str, Any]) -> dict[str, Any]:
    return {"use": "karras", "rho": config.get("rho")}


def _defaults(kind: str) -> dict[str, Any]:
    """Return the defaults of a class of diffusers, which a config of an older version may lack."""
    scheduler = getattr(diffusers, kind, None)
    known = inspect.signature(scheduler).parameters.values() if inspect.isclass(scheduler) else ()
    return {each.name: each.default for each in known if each.default is not each.empty}
