"""Muon: its formula in a few lines of float64, the nearest orthogonal matrix, and what a run needs of an optimizer."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor, nn

from hookdiff.models.footprint import optimizer_bytes
from hookdiff_muon import Muon
from hookdiff_muon.orthogonal import orthogonalized
from tests.conftest import refused

SHAPES = [(8, 8), (16, 64), (64, 16), (4, 256), (8, 4, 3, 3), (6, 3, 5), (1, 9), (5, 1)]


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def weight_of(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(drawn(*shape).to(dtype))


def stepped(optimizer: Muon, weights: list[nn.Parameter], gradients: list[Tensor]) -> None:
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.grad = gradient.clone()
    optimizer.step()


def plainly(weight: Tensor, gradients: list[Tensor], **given: Any) -> Tensor:
    """Muon as Jordan et al. (2024) write it, in float64, for a matrix; the rate as Liu et al. (2025) scale it."""
    options: Any = {"lr": 1e-3, "weight_decay": 0.1, "momentum": 0.95, "nesterov": True, "ns_steps": 5, **given}
    lr, momentum, nesterov = options["lr"], options["momentum"], options["nesterov"]
    w, m = weight.detach().double().flatten(1), torch.zeros_like(weight.flatten(1), dtype=torch.float64)
    for gradient in gradients:
        g = gradient.double().flatten(1)
        m = momentum * m + (1 - momentum) * g
        x = momentum * m + (1 - momentum) * g if nesterov else m
        x = x / x.norm()
        for _ in range(options["ns_steps"]):
            a = x @ x.T
            x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
        w = w - lr * options["weight_decay"] * w - lr * 0.2 * max(w.shape) ** 0.5 * x
    return w.view(weight.shape)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    "options",
    [{}, {"nesterov": False, "momentum": 0.9}, {"momentum": 0.0, "ns_steps": 3}, {"weight_decay": 0.0}],
    ids=str,
)
def test_steps_are_those_of_the_formula(shape: tuple[int, ...], options: Any) -> None:
    weights, gradients = [weight_of(shape)], [drawn(*shape, seed=1 + i) for i in range(4)]
    expected = plainly(weights[0], gradients, lr=0.02, **options)
    optimizer = Muon(weights, lr=0.02, **options)
    for gradient in gradients:
        stepped(optimizer, weights, [gradient])
    torch.testing.assert_close(weights[0].detach().double(), expected, rtol=0, atol=2e-6)


def test_a_step_is_near_that_of_torch() -> None:
    """Torch iterates in bf16, so an update differs by some percent."""
    weights, others = [weight_of((16, 48))], [weight_of((16, 48))]
    before = weights[0].detach().clone()
    options: Any = {"lr": 0.02, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}
    stepped(Muon(weights, **options), weights, [drawn(16, 48, seed=1)])
    others[0].grad = drawn(16, 48, seed=1)
    torch.optim.Muon(others, **options).step()
    ours, theirs = weights[0].detach() - before, others[0].detach() - before
    assert (ours - theirs).norm() < 0.03 * theirs.norm()


RMS = 0.2 * 48**0.5
SCALES = [("match_rms_adamw", RMS, RMS), ("original", 3**0.5, 1.0), ("spectral_unclamped", 3**0.5, 3**-0.5)]


@pytest.mark.parametrize(("kind", "tall", "wide"), SCALES)
def test_the_rate_is_scaled_by_the_shape(kind: Any, tall: float, wide: float) -> None:
    for shape, factor in (((48, 16), tall), ((16, 48), wide)):
        weights, gradient = [weight_of(shape)], drawn(*shape, seed=1)
        before = weights[0].detach().clone()
        stepped(Muon(weights, lr=0.1, adjust_lr_fn=kind, weight_decay=0.0), weights, [gradient])
        (made,) = orthogonalized([gradient], 5)
        torch.testing.assert_close(before - weights[0].detach(), 0.1 * factor * made, rtol=1e-4, atol=1e-6)


def test_the_steps_of_a_weight_do_not_depend_on_its_neighbours() -> None:
    """Weights of one shape share their products."""
    shapes = [(8, 4, 3, 3), (4, 8), (8, 4, 3, 3), (8, 36)]
    together, gradients = [weight_of(shape) for shape in shapes], [drawn(*shape, seed=9) for shape in shapes]
    stepped(Muon(together), together, gradients)
    for shape, weight, gradient in zip(shapes, together, gradients, strict=True):
        alone = [weight_of(shape)]
        stepped(Muon(alone), alone, [gradient])
        torch.testing.assert_close(weight, alone[0], rtol=0, atol=1e-6)


@given(st.integers(1, 12), st.integers(1, 40), st.integers(0, 1000), st.sampled_from([1e-6, 1e-3, 1.0, 1e4]))
def test_the_result_is_nearly_orthogonal_for_any_matrix(rows: int, columns: int, seed: int, size: float) -> None:
    """Jordan et al. (2024): singular values end between 0.68 and 1.14, unless they are small beside the norm."""
    matrix = drawn(rows, columns, seed=seed).double()
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    large = s > 0.003 * s.norm()
    for steps, scaled in ((5, matrix), (5, matrix.float() * size)):
        result = orthogonalized([scaled], steps)[0].double()
        sizes = torch.diagonal(u.mT @ result @ v.mT)
        assert ((sizes > 0.67) & (sizes < 1.21))[large].all()
        torch.testing.assert_close((u * sizes) @ v, result, rtol=0, atol=1e-3)


def test_small_singular_values_survive_float32() -> None:
    """The iteration works with squares; those of 1e-4 and less are about the rounding of float32."""
    u, _, v = torch.linalg.svd(drawn(32, 96).double(), full_matrices=False)
    matrix = (u * torch.logspace(0, -5, 32, dtype=torch.float64)) @ v
    (exact,), (ours,) = orthogonalized([matrix], 5), orthogonalized([matrix.float()], 5)
    assert (ours - exact).norm() < 1e-3 * exact.norm()


@pytest.fixture
def reduced() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.usefixtures("reduced")
def test_where_products_of_float32_are_reduced_the_iteration_is_in_bf16() -> None:
    """So it is on a GPU."""
    assert {result.dtype for result in orthogonalized([drawn(36, 8, seed=2)], 5)} == {torch.bfloat16}
    check_up_to_bf16("cpu", (8, 4, 3, 3), (36, 8))


@pytest.mark.cuda
def test_a_gpu_makes_the_steps_of_the_formula_up_to_bf16() -> None:
    check_up_to_bf16("cuda", (8, 4, 3, 3), (8, 4, 3, 3))


def check_up_to_bf16(device: str, *shapes: tuple[int, ...]) -> None:
    """Assert that a step on weights of these shapes is that of the formula, up to the rounding of bf16."""
    weights = [nn.Parameter(weight_of(shape).detach().to(device)) for shape in shapes]
    gradients = [drawn(*shape, seed=seed).to(device) for seed, shape in enumerate(shapes, 1)]
    before = [weight.detach().double() for weight in weights]
    expected = [plainly(weight, [gradient], lr=0.1) for weight, gradient in zip(weights, gradients, strict=True)]
    stepped(Muon(weights, lr=0.1), weights, gradients)
    for weight, old, new in zip(weights, before, expected, strict=True):
        assert (weight.detach() - new).norm() < 0.03 * (new - old).norm()


def test_a_gradient_of_zeros_moves_nothing() -> None:
    weights = [weight_of((4, 6))]
    stepped(Muon(weights, weight_decay=0.0), weights, [torch.zeros(4, 6)])
    assert torch.equal(weights[0], weight_of((4, 6)))


def test_memory_format_changes_no_step() -> None:
    plain, last = nn.Conv2d(4, 8, 3), nn.Conv2d(4, 8, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    last.load_state_dict(plain.state_dict())
    for net in (plain, last):
        optimizer = Muon([net.weight])
        for seed in range(3):
            net(drawn(2, 4, 6, 6, seed=seed)).square().mean().backward()
            optimizer.step()
    torch.testing.assert_close(plain.weight, last.weight, rtol=0, atol=1e-6)
    assert last.weight.is_contiguous(memory_format=torch.channels_last)


def test_a_flag_on_the_device_holds_back_a_step() -> None:
    held, free = [weight_of((4, 3, 3, 3))], [weight_of((4, 3, 3, 3))]
    optimizers = Muon(held), Muon(free)
    good, bad = drawn(4, 3, 3, 3, seed=1), torch.full((4, 3, 3, 3), float("nan"))
    for optimizer, weights in zip(optimizers, (held, free), strict=True):
        stepped(optimizer, weights, [good])
    optimizers[0].found_inf = torch.ones(())
    stepped(optimizers[0], held, [bad])
    assert torch.equal(held[0], free[0])
    optimizers[0].found_inf = torch.zeros(())
    for optimizer, weights in zip(optimizers, (held, free), strict=True):
        stepped(optimizer, weights, [good])
    torch.testing.assert_close(held[0], free[0], rtol=0, atol=1e-7)
    assert torch.isfinite(held[0]).all()


def test_its_state_is_one_number_for_each_weight() -> None:
    weights = [weight_of((8, 4, 3, 3)), weight_of((6, 5)), nn.Parameter(torch.zeros(2, 2), requires_grad=False)]
    assert optimizer_bytes([Muon(weights)]) == 4 * (8 * 4 * 9 + 6 * 5)


def test_a_weight_without_a_gradient_stays() -> None:
    weights = [weight_of((3, 4)), weight_of((3, 4))]
    weights[0].grad = drawn(3, 4)
    Muon(weights).step()
    assert torch.equal(weights[1], weight_of((3, 4)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_other_precisions(dtype: torch.dtype) -> None:
    weights, gradient = [weight_of((8, 4, 3, 3), dtype)], drawn(8, 4, 3, 3, seed=1).to(dtype)
    expected = plainly(weights[0], [gradient], lr=0.1)
    stepped(Muon(weights, lr=0.1), weights, [gradient])
    assert weights[0].dtype == dtype
    atol = 1e-12 if dtype == torch.float64 else 0.02
    torch.testing.assert_close(weights[0].detach().double(), expected, rtol=0, atol=atol)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lr": -1.0}, ("lr", "-1.0")),
        ({"lr": float("nan")}, ("lr", "nan")),
        ({"weight_decay": -0.1}, ("weight_decay",)),
        ({"momentum": 1.0}, ("momentum", "1.0")),
        ({"ns_steps": 0}, ("ns_steps", "0")),
        ({"ns_steps": 100}, ("ns_steps", "100")),
        ({"adjust_lr_fn": "none"}, ("adjust_lr_fn", "match_rms_adamw")),
    ],
    ids=str,
)
def test_a_value_out_of_range_is_refused(options: Any, words: tuple[str, ...]) -> None:
    with refused(ValueError, *words):
        Muon([weight_of((2, 2))], **options)


def test_a_vector_is_refused() -> None:
    with refused(ValueError, "(3,)"):
        Muon([weight_of((2, 2)), weight_of((3,))])
