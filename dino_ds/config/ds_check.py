"""Checks a ds JSON against the list of keys: unknown names, wrong types, keys and combinations without effect."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from typing import Any

from dino_ds.basics.names import MOST_PROBLEMS, did_you_mean, words_elsewhere
from dino_ds.config.ds_schema import KEYS, PASSED, SECTIONS, Zero, is_key, key_names
from dino_ds.config.schema import Option

Problem = tuple[str, str]  # (dotted key, what is wrong)
_REQUIRED = [name for name, option in KEYS.items() if option.info.is_required()]


def problems_of(config: dict[str, Any]) -> list[Problem]:
    """All problems of `config`, changed in place: 5e7 and 2.0 become integers, and keys that are off are removed."""
    _drop_what_is_off(config, "")
    problems = list(islice(_check_section(config, ""), MOST_PROBLEMS))
    return problems or [*_check_stages(config), *_check_combinations(config)]


def _drop_what_is_off(content: dict[str, Any], section: str) -> None:
    """Remove null, and features that are refused, offloaded or DeepSpeed's alone and are off or as by default."""
    offload = [name for name in SECTIONS if "offload_" in name]
    optional = {*words_elsewhere("refused_ds_keys"), *PASSED, *offload, "dataloader_drop_last"}
    for key, value in [*content.items()]:
        name = _join(section, key)
        if (value is None and name not in _REQUIRED) or (name in optional and _is_off(name, value)):
            del content[key]
        elif isinstance(value, dict) and name in SECTIONS:
            _drop_what_is_off(value, name)


def _is_off(name: str, value: Any) -> bool:
    """Whether a value turns its key off or is DeepSpeed's default; a section's switch decides, else all of its keys."""
    if isinstance(value, dict):
        switch = value.get("enabled", value.get("device"))
        return switch in (False, "none") or (
            switch is None and all(_is_off(_join(name, key), inner) for key, inner in value.items())
        )
    return value in (None, False, "none") or _is_default(name, value)


def _is_default(name: str, value: Any) -> bool:
    return name in (known := words_elsewhere("default_ds_keys")) and bool(json.loads(known[name]) == value)


def wrong_key(name: str) -> str:
    """The message for a dotted name that is not allowed: why, where it belongs, or near names."""
    refused = words_elsewhere("refused_ds_keys")
    parents = [".".join(name.split(".")[:i]) for i in range(1, name.count(".") + 2)]
    if known := next((parent for parent in parents if parent in refused), None):
        return f"refused: {refused[known]}"
    if home := words_elsewhere("recipe_keys").get(parents[0]):
        return f"not a key of the ds JSON: it belongs to the recipe: {home}"
    return f"unknown key.{did_you_mean(name, key_names())}"


def override(config: dict[str, Any], name: str, value: Any) -> str | None:
    """Set the key with the dotted `name` in `config` to `value`, text of a command line or a Python value; returns the
    problem with it, if any."""
    *sections, leaf = name.split(".")
    if not is_key(name):
        return wrong_key(name)
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
                yield name, str(error)
        elif name not in SECTIONS and name not in PASSED:
            yield name, wrong_key(name)
        elif name in SECTIONS and isinstance(value, dict):
            yield from _check_section(value, name)
        elif name in SECTIONS:
            yield name, f"{json.dumps(value)} is not a section: write {{...}}"
    for name in _REQUIRED:
        if name.rpartition(".")[0] == section and (key := name.rpartition(".")[2]) not in content:
            why = "DeepSpeed has a default of its own for it"
            yield section, f'has no "{key}", and {why}: write it ({KEYS[name].type})'


def _check_stages(config: dict[str, Any]) -> Iterator[Problem]:
    """Yield problems of keys that DeepSpeed accepts at any stage, but that have an effect only at some."""
    zero = config.get("zero_optimization", {})
    for key, value in zero.items():
        if key in Zero.model_fields and value is not False and not _is_default(f"zero_optimization.{key}", value):
            stages = Option(key, Zero.model_fields[key]).fact("stages", (zero["stage"],))
            if zero["stage"] not in stages:
                where = ", ".join(map(str, stages))
                yield f"zero_optimization.{key}", f"no effect at stage {zero['stage']}, only at {where}: remove it"


def _check_combinations(config: dict[str, Any]) -> Iterator[Problem]:
    """Yield problems of values that go wrong together."""
    zero, ours = config.get("zero_optimization", {"stage": 0}), config.get("dino_ds", {})
    low = [name for name in ("fp16", "bf16") if config.get(name, {}).get("enabled")]
    dtype, compiled, varlen = low[0] if low else "fp32", ours.get("compile", "off"), ours.get("attention") == "varlen"
    accumulated = config.get("data_types", {}).get("grad_accum_dtype", "fp32")
    wrong: list[tuple[bool, str, str]] = [
        (len(low) == 2, "fp16", "fp16 and bf16 are both enabled: choose one"),
        (
            bool(low) and zero["stage"] == 0,
            "zero_optimization.stage",
            f"stage 0 in {dtype} is broken in DeepSpeed 0.19 (the loss is not scaled, a hidden optimizer step changes "
            "the weights): use stage 1, which on one process shards nothing",
        ),
        (
            accumulated not in ("fp32", dtype),
            "data_types.grad_accum_dtype",
            f'"{accumulated}" does not go with training in {dtype}: use fp32',
        ),
        (
            compiled != "off" and zero["stage"] == 3,
            "dino_ds.compile",
            "ZeRO 3 gathers parameters by hooks that break a compiled block into some 40 pieces: use stage 1 or 2, or "
            "remove it",
        ),
        (
            compiled == "reduce-overhead" and "activation_checkpointing" in config,
            "dino_ds.compile",
            '"reduce-overhead" does not go with activation_checkpointing, which runs blocks twice: use "default"',
        ),
        (varlen and not low, "dino_ds.attention", '"varlen" needs bf16 or fp16: enable one, or use "sdpa"'),
        (
            varlen and bool(ours.get("deterministic")),
            "dino_ds.deterministic",
            "varlen's gradients are added up in any order: remove one of the two",
        ),
        (
            compiled != "off" and bool(ours.get("deterministic")),
            "dino_ds.deterministic",
            "dino_ds.compile, whose kernels are chosen by timing them, does not go with it: remove one of the two",
        ),
    ]
    yield from ((key, problem) for is_wrong, key, problem in wrong if is_wrong)


def _join(section: str, key: str) -> str:
    return f"{section}.{key}" if section else key
