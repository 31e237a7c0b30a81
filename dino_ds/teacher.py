"""The EMA teacher: a whole FP32 copy on every rank, never sharded, never trained, fed from the FP32 masters.

Source: DINO, section 3.1 (arXiv 2104.14294): teacher <- m teacher + (1 - m) student, after each applied step.
An average kept in bf16 would leave most weights unchanged by a step at m >= .996; hence FP32 from FP32.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dino_ds.engine.masters import FlatMasters, Masters, PartitionedMasters, WholeMasters
from dino_ds.models.network import DinoNetwork
from dino_ds.models.vit import VisionTransformer

# Elements gathered at once under ZeRO 3: bounds the scratch memory to 512 MiB.
_CHUNK_ELEMENTS = 128 * 2**20


class Teacher:
    """Runs the teacher network under the engine's precision and moves it after applied steps.

    Args: `network` an FP32 module on its device, equal on all ranks; `masters` where the student's FP32 weights are;
    `dtype` of the forward pass (autocast; storage stays FP32). On construction the network becomes equal to the
    masters, which DeepSpeed makes from weights already rounded to the engine's precision. With `keep_copy` the matrices
    are also kept in `dtype`, cast once per applied step instead of at each use: same results, 2 bytes a weight more.
    `compiled`: how its blocks are compiled, as of `compile_blocks`, or "off".

    Afterwards the network must not be moved, cast or deep-copied: its parameters may be views of flat buffers.
    """

    def __init__(
        self,
        network: DinoNetwork,
        masters: Sequence[Masters],
        dtype: torch.dtype = torch.float32,
        keep_copy: bool = False,
        compiled: str = "off",
    ) -> None:
        self.network = network.eval().requires_grad_(False)
        self.dtype = dtype
        parameters: dict[str, Tensor] = dict(network.named_parameters())
        assert all(p.dtype == torch.float32 for p in parameters.values()), "the teacher is FP32"
        self._device = next(iter(parameters.values())).device
        self._followers = [self._follow(m, parameters) for m in masters]
        followed = [name for m in masters for name in _names(m)]
        assert sorted(followed) == sorted(parameters), "each parameter must have exactly one master"
        self._running, self._casts = _low_precision_copy(network, dtype) if keep_copy else (network, ([], []))
        if compiled != "off":
            self._running.backbone.compile_blocks(compiled)
        self.update(momentum=0.0)

    def _follow(self, masters: Masters, parameters: dict[str, Tensor]) -> _EmaUpdater:
        if isinstance(masters, WholeMasters):
            return _WholeUpdater(masters, parameters)
        if isinstance(masters, FlatMasters):
            return _FlatUpdater(masters, parameters, self._device)
        return _PartitionedUpdater(masters, parameters, self._device)

    @torch.no_grad()
    def update(self, momentum: float) -> None:
        """teacher <- momentum * teacher + (1 - momentum) * masters; every rank must call it."""
        for follower in self._followers:
            follower.move(1.0 - momentum)
        self._cast()

    def _cast(self) -> None:
        if self._casts[0]:
            torch._foreach_copy_(*self._casts)

    @torch.no_grad()
    def __call__(self, views: list[Tensor]) -> Tensor:
        """Global views (b, 3, h, w) -> logits (v * b, k)."""
        with self._autocast():
            return self._running(views)

    def features(self, images: Tensor) -> Tensor:
        """Images (b, 3, h, w) -> CLS features after the final norm (b, d), FP32."""
        with self.evaluating():
            return self.backbone([images])

    @property
    def backbone(self) -> VisionTransformer:
        """The newest weights, FP32 as in teacher.safetensors. To be used while `evaluating`."""
        return self.network.backbone

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """FP32, as `dino-ds eval` computes, no gradients, and nothing compiled."""
        # Evaluation comes in other batch sizes: compiling for each would fill the cache that training needs.
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            yield

    def _autocast(self) -> Any:
        return torch.autocast(self._device.type, dtype=self.dtype, enabled=self.dtype != torch.float32)

    def state_dict(self) -> dict[str, Tensor]:
        """Copies of all parameters on the CPU, FP32, with the network's names."""
        return {name: p.detach().cpu().clone() for name, p in self.network.named_parameters()}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for name, parameter in self.network.named_parameters():
            parameter.copy_(state[name])
        self._cast()


def _low_precision_copy(
    network: DinoNetwork, dtype: torch.dtype
) -> tuple[DinoNetwork, tuple[list[Tensor], list[Tensor]]]:
    """A network whose matrices are of `dtype` and whose other parameters are those of `network`; (copies, originals).

    Autocast casts these matrices and no others, so the results are the same.
    """
    running = copy.deepcopy(network, {id(p): p for p in network.parameters()})  # the parameters themselves are shared
    copies, originals = [], []
    for mine in running.modules():
        cast = isinstance(mine, (nn.Linear, nn.Conv2d))
        for name, parameter in list(mine.named_parameters(recurse=False)):
            if cast:
                copies.append(torch.empty_like(parameter.data, dtype=dtype))
                originals.append(parameter.data)
                setattr(mine, name, nn.Parameter(copies[-1], requires_grad=False))
    return running, (copies, originals)


class _EmaUpdater:
    def move(self, weight: float) -> None:
        """teacher <- teacher + weight * (masters - teacher), for this follower's parameters."""
        raise NotImplementedError


class _WholeUpdater(_EmaUpdater):
    """No communication."""

    def __init__(self, masters: WholeMasters, parameters: dict[str, Tensor]) -> None:
        self._teacher = [parameters[name].data for name, _ in masters.parameters]
        self._masters = [tensor.detach() for _, tensor in masters.parameters]

    def move(self, weight: float) -> None:
        torch._foreach_lerp_(self._teacher, self._masters, weight)


class _FlatUpdater(_EmaUpdater):
    """Each rank moves its shard, then one all-gather in place."""

    def __init__(self, masters: FlatMasters, parameters: dict[str, Tensor], device: torch.device) -> None:
        self._masters = masters
        self._flat = torch.zeros(masters.numel, device=device)
        for name, offset in masters.layout:
            parameter = parameters[name]
            view = self._flat.narrow(0, offset, parameter.numel()).view(parameter.shape)
            view.copy_(parameter.data)
            parameter.data = view
        size = masters.numel // dist.get_world_size(masters.process_group)
        self._shard = self._flat.narrow(0, dist.get_rank(masters.process_group) * size, size)

    def move(self, weight: float) -> None:
        self._shard.lerp_(self._masters.shard().to(self._flat.device, non_blocking=True), weight)
        dist.all_gather_into_tensor(self._flat, self._shard, group=self._masters.process_group)


class _PartitionedUpdater(_EmaUpdater):
    """Gathers the masters chunk by chunk, then moves whole parameters."""

    def __init__(self, masters: PartitionedMasters, parameters: dict[str, Tensor], device: torch.device) -> None:
        self._masters = masters
        self._device = device
        self._world = dist.get_world_size(masters.process_group)
        self._chunks: list[list[tuple[Tensor, int, int]]] = [[]]
        filled = 0
        for name, offset, piece in masters.layout:
            if filled and (filled + piece) * self._world > _CHUNK_ELEMENTS:
                self._chunks.append([])
                filled = 0
            self._chunks[-1].append((parameters[name].data, offset, piece))
            filled += piece

    def move(self, weight: float) -> None:
        shard = self._masters.shard()
        for chunk in self._chunks:
            start, (_, last, piece) = chunk[0][1], chunk[-1]
            mine = shard[start : last + piece].to(self._device)
            gathered = mine.new_empty(self._world * mine.numel())
            dist.all_gather_into_tensor(gathered, mine, group=self._masters.process_group)
            rows = gathered.view(self._world, -1)
            teacher = [tensor.view(-1) for tensor, _, _ in chunk]
            masters = [
                rows[:, offset - start : offset - start + piece].reshape(-1)[: tensor.numel()]
                for tensor, offset, piece in chunk
            ]
            torch._foreach_lerp_(teacher, masters, weight)


def _names(masters: Masters) -> list[str]:
    if isinstance(masters, WholeMasters):
        return [name for name, _ in masters.parameters]
    return [entry[0] for entry in masters.layout]
