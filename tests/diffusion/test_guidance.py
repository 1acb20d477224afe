from collections.abc import Callable
from functools import partial

import pytest
import torch
from attrs import evolve
from hypothesis import given
from torch import Tensor

from hookdiff.diffusion import ClassifierFree, Diffusion, Sampling, Solver
from hookdiff.diffusion.spacing import karras_sigmas
from tests.conftest import refused
from tests.diffusion.conftest import generators, objectives, pointwise, solvers

FLOW = Diffusion("flow", conditional=True)


def recorder(calls: list[Tensor]) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return a network that records its labels and outputs 0.5 with a label and 0.2 without one."""

    def net(x: Tensor, timesteps: Tensor, labels: Tensor) -> Tensor:
        calls.append(labels)
        return torch.where(labels == -1, 0.2, 0.5).view(-1, 1, 1, 1).expand_as(x)

    return net


@pytest.mark.parametrize(("scale", "expected"), [(7.5, 2.45), (1, 0.5), (0, 0.2), (2, 0.8)])
def test_guidance_extrapolates_from_the_unconditional_output(scale: float, expected: float) -> None:
    calls: list[Tensor] = []
    sampling = Sampling(steps=1, guidance=ClassifierFree(scale))
    noise, labels = torch.randn(2, 1, 2, 2, generator=torch.Generator().manual_seed(0)), torch.tensor([3, 4])
    images = sampling.sample(recorder(calls), FLOW, (1, 2, 2), generators(0, 1), "cpu", noise=noise, labels=labels)
    torch.testing.assert_close(noise - images, torch.full_like(noise, expected))  # at t = 1 the sample is noise - u
    assert [call.tolist() for call in calls] == [[3, 4] if scale == 1 else [3, 4, -1, -1]]


@given(objectives(conditional=True), solvers)
def test_scale_1_is_conditional_and_scale_0_unconditional(diffusion: Diffusion, sampler: Solver) -> None:
    def sample(scale: float, *labels: int) -> Tensor:
        return Sampling(sampler, 4, clipping="none", guidance=ClassifierFree(scale)).sample(
            pointwise, diffusion, (1, 3, 3), generators(0, 1), "cpu", labels=torch.tensor(labels)
        )

    conditional = sample(1.0, 3, 4)
    plain = evolve(diffusion, conditional=False)
    for k, label in enumerate((3, 4)):
        always = partial(pointwise, labels=torch.tensor([label]))
        alone = Sampling(sampler, 4, clipping="none").sample(always, plain, (1, 3, 3), generators(k), "cpu")
        assert torch.equal(conditional[k : k + 1], alone)
    assert torch.equal(sample(0.0, 3, 4), sample(1.0, -1, -1))
    assert not torch.equal(conditional, sample(0.0, 3, 4))


def test_guidance_applies_only_in_its_interval() -> None:
    calls: list[Tensor] = []
    diffusion = Diffusion("edm", conditional=True)
    sampling = Sampling("euler", 18, guidance=ClassifierFree(3.0, (0.28, 5.4)))
    sampling.sample(recorder(calls), diffusion, (1, 2, 2), generators(0), "cpu", labels=torch.tensor([7]))
    sigmas = karras_sigmas(18, 0.002, 80.0)
    guided = [[7, -1] if 0.28 <= sigma <= 5.4 else [7] for sigma in sigmas]
    assert [call.tolist() for call in calls] == guided
    assert 3 < sum(call == [7, -1] for call in guided) < 10


def test_only_conditional_networks_get_labels() -> None:
    calls: list[Tensor] = []
    Sampling(steps=2, batch_size=2).sample(
        recorder(calls), FLOW, (1, 2, 2), generators(0, 1, 2), "cpu", labels=torch.tensor([5, -1, 7])
    )
    assert [call.tolist() for call in calls] == [[5, -1], [5, -1], [7], [7]]

    def without(x: Tensor, timesteps: Tensor) -> Tensor:
        return x

    for conditional in (None, False):
        diffusion = Diffusion(conditional=conditional)
        Sampling(steps=1).sample(without, diffusion, (1, 2, 2), generators(0), "cpu", labels=torch.tensor([5]))
    with refused(ValueError, "labels", -1):
        Sampling().sample(pointwise, FLOW, (1, 2, 2), generators(0), "cpu")
    with refused(ValueError, "labels", "(3,)", "(1,)"):
        Sampling().sample(pointwise, FLOW, (1, 2, 2), generators(0), "cpu", labels=torch.zeros(3))


@pytest.mark.parametrize(
    ("conditional", "dropout", "facts"),
    [(False, 0.1, ["'guidance'", "labels"]), (True, 0.0, ["'guidance'", "diffusion.label_dropout"])],
)
def test_guidance_that_does_not_fit_the_objective_is_refused(
    conditional: bool, dropout: float, facts: list[str]
) -> None:
    diffusion = Diffusion(conditional=conditional, label_dropout=dropout)
    with refused(ValueError, *facts):
        Sampling(guidance=ClassifierFree(2.0)).points(diffusion)
    with refused(ValueError, *facts):
        Sampling(guidance=ClassifierFree(2.0)).sample(pointwise, diffusion, (1, 2, 2), [], "cpu")
    assert Sampling(steps=3, guidance=ClassifierFree(1.0)).points(diffusion)  # scale 1 is no guidance
