"""Sends metrics to the trackers that the ds JSON enables: Weights & Biases (by DeepSpeed's monitor), MLflow.

DeepSpeed itself does not get these sections: its engine would synchronize the device in every step to write its loss.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dino_ds.engine import distributed
from dino_ds.errors import ConfigError, one_line
from dino_ds.run.metrics import Logger

_PACKAGES = {
    "wandb": ("wandb", "wandb"),
    "mlflow": ("mlflow", "mlflow-skinny"),
}
"""The package that each section needs: its name in Python and for pip."""


def open_loggers(sections: Mapping[str, Any], run_dir: Path, run_id: str) -> dict[str, Logger]:
    """Open the loggers that a ds config enables, by name, on rank 0 only. A resumed run continues under its `run_id`.

    Raises ConfigError for a package that is not installed, or a service that does not start.
    """
    opened: dict[str, Logger] = {}
    if distributed.rank() != 0:
        return opened
    for name, values in sections.items():
        package, pip = _PACKAGES[name]
        if not values["enabled"]:
            continue
        if find_spec(package) is None:
            raise ConfigError(
                f"the ds JSON's section {name} needs a package: pip install {pip}, or set --ds.{name}.enabled false"
            )
        section = {key: value for key, value in values.items() if key != "enabled"}
        try:
            opened[name] = _OPENERS[name](section, run_dir, run_id)
        except Exception as error:  # whatever a package, network or account raises
            raise ConfigError(
                f"{name} does not start: {_reason(error)}; set it up, or set --ds.{name}.enabled false"
            ) from None
    return opened


def _reason(error: BaseException) -> str:
    """Why a service failed, in one line: the network's own error, if any, which libraries wrap in pages of text."""
    innermost = error
    while below := innermost.__cause__ or innermost.__context__:
        innermost = below
    return one_line(innermost if isinstance(innermost, OSError) else error, most=800)


def _open_wandb(section: dict[str, Any], run_dir: Path, run_id: str) -> Logger:
    """Open a W&B run. W&B's environment variables, such as WANDB_MODE=offline, act where the section sets nothing."""
    import wandb
    from deepspeed.monitor.config import WandbConfig
    from deepspeed.monitor.wandb import WandbMonitor

    variables = {"WANDB_DIR": str(run_dir), "WANDB_RUN_ID": run_id, "WANDB_NAME": run_dir.name, "WANDB_RESUME": "allow"}
    for name, value in variables.items():
        os.environ.setdefault(name, value)
    return _wrap_monitor(WandbMonitor(WandbConfig(enabled=True, **{"project": "dino_ds", **section})), wandb.finish)


def _wrap_monitor(monitor: Any, close: Callable[[], object]) -> Logger:
    """Wrap one of DeepSpeed's monitors."""
    return Logger(lambda values, step: monitor.write_events([(k, v, step) for k, v in values.items()]), close)


def _open_mlflow(section: dict[str, Any], run_dir: Path, run_id: str) -> Logger:
    import mlflow

    if "tracking_uri" in section:
        mlflow.set_tracking_uri(section["tracking_uri"])
    with _soon_refused():
        uri = mlflow.get_tracking_uri()
        print(f"mlflow   connecting to {uri.rpartition('@')[2]}", file=sys.stderr, flush=True)  # without a password
        experiment = mlflow.set_experiment(section.get("experiment", "dino_ds")).experiment_id
        ours = f"tags.run_id = '{run_id}'"
        runs: list[Any] = mlflow.search_runs([experiment], filter_string=ours, output_format="list")
        known = {"run_id": runs[0].info.run_id} if runs else {"run_name": run_dir.name, "tags": {"run_id": run_id}}
        mlflow.start_run(**known, log_system_metrics=False)
    return Logger(lambda values, step: mlflow.log_metrics(dict(values), step=step), mlflow.end_run)


@contextmanager
def _soon_refused() -> Iterator[None]:
    """Let MLflow give up on an absent server within seconds instead of minutes: all ranks wait at a start."""
    limits = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}
    ours = {name: value for name, value in limits.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)


_OPENERS = {"wandb": _open_wandb, "mlflow": _open_mlflow}
