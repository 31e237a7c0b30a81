"""Builds DeepSpeed's engine: sets what the ds config leaves open, and removes work that only costs time."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from dino_ds.config.ds_values import DsConfig
from dino_ds.engine import distributed
from dino_ds.engine.placement import let_go_of
from dino_ds.errors import ConfigError
from dino_ds.models.network import Network


def initialize(network: Network, optimizer: torch.optim.Optimizer, config: DsConfig, clips: bool) -> tuple[Any, Any]:
    """Build DeepSpeed's engine and optimizer; with `clips` DeepSpeed clips by the norm of the whole gradient.

    Raises ConfigError if DeepSpeed refuses the config.
    """
    import deepspeed

    # DeepSpeed's throughput timer, whose figures nobody reads, synchronizes the device twice per micro-batch.
    raw = config.for_deepspeed | {"timers": {"throughput": {"enabled": False}}}
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
        let_go_of(network)
    if distributed.world_size() == 1:
        _sum_with_nothing(engine, zero_optimizer, config)
    if config.dynamic_loss_scale:
        # A window made NaN to stop the run is no error: the training loop checks `Engine.scale_is_exhausted` instead.
        zero_optimizer.loss_scaler.raise_error_at_min_scale = False
    _read_finiteness_once(zero_optimizer)
    _gather_weights_at_once(logged="comms_logger" in config.raw)
    return engine, zero_optimizer


def _sum_with_nothing(engine: Any, optimizer: Any, config: DsConfig) -> None:
    """Let a single process use its gradients as they are at stages 0 and 1. DeepSpeed would copy each of them into a
    bucket and back, two kernels per parameter, and divide the sum by 1."""
    if config.stage == 0:
        engine.enable_backward_allreduce = False
    elif not config.copies_gradients(1):
        optimizer.contiguous_gradients = False  # no memory for buckets
        optimizer.reduce_gradients = lambda **_: optimizer.overlapping_partition_gradients_reduce_epilogue()


def _read_finiteness_once(optimizer: Any) -> None:
    """Let DeepSpeed read from the device once per step whether to apply the step, all that the host must know.

    DeepSpeed 0.19 reads this up to five times at stages 1 to 3: from a pass over all gradients, from the norm, and for
    each group from the same norm again. The norm alone decides: it is infinite or NaN if any gradient is.
    """
    import deepspeed.runtime.zero.stage_1_and_2 as stage_1_and_2

    if hasattr(optimizer, "check_overflow") and not getattr(optimizer, "cpu_offload", False):
        optimizer.check_overflow = lambda partition_gradients=True: None
    stage_1_and_2.is_invalid_grad_norm = _AskedOnce(lambda norm: not 0 <= float(norm) < math.inf)


def _gather_weights_at_once(logged: bool) -> None:
    """Let ZeRO 1 and 2 gather the new weights of all parameter groups (58 for a ViT-L with learning rates by layer) in
    one collective. If collectives are `logged`, DeepSpeed's own remain, one per group, with the same result."""
    from deepspeed.runtime import bf16_optimizer, utils
    from deepspeed.runtime.zero import stage_1_and_2

    for module in (stage_1_and_2, bf16_optimizer):
        module.all_gather_dp_groups = utils.all_gather_dp_groups if logged else _gather_groups


def _gather_groups(groups_flat: Any, partitioned_param_groups: Any, dp_process_group: list[Any], **_: int) -> None:
    shards = [parts[distributed.rank()] for parts in partitioned_param_groups]
    distributed.gather_in_place(groups_flat, shards, dp_process_group[0])


class _AskedOnce:
    """A question about a tensor, whose answer is kept until it is asked about another tensor."""

    def __init__(self, ask: Callable[[Any], bool]) -> None:
        self._ask, self._answer = ask, False
        self._asked_of: Any = None

    def __call__(self, tensor: Any) -> bool:
        if tensor is not self._asked_of:
            self._asked_of, self._answer = tensor, self._ask(tensor)
        return self._answer
