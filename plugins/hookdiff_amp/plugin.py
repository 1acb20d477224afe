"""The plugin `amp`."""

from __future__ import annotations

import logging
import math
from collections.abc import Generator, Mapping
from typing import Any, Literal

import torch
from attrs import define, field
from attrs.validators import ge, gt
from torch import Tensor
from torch.amp import GradScaler, autocast

from hookdiff import Loop, LossOutput, NonFinite, UserError, hookimpl
from hookdiff.weights import Buffers

log = logging.getLogger("hookdiff")

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_KEPT = 16  # void steps that are remembered: from 65536 down to 1


@define(eq=False)
class AMP:
    """Computes the loss in bf16 or fp16, and scales it in fp16 so that small gradients survive.

    A step whose gradients overflow under a finite loss is void: it is not counted, the scale is halved, buffers get
    back the values from before it, nothing else hears of it. At the lowest scale it is no overflow any more: the
    loop's on_nan takes over, and is told how the scale fell.
    """

    precision: Literal["auto", "bf16", "fp16", "off"] = "auto"  # auto: what the device computes natively
    init_scale: float = field(default=65536.0, validator=gt(0))  # fp16: of the loss
    growth_interval: int = field(default=2000, validator=ge(1))  # fp16: good steps before the scale doubles
    min_scale: float = field(default=1.0, validator=gt(0))  # fp16: below it an overflow is a failure
    scaler: GradScaler | None = field(default=None, init=False)
    num_void: int = field(default=0, init=False)
    _fell: list[list[float]] = field(factory=list, init=False)  # [position, scale before it] of the last void steps
    _dtype: torch.dtype | None = field(default=None, init=False)
    _buffers: Buffers = field(init=False)  # as they were before the step: batch norm's may hold the overflow of one

    @hookimpl
    def on_start(self, loop: Loop) -> None:
        device = loop.device
        precision: str = self.precision
        if precision == "auto":
            precision = native_precision(device)
            log.info("amp: precision auto is %s on this %s", precision, device.type)
        self._dtype = DTYPES.get(precision)
        if self._dtype is not torch.float16:
            return
        for name, parameter in loop.model.named_parameters():
            if parameter.requires_grad and parameter.dtype in DTYPES.values():
                raise UserError(
                    f"plugins.amp: {name} is {parameter.dtype}; under a gradient scaler trained weights are float32 "
                    "and autocast makes the half-precision copies. Keep the model in float32, or use precision = 'bf16'"
                )
        self._buffers = Buffers(loop.model)
        self.scaler = GradScaler(device.type, init_scale=self.init_scale, growth_interval=self.growth_interval)

    @hookimpl
    def before_step(self) -> None:
        if self.scaler is not None:
            self._buffers.keep()

    @hookimpl(wrapper=True)
    def compute_loss(self, loop: Loop) -> Generator[None, LossOutput, LossOutput]:
        if self._dtype is None:
            return (yield)
        with autocast(loop.device.type, self._dtype):
            return (yield)

    @hookimpl
    def backward(self, loss: Tensor) -> bool | None:
        if self.scaler is None:
            return None
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        return True

    @hookimpl
    def unscale(self, loop: Loop) -> bool | None:
        if self.scaler is None:
            return None
        for optimizer in loop.optimizers:
            self.scaler.unscale_(optimizer)
        # The loop needs this answer anyway, so asking for it first costs no transfer of its own.
        if loop.gradients.finite or not self._overflowed(loop):
            return True
        self._fell = [*self._fell[1 - _KEPT :], [loop.progress.position, self.scaler.get_scale()]]
        self._lower()
        self._buffers.put_back()
        self.num_void += 1
        loop.log({"amp/void_steps": self.num_void}, detail=True)
        loop.log.average({"amp/void_share": 1.0})
        return False

    @hookimpl(wrapper=True)
    def optimizer_step(self) -> Generator[None, bool, bool]:
        # Not scaler.step: it asks the device once more whether the gradients are finite, and waits for the answer.
        changed = yield
        if self.scaler is not None:
            self.scaler.update()
        return changed

    @hookimpl
    def on_nan(self, report: NonFinite) -> None:
        if self.scaler is None:
            return
        report.notes["loss scale"] = self._history(self.scaler.get_scale())
        self._lower()

    @hookimpl
    def after_optimizer_step(self, loop: Loop) -> None:
        if self.scaler is None:
            return
        loop.log.average({"amp/void_share": 0.0})
        if loop.log.due and (scale := self.scaler._scale) is not None:
            loop.log({"amp/scale": scale})
            loop.log({"amp/void_steps": self.num_void}, detail=True)

    def _overflowed(self, loop: Loop) -> bool:
        assert self.scaler is not None
        flags = [flag for o in loop.optimizers for flag in self.scaler._found_inf_per_device(o).values()]
        found = any(flag.item() for flag in flags)
        return found and math.isfinite(loop.gradients.loss) and self.scaler.get_scale() > self.min_scale

    def _lower(self) -> None:
        """Halve the scale, but not to below its floor."""
        assert self.scaler is not None
        self.scaler.update()
        if self.scaler.get_scale() < self.min_scale:
            self.scaler.update(self.min_scale)

    def _history(self, scale: float) -> str:
        """Return how the scale came to where it is, such as "4 (batch 7) > 2 (batch 8) > 1, the lowest allowed"."""
        steps = "".join(f"{before:g} (batch {position:g}) > " for position, before in self._fell)
        return f"{steps}{scale:g}" + (", the lowest allowed" if scale <= self.min_scale else "")

    def state_dict(self) -> dict[str, Any]:
        """Return the scaler's state, empty without one, the count of void steps, and where the last ones were."""
        scaler = self.scaler.state_dict() if self.scaler else {}
        return {"scaler": scaler, "num_void": self.num_void, "fell": self._fell}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up the scale where it was; a run that had no scaler begins with `init_scale`."""
        self.num_void, self._fell = state["num_void"], [list(pair) for pair in state["fell"]]
        if self.scaler and state["scaler"]:
            # The growth interval is the config's.
            self.scaler.load_state_dict({**state["scaler"], "growth_interval": self.growth_interval})


def native_precision(device: torch.device) -> str:
    """Return "bf16", "fp16" or "off": the cheapest that `device` computes natively.

    On a CPU without bf16 instructions half precision is emulated, many times slower than float32.
    """
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    if device.type == "cpu":
        return "bf16" if _cpu_has_bf16() else "off"
    return "off"


def _cpu_has_bf16() -> bool:
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name) for name in ("amx_bf16", "avx512_bf16", "bf16"))  # x86, x86, Arm
