"""Compiles the model in place."""

import logging
from collections.abc import Generator
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from attrs import define, field
from attrs.validators import min_len

from hookdiff import Loop, LossOutput, UserError, hookimpl, nearest
from hookdiff.loop import DevicePart
from hookdiff.models import compiler_errors, modules_named, try_compiler
from hookdiff.options import about

logger = logging.getLogger("hookdiff")


@define(eq=False)
class Compile:
    """Compiles the model with torch.compile, in place: names in checkpoints and addresses in memory do not change.

    torch compiles once for training and once for sampling, and again for batches of a second size, unless `dynamic`
    is true. Samples of several shapes cost at most one compilation a shape. Code that cannot be compiled runs
    uncompiled. A compiler that is missing or broken ends the run before its first step.
    """

    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = field(
        default="default",
        metadata=about('mode of torch.compile; "reduce-overhead" and "max-autotune" use CUDA graphs on a GPU'),
    )
    dynamic: bool | None = field(
        default=None,
        metadata=about("compile for all batch sizes (true) or for each (false); default: for all, at the second size"),
    )
    backend: str = field(default="inductor", validator=min_len(1), metadata=about('backend; "eager" compiles nothing'))

    blocks: tuple[str, ...] = field(
        default=(),
        metadata=about(
            'patterns of modules to compile on their own, as `["blocks.*"]`; equal modules compile once, which is '
            "faster for a deep model; default: the whole model at once"
        ),
    )

    def __attrs_post_init__(self) -> None:
        if self.mode != "default" and self.backend != "inductor":
            raise ValueError(f"mode = {self.mode!r} needs the backend 'inductor'; {self.backend!r} takes 'default'")

    @hookimpl(tryfirst=True)
    def on_start(self, loop: Loop) -> None:
        # Not in prepare_model: a loop that only samples need not wait for the compiler.
        known = torch._dynamo.list_backends(())
        if self.backend not in known:
            raise UserError(f"plugins.compile.backend: torch has no {self.backend!r}{nearest(self.backend, known)}")
        options: dict[str, Any] = {"mode": self.mode, "dynamic": self.dynamic, "backend": self.backend}
        with self._one_message():  # the model is compiled at its first call, too late to report a missing compiler
            try_compiler(loop.device, **options)
        blocks = modules_named(loop.model, self.blocks, "plugins.compile.blocks")
        # After 8 compilations of the same code, torch would run it uncompiled.
        limit = torch._dynamo.config.recompile_limit + 2 * len(loop.feed.shapes)  # training, and sampling
        loop.resources.enter_context(torch._dynamo.config.patch(recompile_limit=limit))
        for module in blocks.values() or (loop.model,):
            module.compile(**options)
        logger.info("compile: the first step takes longer, a minute or more for a large model")

    @hookimpl
    def on_device(self, loop: Loop) -> list[DevicePart] | None:
        """Return no work: the network is recorded with the passes. None if the compiler records CUDA graphs itself."""
        return [] if self.mode in ("default", "max-autotune-no-cudagraphs") else None

    @hookimpl(wrapper=True)
    def micro_step(self) -> Generator[None, LossOutput, LossOutput]:
        with self._one_message():
            return (yield)

    def _one_message(self) -> AbstractContextManager[None]:
        remedy = "train without the plugin (--plugins no:compile), or set plugins.compile.backend = 'eager'"
        return compiler_errors(f"plugins.compile: {self.backend}", remedy)
