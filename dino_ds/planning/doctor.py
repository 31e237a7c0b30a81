"""`dino-ds doctor`: one page about this machine and this installation, each problem with its remedy."""

from __future__ import annotations

import datetime
import logging
import platform
import sys
from collections.abc import Mapping
from json import dumps
from pathlib import Path
from typing import Any

from tqdm import tqdm

from dino_ds.config.ds_config import resolve_ds_config
from dino_ds.config.recipe import Recipe
from dino_ds.options.machine import DoctorOptions
from dino_ds.planning.doctor_software import (
    FAILURE,
    WARNING,
    Finding,
    library_reports,
    look_at_compilers,
    look_at_software,
)

_BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_PROBLEMS = 2


def run(options: DoctorOptions, *, recipe: Recipe, ds: Mapping[str, Any], ds_path: str) -> None:
    """Print the page. Exits with code 2 where something stops training; warnings don't."""
    found, reports = list(look_at_software()), dict[str, str]()
    if all(finding.level != FAILURE for finding in found):
        found += _look_at_the_rest(options, recipe, ds, ds_path)
        reports = library_reports() if options.json and not options.quick else {}
    count = {level: sum(finding.level == level for finding in found) for level in (FAILURE, WARNING)}
    host, date = platform.node(), datetime.date.today().isoformat()
    if options.json:
        about = {"host": host, "date": date, "trains": not count[FAILURE]}
        page = dumps({**about, "findings": [vars(finding) for finding in found], "reports": reports}, indent=1)
    else:
        lines = [f"doctor on {host}, {date}"]
        for one in found:
            lines.append(f"{one.level:<5} {one.topic:<11}{one.text}")
            lines += [f"{'':<17}-> {one.remedy}"] if one.remedy else []
        verdict = "training would stop" if count[FAILURE] else "training can start"
        page = "\n".join([*lines, f"{verdict}: {count[FAILURE]} problems, {count[WARNING]} warnings"])
    print(page, flush=True)
    if count[FAILURE]:
        sys.exit(_PROBLEMS)


def _look_at_the_rest(options: DoctorOptions, recipe: Recipe, ds: Mapping[str, Any], ds_path: str) -> list[Finding]:
    """Findings that need torch, imported only now: the page is printed also if it does not load."""
    from dino_ds.planning.doctor_machine import look_at_gpus, look_at_network, look_at_system
    from dino_ds.planning.doctor_speed import measure_data, measure_sums

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # Batch sizes depend on machines that are not looked at.
    kept = {key: value for key, value in ds.items() if key not in _BATCH_KEYS}
    config = resolve_ds_config(kept, ds_path, recipe.data.global_batch, 1)
    looks = [lambda: look_at_gpus(config, recipe), lambda: look_at_compilers(config)]
    looks += [lambda: look_at_system(recipe, Path(options.run_dir)), look_at_network]
    looks += [] if options.quick else [lambda: measure_data(recipe), measure_sums]
    return [finding for look in tqdm(looks, "doctor", leave=False, disable=None) for finding in look()]
