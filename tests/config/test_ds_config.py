"""The ds JSON: what it may say, and how it becomes the numbers of one run: batch sizes, dtypes, what is filled in."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from dino_ds.basics.names import words_elsewhere
from dino_ds.config.ds_config import find_ds_config, load_ds_config, resolve_ds_config
from dino_ds.config.ds_schema import DsConfig, DsJson
from dino_ds.config.schema import Option, fields_of
from dino_ds.errors import ConfigError

FOLDER = Path(__file__).parents[2] / "ds_configs"
SHIPPED = sorted(path.name for path in FOLDER.glob("*.json"))


@pytest.fixture
def load(tmp_path: Path):
    def _load(content: dict[str, Any] | str, **overrides: str) -> dict[str, Any]:
        text = content if isinstance(content, str) else json.dumps({"gradient_clipping": 1.0} | content)
        (tmp_path / "my.json").write_text(text)
        return load_ds_config(str(tmp_path / "my.json"), {k.replace("__", "."): v for k, v in overrides.items()})

    return _load


def _resolve(content: dict[str, Any], global_batch: int = 512, ranks: int = 4, **more: Any) -> DsConfig:
    return resolve_ds_config({"gradient_clipping": 1.0} | content, "x.json", global_batch, ranks, **more)


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_files_pass_and_deepspeed_takes_them(name: str):
    path = str(FOLDER / name)
    json.loads(Path(path).read_text())  # plain JSON, for editors
    config = load_ds_config(path, {})
    zero = config["zero_optimization"]
    assert zero.get("reduce_bucket_size", "auto") == zero.get("allgather_bucket_size", "auto") == "auto"
    assert resolve_ds_config(config, path, 64, 2).stage == int(name[4])
    resolved = resolve_ds_config(config, path, 64, 1)
    assert resolved.precision == Path(name).stem.split("_")[1]
    assert resolved.clipping == 3.0
    assert "auto" not in json.dumps(resolved.raw)
    theirs = _deepspeed_config(resolved.raw)
    assert (theirs.zero_optimization_stage, theirs.gradient_clipping) == (resolved.stage, 3.0)
    enabled = {"fp16": theirs.float16_config.enabled, "bf16": theirs.bfloat16_config.enabled, "fp32": True}
    assert next(name for name, is_on in enabled.items() if is_on) == resolved.precision
    assert theirs.gradient_accumulation_steps == resolved.accumulation
    assert theirs.train_micro_batch_size_per_gpu == resolved.micro_batch


def _deepspeed_config(raw: dict[str, Any]) -> Any:
    return pytest.importorskip("deepspeed").DeepSpeedConfig(copy.deepcopy(raw))


def test_every_allowed_key_is_known_to_deepspeed():
    """A file with all keys at once (ZeRO 3, then ZeRO 2) passes DeepSpeed's own strict sections."""
    for stage in (2, 3):
        config = _everything(DsJson, stage) | {"fp16": {"enabled": False}}
        config["zero_optimization"]["stage"] = stage
        assert _deepspeed_config(_resolve(config, 8, 1).raw).zero_optimization_stage == stage


def _everything(schema: Any, stage: int) -> dict[str, Any]:
    samples = {"integer": 1, "number": 1.0, "true": True, "text": "file", "list": ["Block"]}
    content: dict[str, Any] = {}
    for key, info in fields_of(schema).items():
        option = Option(key, info)
        if stage not in option.fact("stages", (stage,)) or key.startswith(("train_batch", "train_micro")):
            continue
        if fields_of(info.annotation):
            content[key] = _everything(info.annotation, stage)
        else:
            kind = option.type.partition(" ")[0].rstrip(",")
            content[key] = "cpu" if key == "device" else samples.get(kind) or option.choices[0]
    return content


def test_comments_and_trailing_commas_are_legal(load):
    config = load(
        '{ // why\n "gradient_clipping": 3, # reason\n "zero_optimization": {"stage": 2, "reduce_bucket_size": 5e7,},}'
    )
    assert config["zero_optimization"] == {"stage": 2, "reduce_bucket_size": 50_000_000}


@pytest.mark.parametrize("value", [3, False, None, {"enabled": False, "x": 3}], ids=str)
def test_refused_keys_say_why_unless_they_are_off(load, value: object):
    for name, why in words_elsewhere("refused_ds_keys").items():
        content: dict[str, Any] = {"zero_optimization": {"stage": 3}}
        section = content
        *sections, leaf = name.split(".")
        for one in sections:
            section = section.setdefault(one, {"fp16": {"enabled": False}, "bf16": {"enabled": False}}.get(one, {}))
        if sections and "offload" in sections[-1]:
            section["device"] = "cpu"
        section[leaf] = value
        if value == 3:
            with pytest.raises(ConfigError) as caught:
                load(content)
            assert f"{name}: refused: {why}" in str(caught.value)
            continue
        loaded = load(content)
        for one in sections:
            loaded = loaded[one]
        assert leaf not in loaded, name


@pytest.mark.parametrize("stage", range(4))
def test_deepspeed_s_defaults_are_accepted(load, stage: int):
    """Every key of DeepSpeed's own classes at its default, with switches of its constants."""
    pytest.importorskip("deepspeed")
    from deepspeed.runtime import constants, precision_config
    from deepspeed.runtime.zero import config as zero

    def defaults(fields: Any, **given: Any) -> dict[str, Any]:
        values = {info.alias or name: info.default for name, info in fields.model_fields.items()}
        return {name: value for name, value in values.items() if not repr(value).startswith("PydanticUnd")} | given

    parts = {"offload_optimizer": zero.DeepSpeedZeroOffloadOptimizerConfig}
    parts["offload_param"] = zero.DeepSpeedZeroOffloadParamConfig
    device = "cpu" if stage == 3 else "none"
    offload = {name: defaults(fields, device=device) for name, fields in parts.items()}
    everything = {"zero_optimization": defaults(zero.DeepSpeedZeroConfig, stage=stage, **offload)}
    everything["fp16"] = defaults(precision_config.DeepSpeedFP16Config)
    everything["bf16"] = defaults(precision_config.DeepSpeedBF16Config)
    switches = "DISABLE_ALLGATHER DISABLE_PYTHON_GC DUMP_STATE MEMORY_BREAKDOWN WALL_CLOCK_BREAKDOWN LOG_LEVEL "
    switches += "DATALOADER_DROP_LAST PRESCALE_GRADIENTS GRADIENT_ALLREDUCE_OP VOCABULARY_SIZE STEPS_PER_PRINT"
    everything |= {getattr(constants, name): getattr(constants, f"{name}_DEFAULT") for name in switches.split()}
    _deepspeed_config(_resolve(load(everything), 8, 1).raw)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"wandb": {"enabled": True, "project": "\ud800"}}, "has half a character or a NUL"),
        ({"gradient_acumulation_steps": 8}, "unknown key. Did you mean gradient_accumulation_steps?"),
        ({"gradient_clipping": "1.0"}, 'gradient_clipping: "1.0" is not a number'),
        ({"fp16": True}, "fp16: true is not a section"),
        ({"zero_optimization": {"overlap_comm": True}}, 'zero_optimization: has no "stage"'),
        ({"fp16": {"enabled": True}}, "stage 0 in fp16 is broken in DeepSpeed 0.19"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}, "choose one"),
        ({"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}, "at stage 2, only at 3"),
        ({"data_types": {"grad_accum_dtype": "bf16"}}, "does not go with training in fp32"),
        ('{"zero_optimization": {"stage": 1}}', 'has no "gradient_clipping", and DeepSpeed has a default of its own'),
        ('{"gradient_clipping": 1, "gradient_clipping": 2}', "gradient_clipping is set twice"),
        ({"zero_optimization": {"stage": 3}, "dino_ds": {"compile": True}}, "dino_ds.compile: ZeRO 3 gathers"),
        ({"dino_ds": {"attention": "varlen"}}, 'dino_ds.attention: "varlen" needs bf16 or fp16'),
        (
            {"dino_ds": {"compile": "reduce-overhead"}, "activation_checkpointing": {}},
            'compile: "reduce-overhead" does not go',
        ),
        ({"dino_ds": {"deterministic": True, "compile": True}}, "dino_ds.deterministic: dino_ds.compile, whose kern"),
    ],
)
def test_wrong_values_and_combinations(content: Any, says: str, load):
    with pytest.raises(ConfigError) as caught:
        load(content)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_overrides(load):
    given = {"zero_optimization__stage": "2", "bf16__enabled": "True", "dino_ds__compile": "true"}
    config = load({}, **given, gradient_clipping="1e-1", gradient_accumulation_steps="auto")
    assert config["zero_optimization"] == {"stage": 2} and config["bf16"] == {"enabled": True}
    assert config["gradient_clipping"] == 0.1 and config["gradient_accumulation_steps"] == "auto"
    assert config["dino_ds"] == {"compile": "default"} == load({"dino_ds": {"compile": True}})["dino_ds"]
    with pytest.raises(ConfigError) as caught:
        load({}, zero__stage="2", gradient_clipping="x", optimizer__lr="1", fp16="1")
    assert str(caught.value).splitlines() == [
        "--ds.zero.stage: unknown key. Did you mean zero_optimization.stage?",
        "--ds.optimizer.lr: not a key of the ds JSON: it belongs to the recipe: optimizer.lr, optimizer.weight_decay, "
        "optimizer.beta1, ...",
        '--ds.gradient_clipping: "x" is not a number',
        "--ds.fp16: 1 is not a section: write {...}",
    ]


@pytest.mark.parametrize("stage", [1, 2])
def test_sharding_over_one_process_in_fp32_is_left_out(stage: int):
    """It would only copy; with more ranks, in bf16 (masters) or with offload (their place) it acts."""
    section = {"zero_optimization": {"stage": stage, "reduce_bucket_size": 7}}
    alone = _resolve(section, ranks=1)
    assert alone.stage == 0 and alone.raw["zero_optimization"] == {"stage": 0}
    assert alone.notes == [
        f"ZeRO {stage} shards nothing on one process: it runs as ZeRO 0, which is the same without its copies"
    ]
    offload = {"zero_optimization": {"stage": stage, "offload_optimizer": {"device": "cpu"}}}
    for content, ranks in ((section, 2), (section | {"bf16": {"enabled": True}}, 1), (offload, 1)):
        assert _resolve(content, ranks=ranks).stage == stage


@pytest.mark.parametrize("given", ["zero2_bf16.json", "zero2_bf16", "ds_configs/zero2_bf16.json"])
def test_shipped_configs_by_their_name_alone(given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert find_ds_config(given).endswith("ds_configs/zero2_bf16.json")
    with pytest.raises(ConfigError, match=r"zero2_fp61 is neither .* Did you mean zero2_"):
        find_ds_config("zero2_fp61")


MICRO = {"train_micro_batch_size_per_gpu": 64}


@pytest.mark.parametrize(
    ("content", "micro", "accumulation"),
    [
        ({}, 128, 1),
        ({"gradient_accumulation_steps": 4}, 32, 4),
        (MICRO | {"gradient_accumulation_steps": "auto"}, 64, 2),
        (MICRO | {"gradient_accumulation_steps": 2, "train_batch_size": 512}, 64, 2),
    ],
)
def test_auto_batch_sizes(content: dict[str, Any], micro: int, accumulation: int):
    config = _resolve(content)
    assert (config.micro_batch, config.accumulation) == (micro, accumulation)
    assert config.raw["train_batch_size"] == 512


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (MICRO | {"gradient_accumulation_steps": 1}, "accumulation 1 x ranks 4 = 256; set --data.global_batch 256"),
        ({"gradient_accumulation_steps": 3}, "= 12; set --data.global_batch 504 or --data.global_batch 516"),
        ({"train_micro_batch_size_per_gpu": 1000}, "ranks 4 x micro-batch 1000 = 4000; set --data.global_batch 4000"),
        ({"train_batch_size": 256}, "data.global_batch 512: remove it from x.json, or set --data.global_batch 256"),
    ],
)
def test_batch_sizes_that_disagree(content: dict[str, Any], says: str):
    with pytest.raises(ConfigError) as caught:
        _resolve(content)
    assert says in str(caught.value)


@pytest.mark.parametrize(("stage", "precision", "accumulation"), [(2, "bf16", 4), (3, "fp16", 2), (2, "bf16", 1)])
def test_low_precision_accumulates_in_fp32(stage: int, precision: str, accumulation: int):
    content = {"zero_optimization": {"stage": stage}, "gradient_accumulation_steps": accumulation}
    content[precision] = {"enabled": True}
    config = _resolve(content)
    assert config.raw.get("data_types", {}).get("grad_accum_dtype") == ("fp32" if accumulation > 1 else None)
    assert len(config.notes) == (accumulation > 1)
    kept = _resolve(content | {"data_types": {"grad_accum_dtype": "fp32"}})
    assert kept.notes == [] and kept.raw["data_types"] == {"grad_accum_dtype": "fp32"}


@pytest.mark.parametrize("given", [None, "auto", 3, 0])
def test_activation_checkpointing(given: int | str | None):
    assert _resolve({}).checkpoint_blocks == 0
    config = _resolve({"activation_checkpointing": {} if given is None else {"number_checkpoints": given}})
    assert config.checkpoint_blocks == ("all" if given in (None, "auto") else given)
    assert "auto" not in json.dumps(config.raw)


def test_what_else_is_filled_in():
    """An optimizer of torch's with offload, the kind of loss scale. CUDA graphs go with one micro-batch alone."""
    config = _resolve({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}})
    assert config.raw["zero_force_ds_cpu_optimizer"] is False
    plain = _resolve({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "none"}}})
    assert "zero_force_ds_cpu_optimizer" not in plain.raw and not plain.dynamic_loss_scale
    for scale, dynamic in (({}, True), ({"loss_scale": 128}, False)):
        fp16 = {"zero_optimization": {"stage": 1}, "fp16": {"enabled": True, **scale}}
        assert _resolve(fp16).dynamic_loss_scale == dynamic
    with pytest.raises(ConfigError, match="does not go with 2 micro-batches a step"):
        _resolve({"dino_ds": {"compile": "reduce-overhead"}, "gradient_accumulation_steps": 2})


def test_fp16_where_there_is_none_is_refused():
    config = load_ds_config("ds_configs/zero3_fp16.json", {})
    with pytest.raises(ConfigError, match=r"no fp16, and mine.json asks for it: take .* ds_con"):
        resolve_ds_config(config, "mine.json", 8, 1, fp16_supported=False)
    assert resolve_ds_config(config, "mine.json", 8, 1, fp16_supported=True).precision == "fp16"
