"""Self-attention over packed tokens: linear layers once for all, the attention itself per size or in one kernel."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from dino_ds.models.packing import Packing

_BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


class QueryKeyValue(nn.Linear):
    """The three projections in one weight (3d, d), as timm's `attn.qkv`.

    It slices its weight inside its own forward: ZeRO 3 gathers a parameter only around its module's forward.
    """

    def forward(  # type: ignore[override]
        self, x: Tensor, query_rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """x (tokens, d) -> queries (tokens or len(query_rows), d), keys and values (tokens, 2d)."""
        d = self.in_features
        if query_rows is None:
            queries, keys_values = super().forward(x).split((d, 2 * d), dim=1)
            return queries, keys_values
        bias = self.bias
        queries = F.linear(x.index_select(0, query_rows), self.weight[:d], bias[:d])
        return queries, F.linear(x, self.weight[d:], bias[d:])


class Attention(nn.Module):
    """implementation: "sdpa" (one call per size), "naive" (the formula) or "varlen" (one CUDA kernel for all sizes,
    bf16 or fp16); backend: the kernel of sdpa, "auto" = torch's choice."""

    def __init__(self, width: int, heads: int, implementation: str, backend: str) -> None:
        super().__init__()
        self.heads = heads
        self.implementation = implementation
        self.backend = backend
        self.qkv = QueryKeyValue(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor, packing: Packing, cls_only: bool) -> Tensor:
        """x (tokens, d) -> (tokens, d), or (sequences, d) for the CLS tokens alone."""
        queries, keys_values = self.qkv(x, packing.cls if cls_only else None)
        attend = self._one_kernel if self.implementation == "varlen" else self._size_by_size
        return self.proj(attend(queries, keys_values, packing, cls_only))

    def _size_by_size(self, queries: Tensor, keys_values: Tensor, packing: Packing, cls_only: bool) -> Tensor:
        # split, not slices: their gradients are put together in one piece instead of added to zeros.
        sizes = [sequences * tokens for sequences, tokens in packing.groups]
        asked = [sequences for sequences, _ in packing.groups] if cls_only else sizes
        outputs = []
        for (sequences, _), q, kv in zip(packing.groups, queries.split(asked), keys_values.split(sizes), strict=True):
            q = rearrange(q, "(s n) (h c) -> s h n c", s=sequences, h=self.heads)
            k, v = rearrange(kv, "(s n) (two h c) -> two s h n c", two=2, s=sequences, h=self.heads)
            outputs.append(rearrange(self._attend(q, k, v), "s h n c -> (s n) (h c)"))
        return torch.cat(outputs)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q (b, heads, m, c), k and v (b, heads, n, c) -> (b, heads, m, c)."""
        if self.implementation == "sdpa":
            with _kernel(self.backend):
                return F.scaled_dot_product_attention(q, k, v)
        weights = (q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])).softmax(dim=-1)
        return weights @ v

    def _one_kernel(self, queries: Tensor, keys_values: Tensor, packing: Packing, cls_only: bool) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        q = rearrange(queries, "t (h c) -> t h c", h=self.heads)
        k, v = rearrange(keys_values, "t (two h c) -> two t h c", two=2, h=self.heads)
        bounds = packing.bounds()
        q_bounds = torch.arange(len(bounds), device=bounds.device, dtype=torch.int32) if cls_only else bounds
        out = varlen_attn(q, k, v, q_bounds, bounds, 1 if cls_only else packing.longest, packing.longest)
        assert isinstance(out, Tensor)
        return rearrange(out, "t h c -> t (h c)")


def chosen_kernel(heads: int, head_width: int, tokens: int, dtype: torch.dtype, device: torch.device) -> str:
    """The kernel that torch's "auto" takes for sequences of `tokens` tokens, such as "flash"."""
    example = torch.empty(2, heads, tokens, head_width, dtype=dtype, device=device, requires_grad=True)
    chosen = SDPBackend(torch._fused_sdp_choice(example, example, example))
    return next((name for name, backend in _BACKENDS.items() if backend == chosen), chosen.name.lower())


def _kernel(backend: str) -> AbstractContextManager[None]:
    return nullcontext() if backend == "auto" else sdpa_kernel(_BACKENDS[backend])
