"""Sends metrics to Weights & Biases and to trackio, as far as the ds JSON enables them.

DeepSpeed does not get these sections: its engine would synchronize the device in every step to write its loss.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dino_ds.config.ds_values import LOGGERS
from dino_ds.engine import distributed
from dino_ds.errors import ConfigError, one_line
from dino_ds.run.metrics import Logger


def open_loggers(ds: Mapping[str, Any], run_dir: Path, run_id: str) -> tuple[list[Logger], list[str]]:
    """Open the loggers that a ds config enables, on rank 0 only; a resumed run continues under its `run_id`. Returns
    them, and a warning for a trackio server that can't be reached, without which the run trains.

    Raises ConfigError for a package that is not installed, and for W&B if it does not start.
    """
    loggers, warnings = list[Logger](), list[str]()
    for name, opener in zip(LOGGERS, (_open_wandb, _open_trackio), strict=True):
        if distributed.rank() != 0 or not ds.get(name, {}).get("enabled"):
            continue
        off = f"set --ds.{name}.enabled false"
        if find_spec(name) is None:
            raise ConfigError(f"the ds JSON's section {name} needs a package: pip install {name}, or {off}")
        try:
            loggers.append(opener(ds[name], run_dir, run_id))
        except Exception as error:  # whatever a package, network or account raises
            if name == "wandb":
                raise ConfigError(f"{name} does not start: {_reason(error)}; set it up, or {off}") from None
            warnings.append(f"warning  {name} does not start: {_reason(error)}; metrics.jsonl has all metrics")
    return loggers, warnings


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
    return Logger(
        "wandb", lambda values, step: monitor.write_events([(k, v, step) for k, v in values.items()]), wandb.finish
    )


def _open_trackio(section: Mapping[str, Any], run_dir: Path, run_id: str) -> Logger:
    """Open a trackio run, whose files are in TRACKIO_DIR unless the section names a Space or a server."""
    import trackio

    names = {"project": "dino_ds"} | {key: value for key, value in section.items() if key != "enabled"}
    run = trackio.init(name=f"{run_dir.name}-{run_id[:8]}", resume="allow", embed=False, **names)
    return Logger("trackio", lambda values, step: run.log(dict(values), step), run.finish)
