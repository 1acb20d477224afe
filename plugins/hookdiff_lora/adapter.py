"""The adapter of one layer, as peft puts it around the layer."""

from typing import Any

from attrs import define
from torch import Tensor, nn

NAME = "default"  # of the adapter, in the names of its weights


@define(frozen=True)
class Adapter:
    """The adapter of a layer: W x becomes W x + scale * B A x."""

    layer: Any  # peft's layer, with the original one in `base_layer`

    @property
    def down(self) -> nn.Parameter:
        """A, with `rank` rows."""
        weight: nn.Parameter = self.layer.lora_A[NAME].weight
        return weight

    @property
    def up(self) -> nn.Parameter:
        """B, with `rank` columns."""
        weight: nn.Parameter = self.layer.lora_B[NAME].weight
        return weight

    @property
    def rank(self) -> int:
        return int(self.layer.r[NAME])

    @property
    def scale(self) -> float:
        """The factor alpha / rank."""
        return float(self.layer.scaling[NAME])

    def merged(self) -> Tensor:
        """Return the weight of the layer with the adapter added, in float32."""
        added: Tensor = self.layer.get_delta_weight(NAME)
        whole: Tensor = self.layer.base_layer.weight.float() + added.float()
        return whole.detach()


def adapters_of(model: nn.Module) -> dict[str, Adapter]:
    """Return the adapters of `model`, by the name of their layer."""
    from peft.tuners.lora import LoraLayer

    return {name: Adapter(module) for name, module in model.named_modules() if isinstance(module, LoraLayer)}
