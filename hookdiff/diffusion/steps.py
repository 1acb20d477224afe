"""One step of each sampler, for any process x_t = alpha * x0 + sigma * noise.

For a variance-preserving process these are the formulas of the papers; in the two rates they hold for others too.
`now` and `after` are the moments a step leads from and to, the second less noisy; `x`, `x0` and `noise` are x_t and
what the network sees in it, all n c h w.
"""

from __future__ import annotations

from math import log, sqrt

from torch import Tensor

from hookdiff.diffusion.process import Point


def ddim_step(x0: Tensor, noise: Tensor, now: Point, after: Point, eta: float = 0.0) -> tuple[Tensor, float]:
    """Song et al. 2020 (arXiv 2010.02502), eq. 12, with the sigma of eq. 16.

    `eta` goes from 0, deterministic and Euler's method for the probability flow, to 1, which is `ddpm_step` with its
    small variance.

    Returns:
        The mean of the next x, n c h w, and the standard deviation of the noise to add: 0 in the last step.
    """
    fresh = eta**2 * _added_variance(now, after) * (after.sigma / now.sigma) ** 2  # variance
    return after.alpha * x0 + sqrt(max(0.0, after.sigma**2 - fresh)) * noise, sqrt(fresh)


def ddpm_step(x: Tensor, x0: Tensor, now: Point, after: Point, variance: str = "fixed_small") -> tuple[Tensor, float]:
    """Ho et al. 2020 (arXiv 2006.11239), algorithm 2, with the mean of eq. 7.

    Any less noisy moment may follow: beta is then that of the process which has only the visited moments (Nichol &
    Dhariwal 2021, arXiv 2102.09672, section 4). `variance` is "fixed_small", that of the posterior, or "fixed_large",
    beta.

    Returns:
        The mean of the next x, n c h w, and the standard deviation of the noise to add: 0 in the last step.
    """
    beta, kept = _added_variance(now, after), (after.sigma / now.sigma) ** 2
    mean = (after.alpha * beta / now.sigma**2) * x0 + (now.alpha / after.alpha * kept) * x
    if not after.sigma:
        return mean, 0.0  # no noise is added to the image itself; the small variance is 0 there anyway
    return mean, sqrt(beta * kept if variance == "fixed_small" else beta)


def _added_variance(now: Point, after: Point) -> float:
    """Return the variance of x_now given x_after, which is beta for neighbouring timesteps."""
    return max(0.0, now.sigma**2 - (now.alpha / after.alpha * after.sigma) ** 2)


def heun_step(
    x: Tensor,
    seen: tuple[Tensor, Tensor],
    seen_after: tuple[Tensor, Tensor],
    now: Point,
    after: Point,
    *,
    straight: bool,
) -> Tensor:
    """Correct an Euler step with what the network sees at its end: Karras et al. 2022 (arXiv 2206.00364), algorithm 1.

    `seen` and `seen_after` are (x0, noise) at both ends. `straight` is `Process.straight`: alpha and sigma are the
    coordinates; else alpha is divided out first and the step is in sigma / alpha.
    """
    (x0, noise), (x0_after, noise_after) = seen, seen_after
    slope = (noise + noise_after) / 2
    if straight:
        return x + (after.alpha - now.alpha) * (x0 + x0_after) / 2 + (after.sigma - now.sigma) * slope
    return after.alpha * (x / now.alpha + (after.ratio - now.ratio) * slope)


def dpmpp_2m_step(x: Tensor, x0: Tensor, before: tuple[Tensor, Point] | None, now: Point, after: Point) -> Tensor:
    """DPM-Solver++(2M): Lu et al. 2022 (arXiv 2211.01095), algorithm 2, with half log-SNRs lambda.

    `before` is the x0 that the network saw in the step before this one, and its moment; None makes a step of first
    order, which is `ddim_step`. So do a moment of pure noise and a step to the image itself, where lambda is infinite.
    """
    linear = after.sigma / now.sigma * x
    # alpha' (1 - exp(-h)), written so that it is right at both infinite ends
    weight = after.alpha - now.alpha * after.sigma / now.sigma
    if before is not None and after.sigma:
        h, h_before = log(now.ratio / after.ratio), log(before[1].ratio / now.ratio)
        x0 = x0 + (x0 - before[0]) * (h / (2 * h_before))
    return linear + weight * x0


def churned(now: Point, churn: float, steps: int, low: float, high: float) -> float:
    """Return the noise level sigma / alpha to raise x to before a step: Karras et al. 2022, algorithm 2.

    `churn` is S_churn, spread over `steps`; it acts where `low` <= sigma / alpha <= `high`, S_tmin and S_tmax.
    """
    gamma = min(churn / steps, sqrt(2) - 1) if now.alpha and low <= now.ratio <= high else 0.0
    return now.ratio * (1 + gamma)
