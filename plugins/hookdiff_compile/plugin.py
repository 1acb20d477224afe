"""The plugin `compile`."""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from attrs import define, field
from attrs.validators import min_len
from torch import Tensor

from hookdiff import Loop, LossOutput, UserError, hookimpl, nearest

log = logging.getLogger("hookdiff")


@define(eq=False)
class Compile:
    """Lets torch compile the model, in place: its names in a checkpoint stay, and so do its weights' addresses.

    What is compiled is compiled for a shape and a mode (training, sampling); at the second size of a batch torch
    compiles once more, for any size, unless `dynamic` says otherwise. Whatever cannot be compiled runs as it is. A
    compiler that is missing or broken is told before the run starts.
    """

    # reduce-overhead, max-autotune: on a GPU with CUDA graphs; max-autotune tries out kernels, for minutes
    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = "default"
    dynamic: bool | None = None  # for any size from the start (true), for each size anew (false); None: as above
    backend: str = field(default="inductor", validator=min_len(1))  # "eager" compiles nothing: is it the compiler?

    def __attrs_post_init__(self) -> None:
        if self.mode != "default" and self.backend != "inductor":
            raise ValueError(f"mode = {self.mode!r} is one of backend 'inductor'; {self.backend!r} takes 'default'")

    @hookimpl(tryfirst=True)
    def on_start(self, loop: Loop) -> None:
        # Not in prepare_model: who only wants images of a run would wait for the compiler.
        known = torch._dynamo.list_backends(())
        if self.backend not in known:
            raise UserError(f"plugins.compile.backend: torch has no {self.backend!r}{nearest(self.backend, known)}")
        options: dict[str, Any] = {"mode": self.mode, "dynamic": self.dynamic, "backend": self.backend}
        with self._told():  # the model itself is only compiled when it is called: too late to find no compiler
            torch.compile(_probe, **options)(torch.zeros(8, device=loop.device))
        loop.model.compile(**options)
        log.info("compile: the first step takes longer, a minute or more for a large model")

    @hookimpl(wrapper=True)
    def micro_step(self) -> Generator[None, LossOutput, LossOutput]:
        with self._told():
            return (yield)

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Turn what the compiler raises into one message."""
        from torch._dynamo.exc import TorchDynamoException  # late: it takes a second

        try:
            yield
        except TorchDynamoException as error:
            cause = getattr(error, "inner_exception", error)
            reason = f"{type(cause).__name__}: {cause}".partition("\n")[0]
            raise UserError(
                f"plugins.compile: {self.backend} failed: {reason}\n"
                "  go on without: --plugins no:compile; plugins.compile.backend = 'eager' tells whether the compiler "
                "is to blame"
            ) from error


def _probe(x: Tensor) -> Tensor:
    return x.sin() + 1
