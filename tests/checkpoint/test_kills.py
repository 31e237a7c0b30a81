"""A checkpoint is complete or absent, whenever and whichever rank dies."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

KILLS = 200 if os.environ.get("DINO_DS_SOAK") else 50


@pytest.mark.slow
def test_no_death_tears_a_checkpoint(tmp_path):
    """SIGKILL at random points of writing, on either of two ranks: nothing that was said to be complete is lost, what
    is found is whole, and the run goes on."""
    command = [sys.executable, "-m", "tests.checkpoint.kills", str(tmp_path), str(KILLS), "11"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout)
    assert result["kills"] == KILLS and not result["wrong"]
