"""Builds DeepSpeed's engine, without needless work, and wraps it: outputs, steps, FP32 masters, training state."""

from __future__ import annotations

import enum
import inspect
import math
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from dino_ds.config.crops import Masks
from dino_ds.config.ds_schema import LOGGERS, DsConfig, check_offload, offloads_optimizer
from dino_ds.engine import distributed, muon, optim, schedules, state
from dino_ds.engine.masters import FrozenWeights, Masters, masters_of
from dino_ds.engine.state import EngineState, OptimizerShard, SavedState
from dino_ds.errors import ConfigError
from dino_ds.models import batch_norm, prototypes
from dino_ds.models.base import Crops
from dino_ds.models.network import Network, Output

# DeepSpeed's counters, and the attributes of its dynamic loss scaler that change.
_COUNTERS = ("global_steps", "global_samples", "skipped_steps")
_SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


class Progress(enum.Enum):
    ACCUMULATING = "the window of micro-batches goes on"
    SKIPPED = "the window ended, its gradient was not finite, nothing moved"
    STEPPED = "the window ended and the optimizer moved the weights"


class Engine:
    """The student under DeepSpeed: one `engine(crops, drop_keys)`, `backward`, `step` per micro-batch.

    Learning rates and weight decays come with each step through `set_groups`.

    Args:
        network: the student, FP32, equal on all ranks.
        config: a resolved ds config.
        options: kind of optimizer, learning rates by layer, clipping.

    Raises:
        ConfigError: DeepSpeed refuses the config, or it does not go with the options.
    """

    def __init__(self, network: Network, config: DsConfig, options: optim.OptimizerOptions = optim.ONE_RATE) -> None:
        _check_together(config, options)
        self.config, self._kind = config, options.kind
        self._name_of = {id(p): name for name, p in network.named_parameters()}
        trained = [(name, p) for name, p in network.named_parameters() if p.requires_grad]
        self._shapes = {name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in trained}
        segments = None if config.checkpoint_blocks == "all" else int(config.checkpoint_blocks)
        network.backbone.checkpoint_segments(segments)
        network.train()
        modules, in_checkpoints = dict(network.named_modules()), set(network.state_dict())
        buffers = {name: buffer.detach().clone() for name, buffer in network.named_buffers()}
        self._buffers = {name: (modules[name.rpartition(".")[0]], name.rpartition(".")[2]) for name in buffers}
        self._saved_buffers = [name for name in buffers if name in in_checkpoints]
        optimizer = optim.build_optimizer(network, options)  # torch's own: DeepSpeed's are compiled at run time
        by_part = options.clip_by != optim.WHOLE
        self._engine, self._optimizer = initialize(network, optimizer, config, clips=not by_part)
        for name, buffer in buffers.items():  # DeepSpeed has cast them together with the parameters
            setattr(*self._buffers[name], buffer.to(self.device))
        weakref.finalize(self, _release, self._engine).atexit = False
        if isinstance(optimizer, (optim.Lars, muon.Muon)) and config.stage:
            state.lay_out_shards(optimizer, self._optimizer, self._name_of, self._shapes)
        optim.norm_in_one_pass(self._optimizer, config.clipping if by_part else 0.0)
        self._unsynced = batch_norm.unsynced_statistics(network)
        parts: dict[str, list[nn.Parameter]] = {}  # parameters that are clipped by one norm, by name of the part
        if config.stage == 0:
            part_of = {id(p): group["part"] for group in self._optimizer.param_groups for p in group["params"]}
            for _, parameter in trained:
                parts.setdefault(part_of[id(parameter)], []).append(parameter)
        self._stage0_parts = list(parts.values())
        self._stage0_norm: float | None = None
        self._before_step = self._dynamic_state()

    @property
    def started_from(self) -> str:
        """The name of the weights that the student started from, or "" if they were drawn at random."""
        return str(self._engine.module.started_from)

    @property
    def device(self) -> torch.device:
        return self._engine.device

    def __call__(
        self,
        crops: Crops,
        drop_keys: Tensor | None,
        masks: Masks = MappingProxyType({}),
        comparisons: Mapping[str, prototypes.Comparison] = MappingProxyType({}),
        step_key: int | None = None,
    ) -> dict[str, Output]:
        """The outputs of the network, which takes the same arguments. One call per micro-batch: ZeRO 3 traces it."""
        # Copies: ZeRO 3's hooks write into the dictionaries that they are given.
        outputs: dict[str, Output] = self._engine(
            crops, drop_keys, {name: dict(mask) for name, mask in masks.items()}, dict(comparisons), step_key
        )
        return outputs

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Evaluation mode: no stochastic depth, BatchNorm by running averages. No window may be open."""
        self._engine.eval()
        try:
            yield
        finally:
            self._engine.train()

    def backward(self, loss: Tensor) -> None:
        self._engine.backward(loss)

    def set_groups(self, schedule: schedules.ScheduleValues) -> None:
        optim.set_groups(self._optimizer.param_groups, schedule)

    def freeze_prototypes(self, frozen: bool) -> None:
        self._engine.module.freeze_prototypes(frozen)

    def freeze_backbone(self, frozen: bool) -> None:
        self._engine.module.freeze_backbone(frozen)

    def step(self) -> Progress:
        """End a micro-batch, and the window if it was the last one. The result is the same on all ranks."""
        boundary = self._engine.is_gradient_accumulation_boundary()
        finite = True
        if boundary and self.config.stage == 0:
            # Clip the gradient, or remove it if not finite, as DeepSpeed does from stage 1 on.
            gradients = [[p.grad for p in part if p.grad is not None] for part in self._stage0_parts]
            norms = [torch.nn.utils.get_total_norm(part) for part in gradients]
            self._stage0_norm = float(norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms)))
            finite = math.isfinite(self._stage0_norm)
            for part, part_norm in zip(self._stage0_parts, norms, strict=True):
                if not finite:
                    for parameter in part:
                        parameter.grad = None
                elif 0 < self.config.clipping < self._stage0_norm + 1e-3:  # otherwise torch would only multiply by 1
                    torch.nn.utils.clip_grads_with_norm_(part, self.config.clipping, part_norm)
        self._before_step = self._dynamic_state()
        self._engine.step()
        if not boundary:
            return Progress.ACCUMULATING
        return Progress.STEPPED if self._engine.was_step_applied() and finite else Progress.SKIPPED

    @property
    def scale_is_exhausted(self) -> bool:
        """After SKIPPED: whether an fp16 gradient has overflowed at the smallest loss scale of the ds config."""
        before = self._before_step["loss_scaler"]
        if before is None:
            return False
        return before["cur_hysteresis"] <= 1 and before["cur_scale"] <= self._optimizer.loss_scaler.min_scale

    @property
    def grad_norm(self) -> float | None:
        """Global norm of the last window's gradient before clipping, without prototypes that receive no gradient."""
        norm = self._stage0_norm if self.config.stage == 0 else self._engine.get_global_grad_norm()
        return None if norm is None else float(norm)

    @property
    def loss_scale(self) -> float:
        """fp16's dynamic loss scale; 1 in other precisions."""
        return float(self._optimizer.loss_scale) if self.config.precision == "fp16" else 1.0

    def set_masters(self, values: Mapping[str, Tensor]) -> None:
        """Set the FP32 masters to `values`: DeepSpeed made them from weights rounded to the engine's precision."""
        for flat in self._flats():
            for name, start, stop, offset in flat.pieces if values else ():
                if name in values:
                    flat.master.detach().view(-1)[offset:][: stop - start].copy_(values[name].reshape(-1)[start:stop])

    def reset_optimizer_state(self, name: str) -> None:
        """Give the parameter groups called `name` a fresh optimizer state: zero moments, step count 0."""
        for flat in self._flats():
            if flat.group == name:
                flat.reset()

    def masters(self) -> list[Masters]:
        frozen = [(name, p) for name, p in self._engine.module.named_parameters() if not p.requires_grad]
        trained = masters_of(self._optimizer, self._engine.module, self._name_of)
        return [*trained, FrozenWeights(frozen, self._optimizer)] if frozen else trained

    def buffers(self, saved: bool = False) -> dict[str, Tensor]:
        """The student's buffers by name, in their own precision; with `saved` only those that checkpoints hold."""
        return {name: getattr(*self._buffers[name]) for name in (self._saved_buffers if saved else self._buffers)}

    def unsynced_statistics(self) -> list[Tensor]:
        """FP32 running averages of the BatchNorm layers that each rank computes over its own batch alone."""
        return self._unsynced

    def state(self) -> EngineState:
        """This rank's part of the training state, by reference: copy it before the next step. Between windows only."""
        assert self._engine.micro_steps % self.config.accumulation == 0, "a window of micro-batches is open"
        return state.export_state(self._flats(), self._shapes, self.config.stage > 0, self._kind, self._dynamic_state())

    def load_state(self, saved: SavedState) -> None:
        """Restore in place what `state` gave on all ranks; ZeRO stage, ranks, precision and offload may differ from the
        save's. If they do not, training goes on bit for bit. All ranks must call it. Raises CheckpointError, on
        all ranks, for a state of another network or kind of optimizer."""
        parameters = state.import_state(saved, self._flats(), self._shapes, self._optimizer, self._kind)
        for name in _COUNTERS:
            setattr(self._engine, name, parameters.counters.get(name, 0))
        if self.config.dynamic_loss_scale:
            known = {name: value for name, value in parameters.loss_scaler.items() if name in _SCALER}
            vars(self._optimizer.loss_scaler).update(known)
        self._engine.micro_steps = self._engine.global_steps * self.config.accumulation

    def _dynamic_state(self) -> dict[str, Any]:
        scaler = self._optimizer.loss_scaler if self.config.dynamic_loss_scale else None
        return {
            "loss_scaler": None if scaler is None else {name: getattr(scaler, name) for name in _SCALER},
            "counters": {name: getattr(self._engine, name) for name in _COUNTERS},
        }

    def _flats(self) -> list[OptimizerShard]:
        return state.partitions_of(self._optimizer, self._engine.module, self._name_of, self._shapes)


def _check_together(config: DsConfig, options: optim.OptimizerOptions) -> None:
    if config.performance.attention == "varlen" and not torch.cuda.is_available():
        raise ConfigError('dino_ds.attention "varlen" is a CUDA kernel, and there is no GPU: use "sdpa"')
    by_part = options.clip_by != optim.WHOLE
    if by_part and not config.clipping:
        why = "optimizer.clip_by part clips nothing with gradient_clipping 0"
        raise ConfigError(f"{why}: set --ds.gradient_clipping to a norm (DINOv2: 3.0), or optimizer.clip_by network")
    if by_part and offloads_optimizer(config.raw["zero_optimization"]):
        why = "optimizer.clip_by part does not go with zero_optimization.offload_optimizer"
        more = "where DeepSpeed clips by the norm of the whole network"
        raise ConfigError(f"{why}, {more}: remove the one, or set optimizer.clip_by network")
    check_offload(config, options.kind)


def initialize(network: Network, optimizer: torch.optim.Optimizer, config: DsConfig, clips: bool) -> tuple[Any, Any]:
    """Build DeepSpeed's engine and optimizer; with `clips` DeepSpeed clips by the norm of the whole gradient. Raises
    ConfigError if DeepSpeed refuses the config."""
    import deepspeed
    from deepspeed.runtime import bf16_optimizer, utils
    from deepspeed.runtime.zero import stage_1_and_2

    # DeepSpeed's throughput timer, whose figures nobody reads, synchronizes the device twice per micro-batch.
    raw = {key: value for key, value in config.raw.items() if key not in LOGGERS}
    raw["timers"] = {"throughput": {"enabled": False}}
    raw["zero_allow_untested_optimizer"] = True  # untested by DeepSpeed; we have tested SGD and LARS
    # At stage 0 DeepSpeed clips parameter by parameter, with a second pass over the norms; it can't clip by part.
    if config.stage == 0 or not clips:
        raw["gradient_clipping"] = 0.0
    try:
        engine, zero_optimizer, _, _ = deepspeed.initialize(
            model=network, optimizer=optimizer, config=raw, dist_init_required=False
        )
    except (deepspeed.runtime.config.DeepSpeedConfigError, ValueError) as error:
        raise ConfigError(f"DeepSpeed refuses this ds config: {' '.join(str(error).split())}") from error
    if config.stage == 3:
        _let_go_of(network)
    if distributed.world_size() == 1 and config.stage == 0:
        engine.enable_backward_allreduce = False
    elif distributed.world_size() == 1 and not config.copies_gradients(1):
        # DeepSpeed would copy each gradient into a bucket and back, two kernels per parameter, and divide it by 1.
        zero_optimizer.contiguous_gradients = False  # no memory for buckets
        zero_optimizer.reduce_gradients = lambda **_: zero_optimizer.overlapping_partition_gradients_reduce_epilogue()
    if config.dynamic_loss_scale:
        # A window made NaN to stop the run is no error: the training loop checks `Engine.scale_is_exhausted` instead.
        zero_optimizer.loss_scaler.raise_error_at_min_scale = False
    # Whether to apply the step is read from the device once; DeepSpeed 0.19 reads it up to five times at stages 1 to 3,
    # from a pass over all gradients too. The norm alone decides: it is infinite or NaN if any gradient is.
    if hasattr(zero_optimizer, "check_overflow") and not getattr(zero_optimizer, "cpu_offload", False):
        zero_optimizer.check_overflow = lambda partition_gradients=True: None
    stage_1_and_2.is_invalid_grad_norm = lru_cache(maxsize=1)(lambda norm: not 0 <= float(norm) < math.inf)
    gather = utils.all_gather_dp_groups if "comms_logger" in config.raw else _gather_groups
    for module in (stage_1_and_2, bf16_optimizer):
        module.all_gather_dp_groups = gather
    return engine, zero_optimizer


def _gather_groups(groups_flat: Any, partitioned_param_groups: Any, dp_process_group: list[Any], **_: int) -> None:
    """Gather the new weights of all parameter groups (58 for a ViT-L with learning rates by layer) in one collective;
    DeepSpeed's own takes one per group, with the same result."""
    shards = [parts[distributed.rank()] for parts in partitioned_param_groups]
    distributed.gather_in_place(groups_flat, shards, dp_process_group[0])


def _let_go_of(module: nn.Module) -> None:
    """Let a partitioned `module` be freed with its last user: a global list of DeepSpeed would keep it, and with it
    the weights, masters and moments of its engine."""
    from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK as stack

    def forget(gone: object) -> None:
        stack[:] = [entry for entry in stack if entry is not gone]

    stack[:] = [weakref.proxy(module, forget) if entry is module else entry for entry in stack]


def _release(engine: Any) -> None:
    """Free the memory of a DeepSpeed engine that is no longer needed: autograd nodes and a global cache of DeepSpeed
    would keep its weights and optimizer state."""
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator as Coordinator

    engine.destroy()
    for copies in ("bf16_groups_flat", "bf16_partitioned_groups"):  # with graphs back to the weights
        getattr(engine.optimizer, copies, []).clear()
    wrapped = inspect.unwrap(Coordinator._PartitionedParameterCoordinator__params_to_release)
    for cache in inspect.getclosurevars(wrapped).nonlocals.values():
        if hasattr(cache, "cache_clear"):
            cache.cache_clear()
