"""Self-attention over packed tokens: linear layers run once, the attention itself per size or in one kernel."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from dino_ds.models.fused import fuses_in_block
from dino_ds.models.packing import Groups, Packing, Selection
from dino_ds.models.positions import write_rotated


class QueryKeyValue(nn.Linear):
    """The three projections in one weight (3d, d), as timm's `attn.qkv`. The weight is sliced inside this module's
    forward: ZeRO 3 gathers a parameter only around its module's forward."""

    def forward(  # type: ignore[override]
        self, x: Tensor, query_rows: Tensor | None = None, bias: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """x (tokens, d) -> all (tokens, 3d); or queries of `query_rows` (rows, d), keys and values (tokens, 2d). bias
        (3d,): used instead of the layer's bias."""
        bias = self.bias if bias is None else bias
        if query_rows is None:
            return (F.linear(x, self.weight, bias),)
        d = self.in_features
        of_queries, of_others = (None, None) if bias is None else (bias[:d], bias[d:])
        queries = F.linear(x.index_select(0, query_rows), self.weight[:d], of_queries)
        return queries, F.linear(x, self.weight[d:], of_others)


class _PerSize(torch.autograd.Function):
    """Projections (tokens, parts * d) -> for each size its `parts` matrices (sequences, heads, tokens, c), all views.
    The backward pass writes each gradient once, into one matrix. Autograd would stack the gradients of keys and values,
    copy them into the order of the tokens, and concatenate sizes and queries in two more passes. parts: (number
    of rotated matrices, of all). With `tables`, RoPE's for each size, the first ones are rotated during a copy."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, groups: Groups, parts: tuple[int, int], heads: int, *tables: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.groups, ctx.parts = groups, parts
        ctx.save_for_backward(*tables)
        views = _views(x, groups, parts[1], heads)
        if tables:
            x = torch.empty_like(x)
            _write_rotated(x, views, groups, tables, parts[0], back=False)
            views = _views(x, groups, parts[1], heads)
        return tuple(piece for group_views in views for piece in group_views)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rotated, parts = ctx.parts
        sizes, width = [sequences * tokens for sequences, tokens in ctx.groups], grads[0].shape[1] * grads[0].shape[3]
        grad = grads[0].new_empty(sum(sizes), parts * width)
        pieces = [grads[i : i + parts] for i in range(0, len(grads), parts)]
        if tables := ctx.saved_tensors:
            _write_rotated(grad, pieces, ctx.groups, tables, rotated, back=True)
        else:
            for rows, group_grads in zip(grad.split(sizes), pieces, strict=True):
                torch.cat([g.transpose(1, 2).reshape(-1, width) for g in group_grads], dim=1, out=rows)
        return grad, None, None, None, *[None] * len(tables)


def _views(x: Tensor, groups: Groups, parts: int, heads: int) -> list[tuple[Tensor, ...]]:
    """x (tokens, parts * d) -> for each size `parts` views (sequences, heads, tokens, c)."""
    cut = zip(groups, x.split([sequences * tokens for sequences, tokens in groups]), strict=True)
    return [rows.view(*group, parts, heads, -1).transpose(1, 3).unbind(2) for group, rows in cut]


def _write_rotated(
    out: Tensor, pieces: Sequence[Sequence[Tensor]], groups: Groups, tables: Sequence[Tensor], rotated: int, back: bool
) -> None:
    cut = out.split([sequences * tokens for sequences, tokens in groups])
    for rows, group, parts, table in zip(cut, groups, pieces, tables, strict=True):
        write_rotated(rows.view(*group, len(parts), parts[0].shape[1], 2, -1), list(parts), table, rotated, back)


class Attention(nn.Module):
    """Multi-head self-attention with timm's parameter names; `implementation`: "sdpa" (torch's choice of a kernel, one
    call per size) or "varlen" (one CUDA kernel for all sizes, bf16 or fp16)."""

    def __init__(self, width: int, heads: int, implementation: str, bias: bool = True) -> None:
        super().__init__()
        self.heads, self.head_width = heads, width // heads
        self.implementation = implementation
        self.qkv = QueryKeyValue(width, 3 * width, bias)
        self.proj = nn.Linear(width, width)

    def forward(
        self, x: Tensor, packing: Packing, selection: Selection | None = None, tables: Sequence[Tensor] = ()
    ) -> Tensor:
        """x (tokens, d) -> (tokens, d), or (rows, d) for the selected rows alone. tables: RoPE's, one for each size."""
        query_packing = packing if selection is None else selection.packing
        if self.implementation == "varlen":
            return self.proj(self._one_kernel(self.projected(x, packing, selection, tables), packing, query_packing))
        rotates_later = tables and fuses_in_block(x)
        projected = self.projected(x, packing, selection, () if rotates_later else tables)
        return self.proj(self._size_by_size(projected, packing, query_packing, tables if rotates_later else ()))

    def projected(
        self, x: Tensor, packing: Packing, selection: Selection | None, tables: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        """Queries, keys and values as `QueryKeyValue` returns them, rotated by `tables` if given."""
        return self.qkv(x, None if selection is None else selection.rows)

    @torch.no_grad()
    def weights(self, x: Tensor, packing: Packing, tables: Sequence[Tensor], cls_only: bool) -> Tensor:
        """x (b * n, d), sequences of one size -> (b, heads, n, n), or for CLS queries alone (b, heads, 1, n)."""
        (projected,) = self.projected(x, packing, None, tables)
        ((sequences, tokens),) = packing.groups
        q, k, _ = projected.view(sequences, tokens, 3, self.heads, -1).transpose(1, 3).unbind(2)
        q = q[:, :, :1] if cls_only else q
        return (q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])).softmax(dim=-1)

    def _size_by_size(
        self, projected: tuple[Tensor, ...], packing: Packing, query_packing: Packing, tables: Sequence[Tensor]
    ) -> Tensor:
        """One kernel call per size; `packing` is of keys and values. tables: RoPE's, if nothing is rotated yet."""
        if len(projected) == 1:
            pieces = _PerSize.apply(projected[0], packing.groups, (2, 3), self.heads, *tables)
            triples = [pieces[i : i + 3] for i in range(0, len(pieces), 3)]
        else:
            queries = _PerSize.apply(projected[0], query_packing.groups, (1, 1), self.heads, *tables)
            pieces = _PerSize.apply(projected[1], packing.groups, (1, 2), self.heads, *tables)
            triples = [(q, *pieces[2 * i : 2 * i + 2]) for i, q in enumerate(queries)]
        outputs = [rearrange(F.scaled_dot_product_attention(*triple), "s h n c -> (s n) (h c)") for triple in triples]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _one_kernel(self, projected: tuple[Tensor, ...], packing: Packing, query_packing: Packing) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        cut = [matrix.unflatten(1, (-1, self.heads, self.head_width)).unbind(1) for matrix in projected]
        q, k, v = (part for parts in cut for part in parts)
        of_queries, of_keys = (max(tokens for _, tokens in rows.groups) for rows in (query_packing, packing))
        out = varlen_attn(q, k, v, query_packing.bounds, packing.bounds, of_queries, of_keys)
        assert isinstance(out, Tensor)
        return rearrange(out, "t h c -> t (h c)")
