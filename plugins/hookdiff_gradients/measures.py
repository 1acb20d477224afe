"""Measures the entries of gradients and the gradient noise scale in logged steps. All results stay on the device."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from hookdiff.machine import counts, is_sharded, local, stacked, summed

CHUNK = 2**22  # entries that are measured together: for few kernels, and little memory


def entry_sizes(tensors: list[Tensor]) -> dict[str, Tensor]:
    """Return mean, max and min of |entry| over all `tensors`; {} for none. All ranks call it for sharded tensors."""
    num = sum(tensor.numel() for tensor in tensors)
    if not num:
        return {}
    is_shared = any(map(is_sharded, tensors))
    held = [local(tensor) for tensor in tensors if not is_shared or counts(tensor)]
    sizes = _sizes(held) if sum(tensor.numel() for tensor in held) else torch.tensor([0.0, 0.0, math.inf])
    totals, largest, smallest = stacked(sizes.to(local(tensors[0]).device)).unbind(1) if is_shared else sizes[:, None]
    return {"mean": totals.sum() / num, "max": largest.max(), "min": smallest.min()}


def _sizes(tensors: list[Tensor]) -> Tensor:
    """Return sum, max and min of |entry|: (3,)."""
    parts = []
    for group in _groups(tensors, CHUNK):
        sizes = torch.cat([_flat(tensor) for tensor in group]).abs_()
        smallest, largest = sizes.aminmax()
        # In half precision the sum would be wrong.
        total = sizes.sum(dtype=torch.promote_types(sizes.dtype, torch.float32))
        parts.append(torch.stack((total, largest.to(total), smallest.to(total))))
    totals, largest, smallest = torch.stack(parts).unbind(1)
    return torch.stack((totals.sum(), largest.max(), smallest.min()))


def _groups(tensors: list[Tensor], size: int) -> Iterator[list[Tensor]]:
    """Yield `tensors` in groups of at most `size` entries, or of one tensor."""
    group: list[Tensor] = []
    held = 0
    for tensor in tensors:
        if group and held + tensor.numel() > size:
            yield group
            group, held = [], 0
        group.append(tensor)
        held += tensor.numel()
    if group:
        yield group


def _flat(tensor: Tensor) -> Tensor:
    """Return the entries in memory order, so that channels_last needs no copy."""
    if not tensor.is_contiguous():
        tensor = tensor.permute(sorted(range(tensor.ndim), key=tensor.stride, reverse=True))
    return tensor.reshape(-1)


@contextmanager
def noted_norms(parameters: Sequence[Tensor], norms: list[Tensor], dtype: torch.dtype) -> Iterator[None]:
    """Append to `norms` the gradient norms of this rank in one backward pass.

    The hook of a parameter is called before DistributedDataParallel averages its gradient over the ranks.
    """

    def take(gradient: Tensor) -> None:
        norms.append(torch.linalg.vector_norm(gradient.detach(), dtype=dtype))

    handles = [p.register_hook(take) for p in parameters]  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class NoiseScale:
    """Gradient noise scale: the batch size, in samples, beyond which more samples help little.

    McCandlish et al. 2018, arXiv 1812.06162, appendix A.1: with the gradients of a part of b samples and of the whole
    batch of B,

        |G|^2 = (B |G_B|^2 - b |G_b|^2) / (B - b)      S = (|G_b|^2 - |G_B|^2) / (1 / b - 1 / B)

    are unbiased estimates. Their ratio is not, so each is smoothed before the ratio S / |G|^2.
    """

    def __init__(self, decay: float, device: torch.device) -> None:
        self._decay = decay
        self.state = torch.zeros(3, device=device)  # |G|^2 and S, smoothed, and the last positive scale
        self.known = False  # whether the state holds a measurement
        self._first: Tensor | None = None
        self._part = 0  # b
        self._measured: tuple[Tensor, int] | None = None  # |G_b|^2 / |G_B|^2 and B

    @property
    def scale(self) -> Tensor:
        """The noise scale, in samples: scalar. It keeps its last value while the estimate of |G|^2 or S is negative."""
        return self.state[2]

    def after_first(self, norms: Tensor, part: int, share: float) -> None:
        """Take the norms of this rank's first micro-batch, of `part` samples; its loss was multiplied by `share`.

        `part` is 0 for a rank without a sample; such a rank does not count.
        """
        self._first, self._part = torch.linalg.vector_norm(norms) / (share or 1), part

    def after_last(self, norms: Tensor, whole: int) -> None:
        """Take the norms for the `whole` samples of all ranks, at the same loss scale as in `after_first`."""
        if self._first is None:
            return
        self._measured = (self._first / torch.linalg.vector_norm(norms)).square(), whole

    def update(self, norms: Tensor) -> None:
        """Smooth the measurement. `norms` are those of the whole step, without the loss scale. All ranks call this."""
        if self._measured is None:
            return
        (ratio, B), self._measured = self._measured, None
        # The mean over ranks of |G_b|^2 is |G|^2 + S times the mean of 1 / b.
        unit = torch.ones_like(ratio)
        terms = torch.stack((ratio, unit / self._part, unit)) if self._part else torch.zeros_like(ratio).repeat(3)
        sums = summed(terms)
        ratio, b = sums[0] / sums[2], sums[2] / sums[1]
        of_whole = torch.linalg.vector_norm(norms).float().square()
        of_part = of_whole * ratio
        signal = (B * of_whole - b * of_part) / (B - b)
        noise = (of_part - of_whole) / (1 / b - 1 / B)
        smooth = torch.stack((signal, noise)).nan_to_num()  # a gradient of zero has no ratio
        self.state[:2] = self._decay * self.state[:2] + (1 - self._decay) * smooth
        sensible = (self.state[:2] > 0).all()
        self.state[2] = torch.where(sensible, self.state[1] / self.state[0], self.state[2])
        self.known = True

    def load(self, state: Tensor) -> None:
        self.state.copy_(state)
        self.known = True
