"""The part of a ds config that a rehearsed micro-batch depends on."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from dino_ds.config.ds_values import DsConfig, PerformanceOptions


@dataclass(frozen=True)
class RehearsalSettings:
    """The settings of a rehearsed micro-batch; window: micro-batches of a step.

    Those that are not rehearsed have one value, so that a rehearsal serves many configs: compiled blocks, a teacher in
    shards, and a copy of the EMA teacher in low precision, whose matrices are cast at each use here.
    """

    precision: str
    checkpoint_blocks: int | str
    checkpoint_on_cpu: bool
    performance: PerformanceOptions
    window: int


def settings_of(config: DsConfig, on_gpu: bool) -> RehearsalSettings:
    """The settings of a config's micro-batch."""
    performance = dataclasses.replace(
        config.performance,
        compile="off",
        frozen_teacher="whole",
        deterministic=False,
        attention_backend="auto",
        teacher_copy=False,
    )
    on_host = config.checkpoint_on_cpu and on_gpu and bool(config.checkpoint_blocks)
    return RehearsalSettings(config.precision, config.checkpoint_blocks, on_host, performance, config.accumulation)
