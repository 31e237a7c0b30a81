"""The ds configs by GPU tier: each is what the planner says, valid, and fits its card."""

from __future__ import annotations

import pytest

from dino_ds.config.ds_config import load_ds_config, resolve_ds_config
from dino_ds.config.loading import load_recipe
from dino_ds.costs.step_costs import count_parameters
from dino_ds.planning.fit import FILLED, GPUS, fit
from scripts.tiers import FOLDER, file_text, pages, plan_all

pytestmark = pytest.mark.full  # every card and size is rehearsed: minutes


@pytest.fixture(scope="module")
def planned():
    return plan_all()


def test_files_and_tables_are_those_of_the_planner(planned):
    """If this fails after a change of the planner: make tiers."""
    expected = {f"{found.name}.json": file_text(found) for _, found in planned if found is not None}
    assert expected == {path.name: path.read_text() for path in FOLDER.glob("*.json")}
    assert all(page.read_text() == text for page, text in pages(planned).items())


def test_each_file_is_valid_and_fits_its_card(planned):
    for case, found in planned:
        if found is None:
            continue
        path = str(FOLDER / f"{found.name}.json")
        recipe, ds = case.load(), load_ds_config(path, {})
        config = resolve_ds_config(ds, path, recipe.data.global_batch, case.ranks, True, count_parameters(recipe))
        assert config == found.config
        assert config.micro_batch * config.accumulation * case.ranks == recipe.data.global_batch
        assert fit(recipe, ds, path, case.ranks)[1].gib <= FILLED * case.card.memory_gib, found.name


def test_a_card_of_10_gb_takes_the_file_of_12_gb():
    path, card = str(FOLDER / "12gb_1gpu_vitb16_zero2_bf16.json"), GPUS["rtx3080-10g"]
    assert fit(load_recipe("vitb16", {}), load_ds_config(path, {}), path, 1)[1].gib <= FILLED * card.memory_gib


def test_a_second_copy_of_the_weights_is_counted():
    """ZeRO++'s hpZ keeps 2 bytes a weight, divided by the ranks of a node."""
    recipe = load_recipe("vitl16", {})
    zero = {"stage": 3, "zero_hpz_partition_size": 8}
    _, memory = fit(recipe, {"gradient_clipping": 0, "bf16": {"enabled": True}, "zero_optimization": zero}, "x", 64)
    assert memory.parts["second copy of the student"] == 2 * count_parameters(recipe) // 8
