"""Diffusion without a trainer: noise schedules, prediction types, the objective and the samplers."""

from hookdiff.diffusion.parametrization import (
    PREDICTION_TYPES,
    Epsilon,
    Parametrization,
    VPrediction,
    noise_from_x0,
    q_sample,
)
from hookdiff.diffusion.process import Diffusion
from hookdiff.diffusion.samplers import SPACINGS, Sampling, ddim_step, ddpm_step, sampling_timesteps
from hookdiff.diffusion.schedules import SCHEDULES, NoiseSchedule, cosine_betas, linear_betas, make_schedule

__all__ = [
    "PREDICTION_TYPES",
    "SCHEDULES",
    "SPACINGS",
    "Diffusion",
    "Epsilon",
    "NoiseSchedule",
    "Parametrization",
    "Sampling",
    "VPrediction",
    "cosine_betas",
    "ddim_step",
    "ddpm_step",
    "linear_betas",
    "make_schedule",
    "noise_from_x0",
    "q_sample",
    "sampling_timesteps",
]
