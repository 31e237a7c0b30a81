"""A checkpoint is complete or absent, whenever and whichever rank dies."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.run.harness import REPOSITORY


@pytest.mark.slow
@pytest.mark.parametrize("kills", [6, pytest.param(200, marks=pytest.mark.full)])
def test_no_death_tears_a_checkpoint(tmp_path, kills):
    """SIGKILL at random points of writing, on either of two ranks: nothing that was said to be complete is lost, what
    is found is whole, and the run goes on."""
    command = [sys.executable, "-m", "tests.checkpoint.kills", str(tmp_path), str(kills), "11"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout)
    assert result["kills"] == kills and not result["wrong"]
