"""The ds configs by GPU tier: each is what the planner says, valid, and fits its card."""

from __future__ import annotations

import pytest

from dino_ds.config.ds_config import load_ds_config, resolve_ds_config
from dino_ds.config.loading import load_recipe
from dino_ds.costs.step_costs import count_parameters
from dino_ds.planning.fit import FILLED, GPUS, fit
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


def test_a_second_copy_of_the_weights_is_counted():
    """ZeRO++'s hpZ keeps 2 bytes a weight, divided by the ranks of a node."""
    recipe = load_recipe("vitl16", {})
    zero = {"stage": 3, "zero_hpz_partition_size": 8}
    found = fit(recipe, {"gradient_clipping": 0, "bf16": {"enabled": True}, "zero_optimization": zero}, "x", 64, 80)
    assert found.memory.parts["second copy of the student"] == 2 * count_parameters(recipe) // 8
