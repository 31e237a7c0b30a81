"""`dino-ds bench tune` finds what is made up for it: a memory limit, a slow loader, a lever that gains, and noise."""

from __future__ import annotations

import itertools
import json
import shlex

import pytest

from dino_ds.commands import tune
from dino_ds.config.ds_config import load_ds_config
from dino_ds.config.loading import load_recipe
from dino_ds.config.stages import Request
from dino_ds.errors import ConfigError, DataError, OutOfMemory
from dino_ds.options.commands import BenchTuneOptions, find_command
from dino_ds.options.flags import parse_flags, read
from dino_ds.planning import bench, measure
from tests.planning.measure.tiny import TINY

GIVEN = {**TINY, "data.global_batch": "64", "crops.num_local": "2"}
MOST_IMAGES = 16
"""Micro-batch beyond which the made-up machine has no memory, whatever the planner predicts."""


class Machine:
    """Answers trials as a machine would on which a step and a micro-batch have a cost of their own, an image costs half
    without recomputation, and each loader process loads 15 images/s of the 22 that the step takes."""

    def __init__(self):
        self.calls, self.noise, self.interrupt_at = [], 0.0, None

    def __call__(self, function, threads, limits, seconds, **words):
        self.calls.append(function.__name__)
        if len(self.calls) == self.interrupt_at:
            raise KeyboardInterrupt
        return measure.ChildResult(self._step(words), 0.0, 0.0)

    def _step(self, words):
        setting, workers = words["setting"], words["setting"]["recipe"]["data"]["workers"]
        micro = setting["ds"]["train_micro_batch_size_per_gpu"]
        if micro > MOST_IMAGES:
            raise measure.ChildOutOfMemory(f"a measuring process took {micro} GiB")
        recomputed = "activation_checkpointing" in setting["ds"]
        images = setting["batch"]
        parts = {"student": images * (1 + recomputed) / 30 + 0.1 * images / micro, "optimizer": 0.1}
        wobble = [1.0, 1.0 + self.noise, 1.0 - self.noise, 1.0]
        result = {"parts": parts, "peak_mib": 100.0 * micro}
        if words.get("real_images"):
            result |= {"loader": 15.0 * (4 if workers is None else max(1, workers)), "stages": {"read": 1.0}}
            parts["data"] = max(0.0, images / result["loader"] - sum(parts.values()))
        return result | {"seconds": [sum(parts.values()) * w for w in wobble]}


@pytest.fixture
def machine(monkeypatch):
    made = Machine()
    monkeypatch.setattr(bench.tune.measure, "run_in_child", made)
    monkeypatch.setattr(bench.tune.distributed, "usable_cores", lambda: [0, 1, 2, 3])
    monkeypatch.setattr(bench.tune, "_busy_seconds", lambda: 0.0)
    return made


def _tune(tmp_path, ds="ds_configs/zero2_bf16_checkpointing.json", changes=(), ds_changes=(), **options):
    tmp_path.mkdir(exist_ok=True)
    request = Request(
        {"config": "vitti16"},
        {**GIVEN, "data.source": "photos", **dict(changes)},
        {"gradient_clipping": 1, **dict(ds_changes)},
    )
    files = {"recipe": load_recipe("vitti16", request.recipe), "ds": load_ds_config(ds, request.ds), "ds_path": ds}
    return tune.run(BenchTuneOptions(**{"out": str(tmp_path / "tune.html"), **options}), **files, request=request)


def test_limit_loader_and_lever_that_are_made_up_are_found(machine, tmp_path):
    """The largest micro-batch is the limit's, the fewest loader processes without a wait are two, and what gains is to
    leave recomputation out; the ratio is that of the made-up costs."""
    result = _tune(tmp_path, changes={"data.global_batch": "16"})
    facts = result.data
    waits = [facts["loaders"][f"loader processes: {n}"]["wait"] for n in (1, 2)]
    assert "--data.workers 2" in facts["command"] and waits[0] > 0.2 > tune.ENOUGH_WAIT > waits[1]
    as_given, tuned = (facts["pair"][name]["images_per_second"] for name in ("as given", "tuned"))
    assert as_given == pytest.approx(16 / (16 * 2 / 30 + 0.2))
    assert tuned == pytest.approx(16 / (16 / 30 + 0.2)) and f"{tuned / as_given:.2f} times" in facts["verdict"]
    assert "this device has no fp16" in facts["skipped"]["zero2_fp16"]
    page = (tmp_path / "tune.html").read_text()
    assert page.count("<svg") == 3 and "Levers" in page and json.loads((tmp_path / "tune.json").read_text())["result"]


def test_the_printed_command_gives_the_settings_that_were_found(machine, tmp_path):
    """Read again, it is the recipe that was given with the loader processes that were found, and the best ds JSON."""
    for resume, written in ((False, None), (True, str(tmp_path / "tuned"))):
        facts = _tune(tmp_path, write=written, resume=resume).data
        words = shlex.split(facts["command"])
        command, rest = find_command(words[1:])
        _, files = read(command, parse_flags(command, rest))
        assert files["recipe"] == load_recipe("vitti16", {**GIVEN, "data.source": "photos", "data.workers": "2"})
        assert files["ds"]["train_micro_batch_size_per_gpu"] == MOST_IMAGES
        assert files["ds"]["gradient_accumulation_steps"] == 4 and "activation_checkpointing" not in files["ds"]
        assert files["ds"]["gradient_clipping"] == 1, "what the user has changed is changed in what was found too"


def test_a_limit_below_the_prediction_is_found_by_running(machine, tmp_path):
    facts = _tune(tmp_path).data
    rates = {name: size.get("images_per_second") for name, size in facts["sizes"].items()}
    assert rates[f"micro-batch {MOST_IMAGES}"] and not rates[f"micro-batch {2 * MOST_IMAGES}"]
    assert "took 32 GiB" in facts["limited_by"] and "as given, it does not run" in facts["verdict"]


def test_what_is_within_the_spread_is_equal_and_the_smaller_micro_batch_is_taken(machine, tmp_path):
    machine.noise = 0.5
    facts = _tune(tmp_path, ds="ds_configs/zero2_bf16.json").data
    rates = {name: size["images_per_second"] for name, size in facts["sizes"].items() if not size["failed"]}
    taken = next(word for before, word in itertools.pairwise(facts["command"].split()) if "micro_batch" in before)
    assert int(taken) < MOST_IMAGES and rates[f"micro-batch {taken}"] < rates[f"micro-batch {MOST_IMAGES}"]


def test_what_is_no_faster_than_the_settings_as_given_is_not_recommended(machine, tmp_path):
    given = {"train_micro_batch_size_per_gpu": 16, "gradient_accumulation_steps": 4}
    facts = _tune(tmp_path, ds="ds_configs/zero2_bf16.json", ds_changes=given, changes={"data.workers": "2"}).data
    assert "no setting is faster" in facts["verdict"] and "--data.workers 2" in facts["command"]
    assert "--ds.train_micro_batch_size_per_gpu 16" in facts["command"]


def test_what_was_measured_beside_other_programs_is_not_believed(machine, tmp_path, monkeypatch):
    times = iter(range(0, 10**6, 1000))
    monkeypatch.setattr(bench.tune, "_busy_seconds", lambda: float(next(times)))
    facts = _tune(tmp_path, changes={"data.global_batch": "16"}).data
    assert facts["verdict"].startswith("not reliable") and "checkpointing" in facts["command"]


def test_an_interrupted_search_shows_what_is_known_and_goes_on(machine, tmp_path):
    machine.interrupt_at = 9
    result = _tune(tmp_path)
    assert isinstance(result.error, KeyboardInterrupt) and "Micro-batches" in result.page
    machine.interrupt_at, before = None, len(machine.calls)
    with pytest.raises(ConfigError, match=r"tune.html exists: --resume goes on"):
        _tune(tmp_path)
    whole = _tune(tmp_path, resume=True)
    assert whole.error is None and "--data.workers 2" in whole.data["command"]
    resumed, again = len(machine.calls) - before, 2  # the micro-batches that had failed
    machine.calls.clear()
    _tune(tmp_path / "again")
    assert resumed - again + 8 == len(machine.calls)


@pytest.mark.parametrize(
    ("options", "says"),
    [({"out": "tune.pdf"}, "must be an .html file"), ({"ranks": 3}, "global batch 64 is not a multiple of ranks 3")],
)
def test_what_can_not_be_tuned_is_refused(machine, tmp_path, options, says):
    with pytest.raises(ConfigError, match=says):
        _tune(tmp_path, **options)


def test_images_that_are_not_there_are_refused_before_a_trial(machine, tmp_path):
    with pytest.raises(DataError, match="nowhere"):
        _tune(tmp_path, changes={"data.source": "folder", "data.root": str(tmp_path / "nowhere")})
    assert not machine.calls


def test_a_batch_that_never_fits_names_the_largest_part(machine, tmp_path):
    result = _tune(tmp_path, memory_gib=0.01)
    assert isinstance(result.error, OutOfMemory) and "most of it for libraries" in str(result.error)
    assert not machine.calls
