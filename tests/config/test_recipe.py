"""The recipe: what it accepts, what it says about what it does not."""

from __future__ import annotations

import json
import re
from contextlib import nullcontext
from pathlib import Path

import pytest
import timm

from dino_ds.config.fields import Length
from dino_ds.config.loading import (
    RECIPES,
    RecipeSettings,
    change_recipe,
    dump_recipe,
    load_recipe,
    recipe_names,
    write_recipe,
)
from dino_ds.config.recipe import Recipe
from dino_ds.config.schema import flat_values
from dino_ds.errors import ConfigError
from dino_ds.method.build import build_schedules
from dino_ds.method.specs.base import StepImages
from dino_ds.method.specs.own import check_images_together


def _problems(config: str | None = None, **overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_recipe(config, {key.replace("__", "."): value for key, value in overrides.items()})
    return str(caught.value).splitlines()


@pytest.fixture
def write(tmp_path: Path):
    def _write(text: str, name: str = "my.yaml") -> str:
        path = tmp_path / name
        path.write_text(text)
        return str(path)

    return _write


def test_vits16_is_the_defaults_written_out():
    assert load_recipe("vits16", {}) == load_recipe(None, {}) == Recipe()
    text = (RECIPES / "vits16.yaml").read_text()
    assert all("#" in line for line in text.splitlines() if line.strip() and not line.endswith(":"))


@pytest.mark.parametrize("name", recipe_names())
def test_shipped_recipes_load_and_survive_a_dump_and_being_written_to_edit(name: str, write, tmp_path: Path):
    given = {"model.init_from": "weights.pth"} if name.startswith("continue") else {}
    recipe = load_recipe(name, given, notes := list[str]())
    assert notes == []  # keys without effect there serve the recipes that extend it
    assert load_recipe(write(dump_recipe(recipe)), {}) == recipe
    write_recipe(edited := str(tmp_path / "edit.yaml"), name, given)
    assert load_recipe(edited, {}) == recipe
    assert RecipeSettings.collect(edited, {}).names() == RecipeSettings.collect(name, given).names()
    assert all("  # " in line for line in Path(edited).read_text().splitlines()[1:] if not line.endswith(":"))
    with pytest.raises(ConfigError, match=r"--print .*edit.yaml can't be written: File exists; name a new file"):
        write_recipe(edited, name, given)


def test_several_recipes_go_one_over_another(write):
    stage = write("length: 3 steps from step 7\nobjective: {koleo_weight: 0..1 over 2 epochs from step 7}\n")
    recipe = load_recipe(f"vitb16,{stage}", {"seed": "3"})
    assert recipe == change_recipe(load_recipe("vitb16", {}), {"seed": "3"}, stage)
    assert recipe.model.backbone == "vit_base_patch16_224" and recipe.length.in_steps(1, 1) == 10
    assert recipe.length.begin == 7 and str(recipe.objective.koleo_weight) == "0..1 over 2 epochs from step 7"
    assert load_recipe(write(dump_recipe(recipe), "again.yaml"), {}) == recipe
    assert load_recipe(stage, {"length": "5"}).length == Length(5, "steps")  # the command line beats a file
    assert _problems(f"vitb16,{stage},vitb17")[0].startswith("no recipe is named 'vitb17'")


def test_a_file_extends_a_shipped_recipe_or_a_file_beside_it(write, tmp_path: Path, monkeypatch):
    """Keys over keys, lists whole, through any number of files, from any folder; what a run writes has all of it."""
    write("extends: cifar10\ncrops: {global_scale: [0.5, 0.9]}\noptimizer: {lr: 1e-3}\n", "base.yaml")
    (tmp_path / "more").mkdir()
    path = write("extends: ../base.yaml\noptimizer: {min_lr: 2e-5}\n", "more/mine.yaml")
    monkeypatch.chdir("/")
    recipe = load_recipe(path, {})
    over = {"crops.global_scale": "0.5,0.9", "optimizer.lr": "1e-3", "optimizer.min_lr": "2e-5"}
    assert recipe == load_recipe("cifar10", over)
    assert "extends" not in dump_recipe(recipe) and load_recipe(write(dump_recipe(recipe)), {}) == recipe
    assert RecipeSettings.collect(path, {}).names() == RecipeSettings.collect("cifar10", over).names()


@pytest.mark.parametrize(
    "base,problem",
    [
        ("cifar", "extends: no recipe is named 'cifar': .* Did you mean cifar10"),
        ("nope.yaml", "extends: .*/nope.yaml does not exist"),
        ("[cifar10, mine.yaml]", r"extends: \[cifar10, mine.yaml\] is not one recipe: give"),
        ("mine.yaml", "mine.yaml extends .*mine.yaml: a circle"),
        ("other.yaml", "other.yaml extends .*mine.yaml: a circle"),
        (f"{'x' * 300}.yaml", "x.yaml does not exist"),
    ],
)
def test_what_can_t_be_extended_is_said_in_one_line(write, tmp_path: Path, base: str, problem: str):
    write("extends: mine.yaml\n", "other.yaml")
    (line,) = _problems(path := write(f"extends: {base}\n", "mine.yaml"))
    assert re.search(problem, line) and line.startswith(path)


def test_another_backbone_drops_what_is_the_recipe_s_network_s(write):
    """Its arguments and sizes that the other lacks, in a line that names them; what is given beside the name stays."""
    backbone = "convnext_atto"
    mine = write(f"extends: resnet18\nmodel: {{backbone: {backbone}}}\n")
    for config, overrides in (("resnet18", {"model.backbone": backbone}), (mine, {})):
        notes: list[str] = []
        recipe = load_recipe(config, overrides, notes)
        assert (recipe.model.backbone, recipe.model.arguments) == (backbone, "{}")
        expected = f"left out for model.backbone {backbone}, as it is resnet18's: model.arguments"
        assert len(notes) == 1 and notes[0].startswith(expected) and "zero_init_last: false" in notes[0]
    given = {"model.backbone": "resnet34", "model.arguments": '{"zero_init_last": true}'}
    recipe = load_recipe("resnet18", given, notes := list[str]())
    assert recipe.model.arguments == given["model.arguments"] and not notes
    load_recipe("cifar10", {"model.backbone": backbone}, notes)
    assert "model.patch_size 8, model.width 128, model.depth 2, model.heads 4" in notes[0]


def test_all_mistakes_of_a_file_are_said_at_once_as_they_are_written(write):
    """Not what only follows from a mistake: 20 is no multiple of the default's patches, and the file's are misspelt."""
    text = "optimizer: {lr: fast, kind: sgd}\ncrops: {global_size: [32, 64], local_scale: [0.5, 0.2]}\n"
    text += "head: {prototype: 48}\nteacher: {distill: features}\neval: {k: 30, bank_images: 20}\n"
    lines = [line.partition("my.yaml: ")[2] or line for line in _problems(write(text))]
    assert lines == [
        "head.prototype: not a recipe key. Did you mean head.prototypes or ibot_head.prototypes?",
        "crops.global_size: [32, 64] is not a whole number",
        "crops.local_scale: [0.5, 0.2] is not a range of areas: two numbers with 0 < low <= high <= 1",
        "optimizer.lr: 'fast' is not a number",
        "teacher: distill features has no effect without source: name a teacher (--teacher.source RUN)",
        "eval.k 30 is more than eval.bank_images 20",
    ]
    lines = _problems(write("crops: {global_size: 20, local_size: 20}\nmodel: {patch_sise: 10}\n"))
    assert len(lines) == 1 and "model.patch_sise" in lines[0]


def test_yaml_traps_are_closed(write):
    """YAML 1.1 reads 1e-4 as text and `no` as False; the schema decides instead."""
    text = "optimizer:\n  lr: 1e-4\ndata:\n  root: no\n  download: no\n  workers: null\ncrops:\n"
    recipe = load_recipe(write(text), {})
    assert recipe.optimizer.lr == 1e-4 and recipe.data.root == "no"
    assert recipe.data.download is False and recipe.data.workers is None
    changes = {"data.root": "./null", "optimizer.eps": "1e-12", "keep_every": "0.1 epochs", "eval.root": "1e3"}
    recipe = load_recipe(write("data: {workers: 3}"), changes | {"data.workers": "none"})
    assert load_recipe(write(dump_recipe(recipe)), {}) == recipe and recipe.data.workers is None
    assert change_recipe(change_recipe(recipe, {"data.root": "none"}), {"data.root": "./null"}) == recipe


def test_arguments_of_a_backbone_are_what_they_look_like(write):
    """As a mapping of YAML, in its spellings, and as JSON: a text "False" would be true for who is given it."""
    inner = "{a: .5, b: -1.e-1, c: '1', d: se}"
    given = f"{{zero_init_last: False, aa_layer: ~, act: Null, layers: [1, 2], block_args: {inner}}}"
    recipe = load_recipe(write(f"model: {{backbone: resnet18, arguments: {given}}}"), {})
    expected = {"zero_init_last": False, "aa_layer": None, "act": None, "layers": [1, 2]}
    expected["block_args"] = {"a": 0.5, "b": -0.1, "c": 1, "d": "se"}
    assert json.loads(recipe.model.arguments) == expected
    assert load_recipe(None, {"model.backbone": "resnet18", "model.arguments": json.dumps(expected)}) == recipe


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("- a\n", "is not a recipe: it must hold 'key: value' lines"),
        ("optimizer:\n\tlr: 1\n", "line 2: a tab stands where spaces belong: indent with spaces"),
        ("optimizer: {lr: 1\n", "line 2: expected ',' or '}', but got the end of the file"),
        ("seed: {a: 1}\n", "is not a whole number"),
        ("fp16: {enabled: true}\n", "not a recipe key: it belongs to the ds JSON: fp16.enabled (--ds.fp16.enabled)"),
        ("epochs: 3\n", "epochs: not a recipe key: here it is length"),
        ("seed: 1\noptimizer:\n  lr: 1\n  lr: 2\n", " line 4: 'lr' is set twice, on lines 3 and 4"),
    ],
)
def test_misshapen_files(text: str, says: str, write):
    path = write(text)
    (problem,) = _problems(path)
    assert problem.startswith(path) and says in problem


IBOT = {"crops.mask": "dinov2", "objective.ibot_weight": "1"}
LAYERS = {"model.backbone": "resnet18"}
ROTARY = {"model.backbone": "vit_small_patch16_dinov3"}
GRAM = {"gram.weight": "2"}
CHANNELS = {"data.mean": "0.5,0.5,0.5", "data.std": "0.2,0.2,0.2"}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"model.patch_size": "14", "model.heads": "6"}, "crops.local_size 96 is not a multiple of the patch size 14 "),
        ({"length": "5 epochs", "optimizer.warmup": "6 epochs"}, "warmup 6 epochs is longer than length 5 epochs"),
        ({"data.download": "true"}, "data: download true needs a torchvision data.source, and 'folder' is none"),
        ({"eval.stop_after": "0"}, "--eval.stop_after: 0 must be >= 1\n--eval.stop_after: '0' is not a distance such"),
        ({"objective.ibot_weight": "-1"}, "--objective.ibot_weight: '-1' is below 0: a weight is 0 or more"),
        (IBOT | {"crops.mask_ratio": "0.0001,0.0002"}, "crops.mask_ratio 0.0001,0.0002 hides none of the 196 patches"),
        ({"objective.ibot_weight": "1"}, "objective.ibot_weight needs masked patches: set crops.mask dinov2"),
        (IBOT | {"ibot_head.batch_norm": "true"}, "ibot_head.batch_norm true: a rank may have no masked"),
        ({"optimizer.momentum": "0.5"}, "momentum 0.5 has no effect with optimizer.kind adamw: leave it out"),
        (CHANNELS | {"data.std": "none"}, "data.mean is given without data.std: give both or neither"),
        (CHANNELS | {"data.std": "0.2,0.2,0"}, "data.std 0.2,0.2,0 must be 0.0001 to 1, in values whose black is 0"),
        ({"model.rope_rescale": "2"}, "rope_rescale 2.0 is for ViTs with rotary positions"),
        (LAYERS | {"model.arguments": '{"layers": [1], "layers": [2]}'}, "is not keywords as JSON"),
        (GRAM | {"gram.crop_size": "208"}, "gram.crop_size 208 must be 1 to 2 times crops.global_size 224: 224 to 448"),
        (GRAM | {"gram.teacher": "ema", "teacher.source": "runs/l"}, "gram.teacher ema in a distillation: the EMA"),
        ({"head.learned_lengths": "true", "head.free_prototypes": "true"}, "head: learned_lengths true and free_prot"),
        *(({"length": text}, "is not a length") for text in ("-1 steps", "1 week", "1e999 steps", "1.2.3")),
        ({"seed": str(10**30)}, "must be < 4294967296"),
        ({"data.root": "a" * 300}, "is too long: 300 bytes"),
        ({"model.init_from": "a\udcff"}, "holds bytes that are not UTF-8"),
    ],
)
def test_what_is_out_of_range_or_does_not_fit_is_refused_in_one_line(changes: dict[str, str], text: str):
    problems = _problems(**changes)
    assert text in "\n".join(problems) and len(problems) == len(text.splitlines())


def test_unknown_recipe_backbone_and_missing_file(write, tmp_path: Path):
    assert _problems("vits17")[0].startswith("no recipe is named 'vits17': ")
    assert _problems(str(tmp_path))[0].startswith(f"--config {tmp_path} is a folder, not a recipe: give a shipped name")
    path = write("seed: 1\n", "tried.yaml")
    assert _problems(str(tmp_path / "tryed.yaml")) == [f"{tmp_path}/tryed.yaml does not exist. Did you mean {path}?"]
    assert "there is no folder" in _problems(str(tmp_path / "no" / "a.yaml"))[0]
    named = _problems(model__backbone="vit_smal_patch16")[0].split("The nearest are ")[1].split(", ")
    assert named[0].startswith("vit_small_patch16_") and len(named) == 3 and all(timm.is_model(name) for name in named)


def test_lengths_in_steps_of_real_data():
    """31 steps an epoch of 128 images; rounded up."""
    steps = {"30epochs": 930, "1 epoch": 31, "5000 steps": 5000, "17": 17, "1e3 images": 8, "129 images": 2}
    steps |= {"0.1 epochs": 4, "0 epochs": 0, " 2.5  epochs ": 78}
    assert {text: Length.parse(text).in_steps(128, 31) for text in steps} == steps
    assert Length.parse("0.1 epochs").in_steps(1, 30) == 3  # exact decimals


def test_a_length_may_be_a_share_of_the_run(write):
    """Of a file or the command line, whatever the order; of each length but the run's own, ramps', of no other key."""
    path = write("optimizer: {warmup: 10 %}\neval: {every: 12.5%}\nsave_every: 50 %\ndata: {root: 5 %}\n")
    recipe = load_recipe(path, {"length": "16000 images", "model.freeze_backbone": "3.3 %", "model.init_from": "x"})
    lengths = recipe.optimizer.warmup, recipe.eval.every, recipe.save_every, recipe.model.freeze_backbone
    assert [str(length) for length in lengths] == [f"{n} images" for n in (1600, 2000, 8000, 528)]
    assert recipe.data.root == "5 %" and load_recipe(write(dump_recipe(recipe), "again.yaml"), {}) == recipe
    (problem,) = _problems(optimizer__warmup="101 %")
    assert "optimizer.warmup 101 epochs is longer than length 100 epochs" in problem
    for name, text in (("length", "10 %"), ("optimizer.warmup", "-1 %"), ("optimizer.warmup", "1e3 %")):
        (problem,) = _problems(**{name: text})
        assert f"'{text}' is not a length" in problem
    assert "'5 %' is not a weight" in _problems(objective__koleo_weight="5 %")[0]


def test_a_shorter_length_shortens_a_shipped_recipes_warm_ups(write):
    """In steps or images, to a third of it, with a note; never those that the user has set, or of the shipped length,
    or where a third is enough."""
    notes: list[str] = []
    recipe = load_recipe("small", {"length": "3000 images"}, notes)
    assert str(recipe.optimizer.warmup) == "990 images"
    assert notes == [
        "optimizer.warmup is 990 images, a third of length 3000 images: the recipe's 12800 images are longer"
    ]
    dinov2 = load_recipe("dinov2_vits14", {"length": "5000 steps"})
    assert {str(dinov2.optimizer.warmup), str(dinov2.objective.teacher_temp_warmup)} == {"1650 steps"}
    for length in ("50000 images", "2 epochs"):
        assert str(load_recipe("small", {"length": length}).optimizer.warmup) == "12800 images"
    own = load_recipe(write("extends: small\nlength: 20000 images\noptimizer: {warmup: 15000 images}\n", "o.yaml"), {})
    assert str(own.optimizer.warmup) == "15000 images"


def test_a_learning_rate_that_would_rise_to_the_end_is_refused_where_it_is_trained():
    load_recipe(None, {"optimizer.min_lr": "1e-3"}).check_learning_rates()  # the peak at a batch of 512
    for changes in ({"optimizer.min_lr": "1.1e-3"}, {"optimizer.min_lr": "1e-3", "data.global_batch": "256"}):
        with pytest.raises(ConfigError, match=r"optimizer\.min_lr .* is more than the peak learning rate"):
            load_recipe(None, changes).check_learning_rates()
        load_recipe(None, changes | {"optimizer.schedule": "constant"}).check_learning_rates()  # which has no end


def test_a_given_key_without_effect_is_said():
    load_recipe(None, {"optimizer.schedule": "constant", "optimizer.min_lr": "1e-7"}, notes := list[str]())
    load_recipe("small", {"objective.teacher_temp": "0.02"}, notes)
    idle, of_small = notes
    assert "min_lr 1e-07 has no effect" in idle
    assert "teacher_temp 0.02 has no effect with objective.dino_weight 0" in of_small


@pytest.mark.parametrize(
    ("recipe", "changes", "keys"),
    [
        ("small", {"optimizer.kind": "adamw"}, ["optimizer.momentum 0.95 has no", "optimizer.scale 4 has no"]),
        ("dinov2_vitg14", {"objective.ibot_weight": "0"}, ["crops.mask dinov2 has no", "ibot_head.prototypes 131072"]),
    ],
)
def test_keys_of_a_shipped_recipe_that_an_override_makes_idle_return_to_their_defaults(recipe, changes, keys, write):
    """Those of a user's own file are refused: he can leave them out."""
    notes: list[str] = []
    values, usual = flat_values(load_recipe(recipe, changes, notes)), flat_values(Recipe())
    said = [note for note in notes if note.startswith("left out of the recipe: ")]
    assert all(any(key in note for note in said) for key in keys), notes
    assert all(values[key.split()[0]] == usual[key.split()[0]] for key in keys)
    assert change_recipe(load_recipe(recipe, {}), changes) == load_recipe(recipe, changes)
    name, *_ = keys[0].split()
    own = {"optimizer.momentum": "0.5", "crops.mask": "dinov3"}[name]
    section, _, leaf = name.partition(".")
    with pytest.raises(ConfigError, match=f"{name} {own} .*has no effect"):
        load_recipe(write(f"extends: {recipe}\n{section}:\n  {leaf}: {own}\n"), changes)


@pytest.mark.parametrize(
    ("changes", "step", "says"),
    [
        ({"objective.koleo_weight": "0.1"}, (1, 2, 1), "koleo compares images, .*: raise train_micro_batch_size"),
        ({"objective.koleo_weight": "0.1"}, (1, 1, 1), "koleo compares images, .*: raise data.global_batch"),
        ({"objective.koleo_weight": "0.1", "objective.koleo_ranks": "all"}, (1, 1, 8), ""),
        ({"objective.centering": "sinkhorn"}, (1, 1, 1), "dino compares images, .*: raise data.global_batch"),
        ({}, (1, 1, 1), ""),
    ],
)
def test_one_image_at_a_time_is_refused_where_terms_compare_several(changes, step, says):
    recipe = load_recipe(None, changes)
    with pytest.raises(ConfigError, match=says) if says else nullcontext():
        check_images_together(recipe, StepImages(*step))


def test_a_recipe_of_distillation_is_not_trained_without_a_teacher():
    for name in ("quickstart_distill", "distill_vits16"):
        load_recipe(name, {"teacher.source": "runs/l"}).check_teacher()
        load_recipe(name, {"teacher.distill": "none"}).check_teacher()
        with pytest.raises(ConfigError, match=r"teacher\.distill heads needs a trained teacher: name one \(--teacher"):
            load_recipe(name, {}).check_teacher()


def test_the_weight_is_0_before_its_start_and_its_ramp_begins_there():
    changes = {"length": "40 steps", "optimizer.warmup": "0 steps", "objective.freeze_prototypes": "0 steps"}
    gram = {"gram.weight": "0..2 over 5 steps", "gram.start": "10 steps", "gram.teacher": "snapshot"}
    changes |= gram | {"objective.dino_local_weight": "1..0.5 over 5"}
    schedules = build_schedules(load_recipe("vits16", changes), epoch_steps=20)
    weights = [schedules.at(step).weights["gram"] for step in range(16)]
    assert weights[:11] == [0] * 11 and weights[14:] == [2, 2]
    assert weights[12] == pytest.approx(1)
    assert [schedules.at(step).weights["dino_local"] for step in (0, 2, 4, 5)] == pytest.approx([1, 0.75, 0.5, 0.5])
    assert [step for step in range(40) if schedules.at(step).replaced] == [10]


@pytest.mark.parametrize(
    "text",
    [
        'data: {root: "\\uD800"}', 'extends: "\\uD800"', '"\\uD800": 3',
        'objective: {terms: {"\\uD800": {spec: "a:b"}}}',
        'data: {mean: ["a\\0"]}', "a: &a {b: *a}", "[" * 5000, f"seed: {'9' * 5000}", "length: 1e300 epochs",
        "data: {global_batch: 1e308}",
    ],
)  # fmt: skip
def test_what_no_text_can_hold_is_one_line_that_names_the_file(write, text: str):
    """Halves of characters, NULs, numbers without end, and what is nested without end."""
    with pytest.raises(ConfigError) as caught:
        load_recipe(path := write(text + "\n"), {})
    assert str(caught.value).startswith(str(path)) and "\n" not in str(caught.value)
    str(caught.value).encode()
    with pytest.raises(ConfigError, match="is not keywords as JSON"):
        load_recipe(None, {"objective.terms": '{"\\ud800": {"spec": "a:b"}}'})
