"""What fits: the rule, cards and machines, and what a run starts with or is told before anything starts."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from unittest import mock

import pytest

import dino_ds.planning.start as start_module
from dino_ds.config.ds_config import change_ds_config, load_ds_config, resolve_ds_config
from dino_ds.config.loading import load_recipe
from dino_ds.engine import distributed
from dino_ds.errors import ConfigError
from dino_ds.options.commands import TRAIN
from dino_ds.options.flags import parse_flags, read
from dino_ds.planning import doctor
from dino_ds.planning.doctor import read_hostfile
from dino_ds.planning.fit import (
    FILLED,
    GPUS,
    SHAPES,
    Cluster,
    Gpu,
    Machine,
    ds_of,
    find_gpu,
    find_machine,
    fit,
    fit_with,
    largest_micro_batch,
    recommend,
    write_ds,
)
from dino_ds.planning.start import check_fits, choose_ds_config, named_start, planned_start, resumed_start
from tests.ranks import run_on_ranks
from tests.run.harness import image_folder, log_of, train_tiny

RTX3090 = Machine(1, 1, 64.0, 23.6)
T4 = Machine(4, 4, 256.0, 14.5, bf16=False)


def _given(name, machine=RTX3090, recipe="vits16", **changes):
    recipe, path = load_recipe(recipe, changes), f"ds_configs/{name}.json"
    return recipe, named_start(recipe, load_ds_config(path, {}), path, machine)


def test_the_default_recipe_fits_a_card_of_24_gb(monkeypatch, tmp_path):
    """As `train` decides it, and by the same prediction that `plan` gives."""
    monkeypatch.setattr(start_module.fit, "find_machine", lambda: RTX3090)
    words = ["--data.root", "/images", "--run_dir", str(tmp_path / "run")]
    options, files = read(TRAIN, parse_flags(TRAIN, words))
    recipe = files.pop("recipe")
    chosen = choose_ds_config(recipe, options, **files)
    assert re.search(r"bf16, ZeRO \d, micro-batch 128 x accumulation 4$", chosen.reason)
    planned = planned_start(recipe, {}, RTX3090)
    again = fit(recipe, planned.ds, planned.path, 1, RTX3090.card_gib)
    assert again.fits and again.memory.gib <= FILLED * 23.6 and again.config == chosen.config
    assert chosen.predicted_gib < again.memory.gib  # without the margins


@pytest.mark.slow
@pytest.mark.parametrize("machine", [RTX3090, T4, Machine(8, 8, 500.0, 79.1)])
def test_what_is_chosen_fits(machine):
    recipe = load_recipe("vitb16", {"model.depth": "2"})
    start = planned_start(recipe, {}, machine)
    check_fits(recipe, start, machine)
    assert start.config.precision == ("bf16" if machine.bf16 else "fp16")
    assert start.config.micro_batch * start.config.accumulation * machine.ranks == recipe.data.global_batch


@pytest.mark.parametrize(
    ("ds", "machine", "depth", "cure"),
    [
        ("zero1_bf16", dataclasses.replace(RTX3090, card_gib=4.0), 2, "leave --ds_config out, for one"),
        ("zero0_fp32", Machine(2, 2, 6.0), 2, "add --ds.train_micro_batch_size_per_gpu 64"),
        ("zero0_fp32", Machine(1, 1, 0.55), 12, "there are 0.6 to take (90 % of what is free): take a smaller model"),
    ],
)
@pytest.mark.slow
def test_what_is_too_large_is_refused_with_what_fits(ds, machine, depth, cure):
    recipe, start = _given(ds, machine, **{"model.depth": str(depth)})
    with pytest.raises(ConfigError, match=r"needs [\d.]+ GiB .*by prediction") as caught:
        check_fits(recipe, start, machine)
    message = str(caught.value)
    assert cure in message and message.count("--config small") == 1
    small = load_recipe("small", {})
    if machine.card_gib is not None:
        check_fits(recipe, planned_start(recipe, {}, machine), machine)
        check_fits(small, planned_start(small, {}, machine), machine)
        return
    check_fits(small, named_start(small, start.ds, start.path, machine), machine)
    if flags := re.findall(r"--ds\.(\S+) (\w+)", message):
        changed = change_ds_config(dict(start.ds), start.path, dict(flags))
        check_fits(recipe, named_start(recipe, changed, start.path, machine), machine)


def test_the_host_s_memory_counts_too():
    recipe, start = _given("zero3_bf16_offload", **{"model.depth": "2"})
    check_fits(recipe, start, dataclasses.replace(RTX3090, card_gib=40.0))
    with pytest.raises(ConfigError, match="of host memory by prediction"):
        check_fits(recipe, start, dataclasses.replace(RTX3090, card_gib=40.0, host_gib=3.2))
    cpu = Machine(2, 2, 6.0)
    recipe, start = _given("zero0_fp32", cpu, **{"model.depth": "2"})
    with pytest.raises(ConfigError, match=r"of host memory by prediction for 2 ranks, .* 6.0 to take .*: add --ds"):
        check_fits(recipe, start, cpu)
    with pytest.raises(ConfigError, match="smaller model, smaller crops or fewer prototypes"):
        check_fits(recipe, start, dataclasses.replace(cpu, host_gib=0.01))


def test_a_cpu_gives_what_is_free_and_what_the_ranks_have_taken_already(monkeypatch):
    """What other programs have is not theirs; offloading on GPUs is held against all of it."""
    monkeypatch.setattr("dino_ds.basics.machine.host_memory_gib", lambda: (24.0, 15.0))
    found = find_machine()
    assert found.card_gib is None and found.host_gib == pytest.approx(0.9 * 15 + found.libraries / 2**30, abs=1e-6)


def test_the_smallest_card_decides():
    both = RTX3090.in_common(Machine(1, 2, 32.0, 11.6, bf16=False, libraries=5))
    assert both == Machine(1, 2, 32.0, 11.6, bf16=False, libraries=5)


@pytest.mark.parametrize("path", sorted(Path("ds_configs").glob("*.json")), ids=lambda path: path.stem)
def test_a_resumed_run_keeps_its_config_to_the_letter(path):
    """What a run writes into its folder is a ds config, and resolves to itself."""
    machine, recipe = Machine(4, 4, 64.0, 79.1), load_recipe("vits16", {})
    first = named_start(recipe, load_ds_config(str(path), {}), str(path), machine).config
    again = resumed_start(recipe, json.loads(json.dumps(first.raw)), "RUN/ds_config.json", {}, machine)
    assert again.config.raw == first.raw


def test_a_resumed_run_keeps_its_precision_on_other_ranks():
    recipe, start = _given("zero1_bf16", Machine(8, 8, 500.0, 23.6))
    saved = start.config
    assert (saved.stage, saved.accumulation) == (1, 1)
    alone = resumed_start(recipe, saved.raw, "x", {}, RTX3090).config
    assert (alone.precision, alone.micro_batch, alone.accumulation) == ("bf16", saved.micro_batch, 8)
    assert alone.raw["data_types"]["grad_accum_dtype"] == "fp32"  # not in low precision, as stage 1 would
    zero = resumed_start(recipe, alone.raw, "x", {}, Machine(8, 8, 500.0, 23.6)).config.raw["zero_optimization"]
    assert not alone.raw["zero_optimization"]["overlap_comm"] and zero["overlap_comm"]
    assert zero["reduce_bucket_size"] < alone.raw["zero_optimization"]["reduce_bucket_size"]
    changed = resumed_start(recipe, saved.raw, "x", {"gradient_accumulation_steps": "32"}, RTX3090)
    assert (changed.config.micro_batch, changed.config.accumulation) == (16, 32)


def _train(images, run, card_gib, **options):
    mine = Machine(2, 2, 64.0, card_gib + distributed.rank())
    with mock.patch.object(start_module.fit, "find_machine", return_value=mine):
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
    message = train_tiny(tmp_path, tmp_path / "run", changes={**large, "data.source": "cifar10"}, predicts=True)
    assert "data.download" in message and "memory" not in message and not (tmp_path / "run").exists()


def _ds(name: str, **overrides: str):
    return load_ds_config(f"ds_configs/{name}.json", {key.replace("__", "."): text for key, text in overrides.items()})


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
        (17.0, "ZeRO 2, checkpointing: 32"),
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


MUON = "optimizer.clip_by network and --optimizer.kind adamw"


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({"optimizer.clip_by": "part"}, "optimizer.clip_by network"),
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


@pytest.mark.parametrize(
    ("name", "card"), [*((word, "rtx4090-24g") for word in ("4090", "RTX 4090", "rtx4090_24g")), ("H100", "h100-80g")]
)
def test_a_name_that_fits_one_card_is_that_card(name, card):
    assert find_gpu(name) == GPUS[card]


@pytest.mark.parametrize(
    ("name", "hint"),
    [("a100", "Did you mean a100-40g or a100-80g?"), ("mi300", "or give --memory_gib"), ("", "or give --memory_gib")],
)
def test_a_name_of_several_cards_or_none_is_refused_with_the_nearest(name, hint):
    with pytest.raises(ConfigError, match=f"^--gpu {name}: this card is not in the table: ") as caught:
        find_gpu(name)
    assert str(caught.value).endswith(hint) or hint in str(caught.value)


SAME = {"python": "3.11.7", "torch": "2.15.0", "the code in /here": "c0de", "a.json": "CRC 1"}
ANSWER = {"same": SAME, "gpus": ["A100", "A100"], "images": "", "sees": True}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ([{}, {}], []),
        ([{}, {"same": {**SAME, "torch": "2.14.0"}}], ["w2: torch is 2.14.0, and 2.15.0 on w1"]),
        ([{"sees": False}], ["w1: does not see /runs/a of this machine -> put --run_dir on a disk that all share"]),
        ([{}, {"images": "/a does not exist"}], ["w2: /a does not exist -> mount the images there"]),
        ([{"gpus": []}, {"gpus": []}], []),  # a run on CPUs
        ([{}, {"gpus": ["A100"]}], ["w2: 1 GPUs are found for 2 slots"]),
        ([{"sees": False}, "not reachable: log in"], ["w1: does not see", "w2: not reachable -> log in"]),
    ],
)
def test_every_problem_of_a_machine_is_named_with_its_remedy(changes, says, monkeypatch):
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    answers = {f"w{n}": more if isinstance(more, str) else ANSWER | more for n, more in enumerate(changes, 1)}
    findings = list(doctor.judge_answers(dict.fromkeys(answers, 2), answers, Path("/runs/a")))
    problems = [f"{finding.text} -> {finding.remedy}" for finding in findings if finding.level == "FAIL"]
    assert all(text.startswith(part) for text, part in zip(problems, says, strict=True))
    assert len({finding.text.partition(":")[0] for finding in findings}) == len(changes)


def test_why_a_machine_is_silent():
    for script, says in (
        ("exit 255", "not reachable by ssh"),
        ("no_such_program", "no_such_program: not found"),
        ("true", "no answer (code 0): this checkout"),
        ('echo welcome; echo \'{"torch": "2.11"}\'', "no answer (code 0)"),
    ):
        assert says in doctor._ask(["sh", "-c", script], "{}")
    assert doctor._ask(["sh", "-c", f"echo welcome; echo '{json.dumps(ANSWER)}'; echo bye"], "{}") == ANSWER


def test_machines_come_in_the_order_of_the_file(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("# cluster\n\nw1 slots=4\r\n  gpu_node-2.example.org\tslots=2  # new\n10.0.0.3 slots=1")
    assert list(read_hostfile(str(path)).items()) == [("w1", 4), ("gpu_node-2.example.org", 2), ("10.0.0.3", 1)]


BROKEN = ["root@w1 slots=1", "w[1-4] slots=1", "w1,w2 slots=1", "w1:22 slots=1", "fe80::1 slots=1", "w1", "slots=1 w1"]
BROKEN += ["w1 slots=0", "w1 slots=1025", "w1 slots=99999999999999", "w1 slots=2x", "w1 slots=-1", "w1 slots=1 extra"]
BROKEN += ["w1 slots = 1", "w1 slots=\u00b2", "w1 slots=1;touch canary", "w1 slots=0x7fffffff", "w" * 300 + " slots=1"]
# Options and commands for ssh and for a shell.
BROKEN += ["w1\x0bslots=1", "-oProxyCommand=touch${IFS}canary slots=1", "--help slots=1", "w1\u202e slots=1"]
BROKEN += ["w1;touch$IFS/canary slots=1", "$(touch${IFS}canary) slots=1", "`touch${IFS}canary` slots=1"]
BROKEN += ["w1|touch${IFS}canary slots=1", "w1&&touch slots=1", "../../etc slots=1", "w\u00e9 slots=1"]


def test_every_other_line_is_named_with_what_to_write(tmp_path):
    path = tmp_path / "hosts"
    for line in BROKEN:
        path.write_text(f"w0 slots=1\n{line}\n")
        with pytest.raises(ConfigError, match=r'is not "name slots=N": .* as in node1') as error:
            read_hostfile(str(path))
        assert str(error.value).startswith(f"hostfile {path}:2: '") and "\n" not in str(error.value)
        assert len(str(error.value)) < 350 + len(str(path))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"w1 slots=1\nw1 slots=2\n", ":2: w1 is named twice"),
        (b"# none\n\n", "names no machine"),
        (b"\xff\xfe", "is not UTF-8 text"),
        (b"w1 slots=1\n" * 100_001, "bytes, 262144 are allowed"),
        (None, "No such file"),
    ],
)
def test_files_that_are_no_hostfile(content, says, tmp_path):
    path = tmp_path / "hosts"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=says):
        read_hostfile(str(path))
