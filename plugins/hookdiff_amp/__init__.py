"""Trains in mixed precision: autocast, with a gradient scaler for float16."""

import logging
from collections.abc import Generator, Mapping
from typing import Any, Literal

import torch
from attrs import asdict, define, field
from attrs.validators import ge, gt, lt
from torch import Tensor
from torch.amp import GradScaler, autocast

from hookdiff import PASS, Loop, LossOutput, NonFinite, Step, UserError, hookimpl
from hookdiff.loop import DevicePart
from hookdiff.options import COUNT, about, numbers

logger = logging.getLogger("hookdiff")

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_KEPT = 16  # newest void steps in the saved state; 16 of them halve the scale from 65536 to 1


@define(frozen=True)
class ScalerState:
    """The saved state of torch's GradScaler."""

    scale: float = field(validator=[gt(0), numbers()])
    growth_factor: float = field(validator=[gt(1), numbers()])
    backoff_factor: float = field(validator=[gt(0), lt(1)])
    growth_interval: int = field(validator=COUNT)
    _growth_tracker: int = field(validator=COUNT, alias="_growth_tracker")


@define(frozen=True)
class AMPState:
    """The saved state of `AMP`; `scaler` is None unless the precision is fp16."""

    scaler: ScalerState | None
    num_void: int = field(validator=COUNT)
    fell: list[tuple[int, float]] = field(validator=numbers(least=0))  # position, and scale before the step


@define(eq=False)
class AMP:
    """Computes the loss in bf16 or fp16, and scales it in fp16 so that small gradients survive.

    If the gradients of a step overflow although its loss is finite, the step is void: the step is not counted, the
    scale is halved, and no later hook of the step is called. At the lowest scale, the step counts as not finite:
    `on_nan` is called, and the report lists how the scale fell.
    """

    precision: Literal["auto", "bf16", "fp16", "off"] = field(
        default="auto", metadata=about('"bf16", "fp16", "off", or "auto": the lowest native precision of the device')
    )
    init_scale: float = field(default=65536.0, validator=gt(0), metadata=about("with fp16, initial factor of the loss"))
    growth_interval: int = field(
        default=2000, validator=ge(1), metadata=about("with fp16, steps without an overflow before the scale doubles")
    )
    min_scale: float = field(
        default=1.0, validator=gt(0), metadata=about("with fp16, lowest scale; an overflow there fails the step")
    )
    scaler: GradScaler | None = field(default=None, init=False)
    num_void: int = field(default=0, init=False)
    _fell: list[list[float]] = field(factory=list, init=False)  # [position, scale before it] of the last void steps
    _dtype: torch.dtype | None = field(default=None, init=False)

    @hookimpl
    def choose(self, device: torch.device) -> Mapping[str, Any]:
        """Return the precision that "auto" stands for on `device`, and the memory format that suits the precision."""
        precision = native_precision(device) if self.precision == "auto" else self.precision
        # The CPU's group norms in bf16 are slow in channels_last: benchmarks/README.md.
        suits = {"run.channels_last": False} if device.type == "cpu" and precision == "bf16" else {}
        return {"precision": precision, **suits}

    @hookimpl
    def on_start(self, loop: Loop) -> None:
        precision: str = self.precision
        if precision == "auto":  # only in a script: for a config, `choose` is called before
            precision = self.choose(loop.device)["precision"]
            logger.info("amp: precision auto is %s on this %s", precision, loop.device.type)
        self._dtype = DTYPES.get(precision)
        if self._dtype is not torch.float16:
            return
        if loop.device.type == "cpu":
            logger.info('amp: a CPU is often ten times slower in fp16 than in float32; set precision = "auto"')
        for name, parameter in (*loop.model.named_parameters(), *loop.adopted.named_parameters()):
            if parameter.requires_grad and parameter.dtype in DTYPES.values():
                raise UserError(
                    f"plugins.amp: {name} is {parameter.dtype}; a gradient scaler needs trained weights in float32, "
                    "which autocast copies to half precision. Keep the model in float32, or use precision = 'bf16'"
                )
        self.scaler = GradScaler(loop.device.type, init_scale=self.init_scale, growth_interval=self.growth_interval)

    @hookimpl(wrapper=True, tryfirst=True)  # outside of all other wrappers, so that autocast covers them, too
    def compute_loss(self, loop: Loop) -> Generator[None, LossOutput, LossOutput]:
        if self._dtype is None:
            return (yield)
        with autocast(loop.device.type, self._dtype):
            return (yield)

    @hookimpl
    def backward(self, loss: Tensor) -> bool:
        if self.scaler is None:
            return PASS
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        return True

    @hookimpl
    def unscale(self, loop: Loop) -> bool:
        if self.scaler is None:
            return PASS
        for optimizer in loop.all_optimizers:
            self.scaler.unscale_(optimizer)
        loop.gradients.clear()
        # `finite` waits for the device. The loop reads the same flag later, so this wait costs nothing extra.
        if loop.gradients.finite or not loop.gradients.overflowed:
            return True
        scale = self.scaler.get_scale()
        if scale <= self.min_scale or not loop.gradients.nonfinite():
            return True
        for flag in self._flags(loop):
            flag.fill_(1)  # also if the overflow was in an earlier pass, and its gradients are gone
        self._fell = [*self._fell[1 - _KEPT :], [loop.progress.position, scale]]
        self._lower()
        self.num_void += 1
        return False

    @hookimpl(wrapper=True)
    def optimizer_step(self) -> Generator[None, bool, bool]:
        # Not scaler.step: it waits for the device once more, to learn whether the gradients are finite.
        changed = yield
        if self.scaler is not None:
            self.scaler.update()
        return changed

    @hookimpl
    def on_device(self, loop: Loop) -> list[DevicePart] | None:
        """Return no work, since autocast is recorded with the passes; None in fp16, since the scale needs the host."""
        return [] if self.scaler is None else None

    @hookimpl
    def on_nan(self, loop: Loop, report: NonFinite) -> None:
        if self.scaler is None:
            return
        # Such as "4 (batch 7) > 2 (batch 8) > 1, the lowest allowed".
        scale = self.scaler.get_scale()
        earlier = "".join(f"{before:g} (batch {position:g}) > " for position, before in self._fell)
        report.notes["loss scale"] = f"{earlier}{scale:g}" + (", the lowest allowed" if scale <= self.min_scale else "")
        flags = self._flags(loop)
        if loop.agree(any(map(bool, flags))):  # flags of adopted modules were set before the ranks averaged gradients
            for flag in flags:
                flag.fill_(1)
        self._lower()

    @hookimpl
    def after_optimizer_step(self, loop: Loop) -> None:
        if self.scaler is None:
            return
        loop.log.average({"amp/void_share": 0.0})
        if loop.log.due and (scale := self.scaler._scale) is not None:
            loop.log({"amp/scale": scale})
            loop.log({"amp/void_steps": self.num_void}, detail=True)

    @hookimpl
    def between_steps(self, loop: Loop, step: Step | None) -> None:
        if self.scaler is not None and step and step.outcome == "void":
            loop.log.average({"amp/void_share": 1.0})

    def _flags(self, loop: Loop) -> list[Tensor]:
        """Return the flags of the scaler, by optimizer and device: 1 if a gradient of the step was not finite."""
        assert self.scaler is not None
        found = self.scaler._found_inf_per_device
        return [flag for optimizer in loop.all_optimizers for flag in found(optimizer).values()]

    def _lower(self) -> None:
        assert self.scaler is not None
        self.scaler.update()
        if self.scaler.get_scale() < self.min_scale:
            self.scaler.update(self.min_scale)

    def state_dict(self) -> dict[str, Any]:
        scaler = self.scaler.state_dict() if self.scaler else None
        return {"scaler": scaler, "num_void": self.num_void, "fell": self._fell}

    def load_state_dict(self, state: AMPState) -> None:
        """Restore the scale; if the saved run had no scaler, the scale begins at `init_scale`."""
        self.num_void, self._fell = state.num_void, [list(pair) for pair in state.fell]
        if self.scaler and state.scaler:
            # The growth interval of the config counts, not the saved one.
            self.scaler.load_state_dict({**asdict(state.scaler), "growth_interval": self.growth_interval})


def native_precision(device: torch.device) -> str:
    """Return "bf16", "fp16" or "off": the lowest precision that `device` computes natively.

    A CPU without bf16 instructions emulates half precision, many times slower than float32.
    """
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    if device.type == "cpu":
        capabilities = torch.cpu.get_capabilities()
        if any(capabilities.get(name) for name in ("amx_bf16", "avx512_bf16", "bf16")):  # x86, x86, Arm
            return "bf16"
    return "off"
