"""Features and metrics are those of the packages that people quote, when all load one file of random weights.

They are not among the dependencies: pip install pytorch-fid torch-fidelity torchmetrics clean-fid
"""

import hashlib
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
import torch
from torch import Tensor

from hookdiff.features import Collected, Space, frechet_distance
from hookdiff.log.pixels import save_image
from hookdiff_features import Inception
from hookdiff_features.inception import InceptionV3
from hookdiff_fid import inception_score, kernel_distance, neighbourhoods
from tests.random_inception import pictures, random_network

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "random.pth"
    torch.save(random_network().state_dict(), path)
    return path


@pytest.fixture(scope="module")
def space(weights: Path) -> Callable[[str], Space]:
    digest = hashlib.sha256(weights.read_bytes()).hexdigest()
    return lambda recipe: Inception(recipe, str(weights), digest).open(torch.device("cpu"))


def by_pytorch_fid(weights: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Tensor], Tensor]:
    package = pytest.importorskip("pytorch_fid.inception")
    monkeypatch.setattr(package, "load_state_dict_from_url", lambda *_, **__: torch.load(weights))
    network = package.InceptionV3([package.InceptionV3.BLOCK_INDEX_BY_DIM[2048]]).eval()
    return lambda images: network(images.float() / 255)[0].flatten(1)


def by_torch_fidelity(weights: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Tensor], Tensor]:
    package = pytest.importorskip("torch_fidelity.feature_extractor_inceptionv3")
    network = package.FeatureExtractorInceptionV3("inception", ["2048"], feature_extractor_weights_path=str(weights))
    return lambda images: network(images)[0]


def by_torchmetrics(weights: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Tensor], Tensor]:
    pytest.importorskip("torch_fidelity")
    package = pytest.importorskip("torchmetrics.image.fid")
    return package.NoTrainInceptionV3("inception-v3-compat", ["2048"], str(weights))


def by_clean_fid(weights: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Tensor], Tensor]:
    """Return the features of its resizing, which is its own; its network is a file that cannot be made here."""
    package = pytest.importorskip("cleanfid.resize")
    resize = package.build_resizer("clean")
    network = InceptionV3(torch.load(weights), as_in_fid=True)

    def features(images: Tensor) -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            resized = numpy.stack([resize(image.permute(1, 2, 0).numpy()) for image in images])
        return network((torch.from_numpy(resized).permute(0, 3, 1, 2) - 128) / 128)[0]

    return features


PACKAGES = {
    "pytorch-fid": by_pytorch_fid,
    "torch-fidelity": by_torch_fidelity,
    "torchmetrics": by_torchmetrics,
    "clean-fid": by_clean_fid,
}


@pytest.mark.parametrize("sides", [(32, 32), (64, 48), (299, 299), (400, 300)])
@pytest.mark.parametrize("recipe", PACKAGES)
def test_features_are_those_of_the_package(
    recipe: str, sides: tuple[int, int], weights: Path, space: Callable[[str], Space], monkeypatch: pytest.MonkeyPatch
) -> None:
    images = pictures(4, 3, *sides)
    with torch.inference_mode():
        theirs = PACKAGES[recipe](weights, monkeypatch)(images)
    ours, _ = space(recipe)(images)
    assert float(theirs.abs().mean()) > 0.5
    assert float((ours - theirs).abs().max()) < 1e-4
    others = [space(other)(images)[0] for other in PACKAGES if other != recipe]
    if sides != (299, 299):  # of which all make nearly the same
        assert min(float((ours - other).abs().max()) for other in others) > 1e-3


def test_the_distance_of_two_folders_is_that_of_pytorch_fid(
    tmp_path: Path, weights: Path, space: Callable[[str], Space], monkeypatch: pytest.MonkeyPatch
) -> None:
    package = pytest.importorskip("pytorch_fid.fid_score")
    monkeypatch.setattr("pytorch_fid.inception.load_state_dict_from_url", lambda *_, **__: torch.load(weights))
    sets = {"a": pictures(60, 3, 48, 48, seed=1), "b": pictures(50, 3, 48, 48, seed=2) // 2}
    for name, images in sets.items():
        for number, image in enumerate(images):
            save_image(image, tmp_path / name / f"{number}.png")
    folders = [str(tmp_path / name) for name in sets]
    theirs = package.calculate_fid_given_paths(folders, 10, torch.device("cpu"), 2048, 0)
    moments = [Collected.of(space("pytorch-fid"), torch.split(images, 10)).moments for images in sets.values()]
    assert frechet_distance(*moments) == pytest.approx(float(theirs), rel=1e-3)


def test_the_other_metrics_are_those_of_torch_fidelity() -> None:
    pytest.importorskip("torch_fidelity")
    from torch_fidelity.metric_isc import isc_features_to_metric
    from torch_fidelity.metric_kid import kid_features_to_metric
    from torch_fidelity.metric_prc import calculate_precision_recall_full

    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(500, 64, generator=generator) * 0.4 + shift for shift in (0, 0.05))
    precision, recall = calculate_precision_recall_full(a.double(), b.double())
    shares = neighbourhoods(a, b)
    assert (shares["precision"], shares["recall"]) == pytest.approx((precision, recall), abs=1e-6)
    kernel = {"kid_kernel": "poly", "kid_kernel_poly_degree": 3, "kid_kernel_poly_gamma": None, "rng_seed": 0}
    kid = kid_features_to_metric(
        a, b, kid_subsets=200, kid_subset_size=250, kid_kernel_poly_coef0=1, verbose=False, **kernel
    )
    distance, error = kernel_distance(a, b)
    # The mean of 200 random halves is not exactly that of all pairs.
    assert abs(kid["kernel_inception_distance_mean"] - distance) < 0.5 * error
    logits = torch.randn(1003, 10, generator=generator) * 3
    theirs = isc_features_to_metric(logits)
    expected = (theirs["inception_score_mean"], theirs["inception_score_std"])
    assert inception_score(logits) == pytest.approx(expected, rel=1e-9)
