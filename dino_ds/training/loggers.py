"""Where else metrics go: Weights & Biases and Comet by DeepSpeed's monitors, and MLflow, as the ds JSON says.

DeepSpeed itself does not see these sections: its engine would wait for the device in every step to write its own loss.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from dino_ds import distributed
from dino_ds.errors import ConfigError, one_line

_PACKAGES = {"wandb": ("wandb", "wandb"), "comet": ("comet_ml", "comet_ml"), "mlflow": ("mlflow", "mlflow-skinny")}
"""Section -> the package that it needs, and what pip calls it."""


class Logger(Protocol):
    """A service that takes metrics; it may fail with any error."""

    def write(self, values: Mapping[str, float], step: int) -> None: ...

    def close(self) -> None: ...


def open_loggers(sections: Mapping[str, Any], run_dir: Path, run_id: str) -> dict[str, Logger]:
    """Those that the `loggers` of a ds config turn on, on rank 0. A resumed run goes on under its `run_id`.

    Raises ConfigError for a package that is not installed, or a service that does not start.
    """
    opened: dict[str, Logger] = {}
    if distributed.rank() != 0:
        return opened
    for name, given in sections.items():
        package, pip = _PACKAGES[name]
        if not given["enabled"]:
            continue
        if find_spec(package) is None:
            raise ConfigError(
                f"the ds JSON's section {name} needs a package: pip install {pip}, or set --ds.{name}.enabled false"
            )
        section = {key: value for key, value in given.items() if key != "enabled"}
        try:
            opened[name] = _OPENERS[name](section, run_dir, run_id)
        except Exception as error:  # of any package, network or account
            raise ConfigError(
                f"{name} does not start: {one_line(error)}; set it up, or set --ds.{name}.enabled false"
            ) from None
    return opened


class _Monitor:
    """One of DeepSpeed's monitors."""

    def __init__(self, monitor: Any, close: Callable[[], object]) -> None:
        self._monitor, self._close = monitor, close

    def write(self, values: Mapping[str, float], step: int) -> None:
        self._monitor.write_events([(name, value, step) for name, value in values.items()])

    def close(self) -> None:
        self._close()


def _open_wandb(section: dict[str, Any], run_dir: Path, run_id: str) -> Logger:
    """What is not in the section is in W&B's own variables, such as WANDB_MODE=offline."""
    import wandb
    from deepspeed.monitor.config import WandbConfig
    from deepspeed.monitor.wandb import WandbMonitor

    own = {"WANDB_DIR": str(run_dir), "WANDB_RUN_ID": run_id, "WANDB_NAME": run_dir.name, "WANDB_RESUME": "allow"}
    for name, value in own.items():
        os.environ.setdefault(name, value)
    return _Monitor(WandbMonitor(WandbConfig(enabled=True, **{"project": "dino_ds", **section})), wandb.finish)


def _open_comet(section: dict[str, Any], run_dir: Path, run_id: str) -> Logger:
    from deepspeed.monitor.comet import CometMonitor
    from deepspeed.monitor.config import CometConfig

    named = {"experiment_key": run_id.ljust(32, "0")[:50], "experiment_name": run_dir.name, "project": "dino_ds"}
    monitor = CometMonitor(CometConfig(enabled=True, samples_log_interval=0, **{**named, **section}))
    return _Monitor(monitor, monitor.experiment.end)


class _MLflow:
    def __init__(self, section: dict[str, Any], run_dir: Path, run_id: str) -> None:
        import mlflow

        if "tracking_uri" in section:
            mlflow.set_tracking_uri(section["tracking_uri"])
        self._mlflow = mlflow
        experiment = mlflow.set_experiment(section.get("experiment", "dino_ds")).experiment_id
        ours = f"tags.run_id = '{run_id}'"
        found: list[Any] = mlflow.search_runs([experiment], filter_string=ours, output_format="list")
        known = {"run_id": found[0].info.run_id} if found else {"run_name": run_dir.name, "tags": {"run_id": run_id}}
        mlflow.start_run(**known, log_system_metrics=False)

    def write(self, values: Mapping[str, float], step: int) -> None:
        self._mlflow.log_metrics(dict(values), step=step)

    def close(self) -> None:
        self._mlflow.end_run()


_OPENERS: dict[str, Callable[[dict[str, Any], Path, str], Logger]] = {
    "wandb": _open_wandb,
    "comet": _open_comet,
    "mlflow": _MLflow,
}
