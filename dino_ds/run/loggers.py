"""Sends metrics to Weights & Biases, if the ds JSON enables it, by DeepSpeed's monitor.

DeepSpeed itself does not get this section: its engine would synchronize the device in every step to write its loss.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dino_ds.config.ds_values import LOGGER
from dino_ds.engine import distributed
from dino_ds.errors import ConfigError, one_line
from dino_ds.run.metrics import Logger


def open_logger(section: Mapping[str, Any] | None, run_dir: Path, run_id: str) -> Logger | None:
    """Open the logger that a ds config's section enables, on rank 0 only. A resumed run continues under its `run_id`.

    Raises ConfigError for a package that is not installed, or a service that does not start.
    """
    if distributed.rank() != 0 or not section or not section["enabled"]:
        return None
    if find_spec(LOGGER) is None:
        raise ConfigError(
            f"the ds JSON's section {LOGGER} needs a package: pip install {LOGGER}, or set --ds.{LOGGER}.enabled false"
        )
    try:
        return _open_wandb(section, run_dir, run_id)
    except Exception as error:  # whatever a package, network or account raises
        raise ConfigError(
            f"{LOGGER} does not start: {_reason(error)}; set it up, or set --ds.{LOGGER}.enabled false"
        ) from None


def _reason(error: BaseException) -> str:
    """Why a service failed, in one line: the network's own error, if any, which libraries wrap in pages of text."""
    innermost = error
    while below := innermost.__cause__ or innermost.__context__:
        innermost = below
    return one_line(innermost if isinstance(innermost, OSError) else error, most=800)


def _open_wandb(section: Mapping[str, Any], run_dir: Path, run_id: str) -> Logger:
    """Open a W&B run. W&B's environment variables, such as WANDB_MODE=offline, act where the section sets nothing."""
    import wandb
    from deepspeed.monitor.config import WandbConfig
    from deepspeed.monitor.wandb import WandbMonitor

    variables = {"WANDB_DIR": str(run_dir), "WANDB_RUN_ID": run_id, "WANDB_NAME": run_dir.name, "WANDB_RESUME": "allow"}
    for name, value in variables.items():
        os.environ.setdefault(name, value)
    monitor = WandbMonitor(WandbConfig(**{"project": "dino_ds", **section}))
    return Logger(lambda values, step: monitor.write_events([(k, v, step) for k, v in values.items()]), wandb.finish)
