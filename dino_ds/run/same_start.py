"""Whether all ranks start the same run: software, code, settings and run folder."""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dino_ds.basics.hashing import hash_code
from dino_ds.config.begun_with import path_keys
from dino_ds.config.recipe import Recipe
from dino_ds.config.schema import flat_values, flatten
from dino_ds.engine import distributed
from dino_ds.errors import ConfigError
from dino_ds.run.environment import versions


def check_same_start(run_dir: Path, recipe: Recipe, ds: Mapping[str, Any]) -> None:
    """Raises ConfigError, on all ranks, where a rank starts something else than rank 0; names the first difference.

    Paths may differ, as those of a disk may by machine; images are compared by content later.
    """
    mine: dict[str, Any] = {**versions(), "the code of dino_ds": hash_code(), "the run folder's name": run_dir.name}
    mine |= {key: value for key, value in flat_values(recipe).items() if key not in path_keys()}
    mine |= {f"ds.{key}": value for key, value in flatten(dict(ds)).items()}
    digest = hashlib.sha256(json.dumps(mine, sort_keys=True, default=str).encode()).hexdigest()
    starts = distributed.gather_objects((socket.gethostname(), digest))
    first_host, expected = starts[0]
    rank, host = next(((rank, host) for rank, (host, digest) in enumerate(starts) if digest != expected), (0, ""))
    if not rank:
        return
    first, facts = (distributed.gather_objects(mine)[number] for number in (0, rank))
    name = next(key for key in {**first, **facts} if first.get(key) != facts.get(key))
    raise ConfigError(
        f"{name} is {facts.get(name)} for rank {rank} on {host}, and {first.get(name)} for rank 0 on {first_host}: "
        "make it the same for all ranks",
        said_by_me=distributed.rank() == 0,
    )
