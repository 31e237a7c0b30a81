"""What fits, what is recommended, and what is warned about."""

from __future__ import annotations

import pytest

from dino_ds.config.ds_config import load_ds_config, resolve_ds_config
from dino_ds.config.loading import load_recipe
from dino_ds.costs.memory import GIB
from dino_ds.costs.step_costs import count_parameters
from dino_ds.errors import ConfigError
from dino_ds.method.specs.of_recipe import accumulation_notes
from dino_ds.planning.command import costly_settings
from dino_ds.planning.fit import FRAGMENTATION, Setup, fit, fit_with, largest_micro_batch, micro_batches
from dino_ds.planning.gpus import GPUS
from dino_ds.planning.host import checkpoint_bytes, host_bytes
from dino_ds.planning.recommend import SHAPES, ds_of, recommend, write_ds
from dino_ds.planning.speed import Cluster, estimate_step
from dino_ds.planning.work import Work

GIANT = {"model.backbone": "vit_giant_patch14_dinov2", "crops.local_size": "98"}


def _cluster(name: str, gpus: int = 8, nodes: int = 1) -> Cluster:
    return Cluster(GPUS[name], gpus, nodes, GPUS[name].network)


def _ds(name: str, **overrides: str):
    return load_ds_config(f"ds_configs/{name}.json", {key.replace("__", "."): text for key, text in overrides.items()})


@pytest.mark.parametrize("name", ["zero1_bf16", "zero2_bf16_checkpointing", "zero3_bf16_offload"])
def test_the_largest_micro_batch_fits_and_one_more_does_not(name):
    recipe, ds = load_recipe("vitl16", {}), _ds(name)
    largest = largest_micro_batch(recipe, ds, name, 8, 40.0)
    assert fit_with(recipe, ds, name, 8, 40.0, largest).fits
    assert not fit_with(recipe, ds, name, 8, 40.0, largest + 1).fits


def test_nothing_fits_too_small_a_card():
    assert largest_micro_batch(load_recipe("vitl16", GIANT), _ds("zero1_bf16"), "x", 1, 8.0) == 0


def test_margins_are_parts_of_their_own():
    parts = fit(load_recipe("vits16", {}), _ds("zero2_bf16"), "x", 8, 80.0).memory.parts
    tensors = sum(n for name, n in parts.items() if name not in ("fragmentation margin", "CUDA context and NCCL"))
    assert parts["fragmentation margin"] == round(FRAGMENTATION * tensors)


def test_times_are_compared_at_equal_work():
    """Of a single crop, batched stochastic depth drops none or all; of many, exactly 30 %."""
    recipe, cluster = (
        load_recipe("dinov2_vits14", {"model.depth": "2", "data.global_batch": "16"}),
        _cluster("l4-24g", 1),
    )
    fits = [fit_with(recipe, _ds("zero2_bf16"), "x", 1, 24.0, size) for size in (16, 1)]
    whole, parts = (estimate_step(recipe, fit.config, cluster) for fit in fits)
    assert whole.seconds_at(whole.once) == whole.seconds
    less = parts.once / whole.once
    assert less < 0.98
    computed = parts.parts["computation"]
    assert parts.seconds_at(whole.once) - parts.seconds == pytest.approx(computed * (1 / less - 1))


def test_micro_batches_make_up_the_global_batch():
    assert micro_batches(96, 8) == [12, 6, 4, 3, 2, 1]
    assert micro_batches(100, 8) == []


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("bf16", [True, False])
def test_every_config_that_may_be_recommended_is_valid(shape, bf16, tmp_path):
    path = tmp_path / "new.json"
    write_ds(ds_of(shape, bf16), path)
    resolve_ds_config(load_ds_config(str(path), {}), str(path), 512, 8)
    assert [p.name for p in tmp_path.iterdir()] == ["new.json"]


@pytest.mark.parametrize(
    ("gpu", "gpus", "changes"),
    [("rtx3060-12g", 1, {}), ("t4-16g", 4, {}), ("a100-40g", 8, GIANT), ("rtx4090-24g", 4, GIANT), ("l4-24g", 2, {})],
)
def test_the_recommended_config_is_the_fastest_that_fits(gpu, gpus, changes):
    """Of all shapes and micro-batches, to the 3 % within which the simplest is taken."""
    recipe, cluster = load_recipe("vits16", changes), _cluster(gpu, gpus)
    found = recommend(recipe, cluster, cluster.gpu.memory_gib)
    assert found.fit.fits
    for shape in SHAPES:
        for size in micro_batches(recipe.data.global_batch, gpus)[: 1 if shape.stage == 1 else None]:
            ds = ds_of(shape, cluster.gpu.bf16)
            other = fit_with(recipe, ds, "x", cluster.world_size, cluster.gpu.memory_gib, size)
            if other.fits:
                assert estimate_step(recipe, other.config, cluster, exact=False).seconds >= found.time.seconds / 1.0301
    simpler = SHAPES[: SHAPES.index(found.shape)]
    assert all(any(line.startswith(f"{shape}:") for line in found.refused) for shape in simpler)


def test_clipping_by_part_is_never_planned_with_an_offloaded_optimizer():
    """Which the engine refuses; the way out is named where nothing else fits."""
    recipe, cluster = load_recipe("vits16", GIANT), _cluster("rtx3060-12g", 1)
    assert recommend(recipe, cluster, 20.0).shape.offload
    by_part = load_recipe("vits16", GIANT | {"optimizer.clip_by": "part"})
    with pytest.raises(ConfigError, match=r"or optimizer\.clip_by network, which allows offloading"):
        recommend(by_part, cluster, 20.0)
    assert not recommend(by_part, cluster, 40.0).shape.offload


def test_accumulation_is_said_where_terms_look_at_several_images():
    terms = {"objective.centering": "sinkhorn", "objective.koleo_weight": "0.1"}
    recipe = load_recipe("vits16", terms)
    notes, warnings = accumulation_notes(recipe, 32, 2, 8)
    assert notes == ["targets are balanced over all 512 images of a step; 2 micro-batches are held at once"]
    assert warnings[0].startswith("KoLeo sees a micro-batch of 32 images at a time, not the 512 of a step")
    everywhere = load_recipe("vits16", terms | {"objective.koleo_ranks": "all"})
    assert "of 256 images" in accumulation_notes(everywhere, 32, 2, 8)[1][0]
    assert accumulation_notes(recipe, 64, 1, 8) == accumulation_notes(load_recipe("vits16", {}), 32, 2, 8) == ([], [])


def test_where_nothing_fits_the_least_is_named():
    recipe = load_recipe("vits16", GIANT)
    with pytest.raises(ConfigError, match=r"nothing fits 5 GiB: ZeRO .* with one image at a time needs \d"):
        recommend(recipe, _cluster("rtx3070-8g", 1), 5.0)


@pytest.mark.parametrize(
    ("gpu", "config", "overrides", "words"),
    [
        ("a100-80g", "zero2_bf16", {"zero_optimization__reduce_bucket_size": "500000000"}, "reduce_bucket_size"),
        ("a100-80g", "zero2_bf16_checkpointing", {}, "activation checkpointing is not needed"),
        ("a100-80g", "zero2_bf16_offload", {}, "offloading is not needed"),
        ("a100-80g", "zero3_bf16_offload", {}, "offloading is not needed"),
        ("a100-80g", "zero3_bf16", {}, "ZeRO 3 gathers every weight"),
        ("a100-80g", "zero2_fp16", {}, "these GPUs have bf16"),
        ("t4-16g", "zero2_bf16", {}, "has no bf16 units"),
        ("a100-80g", "zero2_bf16", {}, ""),
    ],
)
def test_costly_settings_are_named(gpu, config, overrides, words):
    recipe = load_recipe("vits16", {})
    found = costly_settings(Setup(recipe, _ds(config, **overrides), config, _cluster(gpu)))
    assert any(words in line for line in found) if words else not found


def test_no_advice_against_what_is_needed():
    recipe = load_recipe("vitl16", {"data.global_batch": "1024"})
    assert not costly_settings(Setup(recipe, _ds("zero2_bf16_checkpointing"), "x", _cluster("a100-40g")))


def test_a_node_holds_what_is_offloaded_and_saved():
    recipe = load_recipe("vitl16", {"data.workers": "2"})
    weights = count_parameters(recipe)
    found = fit(recipe, _ds("zero3_bf16_offload"), "x", 16, 80.0)
    parts = host_bytes(recipe, found.config, 8, 16)
    assert parts["offloaded optimizer"] == 16 * weights // 2
    assert parts["offloaded weights"] == 2 * (weights // 2)
    assert parts["loaded batches"] == 8 * 7 * recipe.batch_bytes(found.config.micro_batch)
    assert checkpoint_bytes(recipe) == 16 * weights + 4 * 65536


def test_bytes_and_launches_are_those_that_were_counted():
    """ViT-S/16 in bf16 at 64 images, eager: operators of the real step on fake CUDA tensors. To 10 %."""
    recipe = load_recipe("vits16", {"data.global_batch": "64", "model.drop_path": "0"})
    config = fit(recipe, _ds("zero1_bf16"), "x", 1, 1e9).config
    work, alone = Work.of(recipe, config, 2), Work.of(recipe, config, 1)
    assert work.all.moved == pytest.approx(37.8e9, rel=0.1)
    assert (work.all.operators, work.in_step) == (pytest.approx(849 + 313, rel=0.1), pytest.approx(61, rel=0.02))
    assert alone.all.operators == work.all.operators - 2 * 157  # no copies of gradients, to sum them with nothing


def test_recomputation_and_offloading_cost_time():
    recipe, cluster = load_recipe("vitl16", {}), _cluster("a100-80g")

    def seconds(name: str) -> float:
        return estimate_step(recipe, fit(recipe, _ds(name), name, 8, 80.0).config, cluster).seconds

    assert seconds("zero2_bf16") < seconds("zero2_bf16_checkpointing") < 1.5 * seconds("zero2_bf16")
    assert seconds("zero2_bf16") < seconds("zero2_bf16_offload")


def test_the_table_of_gpus_is_sorted_sense():
    """Names end in the size on the box, which torch finds a little less of."""
    for name, gpu in GPUS.items():
        box = int(name.rsplit("-", 1)[1].removesuffix("g"))
        assert 0.85 * box < gpu.memory_gib < box * 1e9 / GIB * 1.075, name
        assert gpu.link >= gpu.pcie
