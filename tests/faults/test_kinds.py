"""Two real ranks, one fault: the exit codes, one clear line, nobody left over, and nothing lost."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.faults import jobs
from tests.faults.kinds import GROUPS, Kind
from tests.faults.scene import Scene
from tests.run.harness import image_folder, losses_of
from tests.sample import sampled

pytestmark = pytest.mark.faults

# At once, not in the background: which step is the last saved one then follows from the step of the fault.
SAVES = {"save_every": "3 steps", "save_in_background": "false"}
STEPS = 12
LOST_AT_MOST = 3


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return image_folder(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="module")
def old_run(images, tmp_path_factory):
    run = tmp_path_factory.mktemp("old") / "run"
    jobs.start(run, images, changes=SAVES, flags=("--max_steps", "6")).finish()
    return run


@pytest.fixture(scope="module")
def straight(images, tmp_path_factory):
    """A run of 12 steps without a fault, for each ds config."""
    runs: dict[tuple[str, ...], Path] = {}

    def of(kind: Kind) -> Path:
        ds = kind.ds if kind.exact else "zero1_fp32.json"
        if ds not in runs:
            runs[ds] = tmp_path_factory.mktemp("straight") / "run"
            jobs.start(runs[ds], images, changes=SAVES, ds=ds).finish()
        return runs[ds]

    return of


def _code(kind: Kind) -> int:
    """Of what a launcher would tell: 6 for all that ends one rank, whatever its own code is."""
    return 6 if 6 in kind.codes else max(kind.codes)


GROUP_OF = {kind.name: group for group, kinds in enumerate(GROUPS) for kind in kinds}
# Each start of a loader process takes seconds: what starts several of them is the last to be chosen.
CHEAP_FIRST = sorted(itertools.chain(*GROUPS), key=lambda kind: kind.name.startswith("loader process killed"))
WAYS_TO_END = sampled(CHEAP_FIRST, lambda kind: (GROUP_OF[kind.name], _code(kind), kind.says == "no progress"))


@pytest.mark.parametrize("kind", WAYS_TO_END, ids=lambda kind: kind.name)
def test_fault(kind, images, old_run, straight, tmp_path):
    place = Scene(tmp_path / "run", tmp_path / "images")
    shutil.copytree(images, place.images)
    if kind.old:
        shutil.copytree(old_run, place.run)
    check = kind.before(place)
    settings = {"changes": SAVES | kind.changes, "ds": kind.ds, "flags": kind.flags, "world": len(kind.codes)}
    job = jobs.start(place.run, place.images, fault=kind.fault, resume=kind.resumes, port=place.port, **settings)
    if kind.by_hand:
        kind.by_hand(job, place)
    outcome = job.wait()

    assert tuple(outcome.codes) == kind.codes, outcome.text
    assert kind.says in outcome.text, outcome.text
    assert "Traceback" not in outcome.text and len(outcome.errors) <= 2, outcome.text
    assert (not outcome.errors) == (set(kind.codes) <= {0, 75}), outcome.text
    assert outcome.orphans == []
    if check:
        check()
    if kind.goes_on:
        _goes_on(kind, place, outcome, settings, straight(kind))


def _goes_on(kind: Kind, place: Scene, outcome: jobs.Outcome, settings: dict, straight: Path) -> None:
    """Check that at most a save interval is lost, and the rest is as if nothing had happened."""
    if set(kind.codes) != {0}:
        reached = losses_of(place.run)[-1][0]
        saved = (place.run / "checkpoints/latest").read_text()
        assert reached - int(saved.removeprefix("step_")) <= (0 if set(kind.codes) == {75} else LOST_AT_MOST)
        again = jobs.start(place.run, place.images, resume=True, **settings).wait()
        assert set(again.codes) == {0}, again.text
    ours, theirs = losses_of(place.run), losses_of(straight)
    assert [step for step, _ in ours] == list(range(1, STEPS + 1))
    values = [loss for _, loss in theirs]
    assert [loss for _, loss in ours] == (values if kind.exact else pytest.approx(values, rel=1e-5))
    mine, other = (load_file(run / "teacher.safetensors") for run in (place.run, straight))
    assert not kind.exact or all(torch.equal(mine[name], other[name]) for name in other)
