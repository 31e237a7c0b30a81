"""The ds configs by GPU tier: each is what the planner says, valid, and fits its card."""

from __future__ import annotations

import json
import re

import pytest

from dino_ds.config.ds_config import load_ds_config, resolve_ds_config
from dino_ds.config.loading import load_recipe
from dino_ds.costs.step_costs import count_parameters
from dino_ds.planning.fit import FILLED, fit
from dino_ds.planning.gpus import GPUS
from scripts import tiers
from scripts.tiers import CASES, FOLDER, README, SCALING, file_text, pages, parts_table, plan_all, table

pytestmark = pytest.mark.full  # every card and size is rehearsed: minutes


VITS = [case for case in CASES if "resnet" not in case.recipe]  # others run on the meta device, for seconds


@pytest.fixture(scope="module", params=[VITS, pytest.param(CASES, marks=pytest.mark.full)], ids=["ViTs", "all"])
def planned(request):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiers, "CASES", request.param)
        return plan_all()


def test_files_and_tables_are_those_of_the_planner(planned):
    """If this fails after a change of the planner: make tiers."""
    expected = {f"{found.name}.json": file_text(found) for _, found in planned if found is not None}
    written = {path.name: path.read_text() for path in FOLDER.iterdir()}
    assert expected.items() <= written.items()
    assert set(table(planned).splitlines()) <= set(README.read_text().splitlines())
    assert parts_table("vit7b16", 8) in SCALING.read_text()
    if len(planned) == len(CASES):
        assert expected == written
        assert all(page.read_text() == text for page, text in pages(planned).items())


def test_each_file_is_valid_and_fits_its_card(planned):
    for case, found in planned:
        if found is None:
            continue
        path = str(FOLDER / f"{found.name}.json")
        recipe, ds = case.load(), load_ds_config(path, {})
        config = resolve_ds_config(ds, path, recipe.data.global_batch, case.ranks, True, count_parameters(recipe))
        assert config == found.fit.config
        assert config.micro_batch * config.accumulation * case.ranks == recipe.data.global_batch
        again = fit(recipe, ds, path, case.ranks, case.card.memory_gib)
        assert again.fits and again.memory.gib <= FILLED * case.card.memory_gib, found.name


def test_a_card_of_10_gb_takes_the_file_of_12_gb():
    path, card = str(FOLDER / "12gb_1gpu_vitb16_zero2_bf16.json"), GPUS["rtx3080-10g"]
    assert fit(load_recipe("vitb16", {}), load_ds_config(path, {}), path, 1, FILLED * card.memory_gib).fits


def test_names_say_what_the_files_are(planned):
    pattern = r"(.+?)_(\d+)gpu_(\w+?)_zero(\d)_(bf16|fp16)((?:_checkpointing|_offload|_offload_all|_hpz|_zeropp)*)"
    for case, found in planned:
        if found is None:
            continue
        tier, gpus, recipe, stage, precision, more = re.fullmatch(pattern, found.name).groups()
        zero, written = found.ds["zero_optimization"], json.dumps(found.ds)
        assert (tier, recipe) == (case.tier, case.recipe + "_gram" * (case.stage is not None))
        assert int(gpus) == case.ranks
        assert (int(stage), precision) == (zero["stage"], found.fit.config.precision)
        for word, key in (
            ("checkpointing", "activation_checkpointing"),
            ("offload", "offload_optimizer"),
            ("hpz", "hpz"),
        ):
            assert (word in more or ("zeropp" in more and word == "hpz")) == (key in written)
        assert ("zeropp" in more) == ("zero_quantized_weights" in written)


def test_every_tier_and_size_has_its_configs(planned):
    tiers = {case.tier for case, found in planned if found is not None}
    assert {"8gb", "12gb", "24gb", "40gb", "80gb", "141gb"} < tiers == {case.tier for case, _ in planned}
    fitting = {(case.tier, case.recipe) for case, found in planned if found is not None}
    assert {"vits16", "vitb16", "vitl16", "vitg14", "vit3b14", "vit7b16"} < {r for _, r in fitting}
    assert all(found.fit.config.precision == "fp16" for case, found in planned if case.tier[0] in "tv")


def test_what_does_not_fit_is_said_to(planned):
    """The teacher is whole and FP32 on every GPU, 26 GiB at 7B, and a Gram teacher takes 12 to 13 more."""
    refused = [(case.tier, case.recipe, case.stage, case.nodes) for case, found in planned if found is None]
    assert refused == [("24gb", "vit7b16", None, 1), ("40gb", "dinov3_vit7b16", "dinov3_gram", 32)]
    assert "| 24gb | 8 | vit7b16 | 8 | – | – | – | – | – | – | does not fit | 22 |" in README.read_text()


def test_a_second_copy_of_the_weights_is_counted():
    """ZeRO++'s hpZ keeps 2 bytes a weight, divided by the ranks of a node."""
    recipe = load_recipe("vitl16", {})
    zero = {"stage": 3, "zero_hpz_partition_size": 8}
    found = fit(recipe, {"gradient_clipping": 0, "bf16": {"enabled": True}, "zero_optimization": zero}, "x", 64, 80)
    assert found.memory.parts["second copy of the student"] == 2 * count_parameters(recipe) // 8
