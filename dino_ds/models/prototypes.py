"""The projection head (MLP, L2 normalization, prototypes), and its cross-entropies, which never hold a whole (rows,
prototypes) matrix. Source: facebookresearch/dino `DINOHead`; its `weight_norm` layer is `Prototypes` here, because
torch's weight_norm can't be deep-copied and sees no weights under ZeRO 3."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dino_ds.basics.ranges import TAKEN, device_kind, rehearsing
from dino_ds.models.base import init_weights
from dino_ds.models.batch_norm import use_own_batch_norm
from dino_ds.models.fused import fused, fuses, log_sum_exp

# Bytes of the logits in one tile; "fused": on a GPU, with functions that need no further scratch.
_TILE = {"cpu": 32 * 2**20, "cuda": 128 * 2**20, "fused": 512 * 2**20}
# Bytes of a tile that are processed at a time, by all passes: what a CPU's caches hold. A GPU processes whole tiles.
_PART = {"cpu": 2**20}
_CPU_BLOCK = 1024  # prototypes multiplied at a time on a CPU, whose caches hold them: 1.3 times as fast as all at once
# Prototypes whose gradient is finished at a time: at a bottleneck of 256, what fits a CPU's caches, or 64 MiB on a GPU.
_BLOCK = {"cpu": 256, "cuda": 65536}


class DinoHead(nn.Module):
    """Features (n, width) -> logits over the prototypes, as factors and before any temperature; with a `Comparison`,
    their loss against a teacher's logits. learned_lengths: whether the prototypes' lengths are trained
    (facebookresearch/dinov2) or are 1."""

    def __init__(
        self, width: int, hidden: int, bottleneck: int, prototypes: int, layers: int, learned_lengths: bool = False
    ) -> None:
        super().__init__()
        sizes = [width] + [hidden] * (layers - 1) + [bottleneck]
        layers_of_mlp = [part for pair in itertools.pairwise(sizes) for part in (nn.GELU(), nn.Linear(*pair))]
        self.mlp = nn.Sequential(*layers_of_mlp[1:])
        self.prototypes = Prototypes(bottleneck, prototypes, learned_lengths)
        init_weights(self)

    def free_prototypes(self) -> DinoHead:
        """Replace the prototypes by those of a plain linear layer, of any length (facebookresearch/dinov3)."""
        prototypes, bottleneck = self.prototypes.weight.shape
        self.prototypes = Prototypes(bottleneck, prototypes, free=True)
        return self

    def add_batch_norm(self, synced: bool) -> DinoHead:
        """Put BatchNorm after each of the hidden layers (`use_bn` of the reference); `synced`: over all ranks."""
        modules: list[Any] = []
        for module in self.mlp:
            modules += [nn.BatchNorm1d(modules[-1].out_features)] if isinstance(module, nn.GELU) else []
            modules.append(module)
        self.mlp = nn.Sequential(*modules)
        use_own_batch_norm(self, synced)
        return self

    def forward(self, features: Tensor, comparison: Comparison | None = None) -> Logits | Compared:
        return self.prototypes(self.mlp(features), comparison)


class RegressionHead(nn.Linear):
    """Features (..., width) -> a teacher's features (..., its width): one linear layer, for distillation."""

    def forward(self, features: Tensor, comparison: Comparison | None = None) -> Tensor:
        return super().forward(features)


class Prototypes(nn.Module):
    """Cosines between bottleneck features (n, c) of any length and k prototypes, times the prototypes' lengths if
    `learned_lengths`. FP32. free: prototypes are the rows of a plain linear layer and keep their own lengths
    (facebookresearch/dinov3). While `frozen`, the weight gets a gradient of exactly zero: ZeRO 3 would repeat an old
    gradient for a parameter without one, and a frozen gradient must not enter the clipping norm."""

    def __init__(self, bottleneck: int, prototypes: int, learned_lengths: bool = False, free: bool = False) -> None:
        super().__init__()
        assert not (free and learned_lengths), "free prototypes have their lengths in themselves"
        self.free = free
        self.weight = nn.Parameter(torch.empty(prototypes, bottleneck))
        self.lengths = nn.Parameter(torch.empty(prototypes, 1)) if learned_lengths else None
        self.frozen = False
        self.reset_parameters()

    def reset_parameters(self) -> None:
        # The references take torch's default for Linear, except for free prototypes. Of others only directions count,
        # but the length of the rows sets how far one step of Adam turns them.
        bound = self.weight.shape[1] ** -0.5
        nn.init.trunc_normal_(self.weight, std=0.02) if self.free else nn.init.uniform_(self.weight, -bound, bound)
        if self.lengths is not None:
            nn.init.ones_(self.lengths)

    def forward(self, z: Tensor, comparison: Comparison | None = None) -> Logits | Compared:
        low = self.weight.dtype != torch.float32 or torch.is_autocast_enabled(z.device.type)
        with torch.autocast(z.device.type, enabled=False):
            rows = F.normalize(z.float(), dim=-1)
            if comparison is None:
                weight = self.weight.float()
                return Logits(rows, weight, _scale(weight, self.lengths, self.free)[0], low)
            how = comparison, self.frozen, self.free, low
            loss, entropy = _TiledCrossEntropy.apply(rows, self.weight, self.lengths, how)
            return Compared(loss, entropy, comparison.share(len(rows)))


def _scale(weight: Tensor, lengths: Tensor | None, free: bool) -> tuple[Tensor, Tensor]:
    """Two factors (k,): from products with the FP32 weight to logits, and 1 / length of its rows. Ones if `free`."""
    if free:
        return (weight.new_ones(len(weight)),) * 2
    inverse = torch.linalg.vector_norm(weight, dim=-1).clamp_min(1e-12).reciprocal()
    return inverse if lengths is None else inverse * lengths.float().squeeze(-1), inverse


class Logits(NamedTuple):
    """Logits (n, k) = (rows @ weight.T) * scale, multiplied out tile by tile, as often as needed, in FP32. rows (n, c)
    of unit length; weight (k, c); scale (k,), all FP32; low: whether the engine computes in bf16 or fp16."""

    rows: Tensor
    weight: Tensor
    scale: Tensor
    low: bool = False

    def sum(self) -> Tensor:
        """(k,) the sum over rows: linear, so no tile is needed."""
        with torch.autocast(self.rows.device.type, enabled=False):
            return (self.weight @ self.rows.sum(dim=0)).mul_(self.scale)

    def multiply(self, rows: Tensor, scratch: Tensor) -> Tensor:
        """Compute `rows` (r, c) @ weight.T, without scale, in the first rows of `scratch`, and return these."""
        out = scratch[: len(rows)]
        with torch.autocast(rows.device.type, enabled=False), tf32(self.low):
            # A rehearsal multiplies all at once, and counts the same: a million prototypes in blocks take minutes.
            block = _CPU_BLOCK if rows.device.type == "cpu" and not rehearsing() else len(self.weight)
            for start in range(0, len(self.weight), block):
                torch.mm(rows, self.weight[start : start + block].t(), out=out[:, start : start + block])
        return out


class Comparison(NamedTuple):
    """The targets that a head compares its rows with, and how. teacher: logits of g * n rows; the targets are
    softmax(logits / temperature + shift), shift (k,). The student's rows are v * n: crop s of an image is compared with
    every one of the g crops, but not with crop s itself if `exclude_own`. weights (n,) of the images, or None for 1.
    others: with `exclude_own`, the weight of pairs with student crops that the teacher does not see. The sum is divided
    by `divisor`, or by the number of pairs if None."""

    teacher: Logits
    shift: Tensor
    temperature: float
    student_temp: float
    crops: int = 1
    exclude_own: bool = False
    weights: Tensor | None = None
    divisor: float | None = None
    others: float = 1.0

    def pairs(self, rows: int) -> tuple[int, int]:
        """Numbers of pairs of an image, with `rows` rows of the student: of all, and of those with weight `others`."""
        images = max(len(self.teacher.rows) // self.crops, 1)
        crops = rows // images if len(self.teacher.rows) else 1
        others = self.crops * (crops - self.crops) if self.exclude_own else 0
        return self.crops * crops - (self.crops if self.exclude_own else 0), others

    def share(self, rows: int) -> float:
        """Mean weight of a pair, with `rows` rows of the student."""
        pairs, others = self.pairs(rows)
        return 1.0 if self.others == 1 else 1 + (self.others - 1) * others / pairs


class Compared(NamedTuple):
    """loss: scalar with gradient, the weighted sum of cross-entropies / divisor; entropy: of the targets, their
    weighted mean, without gradient; share: the mean weight of a pair, 1 if `Comparison.others` is 1."""

    loss: Tensor
    entropy: Tensor
    share: float = 1.0


@contextmanager
def tf32(wanted: bool) -> Iterator[None]:
    """Context in which a GPU computes FP32 products in TF32, which rounds less than bf16 and no more than fp16 does.
    Not set elsewhere: the switch is the whole process's, evaluations need FP32, and compilers of some versions of torch
    read it by its older name, which raises an error while the new name has set it (pytorch issue 166387)."""
    if not (wanted and "tf32" in TAKEN):
        yield
        return
    matmul = torch.backends.cuda.matmul
    before, matmul.fp32_precision = matmul.fp32_precision, "tf32"
    try:
        yield
    finally:
        matmul.fp32_precision = before


def tile_rows(weight: Tensor, fused: bool) -> int:
    """Rows of logits that are multiplied out at a time; fused: by functions that need no further scratch."""
    kind = "fused" if fused else device_kind(weight.device.type)
    return max(1, _TILE.get(kind, _TILE["cuda"]) // (4 * len(weight)))


def part_rows(weight: Tensor) -> int:
    """Rows of a tile that are processed at a time."""
    return max(1, _PART.get(device_kind(weight.device.type), _TILE["cuda"]) // (4 * len(weight)))


class _TiledCrossEntropy(torch.autograd.Function):
    """sum of weight * H(target, softmax(logit / student_temp)) / divisor, and its gradient in the same pass. A
    cross-entropy is linear in its target and targets sum to 1, so the pairs of one student crop add up: sum of its
    pairs = m lse(l) - <T, l>, T = the sum of the targets it is compared with, m = their number. With w = weight, g' =
    gradient of the logits * length / |w|, A = g'^T rows (k, c): rows get g' w, the weight gets A - w (w . A) / |w|^2,
    the length w . A / length. With free prototypes length / |w| is 1 and w gets A."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, lengths: Tensor | None, how: tuple[Comparison, bool, bool, bool]
    ) -> tuple[Tensor, Tensor]:
        comparison, frozen, ctx.free, low = how
        w = weight.float()
        scale, inverse = _scale(w, lengths, ctx.free)
        wanted = any(ctx.needs_input_grad)
        grad_rows = torch.zeros_like(rows) if wanted else None
        grad_weight = torch.empty_like(weight, dtype=torch.float32) if wanted and not frozen else None
        tiles = _Tiles(Logits(rows, w, scale, low), comparison)
        if grad_weight is not None and not tiles.images:
            grad_weight.zero_()
        total, entropy = rows.new_zeros(()), rows.new_zeros(())
        for tile in tiles:
            total += tile.loss
            entropy += tile.entropy
            if grad_rows is not None:
                tile.backward(grad_rows, grad_weight)
        ctx.save_for_backward(grad_rows, grad_weight, weight, inverse, lengths)
        if comparison.weights is None:
            entropy /= max(len(comparison.teacher.rows), 1)
        else:
            entropy /= (comparison.weights.sum() * comparison.crops).clamp_min(1e-9)
        ctx.mark_non_differentiable(entropy)
        return total / tiles.divisor, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        grad_rows, grad_weight, weight, inverse, lengths = ctx.saved_tensors
        grad = grad_outputs[0]
        grad_lengths = None if lengths is None else torch.zeros_like(lengths)
        if grad_weight is None:
            return grad_rows * grad, torch.zeros_like(weight), grad_lengths, None
        if ctx.free:
            return grad_rows * grad, grad_weight.mul_(grad).to(weight.dtype), None, None
        if fuses(weight):
            turned, along = _turned(grad_weight, weight, inverse, grad)
            return grad_rows * grad, turned, None if lengths is None else along / lengths, None
        size = _BLOCK.get(device_kind(weight.device.type), _BLOCK["cuda"])
        for start in range(0, len(weight), size):
            block = slice(start, start + size)
            w, part = weight[block].float(), grad_weight[block].mul_(grad)
            along = (part * w).sum(dim=-1, keepdim=True)
            if lengths is not None and grad_lengths is not None:
                grad_lengths[block] = along / lengths[block].float()
            part.addcmul_(w, along * inverse[block].square().unsqueeze(-1), value=-1)
        return grad_rows * grad, grad_weight.to(weight.dtype), grad_lengths, None


class _Tile:
    """A few images: their loss, the entropy of their targets, and their part of the gradients. The student's logits are
    overwritten by their gradient. After the products, a CPU processes a part of the tile at a time."""

    def __init__(self, tiles: _Tiles, images: slice) -> None:
        self._tiles, self._images = tiles, images
        how, student = tiles.comparison, tiles.student
        self._rows = tiles.rows[:, images].flatten(0, 1)
        count, k = tiles.rows[0, images].shape[0], len(student.weight)
        teacher = tiles.teacher_rows[:, images].flatten(0, 1)
        seen = how.teacher.multiply(teacher, tiles.targets).view(how.crops, count, k)
        self._grad = student.multiply(self._rows, tiles.logits)
        logits = self._grad.view(-1, count, k)
        weights = None if how.weights is None else how.weights[images]
        if tiles.fused:
            self.loss, self.entropy = self._compare(seen, logits, weights)
            return
        parts = [slice(start, start + tiles.part) for start in range(0, count, tiles.part)]
        sums = [self._part(seen[:, p], logits[:, p], None if weights is None else weights[p]) for p in parts]
        self.loss, self.entropy = (torch.stack(values).sum() for values in zip(*sums, strict=True))

    def _part(self, seen: Tensor, logits: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor]:
        """Products of a few images, seen (g, n, k) and logits (v, n, k) -> weighted sums of losses and of entropies."""
        tiles, how = self._tiles, self._tiles.comparison
        torch.addcmul(how.shift, seen, tiles.teacher_scale, out=seen)
        targets = torch.softmax(seen, dim=-1, out=tiles.probs[0][:, : seen.shape[1]])
        entropy = _lse(seen, targets) - torch.linalg.vecdot(targets, seen)
        logits.mul_(tiles.student_scale)
        scale = tiles.grad_scale if weights is None else weights.unsqueeze(-1) * tiles.grad_scale
        loss = torch.zeros_like(entropy[0])
        for crops, target, pairs in _summed(targets, len(logits), how.exclude_own):
            rows, factor = logits[crops], how.others if how.exclude_own and crops.start else 1.0
            probs = torch.softmax(rows, dim=-1, out=tiles.probs[1][: len(rows), : rows.shape[1]])
            products = torch.linalg.vecdot(target, rows.sum(dim=0) if target.dim() == 2 else rows)
            cross_entropy = pairs * _lse(rows, probs).sum(dim=0) - products.view(-1, len(loss)).sum(dim=0)
            loss += cross_entropy if factor == 1 else cross_entropy * factor
            torch.sub(probs if pairs == 1 else probs.mul_(pairs), target, out=rows)
            rows.mul_(scale if factor == 1 else scale * factor)
        if weights is not None:
            loss, entropy = loss * weights, entropy * weights
        return loss.sum(), entropy.sum()

    def _compare(self, seen: Tensor, logits: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor]:
        """Do what `_part` does, for the whole tile on a GPU."""
        tiles, how, g = self._tiles, self._tiles.comparison, len(seen)
        if g == 1 and not how.exclude_own:
            total, entropy = seen[0], _target(seen, how.shift, tiles.teacher_scale, weights)
        else:
            total, entropy = _targets(seen, how.shift, tiles.teacher_scale, weights)
        if not how.exclude_own:
            return _compare(logits, total, tiles.student_scale, tiles.grad_scale, weights, g), entropy
        loss = _compare(logits[:g], seen, tiles.student_scale, tiles.grad_scale, weights, g - 1)
        if len(logits) > g:
            scale = tiles.grad_scale if how.others == 1 else tiles.grad_scale * how.others
            loss = loss + how.others * _compare(logits[g:], total, tiles.student_scale, scale, weights, g)
        return loss, entropy

    def backward(self, grad_rows: Tensor, grad_weight: Tensor | None) -> None:
        tiles, student = self._tiles, self._tiles.student
        with tf32(student.low):
            grads = grad_rows.view(tiles.rows.shape)[:, self._images]
            grads.copy_((self._grad @ student.weight).view(grads.shape))
            if grad_weight is not None:  # the first tile overwrites it: with beta 0 nothing is read
                grad_weight.addmm_(self._grad.t(), self._rows, beta=0 if self._images.start == 0 else 1)


class _Tiles:
    """The student's logits and the teacher's, cut by images; the scratch that all tiles share."""

    def __init__(self, student: Logits, comparison: Comparison) -> None:
        self.student, self.comparison = student, comparison
        teacher, g = comparison.teacher, comparison.crops
        self.images = len(teacher.rows) // g
        self.teacher_rows = teacher.rows.view(g, self.images, teacher.rows.shape[-1])
        crops = len(student.rows) // self.images if self.images else 1
        self.rows = student.rows.view(crops, self.images, student.rows.shape[-1])
        pairs, _ = comparison.pairs(len(student.rows))
        self.divisor = comparison.divisor or float(max(pairs * self.images, 1))
        self.teacher_scale = teacher.scale / comparison.temperature
        self.student_scale = student.scale / comparison.student_temp
        self.grad_scale = self.student_scale / self.divisor
        most, self.fused = max(crops, g), fuses(student.weight)
        self._size = max(1, tile_rows(student.weight, self.fused) // most)
        self.part = max(1, part_rows(student.weight) // most)
        k, n = len(student.weight), min(self._size, self.images)
        self.logits, self.targets = student.rows.new_empty(crops * n, k), student.rows.new_empty(g * n, k)
        if self.fused:
            return
        together = max(crops - g, g) if comparison.exclude_own else crops
        self.probs = [student.rows.new_empty(views, min(self.part, n), k) for views in (g, together)]

    def __iter__(self) -> Iterator[_Tile]:
        for start in range(0, self.images, self._size):
            yield _Tile(self, slice(start, min(start + self._size, self.images)))


def _summed(targets: Tensor, crops: int, exclude_own: bool) -> Iterator[tuple[slice, Tensor, int]]:
    """Yields (student crops, sums of their targets: (n, k) for all or (crops, n, k) for each, number of targets in
    a sum). `targets` (g, n, k) is overwritten if `exclude_own`."""
    g = len(targets)
    total = targets.sum(dim=0) if g > 1 else targets[0]
    if exclude_own:
        yield slice(0, g), torch.sub(total, targets, out=targets), g - 1
    if not exclude_own or crops > g:
        yield slice(g if exclude_own else 0, None), total, g


@fused(kernels=2, seen=3)
def _target(seen: Tensor, shift: Tensor, scale: Tensor, weights: Tensor | None) -> Tensor:
    """Products (1, n, k), which become targets -> the weighted sum of their entropies."""
    targets, entropy = _softmax(seen, shift, scale)
    seen.copy_(targets)
    return (entropy if weights is None else entropy * weights).sum()


@fused(kernels=7, seen=8)
def _targets(seen: Tensor, shift: Tensor, scale: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor]:
    """Products (g, n, k) -> the sum (n, k) of an image's targets, and the weighted sum of their entropies. The products
    are overwritten: for each crop, the sum of the image's other targets."""
    targets, entropy = _softmax(seen, shift, scale)
    total = targets.sum(dim=0)
    seen.copy_(total - targets)
    return total, (entropy if weights is None else entropy * weights).sum()


def _softmax(seen: Tensor, shift: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Products (g, n, k) -> targets, and their entropies (g, n)."""
    x = torch.addcmul(shift, seen, scale)
    logarithms = x - log_sum_exp(x)
    targets = logarithms.exp()
    return targets, -(targets * logarithms).sum(dim=-1)


@fused(kernels=5, logits=3, target=2)
def _compare(
    logits: Tensor, target: Tensor, scale: Tensor, grad_scale: Tensor, weights: Tensor | None, pairs: int
) -> Tensor:
    """In place: `logits` (v, n, k) is overwritten by its gradient. Returns the weighted sum of the cross-entropies;
    `target` (n, k) or (v, n, k) sums `pairs` targets."""
    x = logits * scale
    lse = log_sum_exp(x)
    loss = pairs * lse.squeeze(-1) - (target * x).sum(dim=-1)
    grad = (x - lse).exp() * pairs - target
    logits.copy_(grad * (grad_scale if weights is None else weights.unsqueeze(-1) * grad_scale))
    return (loss if weights is None else loss * weights).sum()


@fused(kernels=1, weight=2)
def _turned(grad_weight: Tensor, weight: Tensor, inverse: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of prototypes whose directions alone count; the whole gradient's dot products with them (k, 1)."""
    w, whole = weight.float(), grad_weight * grad
    along = (whole * w).sum(dim=-1, keepdim=True)
    turned = torch.addcmul(whole, w, along * inverse.square().unsqueeze(-1), value=-1)
    return turned.to(weight.dtype), along


def _lse(logits: Tensor, probs: Tensor) -> Tensor:
    """ln of the sum of exp(logits), whose softmax is `probs`."""
    return logits.amax(dim=-1) - probs.amax(dim=-1).log()
