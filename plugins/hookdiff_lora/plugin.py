"""The plugin `lora`."""

import logging
import re
from collections import Counter
from collections.abc import Generator, Iterable
from typing import Any, Literal

from attrs import define, field
from attrs.validators import ge, gt, lt, min_len, optional
from torch import Tensor

from hookdiff import Loop, UserError, hookimpl, listed, plugin
from hookdiff.authors import seeded
from hookdiff.disk import local_path
from hookdiff.machine import derive_seed
from hookdiff.options import about
from hookdiff_lora.adapter import NAME, adapters_of
from hookdiff_lora.files import KEY, load_adapter
from hookdiff_lora.targets import layers_of

logger = logging.getLogger("hookdiff")
_END = re.compile(r"[^.]+(\.\d+)*$")  # the last part of a name, with the numbers behind it
_SHOWN = 8  # names in the log


@plugin(needs={"peft": "hookdiff[lora]"})
@define(eq=False)
class LoRA:
    """Trains adapters of low rank beside frozen weights (Hu et al. 2021, arXiv 2106.09685, section 4.1).

    A layer W x becomes W x + alpha / rank * B A x. A (rank rows) and B (rank columns) train; W and all other weights of
    the network are frozen. B begins as zero, so that a run begins with the network as it is. Checkpoints and averages
    have the adapters alone, if `[model] use = "pretrained"` has the network.
    """

    rank: int = field(default=4, validator=ge(1), metadata=about("rank of each adapter"))
    alpha: float | None = field(
        default=None,
        validator=optional(gt(0)),
        metadata=about("the adapter's output is multiplied by alpha / rank; default: the rank"),
    )
    targets: tuple[str, ...] = field(
        default=(),
        metadata=about(
            'patterns of the linear layers and 2d convolutions to adapt, such as `["to_q", "*attn2*"]`; default: '
            "the linear layers of attention"
        ),
    )
    dropout: float = field(default=0.0, validator=[ge(0), lt(1)], metadata=about("dropout of the adapter's input"))
    init: Literal["gaussian", "kaiming"] = field(
        default="gaussian",
        metadata=about('first values of A: normal with deviation 1 / rank, or "kaiming": uniform; B is zero'),
    )
    start_from: str | None = field(
        default=None,
        validator=optional(min_len(1)),
        metadata=about(
            "first adapters of a new run: a safetensors file of diffusers or kohya, or `hub:ORG/NAME/FILE`; it keeps "
            "its strength. For a file of a run use `model.start_from`"
        ),
    )

    @hookimpl
    def prepare_model(self, loop: Loop) -> None:
        import peft
        from peft.tuners.tuners_utils import BaseTunerLayer

        model: Any = loop.model
        if any(isinstance(module, BaseTunerLayer) for module in model.modules()):
            raise UserError("plugins.lora: the network has adapters already; merge them, or make the network anew")
        layers = layers_of(model, self.targets)
        options: dict[str, Any] = {
            "r": self.rank,
            "lora_alpha": self.alpha or self.rank,
            "lora_dropout": self.dropout,
            "init_lora_weights": "gaussian" if self.init == "gaussian" else True,
        }
        with seeded(derive_seed(loop.config.seed, "lora"), loop.device):  # the same on all ranks
            # A list would also match the ends of other names.
            named = "|".join(map(re.escape, layers))
            peft.inject_adapter_in_model(peft.LoraConfig(target_modules=named, **options), model, NAME)
        model.requires_grad_(False)
        for adapter in adapters_of(model).values():
            for weight in (adapter.down, adapter.up):
                weight.data = weight.data.float()
                weight.requires_grad_()
        trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
        num = sum(weight.numel() for weight in model.parameters())
        if loop.is_main:
            logger.info("lora: %s of %s weights train, %s", f"{trained:,}", f"{num:,}", _where(layers))

    @hookimpl(wrapper=True)
    def export_weights(self, loop: Loop) -> Generator[None, dict[str, Tensor], dict[str, Tensor]]:
        tensors, adapters = (yield), adapters_of(loop.model)
        plain = {}
        for name, value in tensors.items():
            layer, inside, rest = name.partition(".base_layer.")
            if inside and layer in adapters:
                plain[f"{layer}.{rest}"] = adapters[layer].merged() if rest == "weight" else value
            elif name.partition(".lora_")[0] not in adapters:
                plain[name] = value
        return plain

    @hookimpl(tryfirst=True)
    def on_start(self, loop: Loop) -> None:
        if self.start_from and loop.progress.position == 0:
            load_adapter(loop.model, local_path(self.start_from, KEY))


def _where(layers: Iterable[str]) -> str:
    """Return the names of `layers` in short, such as "in 8 layers: 4 x to_q, 4 x to_out.0"."""
    ends = Counter(_END.search(name)[0] for name in layers)  # type: ignore[index]
    return f"in {ends.total()} layers: {listed([f'{num} x {end}' for end, num in ends.items()], _SHOWN)}"
