"""Muon: updates weight matrices along their orthogonalized momentum, and everything else as AdamW does. Source: Keller
Jordan's Muon (https://kellerjordan.github.io/posts/muon) with Nesterov momentum and five Newton-Schulz iterations; an
update has the root mean square of AdamW's, 0.2 (Moonlight, arXiv 2502.16982), so that a learning rate means the same
for both. Queries, keys and values are matrices of their own, and so are gate and value of a SwiGLU. Under ZeRO 1 to 3 a
matrix lies in pieces on several ranks. By one exchange each rank assembles a share of the matrices from their pieces,
orthogonalizes them, and returns the pieces of the updates by a second exchange; in each it sends and receives about as
many elements as it holds. At stage 0 each rank orthogonalizes a share of the matrices, and broadcasts the updates. On
AMD's CPUs with AVX-512 the FP32 products go to oneDNN, which torch includes too: MKL's kernels for AMD use half of the
width, on a Zen 5 thread 110 GFLOP/s against 250. Their results differ by rounding."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dino_ds.config.ds_schema import ORTHOGONALIZED_ELEMENTS
from dino_ds.models.prototypes import tf32

_LEAST = 2**19  # multiplications of a product below which the call through Python costs more than oneDNN saves

_by_onednn = True


def on_amd() -> bool:
    """Whether this is an AMD CPU with AVX-512, whose products `take_onednn` speeds up."""
    info = Path("/proc/cpuinfo")
    wide = torch.backends.cpu.get_cpu_capability() == "AVX512" and torch.backends.mkldnn.is_available()
    return wide and info.exists() and "AuthenticAMD" in info.read_text()


@cache
def take_onednn() -> torch.library.Library:
    """Have this process multiply FP32 matrices on the CPU by oneDNN from now on, where the operator exists. torch's
    operators `mm` and `addmm` get another kernel, so that layers, heads and their gradients all use it. The kernels
    stay as long as the returned library exists, which the cache keeps."""
    library = torch.library.Library("aten", "IMPL")
    if hasattr(torch.ops.mkldnn, "_linear_pointwise"):  # private: may leave in another version of torch
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch 2.11 says once that a kernel is replaced
            library.impl("mm", _mm, "CPU", allow_override=True)
            library.impl("addmm", _addmm, "CPU", allow_override=True)
    return library


@contextmanager
def products_of_torch() -> Iterator[None]:
    global _by_onednn
    before, _by_onednn = _by_onednn, False
    try:
        yield
    finally:
        _by_onednn = before


def _mm(a: Tensor, b: Tensor) -> Tensor:
    if _suits(a, b):
        return torch.ops.mkldnn._linear_pointwise(a, b.t(), None, "none", [], "")
    return torch.mm(a, b, out=a.new_empty(a.shape[0], b.shape[1]))


def _addmm(added: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    bias = added.dim() == 1 and added.is_contiguous() and added.dtype == a.dtype and beta == alpha == 1
    if bias and len(added) == b.shape[1] and _suits(a, b):
        return torch.ops.mkldnn._linear_pointwise(a, b.t(), added, "none", [], "")
    return torch.addmm(added, a, b, beta=beta, alpha=alpha, out=a.new_empty(a.shape[0], b.shape[1]))


def _suits(a: Tensor, b: Tensor) -> bool:
    """Whether oneDNN can multiply `a` and `b`, without strides of 0, and their product is large enough."""
    large = _by_onednn and a.dtype == b.dtype == torch.float32 and a.shape[0] * a.shape[1] * b.shape[1] >= _LEAST
    return large and a.shape[1] == b.shape[0] and (b.is_contiguous() or b.t().is_contiguous())


class Matrix(NamedTuple):
    """A parameter (rows, columns), whose rows are divided into `blocks` matrices of equal size."""

    rows: int
    columns: int
    blocks: int = 1

    @property
    def cost(self) -> int:
        """A number proportional to the FLOPs of orthogonalizing the parameter."""
        short, long = sorted((self.rows // self.blocks, self.columns))
        return self.blocks * short * short * (2 * long + short)


class Piece(NamedTuple):
    """Elements [start, stop) of `parameter` lie from `offset` on in a flat tensor."""

    parameter: str
    start: int
    stop: int
    offset: int


def matrices_of(network: nn.Module) -> dict[str, int]:
    """Names of the parameters that Muon orthogonalizes, with the number of matrices that each stacks in its rows. These
    are the weights (and low-rank adapters) of linear layers and of ungrouped convolutions, taken as (out, rest), except
    the network's first convolution, which reads pixels."""
    matrices = {}
    modules = dict(network.named_modules())
    first = next((name for name, module in modules.items() if isinstance(module, nn.Conv2d)), None)
    for name, module in modules.items():
        whole = isinstance(module, nn.Conv2d) and module.groups == 1 and name != first
        if isinstance(module, nn.Linear) or whole:
            parent, _, leaf = name.rpartition(".")
            after = getattr(modules[parent], "fc2", None) if leaf == "fc1" else None
            blocks = 3 if leaf == "qkv" else 1
            if isinstance(module, nn.Linear) and isinstance(after, nn.Linear):
                blocks = 2 if module.out_features == 2 * after.in_features else 1  # a SwiGLU
            parameters = dict(module.named_parameters(recurse=False))
            counts = {"weight": blocks, "lora_a": 1, "lora_b": blocks}
            matrices.update({f"{name}.{key}": count for key, count in counts.items() if key in parameters})
    return matrices


class Muon(torch.optim.AdamW):
    """Muon for the parameter groups of "kind" muon, AdamW for the others; lr and weight_decay come with each step.

    A tensor is a whole parameter, the same on all ranks, unless `lay_out` has declared its contents. A step overwrites
    gradients.

    Args:
        blocks: number of matrices in each parameter of a group of kind muon; see `matrices_of`.
        scale: factor of Muon's updates.
    """

    def __init__(
        self, groups: Iterable[dict[str, Any]], blocks: Mapping[Any, int], momentum: float, scale: float, **adamw: Any
    ) -> None:
        super().__init__(groups, lr=0.0, **adamw)
        self.blocks, self._momentum, self._scale = blocks, momentum, scale
        self._exchanges: dict[Tensor, _Exchange] = {}

    def lay_out(
        self, tensor: Tensor, matrices: Mapping[str, Matrix], pieces: list[list[Piece]], process_group: Any
    ) -> None:
        """Declare that `tensor` holds this rank's pieces of one group's `matrices`; `pieces` are those of each rank.
        From now on all ranks must call `step` together."""
        self._exchanges[tensor] = _Exchange(matrices, pieces, process_group)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Make a step without reading from the device."""
        assert closure is None
        groups = self.param_groups
        self.param_groups = [group for group in groups if group["kind"] != "muon"]
        super().step()
        self.param_groups = groups
        for group in groups:
            tensors = [p for p in group["params"] if p.grad is not None] if group["kind"] == "muon" else []
            if tensors:
                self._move(tensors, [p.grad for p in tensors], group)

    def _move(self, tensors: list[Tensor], gradients: list[Tensor], group: dict[str, Any]) -> None:
        for p in tensors:
            if not self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        momenta = [self.state[p]["momentum_buffer"] for p in tensors]
        torch._foreach_lerp_(momenta, gradients, 1 - self._momentum)
        torch._foreach_lerp_(gradients, momenta, self._momentum)  # Nesterov's
        exchange = self._exchanges.get(tensors[0])
        if exchange is not None:
            assert len(tensors) == 1
            targets, updates = exchange.orthogonalized(tensors[0], gradients[0])
        elif any(p not in self.blocks for p in tensors):
            return  # DeepSpeed's first step, with lr 0, only makes the state: no `lay_out` yet
        else:
            targets, updates, offset = tensors, list(gradients), 0  # whole on all ranks: each orthogonalizes a share
            matrices = [
                Matrix(g.shape[0], g[0].numel(), self.blocks[p]) for g, p in zip(gradients, tensors, strict=True)
            ]
            ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
            owners = share_out(matrices, ranks)
            flat = gradients[0].new_empty(sum(g.numel() for g in gradients))
            for owner in range(ranks):
                begin, owned = offset, [i for i in range(len(owners)) if owners[i] == owner]
                for i in owned:
                    updates[i] = flat.narrow(0, offset, gradients[i].numel()).view_as(gradients[i])
                    offset += gradients[i].numel()
                if owner == rank:
                    sources = [gradients[i] for i in owned]
                    _orthogonalize(sources, [updates[i] for i in owned], [matrices[i] for i in owned])
                if ranks > 1 and owned:
                    dist.broadcast(flat[begin:offset], owner)
        torch._foreach_mul_(tensors, 1 - group["lr"] * group["weight_decay"])
        if targets:
            torch._foreach_add_(targets, updates, alpha=-group["lr"] * self._scale)


class _Exchange:
    """Assembles each matrix of a group on one rank, to be orthogonalized there, and sends the update's pieces back.
    pieces: those of each rank of `process_group`, in rank order."""

    def __init__(self, matrices: Mapping[str, Matrix], pieces: list[list[Piece]], process_group: Any) -> None:
        self._group, rank = process_group, dist.get_rank(process_group)
        owners = dict(zip(matrices, share_out([*matrices.values()], len(pieces)), strict=True))
        self._mine = {name: matrix for name, matrix in matrices.items() if owners[name] == rank}
        self._sent = [[part for part in pieces[rank] if owners[part.parameter] == to] for to in range(len(pieces))]
        self._received = [[part for part in parts if owners[part.parameter] == rank] for parts in pieces]

    def orthogonalized(self, tensor: Tensor, gradient: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Views of this rank's pieces in the flat `tensor`, and the update of each; takes two collectives."""
        sent, received = ([*itertools.chain.from_iterable(pieces)] for pieces in (self._sent, self._received))
        arrived = self._swap([_cut(gradient, part.offset, part) for part in sent], self._sent, self._received, tensor)
        # Pieces arrive in rank order: joined in this order, the pieces of a matrix are the matrix.
        pieces: dict[str, list[Tensor]] = {name: [] for name in self._mine}
        for part, piece in zip(received, arrived, strict=True):
            pieces[part.parameter].append(piece)
        wholes = [
            (pieces[name][0] if len(pieces[name]) == 1 else torch.cat(pieces[name])).view(matrix.rows, matrix.columns)
            for name, matrix in self._mine.items()
        ]
        updates = {name: torch.empty_like(whole) for name, whole in zip(self._mine, wholes, strict=True)}
        _orthogonalize(wholes, list(updates.values()), list(self._mine.values()))
        back = [_cut(updates[part.parameter].view(-1), part.start, part) for part in received]
        return [_cut(tensor, part.offset, part) for part in sent], self._swap(back, self._received, self._sent, tensor)

    def _swap(
        self, parts: list[Tensor], sent: list[list[Piece]], received: list[list[Piece]], like: Tensor
    ) -> list[Tensor]:
        """Send `parts`, the values of the pieces in `sent`, and return the values of the pieces in `received`; these
        two list pieces by the other rank. like: a tensor with the values' dtype and device. A collective."""
        if len(sent) == 1:
            return parts
        counts = [[sum(part.stop - part.start for part in pieces) for pieces in way] for way in (sent, received)]
        values = torch.cat([like.new_empty(0), *parts])  # a rank may have none
        taken = values.new_empty(sum(counts[1]))
        dist.all_to_all_single(taken, values, counts[1], counts[0], group=self._group)
        return list(taken.split([part.stop - part.start for pieces in received for part in pieces]))


def _cut(flat: Tensor, begin: int, piece: Piece) -> Tensor:
    return flat.narrow(0, begin, piece.stop - piece.start)


def share_out(matrices: Sequence[Matrix], ranks: int) -> list[int]:
    """The rank that orthogonalizes each matrix: the costliest first, each to the rank with the least to do."""
    load, owners = [0] * ranks, [0] * len(matrices)
    for i in sorted(range(len(matrices)), key=lambda i: -matrices[i].cost):
        owners[i] = load.index(min(load))
        load[owners[i]] += matrices[i].cost
    return owners


def _orthogonalize(sources: Sequence[Tensor], targets: Sequence[Tensor], matrices: Sequence[Matrix]) -> None:
    """Write the updates of `sources` into `targets`, in batches of one shape; tall matrices are transposed."""
    batches: dict[tuple[int, int], list[tuple[Tensor, Tensor, bool]]] = {}
    for source, target, matrix in zip(sources, targets, matrices, strict=True):
        shape = (matrix.rows, matrix.columns)
        for block, update in zip(*(t.view(shape).chunk(matrix.blocks) for t in (source, target)), strict=True):
            short, long = sorted(block.shape)
            batches.setdefault((short, long), []).append((block, update, len(block) > short))
    for (short, long), blocks in batches.items():
        blocks.sort(key=lambda block: block[2])
        at_once = max(1, ORTHOGONALIZED_ELEMENTS // (short * long))
        for i in range(0, len(blocks), at_once):
            some = blocks[i : i + at_once]
            lying = sum(not tall for _, _, tall in some)
            y = orthogonalized(torch.stack([block.mT if tall else block for block, _, tall in some]))
            y.mul_(0.2 * long**0.5)  # the root mean square of AdamW's updates
            updates = [*y[:lying].unbind(), *y[lying:].mT.contiguous().unbind()]
            torch._foreach_copy_([update for _, update, _ in some], updates)


def orthogonalized(y: Tensor) -> Tensor:
    """The nearest matrices with orthonormal rows, roughly: (b, m, n) with m <= n -> (b, m, n) with singular values
    between 0.7 and 1.2, and 0 for a matrix of zeros."""
    y = y / y.norm(dim=(1, 2), keepdim=True).clamp_min(torch.finfo(y.dtype).tiny)
    a, b, c = 3.4445, -4.7750, 2.0315  # of x, x^3 and x^5: they bring singular values fast between 0.7 and 1.2
    with tf32(y.is_cuda):  # 11 bits are enough: the iterations are rough by design
        for _ in range(5):
            squares = torch.bmm(y, y.mT)
            y = torch.baddbmm(y, torch.baddbmm(squares, squares, squares, beta=b, alpha=c), y, beta=a)
    return y
