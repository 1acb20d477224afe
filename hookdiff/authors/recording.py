"""Whether the device only notes its work now, as for a CUDA graph, and when it has done it."""

import torch


def is_recording(device: torch.device) -> bool:
    """Return whether `device` only notes its work now, for later replays. No value can be read meanwhile."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def wait_for(device: torch.device) -> None:
    """Wait until `device` has done its work, for a clock; not while it is recording, which allows no waiting."""
    if device.type == "cuda" and not is_recording(device):
        torch.cuda.synchronize(device)
