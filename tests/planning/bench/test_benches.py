"""What measures: a trial, processes of its own; each bench as its command calls it, at a tiny size; and the exact steps
of the ladder, which are the same training step."""

from __future__ import annotations

import gc
import itertools
import json
import sys
import time

import pytest
import torch

from dino_ds.basics.ranges import PARTS, listen, named_range
from dino_ds.costs.step_costs import model_flops
from dino_ds.engine import distributed
from dino_ds.engine.process import init_distributed, memory_gib, resident_mib
from dino_ds.errors import ConfigError
from dino_ds.models.vit import VisionTransformer
from dino_ds.options.commands import BenchInferenceOptions, BenchLadderOptions, BenchStepOptions
from dino_ds.planning import measure
from dino_ds.planning.bench import inference, step, tune
from dino_ds.weights.export import export_safetensors
from dino_ds.weights.load import Backbone
from tests.planning.measure.tiny import tiny_ds, tiny_recipe
from tests.reference import copied
from tests.weights.test_weights import _backbone

COMMON = {"batch": 2, "steps": 2, "warmup": 1, "threads": 1}


@pytest.fixture
def no_children(monkeypatch):
    """Memory without a process of its own: what it would do, once and here."""
    calls = []

    def here(function, threads, **arguments):
        if not calls:
            function(**json.loads(json.dumps(arguments)))
        calls.append(function)
        return measure.ChildResult(None, 100.0, 60.0)

    monkeypatch.setattr(measure, "run_in_child", here)
    monkeypatch.setattr(measure, "matmul_tflops", lambda *_: 0.25)  # a second's work


def _result(capsys):
    return json.loads(capsys.readouterr().out)


def _bench_step(**changes):
    files = {"recipe": tiny_recipe(), "ds": tiny_ds(0), "ds_path": "t.json"}
    files |= {name: changes.pop(name) for name in files.keys() & changes.keys()}
    step.run(BenchStepOptions(**COMMON, **changes), **files).show(as_json=True)


@pytest.mark.slow
def test_step_of_two_settings(capsys, no_children):
    _bench_step(compare="ds.zero_optimization.stage=0,3")
    result = _result(capsys)
    flops = sum(model_flops(tiny_recipe()).values())
    for stage, setting in zip((0, 3), result["settings"], strict=True):
        assert (setting["stage"], setting["name"]) == (stage, f"ds.zero_optimization.stage={stage}")
        assert setting["images_per_second"] == pytest.approx(2 / setting["step_seconds"])
        parts = setting["parts"]
        assert set(parts) == {*PARTS, "other"} and sum(parts.values()) == pytest.approx(1)
        assert parts["data"] == 0 < min(parts[part] for part in ("teacher", "student", "backward", "ema"))
        assert setting["tflops"] == pytest.approx(flops * 2 / setting["step_seconds"] / 1e12)
        assert setting["mfu"] == pytest.approx(setting["tflops"] / setting["matmul_tflops"])
        assert (setting["peak_memory_mib"], setting["imports_mib"]) == (100.0, 60.0)
    first, second = (setting["images_per_second"] for setting in result["settings"])
    assert result["ratio"] == pytest.approx(second / first) and result["host"]["versions"]["torch"]
    assert "| images/s " in step._page(result)


@pytest.mark.slow
def test_a_trial_waits_for_real_images_and_is_traced_with_its_parts(tmp_path):
    """Without loader processes, all stages of loading are in it too; what is done within the wait is not waiting."""
    recipe = tiny_recipe(data__source="photos", data__workers="0").model_dump(mode="json")
    setting = {"recipe": recipe, "ds": tiny_ds(0), "ds_path": "t.json", "batch": 2}
    init_distributed()
    trial = tune.measure_step(setting, 0.1, real_images=True, profile=str(tmp_path / "new"))
    events = json.loads((tmp_path / "new/trace.json").read_text())["traceEvents"]
    names = [event.get("name") for event in events if event.get("cat") == "user_annotation"]
    assert [names.count(part) for part in ("data", "teacher", "backward", "ema")] == [3] * 4
    assert "aten::" in trial["operators"] and len(trial["seconds"]) >= 2 and trial["loader"] > 0
    assert all(trial["stages"][name] > 0 for name in ("decode", "crop", "copy", "augmentation"))
    inside = sum(trial["parts"][name] for name in ("decode", "crop"))  # photographs of the package are not read
    assert 0.9 * inside < trial["parts"]["data"] < sum(trial["seconds"])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"compare": "seed=1,1"}, "is not a key and two values"),
        ({"compare": "sed=1,2"}, "--sed: not a recipe key"),
        ({"compare": "data.global_batch=1,2"}, "--batch"),
        ({"compare": "seed=1,2", "profile": "x"}, "--compare with --profile"),
        ({"ds": tiny_ds(0, train_micro_batch_size_per_gpu=3)}, "--data.global_batch"),
    ],
)
def test_step_refuses(changes, says):
    with pytest.raises(ConfigError, match=says):
        _bench_step(**changes)


@pytest.mark.slow
def test_ladder(capsys, no_children):
    step.run_ladder(BenchLadderOptions(**COMMON), recipe=tiny_recipe()).show(as_json=True)
    result = _result(capsys)
    assert set(result) >= {"ladder_steps", "exact_total_speedup", "exact_total_memory_ratio"}
    ran = result["ladder_steps"]
    assert "channels-last images" in result["skipped"] and len(ran) + len(result["skipped"]) == len(step.all_steps())
    for before, row in itertools.pairwise(ran):
        assert row["speedup_step"] == pytest.approx(row["images_per_second"] / before["images_per_second"])
        assert row["speedup_total"] == pytest.approx(row["images_per_second"] / ran[0]["images_per_second"])
    assert result["exact_total_speedup"] == [row for row in ran if row["exact"]][-1]["speedup_total"]
    assert result["exact_total_memory_ratio"] == 1.0
    assert "| plain step " in step._ladder_page(result)


@pytest.fixture
def infer(capsys, tmp_path):
    """Runs the bench on a tiny teacher or MODEL, with these options; its result, of json=False its page."""
    export_safetensors(_backbone(), tmp_path / "teacher.safetensors")
    options = {"batches": (1,), "rounds": 5, "seconds": 0.1, "warmup": 0, "threads": 1, "json": True}

    def measured(model=str(tmp_path), **changes):
        given = options | changes
        result = inference.run(BenchInferenceOptions(model=model, **given))
        return result.data if given["json"] else result.page

    return measured


@pytest.mark.slow
def test_inference(infer, monkeypatch):
    """Every way at two batch sizes beside the plain one; bf16 is near, the others equal."""
    compiled = []  # without the minute that it takes
    monkeypatch.setattr(VisionTransformer, "compile_segments", lambda vit: compiled.append(vit))
    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: {"avx512_bf16": True})
    result = infer(batches=(1, 3), size=40, warmup=1)
    rows = {(row["batch"], row["way"]): row for row in result["inference"]}
    ways = {way for _, way in rows}
    assert ways == {"fp32", "bf16", "fp32 compiled", "bf16 compiled"} and not result["skipped"]
    assert {batch for batch, _ in rows} == {1, 3} and len(rows) == 2 * len(ways) and len(compiled) == 4
    for (batch, way), row in rows.items():
        assert 0 < row["p50_ms"] <= row["p95_ms"] <= row["p99_ms"] and row["rounds"] == 5
        assert row["images_per_second"] == pytest.approx(1000 * batch / row["p50_ms"])
        assert row["ratio"] == pytest.approx(rows[batch, "fp32"]["p50_ms"] / row["p50_ms"])
        assert row["deviation"] < (0.05 if "bf16" in way else 1e-5)


@pytest.mark.slow
def test_inference_says_what_it_skips(infer, monkeypatch):
    def no_compiler(*_, **__):
        raise RuntimeError("no C++ compiler")

    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: {})
    monkeypatch.setattr("torch._inductor.cpp_builder.get_cpp_compiler", no_compiler)
    result = infer()
    assert "no bf16 arithmetic" in result["skipped"]["bf16"] and len(result["inference"]) == 1
    assert "no C++ compiler" in result["skipped"]["fp32 compiled"]
    with pytest.raises(ConfigError, match="multiples of the patch size 8"):
        infer(size=33)
    monkeypatch.setattr(inference, "_ways", lambda backbone, *_: ({"fp32": backbone.features}, {"bf16": "it is so"}))
    tiny = "vit_tiny_patch16_224"
    page = infer(tiny, json=False, random=True)
    assert "width 192, 12 blocks, 3 heads), 224 pixels" in page
    assert "| 1, fp32 " in page and "bf16 skipped: it is so" in page
    with pytest.raises(ConfigError, match="--heads 3 is of a file"):
        infer(tiny, random=True, heads=3)


def test_inference_goes_on_where_a_batch_is_too_large(infer, monkeypatch):
    """Nothing is left to compare with; where none fits, that is said."""
    features = Backbone.features

    def small(backbone, images):
        if len(images) == 2:
            raise torch.OutOfMemoryError
        if len(images) == 3:
            raise RuntimeError("[enforce fail at x.cpp:1] DefaultCPUAllocator: can't allocate memory")
        return features(backbone, images)

    monkeypatch.setattr(Backbone, "features", small)
    monkeypatch.setattr(inference, "_ways", lambda backbone, *_: ({"fp32": backbone.features}, {}))
    result = infer(batches=(1, 2))
    assert [row["batch"] for row in result["inference"]] == [1]
    assert result["skipped"] == {"batch 2": "not enough memory"}
    with pytest.raises(ConfigError, match="--batches 2,3: not enough memory: lower them"):
        infer(batches=(2, 3))


EXACT = [rung for rung in step.all_steps() if rung.exact]


DINOV2 = {
    "crops__mask": "dinov2", "head__free_prototypes": "true", "objective__dino_local_weight": "0.5",
    "ibot_head__learned_lengths": "true", "ibot_head__prototypes": "96", "ibot_head__hidden": "48",
    "ibot_head__bottleneck": "24", "objective__ibot_weight": "1", "objective__koleo_weight": "0.1",
    "model__layer_scale": "0.1", "optimizer__layer_decay": "0.9", "optimizer__clip_by": "part",
}  # fmt: skip


def _losses_and_teacher(rung):
    """Four steps with stochastic depth, that can be compared: Adam's epsilon is as large as the gradients, so that a
    step of a weight whose gradient is nothing but rounding is not as long as the others'; and the teacher moves."""
    changes = {"optimizer__lr": "0.03", "optimizer__eps": "0.01", "teacher__momentum": "0.9", "model__drop_path": "0.3"}
    trial = step.build_ladder_step(rung, tiny_recipe(**changes | DINOV2), 4)
    start = copied(trial.step.teachers["ema"].state())
    losses = [float(trial.run()) for _ in range(4)]
    teacher = copied(trial.step.teachers["ema"].state())
    assert max(float((teacher[name] - start[name]).abs().max()) for name in start) > 3e-4, "the weights move"
    statistics = [statistic.value for statistic in trial.step.objective.statistics.values()]
    return torch.tensor(losses), teacher, torch.cat(statistics)


@pytest.fixture(scope="module")
def plain():
    init_distributed()
    return _losses_and_teacher(EXACT[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    "rung", [rung for rung in EXACT[1:] if rung.name != "channels-last images"], ids=lambda rung: rung.name
)
def test_exact_steps_are_the_plain_step(rung, plain):
    """Four steps with clipping, stochastic depth, center and EMA. A cosine or a weight of about 1 is rounded by 6e-8 at
    each use: 1e-6 is sixteen of them. A loss has cosines divided by the temperatures, 0.04 at the least: 2.5e-5."""
    losses, teacher, center = _losses_and_teacher(rung)
    torch.testing.assert_close(losses, plain[0], rtol=0, atol=1e-6 / 0.04)
    torch.testing.assert_close(center, plain[2], rtol=0, atol=1e-6)
    for name in teacher:
        torch.testing.assert_close(teacher[name], plain[1][name], rtol=0, atol=1e-6)


CPU = torch.device("cpu")


def take_memory(mib):
    block = torch.ones(mib * 2**18)
    return float(block.sum()), memory_gib() * 1024


@pytest.mark.slow
def test_a_child_tells_its_own_peak_memory():
    """However large this process is: 150 MiB of work to 20 MiB of allocator and threads; by its metrics too."""
    ballast = torch.ones(2**27)
    result = measure.run_in_child(take_memory, threads=1, mib=150)
    assert result.value == [150 * 2**18, pytest.approx(result.peak_mib, abs=1)]
    assert result.peak_mib - result.imports_mib == pytest.approx(150, abs=20)
    assert ballast.sum() == ballast.numel() and result.peak_mib < resident_mib()
    gc.collect()


def take_long():
    return distributed.world_size() if distributed.world_size() > 1 else time.sleep(60)


@pytest.mark.slow
def test_children_end_at_their_limits_and_several_are_ranks():
    with pytest.raises(measure.ChildOutOfMemory, match=r"took 0\.\d\d GiB, more than 0\.05"):
        measure.run_in_child(take_memory, 1, measure.ChildLimits(gib=0.05), mib=150)
    with pytest.raises(measure.ChildFailed, match="had not ended after 1 s"):
        measure.run_in_child(take_long, 1, measure.ChildLimits(seconds=1.0))
    assert measure.run_in_child(take_long, 1, measure.ChildLimits(ranks=2)).value == 2


@pytest.mark.parametrize(
    ("code", "says"),
    [("echo on purpose >&2; exit 1", "without a result: on purpose"), ("kill -9 $$", "take a smaller batch")],
)
def test_a_child_that_fails_says_why(code, says, tmp_path, monkeypatch):
    (tmp_path / "python").write_text(f"#!/bin/sh\n{code}\n")
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(measure.ChildFailed, match=says):
        measure.run_in_child(take_memory, threads=1, mib=1)


@pytest.mark.gpu
def test_part_times_of_a_gpu_see_the_kernel():
    device = torch.device("cuda", 0)
    parts, a = measure.PartTimes(device), torch.ones(4096, 4096, device=device)
    with listen(parts), named_range("teacher"):
        a @ a
    assert parts.read()["teacher"] > 1e-5
