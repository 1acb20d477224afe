from .chain import Chain as Chain
from .clipping import (
    Clamp as Clamp,
    Clipping as Clipping,
    DynamicThreshold as DynamicThreshold,
    NoClipping as NoClipping,
)
from .diffusion import Diffusion as Diffusion, Given as Given, Net as Net, as_diffusion as as_diffusion
from .guidance import Ask as Ask, ClassifierFree as ClassifierFree, Guidance as Guidance
from .losses import L1 as L1, MSE as MSE, Huber as Huber, Loss as Loss
from .prediction import (
    EDMPrediction as EDMPrediction,
    Epsilon as Epsilon,
    FlowPrediction as FlowPrediction,
    Prediction as Prediction,
    SamplePrediction as SamplePrediction,
    VPrediction as VPrediction,
)
from .process import (
    EDM as EDM,
    IMAGE as IMAGE,
    VP as VP,
    DDPMProcess as DDPMProcess,
    Flow as Flow,
    Point as Point,
    Process as Process,
)
from .sampling import Sampling as Sampling
from .schedules import (
    Cosine as Cosine,
    Linear as Linear,
    ScaledLinear as ScaledLinear,
    Schedule as Schedule,
    Sigmoid as Sigmoid,
)
from .solvers import (
    DDIM as DDIM,
    DDPM as DDPM,
    Churning as Churning,
    DPMSolver2M as DPMSolver2M,
    Euler as Euler,
    Heun as Heun,
    Solver as Solver,
)
from .spacing import (
    Karras as Karras,
    Leading as Leading,
    Shifted as Shifted,
    ShiftedBy as ShiftedBy,
    Spacing as Spacing,
    Trailing as Trailing,
)
from .times import LogitNormal as LogitNormal, LogNormal as LogNormal, Times as Times, UniformTimes as UniformTimes
from .weighting import (
    P2 as P2,
    Debiased as Debiased,
    EDMWeighting as EDMWeighting,
    MinSNR as MinSNR,
    UniformWeighting as UniformWeighting,
    Weighting as Weighting,
    X0Weighting as X0Weighting,
)
