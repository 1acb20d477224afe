"""A network with layers in place is trained, samples and is measured as its twin that leaves its inputs alone."""

import pytest
import torch
from torch import Tensor, nn

from hookdiff import Batch, InMemory
from hookdiff.diffusion import ClassifierFree, Diffusion, Guidance, Sampling, Solver
from hookdiff.testing import assert_same, toy_loop
from hookdiff_autoguidance import AwayFrom
from hookdiff_debug.measure import measure_outputs, untouched
from tests.conftest import ran
from tests.diffusion.conftest import generators, seeded


class Net(nn.Module):
    """Changes all that it gets, in place or not, before it computes."""

    num_classes = 4

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.in_place = in_place
        self.weight = nn.Parameter(torch.full((1,), 0.7))

    def forward(self, x: Tensor, times: Tensor, labels: Tensor, level: Tensor) -> Tensor:
        inputs = [x, times, labels, level]
        if not self.in_place:
            inputs = [column.clone() for column in inputs]
        x, times, labels, level = (column.mul_(2) for column in inputs)
        shift = (times / 4000 + labels / 8).view(-1, 1, 1, 1) + level
        return self.weight * nn.functional.leaky_relu(x, 0.2) + shift


LABELS, LEVELS = torch.tensor([2, 0, -1]), torch.linspace(-1, 1, 12).view(3, 1, 2, 2)
GUIDANCE = {
    "none": lambda net: ClassifierFree(),
    "cfg": lambda net: ClassifierFree(2.0, (0.5, 5.0)),
    "autoguidance": lambda net: AwayFrom(net, 2.0, (0.0, 5.0)),
}


@pytest.mark.parametrize("process", ["vp", "flow", "edm"])
@pytest.mark.parametrize("sampler", Solver.known)
@pytest.mark.parametrize("guidance", GUIDANCE)
def test_a_network_in_place_samples_as_its_twin(process: str, sampler: str, guidance: str) -> None:
    images, diffusion = [], Diffusion(process, conditional=True, conditions="level")
    for in_place in (False, True):
        net, labels, levels = Net(in_place), LABELS.clone(), LEVELS.clone()
        chosen: Guidance = GUIDANCE[guidance](net)
        images.append(
            Sampling(sampler, 3, guidance=chosen).sample(
                net, diffusion, (1, 2, 2), generators(0, 1, 2), "cpu", labels=labels, conditions={"level": levels}
            )
        )
        assert torch.equal(labels, LABELS)
        assert torch.equal(levels, LEVELS)
    assert torch.equal(*images)
    assert images[0].isfinite().all()


@pytest.mark.parametrize("process", ["vp", "flow", "edm"])
def test_a_network_in_place_is_trained_and_measured_as_its_twin(process: str) -> None:
    results = []
    for in_place in (False, True):
        data = InMemory(LEVELS.clone(), LABELS.clone(), conditions={"level": LEVELS.clone()})
        objective = Diffusion(process, conditional=True, conditions="level")
        batch = objective.draw(Batch(data.images, data.labels, conditions=data.conditions), seeded())
        kept = {name: draw.clone() for name, draw in batch.draws.items()}
        output = objective(Net(in_place), batch)
        assert_same(dict(batch.draws), kept)
        options = {"objective": objective, "data": data, "batch_size": 3}
        trained = ran(toy_loop(model=Net(in_place), steps=4, **options)).model
        with toy_loop(model=Net(in_place), **options) as measured, untouched(measured):
            outputs = measure_outputs(measured, batch)
        results.append((output.loss.item(), output.per_sample.tolist(), trained.weight.item(), outputs))
    assert results[0] == results[1]
