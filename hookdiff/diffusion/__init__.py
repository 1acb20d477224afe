"""Diffusion without a trainer: processes, prediction types, loss weights, the objective and the samplers."""

from hookdiff.diffusion.objective import LOSSES, SCHEDULES, Diffusion
from hookdiff.diffusion.parametrization import (
    EDM,
    PREDICTION_TYPES,
    Epsilon,
    FlowPrediction,
    Parametrization,
    Sample,
    VPrediction,
    make_parametrization,
    noise_from_x0,
    q_sample,
)
from hookdiff.diffusion.process import (
    IMAGE,
    SPACINGS,
    Discrete,
    Flow,
    Point,
    Process,
    VarianceExploding,
    karras_sigmas,
    sampling_timesteps,
)
from hookdiff.diffusion.samplers import SAMPLERS, Sampling, thresholded
from hookdiff.diffusion.schedules import (
    BETAS,
    NoiseSchedule,
    cosine_betas,
    linear_betas,
    make_schedule,
    rescale_betas_zero_snr,
    scaled_linear_betas,
    sigmoid_betas,
)
from hookdiff.diffusion.steps import ddim_step, ddpm_step, dpmpp_2m_step, heun_step
from hookdiff.diffusion.times import TIMES
from hookdiff.diffusion.weighting import WEIGHTINGS, loss_weights

__all__ = [
    "BETAS",
    "EDM",
    "IMAGE",
    "LOSSES",
    "PREDICTION_TYPES",
    "SAMPLERS",
    "SCHEDULES",
    "SPACINGS",
    "TIMES",
    "WEIGHTINGS",
    "Diffusion",
    "Discrete",
    "Epsilon",
    "Flow",
    "FlowPrediction",
    "NoiseSchedule",
    "Parametrization",
    "Point",
    "Process",
    "Sample",
    "Sampling",
    "VPrediction",
    "VarianceExploding",
    "cosine_betas",
    "ddim_step",
    "ddpm_step",
    "dpmpp_2m_step",
    "heun_step",
    "karras_sigmas",
    "linear_betas",
    "loss_weights",
    "make_parametrization",
    "make_schedule",
    "noise_from_x0",
    "q_sample",
    "rescale_betas_zero_snr",
    "sampling_timesteps",
    "scaled_linear_betas",
    "sigmoid_betas",
    "thresholded",
]
