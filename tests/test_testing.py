"""`CountTransfers` counts each transfer to the host once."""

import torch
from torch import nn

from hookdiff.testing import CountTransfers, toy_loop


def test_each_read_of_a_tensor_counts_once() -> None:
    vector, scalar = torch.ones(3), torch.ones(())
    with CountTransfers() as transfers:
        vector.tolist()
        scalar.tolist()
        scalar.item()
        float(scalar)
        bool(scalar)
        vector.numpy()
        vector.cpu()
        vector.to("cpu", torch.float64)
        vector.to(device="cpu")
    assert transfers.count == 9


def test_values_that_stay_on_the_device_do_not_count() -> None:
    values = torch.ones(3)
    with CountTransfers() as transfers:
        (values * 2).sum().to(torch.float64)
        values.to(values.device, non_blocking=True)
    assert transfers.count == 0
    values.tolist()
    assert transfers.count == 0


def test_a_loop_reads_once_a_step_and_an_unfused_optimizer_more_often() -> None:
    def adamw(fused: bool) -> int:
        loop = toy_loop(
            log_every=100,
            optimizers=lambda model: torch.optim.AdamW(nn.ModuleList([model]).parameters(), fused=fused),
        )
        with loop:
            steps = loop.steps()
            next(steps)
            with CountTransfers() as transfers:
                next(steps)
                next(steps)
        return transfers.count

    assert adamw(fused=True) == 2
    assert adamw(fused=False) > 2
