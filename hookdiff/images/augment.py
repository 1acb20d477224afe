"""The random stage of the transforms, for a whole batch at once, on the batch's device.

Conditions of the height and width of the pictures, such as masks, are cropped and flipped with them. The random
numbers of a sample depend on (seed, epoch, index) alone: batch size, ranks, workers and store change no pixel.
"""

from collections.abc import Callable

import torch
from attrs import evolve
from torch import Tensor

from hookdiff.data.batch import Batch
from hookdiff.data.memory import to_device
from hookdiff.data.memory_reader import in_unit_range, is_paired
from hookdiff.images.transforms import Transforms, centre_start
from hookdiff.machine.randomness import uniforms

# The columns of the random numbers. Each augmentation has its own, so that enabling one does not change another.
_TOP, _LEFT, FLIP, _FACTORS, _ORDER = 0, 1, 2, slice(3, 7), slice(7, 11)


def augment(samples: Batch, transforms: Transforms, seed: int, epoch: int) -> Batch:
    """Augment resized `samples`, which have indices. Images of uint8 become float32 in [-1, 1]."""
    if not transforms.random:
        return in_unit_range(samples)
    images, indices = samples.inputs, samples.indices
    assert indices is not None
    draws = uniforms(seed, "augment", epoch, indices, 11)
    size, side = transforms.resize and transforms.square, images.shape[-1]

    def move(images: Tensor) -> Tensor:
        if size is not None and size != side:
            top, left = to_device(_places(draws, side - size), images.device).unbind(1)
            windows = images.unfold(2, size, 1).unfold(3, size, 1)  # n c y x size size: a view of every window
            images = windows[torch.arange(len(images), device=images.device), :, top, left]
        if transforms.flip:
            share = 0.5 if transforms.flip is True else transforms.flip
            mirrored = to_device(draws[:, FLIP] < share, images.device)
            images = torch.where(mirrored.view(-1, 1, 1, 1), images.flip(-1), images)
        return images

    def recolour(images: Tensor) -> Tensor:
        images = images.add(1).div_(2)
        return jitter(images, transforms.color_jitter, draws[:, _FACTORS], draws[:, _ORDER]).mul_(2).sub_(1)

    moved = _moved(samples, move)
    return evolve(moved, inputs=recolour(moved.inputs)) if any(transforms.color_jitter) else moved


def center_crop(samples: Batch, transforms: Transforms) -> Batch:
    """Crop the centre of resized `samples`. Images of uint8 become float32 in [-1, 1]."""
    return _moved(samples, transforms.centre) if transforms.resize else in_unit_range(samples)


def corners(transforms: Transforms, indices: Tensor, seed: int, epoch: int | None) -> Tensor:
    """Return top and left (n 2, int64) of the random crops of the samples `indices` in `epoch`; None: centre crops."""
    slack = (transforms.side or 0) - (transforms.square or 0)
    if epoch is None:
        return torch.full((len(indices), 2), centre_start(slack))
    return _places(uniforms(seed, "augment", epoch, indices, _LEFT + 1), slack)


def _places(draws: Tensor, slack: int) -> Tensor:
    return (draws[:, [_TOP, _LEFT]] * (slack + 1)).long()


def _moved(samples: Batch, move: Callable[[Tensor], Tensor]) -> Batch:
    """Apply `move` (n c h w to n c h w) to the inputs and to images among the conditions; see `in_unit_range`."""
    conditions = dict(samples.conditions)
    for name, column in conditions.items():
        if is_paired(column.shape[1:], samples.inputs.shape[1:]):
            conditions[name] = move(column) if column.dim() == 4 else move(column.unsqueeze(1)).squeeze(1)
    return in_unit_range(evolve(samples, inputs=move(samples.inputs), conditions=conditions))


def jitter(images: Tensor, strengths: tuple[float, float, float, float], draws: Tensor, order: Tensor) -> Tensor:
    """Change `images` (n c h w, float32 in [0, 1]) in place as torchvision's ColorJitter does, and return them.

    Factors of brightness, contrast and saturation lie between 1 - strength (at least 0) and 1 + strength; shifts of
    the hue lie between -strength and strength, in turns of the colour circle. Each sample has its own order of the
    four changes. `draws` and `order` are random numbers from [0, 1), n 4.
    """
    changes: list[Callable[[Tensor, Tensor], Tensor]] = [
        lambda images, factors: images * factors,
        _contrast,
        lambda images, factors: images * factors + _grey(images) * (1 - factors),
        _hue,
    ]
    ranks = order.argsort(1)
    for turn in range(4):
        for number, (change, strength) in enumerate(zip(changes, strengths, strict=True)):
            rows = (ranks[:, turn] == number).nonzero().squeeze(1)
            if not strength or not len(rows) or (number > 1 and images.shape[1] == 1):
                continue  # grey has neither saturation nor hue
            low, high = (-strength, strength) if change is _hue else (max(0.0, 1 - strength), 1 + strength)
            factors = (low + draws[rows, number] * (high - low)).float().view(-1, 1, 1, 1)
            factors, rows = to_device(factors, images.device), to_device(rows, images.device)
            images[rows] = change(images[rows], factors).clamp_(0, 1)
    return images


def _grey(images: Tensor) -> Tensor:
    if images.shape[1] == 1:
        return images
    red, green, blue = images.unbind(1)
    return (0.2989 * red + 0.587 * green + 0.114 * blue).unsqueeze(1)  # Rec. 601, with torchvision's digits


def _contrast(images: Tensor, factors: Tensor) -> Tensor:
    # Integers are summed, because the rounding of a sum of floats depends on the batch size.
    counts = (_grey(images) * 2**24).round().long().sum((1, 2, 3), keepdim=True)
    means = counts.float() / (2**24 * images[0, 0].numel())
    return images * factors + means * (1 - factors)


def _hue(images: Tensor, shifts: Tensor) -> Tensor:
    """Shift the hue by `shifts` turns of the colour circle, by way of HSV (Smith 1978)."""
    red, green, blue = images.unbind(1)
    value, chroma = images.amax(1), images.amax(1) - images.amin(1)
    safe = chroma.clamp(min=1e-12)
    sixth = torch.where(
        value == red,
        (green - blue) / safe,
        torch.where(value == green, 2 + (blue - red) / safe, 4 + (red - green) / safe),
    )
    sixth = (sixth + 6 * shifts.squeeze(1)) % 6
    parts = []
    for corner in (5, 3, 1):  # offsets in sixths of a turn: red, green and blue are lowest at distances from 1 to 3
        distance = (corner + sixth) % 6
        parts.append(value - chroma * torch.minimum(distance, 4 - distance).clamp(0, 1))
    return torch.stack(parts, 1)
