"""What enters a Loop as objective and sampler: with all members that are asked of one, or with the least."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hookdiff import Batch, Loop, LoopConfig, SampleRequest, UserError, builtin_plugins
from hookdiff.diffusion import Diffusion, Sampling
from hookdiff.testing import ToyObjective, ToySampler
from hookdiff_checkpoint import Checkpoint
from hookdiff_ema import EMA
from hookdiff_samples import SampleGrid
from tests.conftest import refused

PICTURES = torch.linspace(-1, 1, 16 * 16).view(16, 1, 4, 4)


class RemovesNoise:
    """An objective of a user: it has no member but these two."""

    def draw(self, batch: Batch, generator: torch.Generator) -> Batch:
        noise = torch.randn((batch.total, *batch.inputs.shape[1:]), generator=generator)
        return batch.with_draws({"noise": batch.own(noise)})

    def __call__(self, net: nn.Module, batch: Batch) -> Tensor:
        loss: Tensor = (net(batch.inputs + batch.draws["noise"]) - batch.draws["noise"]).square()
        return loss


def mean_error(net: nn.Module, batch: Batch) -> Tensor:
    loss: Tensor = (net(batch.inputs) - batch.inputs).square().mean()
    return loss


class Alone:
    """A sampler of a user: it has no member but `sample`, without the arguments that it does not know."""

    objective: Any = None

    def sample(self, net: nn.Module, objective: Any, shape: Any, generators: Any, device: torch.device) -> Tensor:
        self.objective = objective
        images: Tensor = net(torch.stack([torch.randn(*shape, generator=generator) for generator in generators]))
        return images


def loop_of(objective: Any, sampler: Any, **options: Any) -> Loop:
    model = nn.Conv2d(1, 1, 3, padding=1)
    config = LoopConfig(steps=4, batch_size=8)
    return Loop(
        model, torch.optim.SGD(model.parameters(), 0.01), objective, PICTURES, config, sampler=sampler, **options
    )


@pytest.mark.parametrize("objective", [mean_error, RemovesNoise()])
def test_the_least_trains_samples_and_goes_on(objective: Any, tmp_path: Path) -> None:
    def run(resume: bool) -> Alone:
        sampler = Alone()
        plugins = {
            **builtin_plugins(signals=False),
            "ema": EMA(),
            "samples": SampleGrid(num=4),
            "checkpoint": Checkpoint(),
        }
        loop = loop_of(objective, sampler, plugins=plugins, run_dir=tmp_path, resume=resume)
        assert (loop.run(), loop.progress.step) == ("done", 4)
        assert loop.sample(SampleRequest(2)).images.shape == (2, 1, 4, 4)
        assert loop.sample(SampleRequest(0)).weights == "ema"
        return sampler

    given = run(resume=False).objective  # the object itself, because a sampler of a user may know more of its members
    assert (given.origin if objective is mean_error else given) is objective
    assert (tmp_path / "samples" / "step-00000004.png").exists()
    run(resume=True)


def test_what_has_all_members_enters_as_it_is() -> None:
    for objective, sampler in ((ToyObjective(), ToySampler()), (Diffusion(), Sampling())):
        loop = loop_of(objective, sampler)
        assert loop.objective is objective
        assert loop.sampler is sampler


def test_a_member_of_a_user_counts_and_others_have_their_default(caplog: pytest.LogCaptureFixture) -> None:
    class Told(RemovesNoise):
        conditional = True

        def remarks(self) -> list[str]:
            return ["it learns little"]

    class Chosen(Alone):
        weights = "model"
        batch_size = 3

    loop = loop_of(Told(), Chosen())
    assert [record.getMessage() for record in caplog.records] == ["it learns little"]
    assert (loop.objective.conditional, loop.objective.condition_names) == (True, ())
    assert loop.sampler is not None
    assert (loop.sampler.weights, loop.sampler.batch_size, loop.sampler.guidance) == ("model", 3, None)
    with pytest.raises(UserError, match="bind"):
        loop.objective.bind({})


def test_the_sampler_of_a_diffusion_refuses_another_objective_when_the_loop_gets_it() -> None:
    with refused(UserError, "RemovesNoise", "Diffusion(loss=", "sample("):
        loop_of(RemovesNoise(), Sampling())
    with refused(UserError, "function", "Diffusion"):
        loop_of(mean_error, Alone()).using(sampler=Sampling())


def test_an_adapter_reads_its_object_when_it_is_asked() -> None:
    sampler, objective = Alone(), RemovesNoise()
    loop = loop_of(objective, sampler)
    assert (loop.sampler.batch_size, loop.objective.conditional) == (256, False)
    sampler.batch_size, objective.conditional = 8, True
    assert (loop.sampler.batch_size, loop.objective.conditional) == (8, True)
    loop.sampler.batch_size = 4
    assert sampler.batch_size == 4


def test_a_sampler_without_its_method_is_refused() -> None:
    with refused(UserError, "sampler", "sample("):
        loop_of(mean_error, mean_error)
