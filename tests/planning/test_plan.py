"""What fits: `dino-ds plan`, the rule, cards and machines, and what a run starts with or is told before it starts."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from unittest import mock

import pytest
import torch

from dino_ds.cli.main import main
from dino_ds.config.ds_config import change_ds_config, load_ds_config, resolve_ds_config
from dino_ds.config.loading import load_recipe
from dino_ds.costs.memory import GIB, Memory
from dino_ds.costs.step_costs import count_parameters, frozen_spec, student_facts
from dino_ds.engine import distributed
from dino_ds.errors import ConfigError
from dino_ds.models.specs.backbones import VITS
from dino_ds.models.vit import VisionTransformer
from dino_ds.planning import fit as planner
from dino_ds.planning.start import check_fits, named_start, planned_start, resumed_start
from tests.ranks import run_on_ranks
from tests.run.harness import image_folder, log_of, train_tiny


@pytest.fixture
def invented(monkeypatch):
    """Memory by a formula, so that every shape has its turn without a rehearsal; the line is 10 % too low."""

    def memory(recipe, config, world_size, on_gpu, exact=True):
        zero = config.raw["zero_optimization"]
        state = {1: 12, 2: 10, 3: 6}[config.stage] - 4 * ("offload_optimizer" in zero) - ("offload_param" in zero)
        image = 0.1 if config.checkpoint_blocks else 1.0
        return Memory("the loss", {"all": round((1 if exact else 0.9) * GIB * (state + image * config.micro_batch))})

    monkeypatch.setattr(planner, "estimate_memory", memory)


RTX3090 = planner.Machine(1, 1, 64.0, 23.6)


def _given(name, machine=RTX3090, recipe="vits16", **changes):
    recipe, path = load_recipe(recipe, changes), f"ds_configs/{name}.json"
    return recipe, named_start(recipe, load_ds_config(path, {}), path, machine)


@pytest.mark.parametrize(
    ("ds", "machine", "cure"),
    [
        ("zero1_bf16", RTX3090._replace(card_gib=4.0), "leave --ds_config out, for one"),
        ("zero0_fp32", planner.Machine(2, 2, 6.0), "add --ds.train_micro_batch_size_per_gpu 64"),
    ],
)
@pytest.mark.slow
def test_what_is_too_large_is_refused_with_what_fits(ds, machine, cure):
    recipe, start = _given(ds, machine, **{"model.depth": "2"})
    with pytest.raises(ConfigError, match=r"needs [\d.]+ GiB .*by prediction") as caught:
        check_fits(recipe, start, machine)
    message = str(caught.value)
    assert cure in message and message.count("--config small") == 1
    if machine.card_gib is not None:
        check_fits(recipe, planned_start(recipe, {}, machine), machine)
        return
    changed = change_ds_config(dict(start.ds), start.path, dict(re.findall(r"--ds\.(\S+) (\w+)", message)))
    check_fits(recipe, named_start(recipe, changed, start.path, machine), machine)


def test_the_host_s_memory_counts_too():
    recipe, start = _given("zero3_bf16_offload", **{"model.depth": "2"})
    check_fits(recipe, start, RTX3090._replace(card_gib=40.0))
    with pytest.raises(ConfigError, match="of host memory by prediction"):
        check_fits(recipe, start, RTX3090._replace(card_gib=40.0, host_gib=3.2))


def test_a_cpu_gives_what_is_free_and_what_the_ranks_have_taken_already(monkeypatch):
    """What other programs have is not theirs; offloading on GPUs is held against all of it."""
    monkeypatch.setattr("dino_ds.basics.machine.host_memory_gib", lambda: (24.0, 15.0))
    found = planner.find_machine()
    assert found.card_gib is None and found.host_gib == pytest.approx(0.9 * 15 + found.libraries / 2**30, abs=1e-6)


@pytest.mark.parametrize("path", sorted(Path("ds_configs").glob("*.json")), ids=lambda path: path.stem)
def test_a_resumed_run_keeps_its_config_to_the_letter(path):
    """What a run writes into its folder is a ds config, and resolves to itself."""
    machine, recipe = planner.Machine(4, 4, 64.0, 79.1), load_recipe("vits16", {})
    first = named_start(recipe, load_ds_config(str(path), {}), str(path), machine).config
    again = resumed_start(recipe, json.loads(json.dumps(first.raw)), "RUN/ds_config.json", {}, machine)
    assert again.config.raw == first.raw


def test_a_resumed_run_keeps_its_precision_on_other_ranks():
    recipe, start = _given("zero1_bf16", planner.Machine(8, 8, 500.0, 23.6))
    saved = start.config
    assert (saved.stage, saved.accumulation) == (1, 1)
    alone = resumed_start(recipe, saved.raw, "x", {}, RTX3090).config
    assert (alone.precision, alone.micro_batch, alone.accumulation) == ("bf16", saved.micro_batch, 8)
    assert alone.raw["data_types"]["grad_accum_dtype"] == "fp32"  # not in low precision, as stage 1 would
    zero = resumed_start(recipe, alone.raw, "x", {}, planner.Machine(8, 8, 500.0, 23.6)).config.raw["zero_optimization"]
    assert not alone.raw["zero_optimization"]["overlap_comm"] and zero["overlap_comm"]
    assert zero["reduce_bucket_size"] < alone.raw["zero_optimization"]["reduce_bucket_size"]
    changed = resumed_start(recipe, saved.raw, "x", {"gradient_accumulation_steps": "32"}, RTX3090)
    assert (changed.config.micro_batch, changed.config.accumulation) == (16, 32)


def _train(images, run, card_gib, **options):
    mine = planner.Machine(2, 2, 64.0, card_gib + distributed.rank())
    with mock.patch.object(planner, "find_machine", return_value=mine):
        return train_tiny(images, run, ds_overrides={}, predicts=True, **options)


def test_ranks_agree_and_a_resumed_run_is_not_chosen_for_anew(tmp_path):
    images, run = image_folder(tmp_path / "images"), tmp_path / "run"
    assert run_on_ranks(_train, images, run, 2.0, max_steps=2) == [None, None]
    first = json.loads((run / "ds_config.json").read_text())
    assert first["bf16"]["enabled"]
    assert "chosen   by the planner for 2 x 2.0 GiB" in log_of(run)
    too_small = run_on_ranks(_train, images, run, 0.5, resume=True)
    assert all("and the GPU has 0.5" in message for message in too_small)
    assert run_on_ranks(_train, images, run, 0.5, max_steps=3, resume=True, allow_oversize=True) == [None, None]
    assert json.loads((run / "ds_config.json").read_text()) == first
    assert "chosen   as this run was started" in log_of(run)


def test_images_that_are_missing_or_too_few_are_said_before_the_memory(tmp_path):
    """With the command that has settings for few of them: a remedy for memory would have been in vain."""
    large = {"head.hidden": "131072", "head.bottleneck": "65536", "head.layers": "32"}
    images = image_folder(tmp_path / "my images", 20)
    message = train_tiny(images, tmp_path / "run", changes={**large, "data.global_batch": "32"}, predicts=True)
    assert "20 images < one global batch of 32" in message and "memory" not in message
    assert message.rstrip().endswith(f"dino-ds advise '{images}'")


@pytest.mark.parametrize(
    ("shape", "bf16"), [(shape, place % 2 == 0) for place, shape in enumerate(planner.SHAPES)], ids=str
)
def test_every_config_that_may_be_recommended_is_valid(shape, bf16, tmp_path):
    path = tmp_path / "new.json"
    path.write_text(json.dumps(planner.ds_of(shape, bf16)))
    resolve_ds_config(load_ds_config(str(path), {}), str(path), 512, 8)


@pytest.mark.parametrize(
    ("card_gib", "chosen"),
    [
        (90.0, "ZeRO 1: 64"),
        (17.0, "ZeRO 2, checkpointing: 32"),
        (4.0, "ZeRO 3, checkpointing, optimizer on the host: 8"),
        (2.1, "ZeRO 3, checkpointing, optimizer and weights on the host: 4"),
    ],
)
def test_the_rule(card_gib, chosen, invented):
    """The first shape of which anything fits, with its largest micro-batch; recomputed where that gives more than fewer
    than 8 images. 0.5 GiB and 5 % are margins."""
    recipe = load_recipe("vits16", {"data.global_batch": "64"})
    shape, ds, config, memory = planner.recommend(
        recipe, planner.Cluster(planner.Gpu("a GPU", card_gib, bf16=False), 1, 1), card_gib
    )
    assert f"{shape}: {config.micro_batch}" == chosen and memory.gib <= card_gib
    assert ds["train_micro_batch_size_per_gpu"] == config.micro_batch and ds["fp16"]["enabled"]


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({"optimizer.clip_by": "part"}, "optimizer.clip_by network"),
        ({"optimizer.kind": "lars"}, "optimizer.kind adamw"),
    ],
)
def test_what_the_engine_refuses_with_an_offloaded_optimizer_is_never_planned_with_it(invented, changes, remedy):
    """The way out is named where nothing else fits."""
    cluster, other = planner.Cluster(planner.Gpu("a GPU", 5.0), 1, 1), load_recipe("vits16", changes)
    assert planner.recommend(load_recipe("vits16", {}), cluster, 5.0)[0].offload
    with pytest.raises(ConfigError, match=rf"Take --{re.escape(remedy)}, which allows offloading"):
        planner.recommend(other, cluster, 4.0 if "optimizer.kind" in changes else 5.0)
    assert not planner.recommend(other, cluster, 40.0)[0].offload


def test_where_nothing_fits_the_least_is_named(invented):
    with pytest.raises(ConfigError, match=r"nothing fits 1 GiB: .* one image at a time .* Take more GPUs"):
        planner.recommend(load_recipe("vits16", {}), planner.Cluster(planner.Gpu("a GPU", 1.0), 1, 1), 1.0)


def test_the_largest_micro_batch_fits_and_one_more_does_not(invented):
    recipe, ds = load_recipe("vits16", {}), load_ds_config("ds_configs/zero2_bf16_checkpointing.json", {})
    largest = planner.largest_micro_batch(recipe, ds, "x", 8, 40.0)
    fits, more = (planner.fit(recipe, ds, "x", 8, micro)[1].gib for micro in (largest, largest + 1))
    assert fits <= 40.0 < more and planner.largest_micro_batch(recipe, ds, "x", 8, 2.0) == 0


@pytest.mark.parametrize(
    ("name", "card"), [*((word, "rtx4090-24g") for word in ("4090", "RTX 4090", "rtx4090_24g")), ("H100", "h100-80g")]
)
def test_a_name_that_fits_one_card_is_that_card(name, card):
    assert planner.named_gpu(name, None) == planner.GPUS[card]


@pytest.mark.parametrize(
    ("name", "hint"),
    [("a100", "Did you mean a100-40g or a100-80g?"), ("mi300", "or give --memory_gib"), ("", "or give --memory_gib")],
)
def test_a_name_of_several_cards_or_none_is_refused_with_the_nearest(name, hint):
    with pytest.raises(ConfigError, match=f"^--gpu {name}: this card is not in the table: ") as caught:
        planner.named_gpu(name, None)
    assert str(caught.value).endswith(hint) or hint in str(caught.value)


def _plan(capsys, *words: str):
    main(["plan", *words, "--json"])
    return json.loads(capsys.readouterr().out)


@pytest.mark.slow
def test_a_plan_that_is_asked_again_and_reports_load_no_torch(capsys):
    """What was rehearsed is kept."""
    words = ["plan", "--gpu", "a100-40g", "--gpus", "8", "--model.depth", "1"]
    main(words)
    code = f"import sys, dino_ds.report.single_run; from dino_ds.cli.main import main; main({words!r})"
    code += "; assert 'torch' not in sys.modules"
    page = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert "recommended: ZeRO" in page and "fragmentation margin" in page and "hours" in page


def test_one_json_object_has_all_that_was_asked_and_the_written_config_is_the_planned_one(capsys, tmp_path):
    path, large = tmp_path / "mine.json", ("--config", "vitl16", "--model.depth", "2", "--gpu", "rtx3060-12g")
    found = _plan(capsys, *large, "--gpus", "8", "--nodes", "2", "--write", str(path))
    assert found["fits"] and found["max_micro_batch"] >= found["micro_batch"]
    assert sum(found["bytes_per_gpu"].values()) <= found["limit_bytes"]
    assert {"student", "teacher", "activations", "masters and moments"} <= found["bytes_per_gpu"].keys()
    assert found["micro_batch"] * found["accumulation"] * 16 == found["global_batch"] == 1024
    assert found["activation_bytes"]["with_checkpointing"] < found["activation_bytes"]["without_checkpointing"]
    assert "not measured" in found["time"] and load_ds_config(str(path), {}) == found["ds_config"]
    again = _plan(capsys, *large, "--gpus", "8", "--nodes", "2", "--ds_config", str(path))
    assert again["bytes_per_gpu"] == found["bytes_per_gpu"] and again["verdict"].startswith("fits: ")


@pytest.mark.parametrize(
    ("card", "ds", "verdict", "warning"),
    [
        ("--memory_gib 80", "fp16", "fits: 78.7 of 80 GiB; largest micro-batch that fits 73", "these GPUs have bf16"),
        ("--memory_gib 8", "fp16", "does not fit: it needs 78.7 of 8 GiB; ZeRO 3, checkpointing with", "have bf16"),
        ("--gpu t4-16g", "bf16", "fits with micro-batch 4, accumulation 16: as it is it needs", "has no bf16 units"),
    ],
)
def test_a_config_that_does_not_fit_says_what_would(card, ds, verdict, warning, invented, capsys):
    given = "--gpus", "8", "--ds_config", f"ds_configs/zero2_{ds}.json", "--model.depth", "1"
    found = _plan(capsys, *card.split(), *given)
    assert found["verdict"].startswith(verdict) and warning in found["warnings"][0], found["verdict"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "no GPU is given: --gpu NAME"),
        (["--gpu", "t4-16g", "--gpus", "24"], "512 is not a multiple of 24 GPUs: add --data.global_batch 504"),
        (["--gpu", "t4-16g", "--write", "config.yaml"], "config.yaml is there already"),
        (["--gpu", "t4-16g", "--write", "x", "--ds_config", "ds_configs/zero1_fp16.json"], "leave --ds_config out"),
    ],
)
def test_mistakes_are_one_line(words, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["plan", *words])
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert message in said and len(said.splitlines()) == 1


ROTARY = {"model.backbone": "vit_small_patch16_dinov3", "model.depth": "2"}
GRAM = {"gram.weight": "2", "gram.crop_size": "448"}
VIT_L = {"teacher.source": "vit_large_patch16_dinov3", "model.backbone": "vit_small_patch16_dinov3"}


def _fit(changes: dict[str, str], stage: int = 2, ranks: int = 8):
    ds = {"gradient_clipping": 3.0, "bf16": {"enabled": True}, "zero_optimization": {"stage": stage}}
    ds |= {"train_micro_batch_size_per_gpu": 8}
    return planner.fit(load_recipe("vits16", ROTARY | changes), ds, "x", ranks)[1].parts


def test_a_gram_teacher_takes_memory_and_room_in_the_checkpoint():
    """Matrices in the engine's precision, without heads; one that is not a snapshot is not saved."""
    recipe, without = load_recipe("vits16", ROTARY | GRAM), load_recipe("vits16", ROTARY)
    backbone = {n: k for n, k in student_facts(recipe).sizes.items() if n.startswith("backbone.")}
    held = _fit(GRAM)["Gram teacher"]
    assert 2 * sum(backbone.values()) < held < 2.1 * sum(backbone.values())
    assert "Gram teacher" not in _fit({"gram.weight": "2", "gram.teacher": "ema"})
    assert planner.checkpoint_bytes(recipe) - planner.checkpoint_bytes(without) == 4 * sum(backbone.values())
    fixed = load_recipe("vits16", ROTARY | GRAM | {"gram.teacher": "runs/other"})
    assert planner.checkpoint_bytes(fixed) == planner.checkpoint_bytes(without)


def test_a_frozen_teacher_is_counted_by_its_own_architecture():
    changes, large = VIT_L | {"teacher.distill": "heads"}, VITS["vit_large_patch16_dinov3"]
    with torch.device("meta"):
        own = sum(p.numel() for p in VisionTransformer(large, 224).parameters())
    parts, heads = _fit(changes), 4 * 65536 * 256
    assert 2 * own + heads < parts["frozen teacher"] < 2.05 * own + heads * 1.2
    assert parts["teacher"] == 4 * count_parameters(load_recipe("vits16", ROTARY | changes))


def test_the_architecture_of_a_run_is_read_from_its_json(tmp_path, capsys):
    spec = dataclasses.replace(VITS["vit_base_patch16_dinov3"], depth=2, local_cls_norm=True)
    (tmp_path / "teacher.json").write_text(json.dumps({"architecture": asdict(spec)}))
    known = load_recipe("vits16", {"teacher.source": str(tmp_path)})
    assert frozen_spec(known) == dataclasses.replace(spec, local_cls_norm=False)
    unknown = tmp_path / "weights.pth"
    unknown.write_bytes(b"")
    words = ["plan", "--gpu", "a100-80g", "--config", "vits16", "--model.depth", "1"]
    main([*words, "--teacher.source", str(unknown)])
    page = capsys.readouterr().out
    line = f"teacher.source {unknown} does not say its architecture without being read: its memory is not counted"
    assert line in page and "frozen teacher" not in page
    main([*words, "--teacher.distill", "heads"])
    assert "no teacher.source: an EMA teacher is counted" in capsys.readouterr().out
