"""What of a recipe does not go with DINOv3's terms is refused in one line; weights and replacements by step."""

from __future__ import annotations

import pytest

from dino_ds.config.loading import load_recipe
from dino_ds.engine.schedules import Replacements
from dino_ds.errors import ConfigError
from dino_ds.method.build import build_schedules

ON = {"gram.weight": "2"}
EMA = {**ON, "gram.teacher": "ema"}


def _problem(changes: dict[str, str]) -> str:
    with pytest.raises(ConfigError) as error:
        load_recipe("vits16", changes)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"gram.crop_size": "448"}, "gram.crop_size 448 has no effect with gram.weight 0: leave it out"),
        (
            {**ON, "gram.crop_size": "208"},
            "gram.crop_size 208 must be 1 to 2 times crops.global_size 224: 224 to 448, or",
        ),
        ({**ON, "gram.crop_size": "250"}, "gram.crop_size 250 is not a multiple of the patch size 16: use 240 or 256"),
        ({**EMA, "gram.crop_size": "448"}, "gram.crop_size 448 has no effect with gram.teacher ema: leave it out"),
        ({**EMA, "teacher.source": "runs/large"}, "gram.teacher ema in a distillation: the EMA teacher sees no crops"),
        ({**ON, "gram.start": "200 epochs"}, "gram.start 200 epochs is longer than length 100 epochs"),
        ({"head.learned_lengths": "true", "head.free_prototypes": "true"}, "head: learned_lengths true and free_prot"),
        ({"objective.dino_local_weight": "0.5", "crops.num_local": "0"}, "0.5 has no effect with crops.num_local 0"),
        ({"crops.mask_hides": "false"}, "crops.mask_hides false has no effect with crops.mask none"),
    ],
)
def test_what_has_no_effect_or_does_not_fit_is_refused_in_one_line(changes, text):
    assert text in _problem(changes)


def test_crops_that_only_the_teacher_s_own_patches_can_judge():
    """A teacher from a file may have other patches: its crops are checked with it."""
    recipe = load_recipe("vits16", {**ON, "gram.teacher": "runs/other", "gram.crop_size": "252"})
    assert [(group.name, group.size, group.teachers) for group in recipe.groups] == [
        ("global", 224, ("ema",)),
        ("local", 96, ()),
        ("gram", 252, ("gram",)),
    ]


def test_the_weight_is_0_before_its_start_and_its_ramp_begins_there():
    changes = {"length": "40 steps", "optimizer.warmup": "0 steps", "objective.freeze_prototypes": "0 steps"}
    gram = {
        "gram.weight": "0..2 over 5 steps",
        "gram.start": "10 steps",
        "objective.dino_local_weight": "1..0.5 over 5",
    }
    schedules = build_schedules(load_recipe("vits16", changes | gram), epoch_steps=20)
    weights = [schedules.at(step).weights["gram"] for step in range(16)]
    assert weights[:11] == [0] * 11 and weights[14:] == [2, 2]
    assert weights[12] == pytest.approx(1)
    assert [schedules.at(step).weights["dino_local"] for step in (0, 2, 4, 5)] == pytest.approx([1, 0.75, 0.5, 0.5])
    assert [step for step in range(40) if schedules.at(step).replaced] == [10]


def test_replacements_are_counted_from_the_start():
    """As facebookresearch/dinov3's update_frequency 3 and it_first_update 3 with one update, and ours of a snapshot."""
    theirs = Replacements(start=0, at_start=False, every=3, most=1)
    ours = Replacements(start=4, at_start=True, every=3, most=2)
    assert [step for step in range(20) if theirs.due(step)] == [3]
    assert [step for step in range(20) if ours.due(step)] == [4, 7, 10]
