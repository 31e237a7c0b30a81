"""The values of a ds JSON by which a run is built: `DsConfig`, and its section "dino_ds", `PerformanceOptions`.

`dino_ds.config.ds_config` loads and resolves them. No torch and no DeepSpeed here.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Strict
from pydantic.dataclasses import dataclass

from dino_ds.config.fields import option
from dino_ds.errors import ConfigError

COPIED_WEIGHTS = 500_000_000
"""Weights of the largest teacher that is copied by default, a ViT-L with its heads. Without the copy, casts would be
a quarter of its kernel launches; for larger teachers memory is worth more."""
LOGGERS = ("wandb", "trackio")
"""The sections of metric loggers. They are not passed to DeepSpeed, which would synchronize the device in each step."""
Bool = Annotated[bool, Strict()]


def _way_to_compile(value: object) -> object:
    """The mode that true or false means, in ds JSONs from before there were several modes."""
    return {True: "default", False: "off"}[value] if isinstance(value, bool) else value


_Compile = Annotated[Literal["off", "default", "max-autotune", "reduce-overhead"], BeforeValidator(_way_to_compile)]


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class PerformanceOptions:
    """The section "dino_ds" of a ds JSON: how fast, not what is learned."""

    attention: Literal["sdpa", "varlen"] = option("sdpa", "varlen: one kernel for all sizes (CUDA)")
    packed: Bool = option(True, "crops of all sizes in one pass (default true); exact")
    channels_last: Bool | None = option(
        None, "convolutions with the channels innermost in memory (default: on a GPU); exact"
    )
    cls_only_last_block: Bool = option(True, "the last block for the CLS token alone (default true); exact")
    compile: _Compile = option(
        "off",
        "torch.compile each block; same up to rounding. reduce-overhead: CUDA graphs; true = default, false = off",
        stages=(0, 1, 2),
    )
    teacher_copy: Bool | None = option(
        None, "keep the teacher's matrices in bf16 or fp16 too; exact (default: on a GPU, up to 5e8 weights)"
    )
    deterministic: Bool = option(False, "kernels that add up in the same order in every run (GPU; slower)")


@dataclasses.dataclass(frozen=True)
class DsConfig:
    """A ds JSON resolved for one run. `raw` is the JSON with its open values filled in; `notes` say which these were.

    micro_batch: images per rank; accumulation: micro-batches per step; clipping: largest global gradient norm,
    0 = none; checkpoint_blocks: how many blocks are recomputed, or "all".
    """

    raw: dict[str, Any]
    micro_batch: int
    accumulation: int
    stage: int
    precision: str
    dynamic_loss_scale: bool
    clipping: float
    checkpoint_blocks: int | str
    performance: PerformanceOptions
    notes: list[str] = dataclasses.field(default_factory=list)

    @property
    def for_deepspeed(self) -> dict[str, Any]:
        return {key: value for key, value in self.raw.items() if key not in LOGGERS}

    def keeps_teacher_copy(self, on_gpu: bool, weights: int) -> bool:
        """Whether the teacher's matrices are kept in the engine's precision too; by default for small networks on a
        GPU, where launching the casts takes time."""
        asked = self.performance.teacher_copy
        return self.precision != "fp32" and (on_gpu and weights <= COPIED_WEIGHTS if asked is None else asked)

    def copies_gradients(self, world_size: int) -> bool:
        """Whether DeepSpeed copies gradients into buckets. A single process has no one to reduce with: at stages 0
        and 1 its gradients stay in place, unless the optimizer takes them on another device or in another dtype."""
        zero = self.raw.get("zero_optimization", {})
        if self.stage != 1 or world_size > 1 or zero.get("overlap_comm") or offloads_optimizer(zero):
            return self.stage > 0
        return self.raw.get("data_types", {}).get("grad_accum_dtype", self.precision) not in (self.precision, None)


def offloads_optimizer(zero: dict[str, Any]) -> bool:
    """Whether a zero_optimization section puts the optimizer's state on another device."""
    return bool(zero.get("offload_optimizer", {}).get("device", "none") != "none")


def offloads_weights(zero: dict[str, Any]) -> bool:
    return bool(zero.get("offload_param", {}).get("device", "none") != "none")


MEETING = {
    "lars": ("the norm of a layer is summed over ranks", "sgd"),
    "muon": ("ranks exchange slices of matrices", "adamw"),
}
"""Kinds of optimizer that communicate in the middle of a step, what their ranks do, and the kind to take instead."""


def check_offload(config: DsConfig, kind: str) -> None:
    """Raises ConfigError for an optimizer that communicates inside its step and is offloaded to the host."""
    if kind in MEETING and offloads_optimizer(config.raw["zero_optimization"]):
        does, instead = MEETING[kind]
        raise ConfigError(
            f"optimizer.kind {kind} does not go with zero_optimization.offload_optimizer: {does} in the middle of a "
            f"step that runs on the host; remove the one, or set optimizer.kind {instead}"
        )
