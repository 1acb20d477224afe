"""Diffusion without a trainer: processes, predictions, weightings, the objective and the samplers, as parts."""

from hookdiff.diffusion.chain import Chain
from hookdiff.diffusion.clipping import Clamp, Clipping, DynamicThreshold, NoClipping
from hookdiff.diffusion.guidance import Ask, ClassifierFree, Guidance
from hookdiff.diffusion.losses import L1, MSE, Huber, Loss
from hookdiff.diffusion.objective import Diffusion, Given, Net, without
from hookdiff.diffusion.prediction import (
    EDMPrediction,
    Epsilon,
    FlowPrediction,
    Prediction,
    SamplePrediction,
    VPrediction,
)
from hookdiff.diffusion.process import EDM, IMAGE, VP, DDPMProcess, Flow, Point, Process
from hookdiff.diffusion.sampling import Sampling
from hookdiff.diffusion.schedules import Cosine, Linear, ScaledLinear, Schedule, Sigmoid
from hookdiff.diffusion.solvers import DDIM, DDPM, Churning, DPMSolver2M, Euler, Heun, Solver
from hookdiff.diffusion.spacing import Karras, Leading, Shifted, Spacing, Trailing
from hookdiff.diffusion.times import LogitNormal, LogNormal, Times, UniformTimes
from hookdiff.diffusion.weighting import P2, Debiased, EDMWeighting, MinSNR, UniformWeighting, Weighting, X0Weighting

__all__ = [
    "DDIM",
    "DDPM",
    "EDM",
    "IMAGE",
    "L1",
    "MSE",
    "P2",
    "VP",
    "Ask",
    "Chain",
    "Churning",
    "Clamp",
    "ClassifierFree",
    "Clipping",
    "Cosine",
    "DDPMProcess",
    "DPMSolver2M",
    "Debiased",
    "Diffusion",
    "DynamicThreshold",
    "EDMPrediction",
    "EDMWeighting",
    "Epsilon",
    "Euler",
    "Flow",
    "FlowPrediction",
    "Given",
    "Guidance",
    "Heun",
    "Huber",
    "Karras",
    "Leading",
    "Linear",
    "LogNormal",
    "LogitNormal",
    "Loss",
    "MinSNR",
    "Net",
    "NoClipping",
    "Point",
    "Prediction",
    "Process",
    "SamplePrediction",
    "Sampling",
    "ScaledLinear",
    "Schedule",
    "Shifted",
    "Sigmoid",
    "Solver",
    "Spacing",
    "Times",
    "Trailing",
    "UniformTimes",
    "UniformWeighting",
    "VPrediction",
    "Weighting",
    "X0Weighting",
    "without",
]
