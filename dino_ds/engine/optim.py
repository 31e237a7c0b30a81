"""The optimizer (AdamW, SGD, LARS or Muon), its parameter groups, and gradient clipping. Source:
facebookresearch/dino `get_params_groups`: biases and one-dimensional weights are not decayed; tokens and position
embeddings are. The prototypes have a group of their own: lr 0 is the only exact freeze at every ZeRO stage. Layer-wise
learning rates, and clipping of backbone and heads each by its own norm: facebookresearch/dinov2. LARS: You et al. 2017
(arXiv 1708.03888) as facebookresearch/dino `utils.LARS`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dino_ds.engine import masters, schedules
from dino_ds.engine.muon import Muon, Piece, matrices_of
from dino_ds.errors import ConfigError
from dino_ds.models.network import Network

_EPS = 1e-6  # added to the norm, as in DeepSpeed and torch
DECAY, NO_DECAY, PROTOTYPES = "decay", "no_decay", "prototypes"
BACKBONE = "backbone_"  # prefix of DECAY and NO_DECAY for the groups of a backbone that is frozen for a while
NAMES = (DECAY, NO_DECAY, PROTOTYPES, BACKBONE + DECAY, BACKBONE + NO_DECAY)
WHOLE = "network"
PATCH_EMBED = "patch_embed"  # the module of a backbone whose learning rate `patch_embed_lr` multiplies


@dataclass(frozen=True)
class OptimizerOptions:
    """Options of the recipe's section `optimizer`. Defaults: one learning rate, clipping by one global norm (DINO).
    kind: adamw, with `betas` and `eps`; sgd, with `momentum`; lars, with `momentum` and `trust`; or muon, with
    `momentum` and `scale` for weight matrices, and adamw with its options for the rest."""

    layer_decay: float = 1.0
    patch_embed_lr: float = 1.0
    clip_by: str = WHOLE
    kind: str = "adamw"
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    momentum: float = 0.9
    trust: float = 0.001
    scale: float = 1.0


ONE_RATE = OptimizerOptions()


def build_optimizer(network: Network, options: OptimizerOptions) -> torch.optim.Optimizer:
    """The optimizer of the trained parameters, at learning rate 0; AdamW and SGD are torch's fused ones. Raises
    ConfigError where Muon has no matrix to orthogonalize."""
    groups = parameter_groups(network, options)
    if options.kind == "lars":
        return Lars(groups, options.momentum, options.trust)
    if options.kind == "sgd":
        return torch.optim.SGD(groups, lr=0.0, momentum=options.momentum, fused=True, foreach=False)
    adamw: dict[str, Any] = {"betas": options.betas, "eps": options.eps, "fused": True, "foreach": False}
    if options.kind == "muon":
        named = dict(network.named_parameters())
        blocks = {named[name]: count for name, count in matrices_of(network).items()}
        return Muon(groups, blocks, options.momentum, options.scale, **adamw)
    return torch.optim.AdamW(groups, lr=0.0, **adamw)


def parameter_groups(network: Network, options: OptimizerOptions = ONE_RATE) -> list[dict[str, Any]]:
    """The optimizer's parameter groups, without frozen parameters and without empty groups, which DeepSpeed would drop.
    Keys of a group: "name", by which `set_groups` sets its lr and weight decay; "lr_multiplier", a factor on that lr;
    "part", the part of the network with which its gradient is clipped; "kind", the optimizer that updates it. Groups of
    the same name differ in another of these keys. Raises ConfigError for a learning rate of a patch embedding that the
    network does not have, and where Muon has no matrix to orthogonalize."""
    groups: dict[tuple[str, str, float, str], list[nn.Parameter]] = {}
    matrices = matrices_of(network) if options.kind == "muon" else {}
    layers, top = network.backbone.layers(), len(network.backbone.segments()) + 1
    patches = {name: options.patch_embed_lr for name in layers if name.partition(".")[0] == PATCH_EMBED}
    if options.patch_embed_lr != 1.0 and not patches:
        raise ConfigError(
            f"optimizer.patch_embed_lr {options.patch_embed_lr:g} multiplies the learning rate of a backbone's module "
            f"{PATCH_EMBED}, and this one has none: leave it out"
        )
    multipliers = {
        f"backbone.{name}": options.layer_decay ** (top - layer) * patches.get(name, 1.0)
        for name, layer in layers.items()
    }
    for name, parameter in filter(lambda pair: pair[1].requires_grad, network.named_parameters()):
        freezes = network.freezes_backbone and name.startswith("backbone.")
        part = WHOLE if options.clip_by == WHOLE else name.partition(".")[0]
        kind = "adamw" if options.kind == "muon" and name not in matrices else options.kind
        # A parameter that ZeRO 3 has partitioned is empty; its full shape is `ds_shape`.
        flat = name.endswith(".bias") or len(getattr(parameter, "ds_shape", parameter.shape)) == 1
        group = (BACKBONE if freezes else "") + (NO_DECAY if flat else DECAY)
        if name.rpartition(".")[0].endswith("prototypes"):  # their learned lengths too, if any
            group = PROTOTYPES
        groups.setdefault((part, group, multipliers.get(name, 1.0), kind), []).append(parameter)
    if options.kind == "muon" and all(kind != "muon" for *_, kind in groups):
        why = "optimizer.kind muon orthogonalizes matrices of linear layers and convolutions"
        raise ConfigError(f"{why}, and this network trains none: set optimizer.kind adamw")
    parts = list(dict.fromkeys(part for part, *_ in groups))
    order = sorted(groups, key=lambda key: (parts.index(key[0]), NAMES.index(key[1]), *key[2:]))
    return [{"params": groups[k], "name": k[1], "part": k[0], "lr_multiplier": k[2], "kind": k[3]} for k in order]


def set_groups(groups: Iterable[dict[str, Any]], schedule: schedules.ScheduleValues) -> None:
    """Set lr and weight decay of an optimizer's `groups` for a step; both are 0 in a frozen group."""
    for group in groups:
        is_backbone = group["name"].startswith(BACKBONE) and schedule.backbone_frozen
        moves = 0.0 if is_backbone or (group["name"] == PROTOTYPES and schedule.prototypes_frozen) else 1.0
        group["lr"] = schedule.lr * moves * group["lr_multiplier"]
        group["weight_decay"] = 0.0 if group["name"].endswith(NO_DECAY) else schedule.weight_decay * moves


class Lars(torch.optim.Optimizer):
    """LARS with one `momentum` and `trust` for all groups; lr and weight_decay come with each step. A tensor is a whole
    parameter unless `lay_out` has declared its contents. A step overwrites the gradients."""

    def __init__(self, params: Iterable[Any], momentum: float, trust: float) -> None:
        super().__init__(params, {"lr": 0.0, "weight_decay": 0.0, "momentum": momentum, "trust": trust})
        self._shards: dict[Tensor, tuple[list[Piece], Tensor, int, Any]] = {}

    def lay_out(self, tensor: Tensor, pieces: list[Piece], adapted: list[str], process_group: Any) -> None:
        """Declare that `tensor` holds `pieces` of one group's parameters. adapted: names of all its parameters, on any
        rank, that have a trust ratio. From now on all ranks must call `step` together, with equal groups."""
        owners = [adapted.index(piece.parameter) for piece in pieces]
        numbers = torch.tensor(owners, dtype=torch.long, device=tensor.device)
        self._shards[tensor] = pieces, numbers, len(adapted), process_group

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Make a step without reading from the device, with one all-reduce for each tensor that was laid out."""
        assert closure is None
        for group in self.param_groups:
            tensors = [p for p in group["params"] if p.grad is not None]
            if not tensors:
                continue
            gradients = [p.grad for p in tensors]
            self._adapt(tensors, gradients, group)
            for p in tensors:
                if not self.state[p]:
                    self.state[p]["momentum_buffer"] = torch.zeros_like(p)
            momenta = [self.state[p]["momentum_buffer"] for p in tensors]
            torch._foreach_mul_(momenta, group["momentum"])
            torch._foreach_add_(momenta, gradients)
            torch._foreach_add_(tensors, momenta, alpha=-group["lr"])

    def _adapt(self, tensors: list[Tensor], gradients: list[Tensor], group: dict[str, Any]) -> None:
        laid_out = self._shards.get(tensors[0])
        if laid_out is None:
            weights, steps = ([t for t in ts if t.ndim != 1] for ts in (tensors, gradients))
        else:
            assert len(tensors) == 1
            pieces = laid_out[0]
            weights, steps = ([t.narrow(0, p.offset, p.stop - p.start) for p in pieces] for t in (*tensors, *gradients))
        if weights:
            torch._foreach_add_(steps, weights, alpha=group["weight_decay"])
            norms = torch.stack([*torch._foreach_norm(weights), *torch._foreach_norm(steps)])
            squares = norms.double().square().view(2, -1)  # in FP32 the squares of small gradients would vanish
        else:
            squares = torch.zeros(2, 0, dtype=torch.float64, device=tensors[0].device)
        if laid_out is not None and laid_out[2]:
            _, numbers, total, process_group = laid_out
            every = squares.new_zeros(2, total).index_copy_(1, numbers, squares)
            dist.all_reduce(every, group=process_group)
            squares = every.index_select(1, numbers)
        if weights:
            weight, step = squares.sqrt()
            ratios = torch.where((weight > 0) & (step > 0), group["trust"] * weight / step, 1.0).float()
            # Multiplied by tensors, not numbers: the ratios are on the device and must stay there.
            torch._foreach_mul_(steps, list(ratios.unbind()))


def norm_in_one_pass(optimizer: Any, clip_parts: float = 0.0) -> None:
    """Make ZeRO 1 to 3 compute the gradient's global norm over all groups at once, with one all-reduce. DeepSpeed
    launches two kernels per parameter and copies a constant to the device per group. The norm is the same, summed in
    FP64, infinite if a gradient is not finite. An offloaded optimizer keeps DeepSpeed's code, on the host. clip_parts:
    if above 0, each part's norm is clipped to it here, and DeepSpeed's gradient_clipping must be 0."""
    if getattr(optimizer, "cpu_offload", False) or getattr(optimizer, "offload_optimizer", False):
        return
    if hasattr(optimizer, "averaged_gradients"):
        gradient = _ShardedGradient(optimizer, clip_parts)
        if hasattr(optimizer, "scaled_global_norm"):
            optimizer.scaled_global_norm = lambda norm_type=2: gradient.norm()
            optimizer.unscale_and_clip_grads = _FactorOnce(optimizer)
        else:  # ZeRO 3
            optimizer._get_norm_groups = lambda: [gradient.norm()]
        if clip_parts:
            optimizer.unscale_and_clip_grads = gradient.unscale_and_clip
    elif clip_parts and hasattr(optimizer, "get_grads_for_norm"):
        optimizer.get_grads_for_norm = lambda for_clipping=False: ([_clip_bf16(optimizer, clip_parts)], {})


class _ShardedGradient:
    """This rank's gradients under ZeRO 1 to 3. Unless `limit` is 0, each part's norm is clipped to it."""

    def __init__(self, optimizer: Any, limit: float) -> None:
        self._optimizer, self._limit = optimizer, limit
        zero3 = hasattr(optimizer, "_get_sub_group_process_group")
        self._process_group = optimizer._get_sub_group_process_group(0) if zero3 else optimizer.dp_process_group
        parts = [group["part"] for group in masters.shard_groups(optimizer)]
        self._parts = list(dict.fromkeys(parts))
        self._part_of = [self._parts.index(part) for part in parts]

    def norm(self) -> Tensor:
        """The norm of all gradients times the loss scale, an FP32 scalar, infinite if one is not finite. Collective."""
        owned: list[list[Tensor]] = [[] for _ in self._parts]
        for i, gradients in self._optimizer.averaged_gradients.items():
            present = [g for g in gradients or () if g.numel() and not getattr(g, "_zero_padding", False)]
            owned[self._part_of[i]] += [gradient.detach() for gradient in present]
        parts = [_sum_of_squares(gradients, self._optimizer.device) for gradients in owned]
        squares = torch.stack(parts) if len(parts) > 1 else parts[0].view(1)
        dist.all_reduce(squares, group=self._process_group)
        if self._limit:
            # Now, not when the factors are used: DeepSpeed changes the loss scale in between.
            self._factors = _clip_factors(squares, self._limit, self._optimizer.loss_scale) / self._optimizer.loss_scale
        norm = (squares.sum() if len(parts) > 1 else squares[0]).sqrt().float()
        return norm.nan_to_num(nan=torch.inf, posinf=torch.inf)

    def unscale_and_clip(self, shard: int | list[Tensor], total_norm: Tensor) -> None:
        """Unscale and clip one master shard, given by index (ZeRO 3) or gradient; DeepSpeed calls it after `norm`."""
        shards = masters.master_shards(self._optimizer)
        i = shard if isinstance(shard, int) else next(i for i, m in enumerate(shards) if m.grad is shard[0])
        gradient = shards[i].grad
        assert gradient is not None
        gradient.mul_(self._factors[self._part_of[i]])


class _FactorOnce:
    """Replaces `unscale_and_clip_grads` of ZeRO 1 and 2, which computes the same factor again for each group."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer, self._unscale = optimizer, optimizer.unscale_and_clip_grads
        self._norm: Tensor | None = None

    def __call__(self, gradients: list[Tensor], norm: Tensor) -> None:
        if not self._optimizer.clip_grad and self._optimizer.loss_scale == 1.0:
            return
        if norm is not self._norm:
            self._norm, self._factor = norm, torch.ones_like(norm)
            self._unscale([self._factor], norm)
        for gradient in gradients:
            gradient.mul_(self._factor)


def _clip_bf16(optimizer: Any, limit: float) -> Tensor:
    """Clip the gradients of DeepSpeed's BF16_Optimizer, FP32 and whole on every rank; returns the unclipped norm."""
    parts: dict[str, list[Tensor]] = {}
    for i, group in enumerate(optimizer.optimizer.param_groups):
        there = zip(optimizer.fp32_groups_gradients[i], optimizer.fp32_groups_has_gradients[i], strict=True)
        parts.setdefault(group["part"], []).extend(gradient for gradient, has in there if has)
    gradients = [part for part in parts.values() if part]
    squares = torch.stack([_sum_of_squares(part, part[0].device) for part in gradients])
    for part, factor in zip(gradients, _clip_factors(squares, limit, 1.0), strict=True):
        torch._foreach_mul_(part, factor)
    return squares.sum().sqrt().float()


def _sum_of_squares(gradients: list[Tensor], device: torch.device) -> Tensor:
    if not gradients:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack(torch._foreach_norm(gradients, 2, dtype=torch.float64)).square().sum()


def _clip_factors(squares: Tensor, limit: float, scale: float) -> Tensor:
    """FP32 clipping factors, at most 1, of parts whose gradients times `scale` have these squared norms (parts,)."""
    return (limit / (squares.sqrt() / scale + _EPS)).clamp(max=1.0).float()
