"""An installed copy has what a checkout has beside the package."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


def test_a_copy_without_its_checkout_has_recipes_and_ds_configs(tmp_path):
    """As `pip install .` copies the package; the default --ds_config is found from any folder."""
    build = [
        "setup.py",
        "-q",
        "egg_info",
        "--egg-base",
        str(tmp_path),
        "build_py",
        "--build-lib",
        str(tmp_path / "lib"),
    ]
    subprocess.run([sys.executable, *build], cwd=REPOSITORY, check=True, capture_output=True, timeout=120)
    copy = tmp_path / "lib/dino_ds"
    for pattern in ("ds_configs/**/*.json", "dino_ds/recipes/*.yaml", "dino_ds/data/photos/*.jpg"):
        there = {path.relative_to(REPOSITORY) for path in REPOSITORY.glob(pattern)}
        assert there
        for path in there:
            copied = copy / path.relative_to("dino_ds") if path.parts[0] == "dino_ds" else copy / path
            assert copied.read_bytes() == (REPOSITORY / path).read_bytes()
    program = "from dino_ds.config.ds_config import find_ds_config; print(find_ds_config('ds_configs/zero0_fp32.json'))"
    found = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "lib")},
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert found.stdout.strip() == str(copy / "ds_configs/zero0_fp32.json")
