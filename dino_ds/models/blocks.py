"""The Transformer block over packed tokens: sequences of several lengths in one (tokens, width) matrix."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from dino_ds.architectures import Architecture


@dataclass(frozen=True)
class Packing:
    """How the rows of a (tokens, width) matrix divide into sequences.

    groups: (sequences, tokens of each) per size, in order; cls: index (sequences,) of every sequence's CLS token;
    sequence_of_token: (tokens,) the sequence each row belongs to.
    """

    groups: tuple[tuple[int, int], ...]
    cls: Tensor
    sequence_of_token: Tensor

    @classmethod
    def of(cls, groups: list[tuple[int, int]], device: torch.device) -> Packing:
        starts, offset = [], 0
        for sequences, tokens in groups:
            starts.append(torch.arange(sequences, device=device) * tokens + offset)
            offset += sequences * tokens
        first = torch.cat(starts)
        owner = torch.zeros(offset, dtype=torch.long, device=device)
        owner[first] = 1
        return cls(tuple(groups), first, owner.cumsum(0) - 1)


class PatchEmbed(nn.Module):
    def __init__(self, patch_size: int, width: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, width, kernel_size=patch_size, stride=patch_size)

    def forward(self, images: Tensor) -> Tensor:
        """Images (b, 3, h, w) -> (b, patches, d)."""
        return self.proj(images.to(self.proj.weight.dtype)).flatten(2).transpose(1, 2)


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
            out = super().forward(x)
            return out[:, :d], out[:, d:]
        bias = self.bias
        queries = F.linear(x[query_rows], self.weight[:d], bias[:d])
        return queries, F.linear(x, self.weight[d:], bias[d:])


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, implementation: str) -> None:
        super().__init__()
        self.heads = heads
        self.implementation = implementation
        self.qkv = QueryKeyValue(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor, packing: Packing, cls_only: bool) -> Tensor:
        """x (tokens, d) -> (tokens, d), or (sequences, d) for the CLS tokens alone."""
        queries, keys_values = self.qkv(x, packing.cls if cls_only else None)
        outputs, q_at, kv_at = [], 0, 0
        for sequences, tokens in packing.groups:
            asked = 1 if cls_only else tokens
            rows, kv_rows = slice(q_at, q_at + sequences * asked), slice(kv_at, kv_at + sequences * tokens)
            q = rearrange(queries[rows], "(s n) (h c) -> s h n c", s=sequences, h=self.heads)
            k, v = rearrange(keys_values[kv_rows], "(s n) (two h c) -> two s h n c", two=2, s=sequences, h=self.heads)
            outputs.append(rearrange(self._attend(q, k, v), "s h n c -> (s n) (h c)"))
            q_at += sequences * asked
            kv_at += sequences * tokens
        return self.proj(torch.cat(outputs))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q (b, heads, m, c), k and v (b, heads, n, c) -> (b, heads, m, c)."""
        if self.implementation == "sdpa":
            return F.scaled_dot_product_attention(q, k, v)
        weights = (q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])).softmax(dim=-1)
        return weights @ v


class Mlp(nn.Module):
    def __init__(self, width: int, hidden: int, swiglu: bool) -> None:
        super().__init__()
        self.swiglu = swiglu
        self.fc1 = nn.Linear(width, hidden)
        self.fc2 = nn.Linear(hidden // 2 if swiglu else hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        """x (tokens, d) -> (tokens, d)."""
        hidden = self.fc1(x)
        if self.swiglu:
            gate, value = hidden.chunk(2, dim=-1)
            return self.fc2(F.silu(gate) * value)
        return self.fc2(F.gelu(hidden))


class LayerScale(nn.Module):
    def __init__(self, width: int, initial: float) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((width,), initial))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class Block(nn.Module):
    def __init__(self, arch: Architecture, attention: str) -> None:
        super().__init__()
        width = arch.width
        self.norm1 = nn.LayerNorm(width, eps=1e-6)
        self.attn = Attention(width, arch.heads, attention)
        self.ls1 = nn.Identity() if arch.layer_scale is None else LayerScale(width, arch.layer_scale)
        self.norm2 = nn.LayerNorm(width, eps=1e-6)
        self.mlp = Mlp(width, int(width * arch.mlp_ratio), arch.swiglu)
        self.ls2 = nn.Identity() if arch.layer_scale is None else LayerScale(width, arch.layer_scale)

    def forward(self, x: Tensor, packing: Packing, drop: Tensor | None, cls_only: bool) -> Tensor:
        """x (tokens, d); drop (2, sequences) scales of the two residual branches, or None -> (tokens, d).

        With cls_only: (sequences, d). Keys and values come from all tokens, everything else from the CLS token.
        """
        rows = None
        if drop is not None:
            scales = drop if cls_only else drop[:, packing.sequence_of_token]
            rows = scales.unsqueeze(-1).to(x.dtype)
        branch = self.ls1(self.attn(self.norm1(x), packing, cls_only))
        x = (x[packing.cls] if cls_only else x) + (branch if rows is None else branch * rows[0])
        branch = self.ls2(self.mlp(self.norm2(x)))
        return x + (branch if rows is None else branch * rows[1])
