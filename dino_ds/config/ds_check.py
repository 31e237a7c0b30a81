"""Checks a ds JSON against the list of keys: unknown names, wrong types, keys and combinations without effect."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from typing import Any

from dino_ds.basics.names import MOST_PROBLEMS, did_you_mean, words_elsewhere
from dino_ds.config.ds_schema import KEYS, SECTIONS, STRICT_SECTIONS, Zero, key_names
from dino_ds.config.ds_values import offloads_optimizer
from dino_ds.config.schema import Option

Problem = tuple[str, str]  # (dotted key, what is wrong)
_REQUIRED = [name for name, option in KEYS.items() if option.info.is_required()]


def problems_of(config: dict[str, Any]) -> list[Problem]:
    """All problems of `config`, changed in place: 5e7 and 2.0 become integers, and keys that are off are removed."""
    _drop_what_is_off(config, "")
    problems = list(islice(_check_section(config, ""), MOST_PROBLEMS))
    if not problems:
        problems += _check_stages(config)
        problems += _check_combinations(config)
    return problems


def _drop_what_is_off(content: dict[str, Any], section: str) -> None:
    """Remove keys of DeepSpeed's that are refused or optional here, and whose values turn nothing on."""
    known, recipe_keys = words_elsewhere("refused_ds_keys"), words_elsewhere("recipe_keys")
    for key, value in [*content.items()]:
        name = _join(section, key)
        is_offload = name.rpartition(".")[2].startswith("offload_") and name in SECTIONS
        if name in known or is_offload:
            if _is_off(name, value):
                del content[key]
                continue
        elif value is None and (name in SECTIONS or name in recipe_keys or name in KEYS.keys() - _REQUIRED):
            del content[key]
        if isinstance(value, dict) and name in SECTIONS:
            _drop_what_is_off(value, name)


def _is_off(name: str, value: Any) -> bool:
    """Whether the value of a key turns the key's feature off."""
    if name == "zero_optimization.compute_grad_norm":
        return value is True  # what DeepSpeed does anyway; false would take the norm away
    if isinstance(value, dict):
        switch = value.get("enabled", value.get("device", ""))
        return switch in (False, None, "none") or all(_is_off("", inner) for inner in value.values())
    if type(value) is int:
        return name.endswith("_size") and value in (-1, 0, 1)
    return value in (None, False, "none")


def wrong_key(section: str, key: str) -> str:
    """The message for a key that is not allowed in `section` ("" = top level): why, where it belongs, or near names."""
    name = _join(section, key)
    refused = words_elsewhere("refused_ds_keys")
    parents = [".".join(name.split(".")[:i]) for i in range(1, name.count(".") + 2)]
    for parent in parents:
        if parent in refused:
            return f"refused: {refused[parent]}"
    if home := words_elsewhere("recipe_keys").get(name.split(".", 1)[0]):
        return f"not a key of the ds JSON: it belongs to the recipe: {home}"
    if fixed := words_elsewhere("fixed_keys").get(f"ds.{name}"):
        return f"not a key any more: it is {fixed} in every run; leave it out"
    ignored = section.split(".")[0] not in STRICT_SECTIONS and section in SECTIONS
    silent = "DeepSpeed would ignore it silently." if ignored else "unknown key."
    beside = [name for name in key_names() if name.rpartition(".")[0] == section]
    return silent + (did_you_mean(name, beside) or did_you_mean(name, key_names()))


def override(config: dict[str, Any], name: str, value: Any) -> str | None:
    """Set the key with the dotted `name` in `config` to `value`, text of a command line or a Python value; returns the
    problem with it, if any."""
    *sections, leaf = name.split(".")
    prefix = ".".join(sections)
    if name not in key_names():
        return wrong_key(prefix, leaf)
    target = config
    for section in sections:
        target = target.setdefault(section, {})
        if not isinstance(target, dict):
            return f"{section} is not a section in the file"
    try:
        is_word = isinstance(value, str) and value.lower() in ("true", "false")
        target[leaf] = json.loads(value.lower() if is_word else value) if isinstance(value, str) else value
    except json.JSONDecodeError:
        target[leaf] = value
    return None


def _check_section(content: dict[str, Any], section: str) -> Iterator[Problem]:
    for key, value in content.items():
        name = _join(section, key)
        if name in KEYS:
            try:
                read = KEYS[name].read(value, json.dumps)
                content[key] = value if isinstance(read, float) else read
            except ValueError as error:
                yield name, _not_decided(name) if value == "auto" else str(error)
        elif f"ds.{name}" in words_elsewhere("fixed_keys"):
            continue  # of an earlier version's run: `resolve_ds_config` drops it
        elif name not in SECTIONS:
            yield name, wrong_key(section, key)
        elif isinstance(value, dict):
            yield from _check_section(value, name)
        else:
            yield name, f"{json.dumps(value)} is not a section: write {{...}}"
    for name in _REQUIRED:
        if name.rpartition(".")[0] == section and name.rpartition(".")[2] not in content:
            yield section, _missing(name.rpartition(".")[2])


def _not_decided(name: str) -> str:
    dropped = " (DeepSpeed would drop it and use its default)" if KEYS[name].is_switch else ""
    return f'"auto" is not decided here{dropped}: write its value ({KEYS[name].type})'


def _missing(key: str) -> str:
    if key == "gradient_clipping":
        return (
            'has no gradient_clipping, and DeepSpeed would clip at 1.0: write "gradient_clipping": 3.0, or 0 for none'
        )
    default = {"enabled": "false", "stage": "0", "device": '"none"'}[key]
    return f'has no "{key}", and DeepSpeed would take {default}: write it'


def _check_stages(config: dict[str, Any]) -> Iterator[Problem]:
    """Yield problems of keys that DeepSpeed accepts at any stage, but that have an effect only at some."""
    zero = config.get("zero_optimization", {"stage": 0})
    stage = zero["stage"]
    for key in zero:
        stages = Option(key, Zero.model_fields[key]).fact("stages", (stage,))
        if stage not in stages and zero[key] is not False:
            at = " and ".join(", ".join(str(s) for s in stages).rsplit(", ", 1))
            where = f"stage{'s' if len(stages) > 1 else ''} {at}"
            yield f"zero_optimization.{key}", f"it does nothing at stage {stage}, only at {where}: remove it"


def _check_combinations(config: dict[str, Any]) -> Iterator[Problem]:
    zero = config.get("zero_optimization", {"stage": 0})
    low = [name for name in ("fp16", "bf16") if config.get(name, {}).get("enabled")]
    if len(low) == 2:
        yield "fp16", "fp16 and bf16 are both enabled: choose one"
    if low and zero["stage"] == 0:
        yield (
            "zero_optimization.stage",
            f"stage 0 in {low[0]} is broken in DeepSpeed 0.19 (the loss is not scaled, a hidden optimizer step changes "
            "the weights): use stage 1, which on one process shards nothing",
        )
    if not config.get("bf16", {}).get("check_grad_overflow", True):
        yield "bf16.check_grad_overflow", "it must be true: else NaN gradients are written into the weights"
    yield from _check_performance(config, zero["stage"], low)
    accumulated = config.get("data_types", {}).get("grad_accum_dtype", "fp32")
    if accumulated not in ("fp32", low[0] if low else "fp32"):
        wanted = "fp32" if not low else f"fp32 or {low[0]}"
        yield (
            "data_types.grad_accum_dtype",
            f'"{accumulated}" does not go with training in {low[0] if low else "fp32"}: use {wanted}',
        )
    if offloads_optimizer(zero) and config.get("zero_force_ds_cpu_optimizer"):
        yield "zero_force_ds_cpu_optimizer", "it must be false: dino_ds gives DeepSpeed an optimizer of torch's"


def _check_performance(config: dict[str, Any], stage: int, low: list[str]) -> Iterator[Problem]:
    performance = config.get("dino_ds", {})
    compiled = performance.get("compile", "off")
    if compiled != "off" and stage == 3:
        yield (
            "dino_ds.compile",
            "ZeRO 3 gathers parameters by hooks that break a compiled block into some 40 pieces: use stage 1 or 2, "
            "or remove it",
        )
    if compiled == "reduce-overhead" and "activation_checkpointing" in config:
        yield (
            "dino_ds.compile",
            '"reduce-overhead" does not go with activation_checkpointing, which runs blocks twice: use "default"',
        )
    if performance.get("deterministic") and performance.get("attention") == "varlen":
        yield (
            "dino_ds.deterministic",
            "varlen's gradients are added up in any order: remove one of the two",
        )
    if performance.get("attention") == "varlen" and not low:
        yield "dino_ds.attention", '"varlen" needs bf16 or fp16: enable one, or use "sdpa"'
    if performance.get("deterministic") and compiled != "off":
        yield (
            "dino_ds.deterministic",
            "dino_ds.compile, whose kernels are chosen by timing them, does not go with it: remove one of the two",
        )
    if performance.get("teacher_copy") and not low:
        yield "dino_ds.teacher_copy", "in fp32 the copy would be the teacher itself: remove it"


def _join(section: str, key: str) -> str:
    return f"{section}.{key}" if section else key
