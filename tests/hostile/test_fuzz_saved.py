"""Broken checkpoints whose checksums were made to fit: an older one is taken, or a CheckpointError. Without good sums:
tests/checkpoint/test_damage.py."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dino_ds.errors import CheckpointError
from tests.checkpoint.small_run import SmallRun, is_that_of
from tests.hostile.conftest import NUMEL
from tests.hostile.guard import examples, put_with_good_sums, raised_by, seal
from tests.hostile.mutate import broken_bytes, nasty

pytestmark = pytest.mark.faults


@pytest.fixture
def run(saved, tmp_path):
    return Path(shutil.copytree(saved, tmp_path / "run"))


def _choose(run) -> int | None:
    found = []

    def work() -> None:
        saved = SmallRun(run).choose().saved
        found.append(saved.manifest.step if is_that_of(saved, saved.manifest.step, NUMEL) else None)

    message = raised_by(work, CheckpointError)
    return found[0] if message is None else None


@pytest.mark.parametrize("name", ["rank_00000.safetensors", "whole_00000.safetensors"])
def test_broken_tensors_with_good_sums_are_other_tensors_or_refused(run, name):
    """Whoever can write the file can compute its sum: what it holds may be wrong, and does nothing else."""
    folder = run / "checkpoints/step_00000008"

    @examples(12)
    @given(data=broken_bytes((folder / name).read_bytes()))
    def check(data):
        put_with_good_sums(folder, name, data)
        _choose(run)

    check()


@examples(30)
@given(data=st.data())
def test_manifests_with_good_sums_and_odd_values(run, data):
    path = run / "checkpoints/step_00000008/manifest.json"
    text = path.read_text()
    body = json.loads(text)
    key = data.draw(st.sampled_from(sorted(body.keys() - {"crc32"})))
    value = st.one_of(nasty, st.integers(), st.none(), st.lists(st.integers(), max_size=2), st.just({"a": [{}]}))
    body[key] = data.draw(st.one_of(value, st.just([body[key]]), st.just({"x": body[key]})))
    path.write_text(seal(body))
    _choose(run)
    path.write_text(text)
