"""Attention of tokens to each other or to text, by torch's kernel or by plain matrix products, whichever is faster."""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Form = Literal["by_layer", "kernel", "product"]


def attention(q: Tensor, k: Tensor, v: Tensor, form: Form = "by_layer", mask: Tensor | None = None) -> Tensor:
    """Return the attention of the queries to the keys: softmax(q kᵀ / sqrt(d)) v, of the shape of `q`.

    `q` is n heads tokens d; `k` and `v` are n heads keys d. `mask`, such as n 1 1 keys, is True for keys that count; a
    query without such a key gets zeros. `form` chooses the computation, and changes the result only by rounding:
    "kernel" is torch's `scaled_dot_product_attention`, "product" keeps the weights of all pairs of tokens, and
    "by_layer" asks `product_is_faster`.
    """
    by_product = form == "product" or (
        form == "by_layer" and product_is_faster(q.shape[2], q.shape[3], q.dtype, q.device.type)
    )
    if mask is None:
        return _product(q, k, v, None) if by_product else F.scaled_dot_product_attention(q, k, v)
    counts = mask.any(-1, keepdim=True)
    mask = mask | ~counts  # a softmax over no keys would be NaN, and so would its gradient
    out = _product(q, k, v, mask) if by_product else F.scaled_dot_product_attention(q, k, v, mask)
    return out.masked_fill(~counts, 0)


def _product(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    n, heads, _, d = q.shape
    q, k, v = (part.reshape(n * heads, part.shape[2], d) for part in (q, k, v))
    if mask is None:
        # With beta = 0 the first argument is not read.
        scores = torch.baddbmm(q.new_empty(()), q, k.transpose(1, 2), beta=0, alpha=d**-0.5)
    else:
        hidden = torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, -torch.inf)
        scores = torch.baddbmm(hidden.expand(n, heads, -1, -1).flatten(0, 1), q, k.transpose(1, 2), alpha=d**-0.5)
    return torch.bmm(scores.softmax(-1), v).view(n, heads, q.shape[1], d)


def product_is_faster(tokens: int, head_dim: int, dtype: torch.dtype, device: str) -> bool:
    """Return whether matrix products are faster than torch's kernel, for training or, without gradients, sampling.

    The rule follows from the table of step.py in benchmarks/tried.md. In bfloat16 the CPU's kernel has a slow backward
    pass. More tokens would take too much memory, and a GPU has good kernels.
    """
    if device != "cpu":
        return False
    if dtype == torch.bfloat16:
        return tokens <= 1024
    if dtype != torch.float32:
        return False
    return (head_dim <= 8 and 64 <= tokens <= 256) or (tokens <= 64 and not torch.is_grad_enabled())


def use_attention(model: nn.Module, form: Form) -> None:
    """Set the form of the attention of `model`.

    This changes modules with an attribute `attention_form`, as in networks of hookdiff, and attention of diffusers
    that has the default processor.
    """
    module: Any
    for module in model.modules():
        if hasattr(module, "attention_form"):
            module.attention_form = form
        elif hasattr(module, "set_processor"):
            _use_processor(module, form)


def _use_processor(module: Any, form: Form) -> None:
    try:
        from diffusers.models.attention_processor import AttnProcessor, AttnProcessor2_0
    except ImportError:
        return
    if type(getattr(module, "processor", None)) is not AttnProcessor2_0 or form == "kernel":
        return
    # The product of diffusers knows neither the normalised queries nor the shared keys that their kernel knows.
    has_more = getattr(module, "norm_q", None) is not None or module.inner_kv_dim != module.inner_dim
    if not has_more:
        product: Any = AttnProcessor()
        module.set_processor(product if form == "product" else _ByLayer(module.processor, product))


class _ByLayer:
    """A processor of diffusers that passes each call to the faster of two."""

    def __init__(self, kernel: Any, product: Any) -> None:
        self.kernel = kernel
        self.product = product

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        # Attention of diffusers drops arguments that the processor does not name.
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        temb: Tensor | None = None,
    ) -> Any:
        device = hidden_states.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden_states.dtype
        tokens = hidden_states.shape[2:].numel() if hidden_states.dim() == 4 else hidden_states.shape[1]
        by_product = product_is_faster(tokens, attn.inner_dim // attn.heads, dtype, device)
        return (self.product if by_product else self.kernel)(
            attn, hidden_states, encoder_hidden_states, attention_mask, temb
        )
