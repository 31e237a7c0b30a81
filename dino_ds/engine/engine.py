"""A thin wrapper around the DeepSpeed engine.

It answers three questions: what are the outputs, has the step been applied, and where are the FP32 masters.
"""

from __future__ import annotations

import enum
import math
import weakref
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from dino_ds.config.ds_values import DsConfig
from dino_ds.engine import distributed
from dino_ds.engine.clipping import check_clip_by_part, norm_in_one_pass, norm_of_parts, parts_of
from dino_ds.engine.lars import Lars, check_lars
from dino_ds.engine.masters import Masters, masters_of
from dino_ds.engine.optim import ONE_RATE, WHOLE, OptimizerOptions, apply_settings, build_optimizer
from dino_ds.engine.placement import let_go_of, release
from dino_ds.engine.saved_state import EngineState, SavedState
from dino_ds.engine.state import Flat, export_state, import_state, lay_out_layers, partitions_of
from dino_ds.errors import ConfigError
from dino_ds.models.base import Crops, Masks
from dino_ds.models.batch_norm import unsynced_statistics
from dino_ds.models.logits import Comparison
from dino_ds.models.network import Network, Output

# What DeepSpeed counts, and what moves in its dynamic loss scaler.
_COUNTERS = ("global_steps", "global_samples", "skipped_steps")
_SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


class Progress(enum.Enum):
    """What a call of `Engine.step` did."""

    ACCUMULATING = "the window of micro-batches goes on"
    SKIPPED = "the window ended, its gradient was not finite, nothing moved"
    STEPPED = "the window ended and the optimizer moved the weights"


class Engine:
    """The student under DeepSpeed: one `engine(crops, keys)`, `backward`, `step` per micro-batch.

    Args: `network` the student, FP32, equal on all ranks; `config` a resolved ds config; `options` of the optimizer,
    of learning rates by layer and of clipping. Learning rates and weight decays come with each step through
    `set_groups`. Raises ConfigError if DeepSpeed refuses the config, or it and the options don't go together.
    """

    def __init__(self, network: Network, config: DsConfig, options: OptimizerOptions = ONE_RATE) -> None:
        import deepspeed

        self.config, self._kind = config, options.kind
        if config.performance.attention == "varlen" and not torch.cuda.is_available():
            raise ConfigError('dino_ds.attention "varlen" is a CUDA kernel, and there is no GPU: use "sdpa"')
        by_part = options.clip_by != WHOLE
        if by_part:
            check_clip_by_part(config)
        if options.kind == "lars":
            check_lars(config)
        self._name_of = {id(p): name for name, p in network.named_parameters()}
        self._shapes = {name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in network.named_parameters()}
        segments = None if config.checkpoint_blocks == "all" else int(config.checkpoint_blocks)
        network.backbone.checkpoint_segments(segments, config.checkpoint_on_cpu)
        network.train()
        buffers = {name: buffer.detach().clone() for name, buffer in network.named_buffers()}
        saved = network.state_dict().keys() & buffers.keys()
        modules = dict(network.named_modules())
        owners = {name: modules[name.rpartition(".")[0]] for name in buffers}
        self._buffers = [(name, owners[name], name.rpartition(".")[2], name in saved) for name in buffers]
        # torch's own: DeepSpeed's are compiled at run time.
        optimizer = build_optimizer(network, options)
        # DeepSpeed's timer, whose figures nobody asks for, waits for the device twice in a micro-batch.
        raw = config.for_deepspeed | {"timers": {"throughput": {"enabled": False}}}
        raw["zero_allow_untested_optimizer"] = True  # by DeepSpeed; we have tested SGD and LARS
        # At stage 0 DeepSpeed clips parameter by parameter, with a second pass over the norms; by part it can't.
        if config.stage == 0 or by_part:
            raw["gradient_clipping"] = 0.0
        try:
            self._engine, self._optimizer, _, _ = deepspeed.initialize(
                model=network, optimizer=optimizer, config=raw, dist_init_required=False
            )
        except (deepspeed.runtime.config.DeepSpeedConfigError, ValueError) as error:
            raise ConfigError(f"DeepSpeed refuses this ds config: {' '.join(str(error).split())}") from error
        if config.stage == 3:
            let_go_of(network)
        weakref.finalize(self, release, self._engine).atexit = False
        for name, buffer in buffers.items():  # DeepSpeed casts them to the engine's precision with the parameters
            setattr(owners[name], name.rpartition(".")[2], buffer.to(self.device))
        self._unsynced = unsynced_statistics(network)
        if isinstance(optimizer, Lars) and config.stage:
            lay_out_layers(optimizer, self._optimizer, self._name_of, self._shapes)
        norm_in_one_pass(self._optimizer, config.clipping if by_part else 0.0)
        _read_finiteness_once(self._optimizer)
        if config.dynamic_loss_scale:
            # Of a window that was spoilt to stop, it would be no error: `scale_is_exhausted` tells who knows.
            self._optimizer.loss_scaler.raise_error_at_min_scale = False
        self._before_step = self._dynamic_state()
        if config.stage == 0 and distributed.world_size() == 1:
            self._engine.enable_backward_allreduce = False  # it copies all gradients, to sum them with nothing
        self._stage0_parts = parts_of(self._optimizer, self._engine.module) if config.stage == 0 else []
        self._stage0_norm: float | None = None

    @property
    def started_from(self) -> str:
        """The weights that the student was given, for people; empty where they were drawn."""
        return str(self._engine.module.started_from)

    @property
    def device(self) -> torch.device:
        return self._engine.device

    def __call__(
        self,
        crops: Crops,
        drop_keys: Tensor | None,
        masks: Masks = MappingProxyType({}),
        comparisons: Mapping[str, Comparison] = MappingProxyType({}),
        step_key: int | None = None,
    ) -> dict[str, Output]:
        """As of the network. One call per micro-batch: ZeRO 3 traces it."""
        # Copies: ZeRO 3's hooks write into the dictionaries that they are given.
        outputs: dict[str, Output] = self._engine(
            crops, drop_keys, {name: dict(mask) for name, mask in masks.items()}, dict(comparisons), step_key
        )
        return outputs

    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradient of the mean loss of one micro-batch."""
        self._engine.backward(loss)

    def set_groups(self, settings: dict[str, dict[str, float]]) -> None:
        """lr, before a group's own multiplier, and weight_decay of each parameter group, by its name."""
        apply_settings(self._optimizer.param_groups, settings)

    def freeze_prototypes(self, frozen: bool) -> None:
        self._engine.module.freeze_prototypes(frozen)

    def freeze_backbone(self, frozen: bool) -> None:
        self._engine.module.freeze_backbone(frozen)

    def step(self) -> Progress:
        """After every micro-batch. On all ranks the answer is the same."""
        boundary = self._engine.is_gradient_accumulation_boundary()
        skip = boundary and self.config.stage == 0 and not self._stage0_clip()
        self._before_step = self._dynamic_state()
        self._engine.step()
        if not boundary:
            return Progress.ACCUMULATING
        return Progress.STEPPED if self._engine.was_step_applied() and not skip else Progress.SKIPPED

    def restore_scaler_state(self) -> None:
        """After SKIPPED: as if the window had not been, for DeepSpeed's counters and the loss scale too."""
        self._set_dynamic_state(self._before_step["counters"], self._before_step["loss_scaler"] or {})

    @property
    def scale_is_exhausted(self) -> bool:
        """After SKIPPED: whether an fp16 gradient has overflowed at the smallest loss scale of the ds config."""
        before = self._before_step["loss_scaler"]
        if before is None:
            return False
        return before["cur_hysteresis"] <= 1 and before["cur_scale"] <= self._optimizer.loss_scaler.min_scale

    def _stage0_clip(self) -> bool:
        """Whether the gradient is finite; it is then clipped, else removed: NaN would get into the weights.

        DeepSpeed sums gradients over ranks before this at stage 0, and checks them itself from stage 1 on.
        """
        norm, norms = norm_of_parts(self._stage0_parts)
        self._stage0_norm = float(norm)
        finite = math.isfinite(self._stage0_norm)
        for part, part_norm in zip(self._stage0_parts, norms, strict=True):
            if not finite:
                for parameter in part:
                    parameter.grad = None
            elif self.config.clipping:
                torch.nn.utils.clip_grads_with_norm_(part, self.config.clipping, part_norm)
        return finite

    @property
    def grad_norm(self) -> float | None:
        """Global norm of the last window's gradient before clipping, without prototypes that get none."""
        norm = self._stage0_norm if self.config.stage == 0 else self._engine.get_global_grad_norm()
        return None if norm is None else float(norm)

    @property
    def loss_scale(self) -> float:
        """fp16's dynamic loss scale; 1 in other precisions."""
        if self.config.precision != "fp16":
            return 1.0
        return float(self._optimizer.loss_scale)

    def reset_optimizer_state(self, name: str) -> None:
        """Give the groups `name` a fresh state of the optimizer: zero moments, step count 0."""
        for flat in self._flats():
            if flat.group == name:
                flat.reset()

    def masters(self) -> list[Masters]:
        """Where the FP32 master weights of this engine are; see `dino_ds.engine.masters`."""
        return masters_of(self._optimizer, self._engine.module, self._name_of)

    def buffers(self, saved: bool = False) -> dict[str, Tensor]:
        """The student's buffers by name, in their own precision; `saved`: those that belong into a checkpoint."""
        return {name: getattr(owner, leaf) for name, owner, leaf, kept in self._buffers if kept or not saved}

    def unsynced_statistics(self) -> list[Tensor]:
        """BatchNorm's running averages, FP32, that each rank has of its own batch."""
        return self._unsynced

    def state(self) -> EngineState:
        """This rank's part of the training state, by reference: copy it before the next step. Between windows only."""
        assert self._engine.micro_steps % self.config.accumulation == 0, "a window of micro-batches is open"
        common = {"optimizer": self._kind, **self._dynamic_state()}
        return export_state(self._flats(), self._shapes, self.config.stage > 0, common)

    def load_state(self, saved: SavedState) -> None:
        """Put back what the `state` of all ranks gave, under this engine's stage, ranks, precision and offload.

        In place: who follows the masters need not know. With the settings that saved, training goes on to the bit. All
        ranks must call it. Raises CheckpointError, on all ranks, for a state of another network or kind of optimizer.
        """
        parameters = import_state(saved, self._flats(), self._shapes, self._optimizer, self._kind)
        self._set_dynamic_state(parameters.counters, parameters.loss_scaler)
        self._engine.micro_steps = self._engine.global_steps * self.config.accumulation

    def _dynamic_state(self) -> dict[str, Any]:
        """DeepSpeed's counters, and of fp16's dynamic loss scaler what moves; its settings are the ds config's."""
        scaler = self._optimizer.loss_scaler if self.config.dynamic_loss_scale else None
        return {
            "loss_scaler": None if scaler is None else {name: getattr(scaler, name) for name in _SCALER},
            "counters": {name: getattr(self._engine, name) for name in _COUNTERS},
        }

    def _set_dynamic_state(self, counters: Mapping[str, int], scaler: Mapping[str, float]) -> None:
        for name in _COUNTERS:
            setattr(self._engine, name, counters.get(name, 0))
        if self.config.dynamic_loss_scale:
            known = {name: value for name, value in scaler.items() if name in _SCALER}
            vars(self._optimizer.loss_scaler).update(known)

    def _flats(self) -> list[Flat]:
        return partitions_of(self._optimizer, self._engine.module, self._name_of, self._shapes)


def _read_finiteness_once(optimizer: Any) -> None:
    """Whether a step is applied is the one thing that the host must know in it: read it from the device once.

    DeepSpeed 0.19 reads it up to five times at stages 1 to 3: from a pass over all gradients, from the norm, and for
    each group from the same norm again. The norm alone decides: it is infinite or NaN if any gradient is.
    """
    import deepspeed.runtime.zero.stage_1_and_2 as stage_1_and_2
    from deepspeed.runtime.utils import is_invalid_grad_norm

    if hasattr(optimizer, "check_overflow") and not getattr(optimizer, "cpu_offload", False):
        optimizer.check_overflow = lambda partition_gradients=True: None
    last: list[Any] = [None, False]

    def ask(norm: Any) -> bool:
        if norm is not last[0]:
            last[:] = norm, is_invalid_grad_norm(norm)
        return last[1]

    stage_1_and_2.is_invalid_grad_norm = ask
