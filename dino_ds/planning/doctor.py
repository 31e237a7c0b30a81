"""`dino-ds doctor`: one page about this machine and this installation, each problem with its remedy."""

from __future__ import annotations

import datetime
import logging
import platform
import sys
from collections.abc import Callable, Mapping
from json import dumps
from pathlib import Path
from typing import Any

from tqdm import tqdm

from dino_ds.config.ds_config import DsConfig, resolve_ds_config
from dino_ds.config.recipe import Recipe
from dino_ds.options.machine import DoctorOptions
from dino_ds.planning.doctor_software import (
    FAILURE,
    WARNING,
    Finding,
    deepspeed_report,
    look_at_compilers,
    look_at_software,
    torch_report,
)

_BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_PROBLEMS = 2
Look = Callable[[], list[Finding]]


def run(options: DoctorOptions, *, recipe: Recipe, ds: Mapping[str, Any], ds_path: str) -> None:
    """Print the page. Exits with code 2 where something stops training; warnings don't."""
    found, reports = look_at_software(), dict[str, str]()
    if all(finding.level != FAILURE for finding in found):
        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        looks = _looks(recipe, _resolve(ds, ds_path, recipe), Path(options.run_dir), options.quick)
        for look in tqdm(looks, "doctor", leave=False, disable=None):
            found += look()
        if options.json and not options.quick:
            reports = {"deepspeed": deepspeed_report(), "torch": torch_report()}
    problems = sum(finding.level == FAILURE for finding in found)
    result = {
        "host": platform.node(),
        "date": datetime.date.today().isoformat(),
        "trains": problems == 0,
        "findings": [vars(finding) for finding in found],
        "reports": reports,
    }
    # Also where torch does not load.
    print(dumps(result, indent=1) if options.json else _page(result, found), flush=True)
    if problems:
        sys.exit(_PROBLEMS)


def _resolve(ds: Mapping[str, Any], path: str, recipe: Recipe) -> DsConfig:
    """The ds config without its batch sizes, which depend on machines that are not looked at."""
    kept = {key: value for key, value in ds.items() if key not in _BATCH_KEYS}
    return resolve_ds_config(kept, path, recipe.data.global_batch, 1)


def _looks(recipe: Recipe, config: DsConfig, run_dir: Path, quick: bool) -> list[Look]:
    """What is looked at in turn; these rooms need torch, so that they are imported only now."""
    from dino_ds.planning.doctor_machine import look_at_gpus, look_at_network, look_at_system
    from dino_ds.planning.doctor_speed import measure_data, measure_sums

    looks: list[Look] = [lambda: look_at_gpus(config, recipe), lambda: look_at_compilers(config)]
    looks += [lambda: look_at_system(recipe, run_dir), look_at_network]
    return looks if quick else [*looks, lambda: measure_data(recipe), measure_sums]


def _page(result: dict[str, Any], found: list[Finding]) -> str:
    lines = [f"doctor on {result['host']}, {result['date']}"]
    for finding in found:
        lines.append(f"{finding.level:<5} {finding.topic:<11}{finding.text}")
        if finding.remedy:
            lines.append(f"{'':<17}-> {finding.remedy}")
    count = {level: sum(finding.level == level for finding in found) for level in (FAILURE, WARNING)}
    verdict = "training can start" if result["trains"] else "training would stop"
    return "\n".join([*lines, f"{verdict}: {count[FAILURE]} problems, {count[WARNING]} warnings"])
