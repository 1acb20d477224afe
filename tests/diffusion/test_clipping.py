import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from hookdiff.diffusion import Clamp, Diffusion, DynamicThreshold, NoClipping, Sampling, Solver
from tests.diffusion.conftest import generators, solvers


@given(st.integers(0, 2**32), st.floats(0, 1), st.floats(0.2, 5))
def test_the_dynamic_threshold_is_a_quantile_of_each_image(seed: int, ratio: float, scale: float) -> None:
    images = scale * torch.randn(3, 2, 4, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    for image, result in zip(images, DynamicThreshold(ratio).clip(images), strict=True):
        sizes = sorted(image.abs().flatten().tolist())
        place = ratio * (len(sizes) - 1)  # the quantile is linear between two sizes
        low = int(place)
        bound = sizes[low] + (place - low) * (sizes[min(low + 1, len(sizes) - 1)] - sizes[low])
        bound = max(bound, 1)
        torch.testing.assert_close(result, (image / bound).clamp(-1, 1), rtol=1e-9, atol=1e-12)


def test_each_clipping_is_applied_to_the_predicted_image() -> None:
    image = torch.linspace(-4, 4, 16).view(1, 1, 4, 4)
    for clipping, expected in (
        (NoClipping(), image),
        (Clamp(), image.clamp(-1, 1)),
        (DynamicThreshold(0.5), (image / image.abs().quantile(0.5)).clamp(-1, 1)),
    ):
        sampling, diffusion = Sampling(steps=1, clipping=clipping), Diffusion(prediction="sample")
        samples = sampling.sample(lambda x, t: image.expand_as(x), diffusion, (1, 4, 4), generators(0), "cpu")
        torch.testing.assert_close(samples, expected)
        torch.testing.assert_close(clipping.clip(image), expected)
        assert clipping.clips == (samples.abs().max() <= 1)


@given(
    st.floats(-1, 1),
    st.floats(0.05, 1),
    solvers,
    st.sampled_from(["clamp", "dynamic"]),
    st.sampled_from([torch.float32, torch.float64]),
)
@settings(max_examples=60)
def test_samples_are_back_in_the_range_of_images(
    mean: float, std: float, sampler: Solver, clipping: str, dtype: torch.dtype
) -> None:
    def net(x: Tensor, timesteps: Tensor) -> Tensor:
        return 100 * torch.sign(x)  # far too bright or dark, so that all pixels are clamped

    diffusion = Diffusion("flow", "sample", data_mean=mean, data_std=std)
    sampling = Sampling(sampler, 4, clipping=clipping)
    images = sampling.sample(net, diffusion, (3, 4, 4), generators(0, 1), "cpu", dtype)
    assert 0.999 < images.abs().max() <= 1  # no rounding error exceeds 1
