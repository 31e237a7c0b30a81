"""What fits, what is recommended, and what is warned about."""

from __future__ import annotations

import re

import pytest

from dino_ds.config.ds_config import load_ds_config, resolve_ds_config
from dino_ds.config.loading import load_recipe
from dino_ds.costs.step_costs import count_parameters
from dino_ds.errors import ConfigError
from dino_ds.method.specs.own import accumulation_notes
from dino_ds.planning.fit import SHAPES, ds_of, fit, fit_with, largest_micro_batch, micro_batches, recommend, write_ds
from dino_ds.planning.host import GPUS, Cluster, Gpu, checkpoint_bytes, describe_hours, find_gpu, host_bytes


def _ds(name: str, **overrides: str):
    return load_ds_config(f"ds_configs/{name}.json", {key.replace("__", "."): text for key, text in overrides.items()})


def test_micro_batches_make_up_the_global_batch():
    assert micro_batches(96, 8) == [12, 6, 4, 3, 2, 1]
    assert micro_batches(100, 8) == []


@pytest.mark.parametrize(("shape", "bf16"), [(shape, place % 2 == 0) for place, shape in enumerate(SHAPES)], ids=str)
def test_every_config_that_may_be_recommended_is_valid(shape, bf16, tmp_path):
    path = tmp_path / "new.json"
    write_ds(ds_of(shape, bf16), path)
    resolve_ds_config(load_ds_config(str(path), {}), str(path), 512, 8)
    assert [p.name for p in tmp_path.iterdir()] == ["new.json"]


@pytest.mark.parametrize(
    ("card_gib", "chosen"),
    [
        (90.0, "ZeRO 1: 64"),
        (60.0, "ZeRO 2: 32"),
        (20.0, "ZeRO 2: 8"),
        (17.0, "ZeRO 2, checkpointing: 32"),
        (10.5, "ZeRO 3, checkpointing: 32"),
        (7.0, "ZeRO 3, checkpointing: 1"),
        (4.0, "ZeRO 3, checkpointing, optimizer on the host: 8"),
        (2.1, "ZeRO 3, checkpointing, optimizer and weights on the host: 4"),
    ],
)
def test_the_rule(card_gib, chosen, invented):
    """The first shape of which anything fits, with its largest micro-batch; recomputed where that gives more than fewer
    than 8 images. 0.5 GiB and 5 % are margins."""
    recipe = load_recipe("vits16", {"data.global_batch": "64"})
    found = recommend(recipe, Cluster(Gpu("a GPU", card_gib), 1, 1), card_gib)
    assert f"{found.shape}: {found.fit.config.micro_batch}" == chosen and found.fit.fits
    assert found.ds["train_micro_batch_size_per_gpu"] == found.fit.config.micro_batch


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({"optimizer.clip_by": "part"}, "optimizer.clip_by network"),
        ({"optimizer.kind": "muon", "optimizer.clip_by": "part"}, "clip_by network and --optimizer.kind adamw"),
        ({"optimizer.kind": "lars"}, "optimizer.kind adamw"),
    ],
)
def test_what_the_engine_refuses_with_an_offloaded_optimizer_is_never_planned_with_it(invented, changes, remedy):
    """The way out is named where nothing else fits."""
    cluster, other = Cluster(Gpu("a GPU", 5.0), 1, 1), load_recipe("vits16", changes)
    assert recommend(load_recipe("vits16", {}), cluster, 5.0).shape.offload
    with pytest.raises(ConfigError, match=rf"Take --{re.escape(remedy)}, which allows offloading"):
        recommend(other, cluster, 4.0 if "optimizer.kind" in changes else 5.0)
    assert not recommend(other, cluster, 40.0).shape.offload


def test_where_nothing_fits_the_least_is_named(invented):
    with pytest.raises(ConfigError, match=r"nothing fits 1 GiB: .* one image at a time .* Take more GPUs"):
        recommend(load_recipe("vits16", {}), Cluster(Gpu("a GPU", 1.0), 1, 1), 1.0)


@pytest.mark.parametrize("name", ["zero2_bf16", "zero2_bf16_checkpointing", "zero3_bf16_offload"])
def test_the_largest_micro_batch_fits_and_one_more_does_not(name, invented):
    recipe, ds = load_recipe("vits16", {}), _ds(name)
    largest = largest_micro_batch(recipe, ds, name, 8, 40.0)
    assert fit_with(recipe, ds, name, 8, 40.0, largest).fits
    assert not fit_with(recipe, ds, name, 8, 40.0, largest + 1).fits
    assert largest_micro_batch(recipe, ds, name, 8, 2.0) == 0


def test_accumulation_is_said_where_terms_look_at_several_images():
    terms = {"objective.centering": "sinkhorn", "objective.koleo_weight": "0.1"}
    recipe = load_recipe("vits16", terms)
    notes, warnings = accumulation_notes(recipe, 32, 2, 8)
    assert notes == ["targets are balanced over all 512 images of a step; 2 micro-batches are held at once"]
    assert warnings[0].startswith("loss term koleo compares 32 images at a time, not the 512 of a step")
    everywhere = load_recipe("vits16", terms | {"objective.koleo_ranks": "all"})
    assert "compares 256 images" in accumulation_notes(everywhere, 32, 2, 8)[1][0]
    assert accumulation_notes(recipe, 64, 1, 8) == accumulation_notes(load_recipe("vits16", {}), 32, 2, 8) == ([], [])


def test_a_node_holds_what_is_offloaded_and_saved():
    recipe = load_recipe("vitl16", {"data.workers": "2", "model.depth": "2"})
    weights = count_parameters(recipe)
    found = fit(recipe, _ds("zero3_bf16_offload"), "x", 16, 80.0)
    parts = host_bytes(recipe, found.config, 8, 16)
    assert parts["offloaded optimizer"] == 16 * weights // 2
    assert parts["offloaded weights"] == 2 * (weights // 2)
    assert parts["loaded batches"] == 8 * 7 * recipe.batch_bytes(found.config.micro_batch)
    assert checkpoint_bytes(recipe) == 16 * weights + 4 * 65536


@pytest.mark.parametrize(
    ("name", "card"), [*((word, "rtx4090-24g") for word in ("4090", "RTX 4090", "rtx4090_24g")), ("H100", "h100-80g")]
)
def test_a_name_that_fits_one_card_is_that_card(name, card):
    assert find_gpu(name) == GPUS[card]


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("a100", "Did you mean a100-40g or a100-80g?"),
        ("h1000-80g", "Did you mean h100-80g?"),
        ("mi300", "or give --memory_gib"),
        ("", "or give --memory_gib"),
    ],
)
def test_a_name_of_several_cards_or_none_is_refused_with_the_nearest(name, hint):
    with pytest.raises(ConfigError, match=f"^--gpu {name}: this card is not in the table: ") as caught:
        find_gpu(name)
    assert str(caught.value).endswith(hint) or hint in str(caught.value)


def test_hours_are_flops_over_a_part_of_the_peak():
    """30 to 50 % of 312 TFLOP/s; nothing is claimed of a card whose peak is not known."""
    assert describe_hours(GPUS["a100-80g"], 0.5 * 312e12 * 3600, "length 3 steps") == (
        "length 3 steps: 1 to 1.67 hours, 562 PFLOP on each GPU at 50 to 30 % of the peak of a100-80g; not measured"
    )
    unknown = Gpu("a GPU", 20.0)
    assert "not known" in describe_hours(unknown, 1e15, "x")
