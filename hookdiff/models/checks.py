"""Checks of the inputs of a model."""

import torch
from torch import Tensor


def check_labels(labels: Tensor | None, num: int, num_classes: int) -> None:
    """Raise ValueError unless there are labels if and only if there are classes, one per image and each in range.

    The range is checked only on the CPU: on a GPU the host would wait for the answer in every step.
    """
    if labels is None:
        if num_classes:
            raise ValueError(
                f"the model was built with num_classes={num_classes} and got no labels: call it as "
                "model(x, timesteps, labels), with -1 where there is no class"
            )
        return
    if not num_classes:
        raise ValueError("the model got labels and was built without classes: set num_classes, or give no labels")
    if labels.shape != (num,) or labels.dtype not in (torch.int64, torch.int32):
        raise ValueError(
            f"labels has shape {tuple(labels.shape)} of {labels.dtype}, expected ({num},) of int64: one per image"
        )
    if labels.device.type == "cpu" and num and not torch.compiler.is_compiling():
        low, high = map(int, labels.aminmax())
        if low < -1 or high >= num_classes:
            raise ValueError(
                f"labels has {low if low < -1 else high}, expected -1 (no class) to {num_classes - 1}: "
                f"the model was built with num_classes={num_classes}"
            )
