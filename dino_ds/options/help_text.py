"""`--help` and docs/configs.md, both made from the schemas.

python -m dino_ds.options.help_text > docs/configs.md
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from dino_ds.architectures import ARCHITECTURES
from dino_ds.config import recipe_names, recipe_options
from dino_ds.ds_schema import REFUSED, SECTIONS
from dino_ds.options.flags import TRAIN_FLAGS

_EXAMPLES = """\
examples
  dino-ds train --config quickstart
  deepspeed --num_gpus 4 dino_ds/train.py --ds_config ds_configs/zero2_fp16.json --data.root /images
  torchrun --nproc_per_node 2 dino_ds/train.py --config cifar10 --data.root data --data.download true
  dino-ds train --config vitb16 --data.root /images --optimizer.lr 5e-4 --ds.gradient_clipping 0.3
"""

_INTRO = """\
# Who owns which knob

This file is made from the schemas: `python -m dino_ds.options.help_text > docs/configs.md`.

- **Recipe** (`--config NAME` or `--config FILE.yaml`; override with `--section.key value`): *what is learned*.
- **ds JSON** (`--ds_config FILE.json`; override with `--ds.section.key value`): *how fast and on what hardware*.
  Swapping it changes nothing that is learned beyond rounding, clipping excepted.
- A key in the wrong file, an unknown key, a key set twice or a key that can't act is an error.
- Defaults < recipe file < command line. A length is `100 epochs`, `5000 steps` or `1e6 images`; a bare number is steps.
- `none` on the command line and `null` in YAML unset an optional value.
- global batch = micro-batch x accumulation x ranks: the recipe owns the product, the ds JSON its factors (`"auto"`).
"""


def help_text() -> str:
    """The page of `dino-ds --help`."""
    fixed = [
        (f"--{f.name}{'' if f.kind == 'switch' else ' N' if f.kind == 'int' else ' X'}", f.default, f.description)
        for f in TRAIN_FLAGS
    ]
    options = [(f"--{o.name}", o.default, f"{o.description} [{o.type}]") for o in recipe_options()]
    parts = [
        "usage: dino-ds train [--ds_config FILE.json] [--config RECIPE] [--section.key value ...]",
        "       deepspeed [--num_gpus N] dino_ds/train.py [the same options]",
        "",
        f"recipes: {', '.join(recipe_names())}",
        "",
        "options (default)",
        *_rows(fixed),
        "",
        "overrides of the recipe (default); a length is '100 epochs', '5000 steps' or '1e6 images'",
        *_rows(options),
        "",
        "overrides of the ds JSON",
        *_rows(
            [
                (
                    "--ds.KEY",
                    "the file's",
                    "any key of the JSON, for example --ds.zero_optimization.stage 2; docs/configs.md lists them",
                )
            ]
        ),
        "",
        _EXAMPLES,
    ]
    return "\n".join(parts)


def configs_markdown() -> str:
    """The whole of docs/configs.md."""
    parts = [_INTRO, "## Options of `train`\n", *_table(("option", "default", "what it does"), (
        (f"`--{f.name}`", f.default, f.description) for f in TRAIN_FLAGS
    )), "\n## Recipe\n", f"Shipped recipes: {', '.join(f'`{n}`' for n in recipe_names())}.\n", *_table(
        ("key", "type", "default", "what it is"),
        ((f"`{o.name}`", o.type, f"`{o.default}`", o.description) for o in recipe_options()),
    ), "\n`model.backbone` is one of " + ", ".join(f"`{name}`" for name in ARCHITECTURES) + ".", "\n## ds JSON\n",
        "Every key that acts. DeepSpeed's documentation has the details; the file may hold comments (hjson).\n",
        *_table(("key", "type", "ZeRO stages", "what it does"), _ds_rows()), "\n### Refused\n",
        "Keys of DeepSpeed that can't act here or would make training wrong.\n",
        *_table(("key", "why"), ((f"`{key}`", why) for key, why in REFUSED.items())), "",
    ]  # fmt: skip
    return "\n".join(parts)


def _ds_rows() -> Iterator[tuple[str, ...]]:
    for section, keys in SECTIONS.items():
        for key, spec in keys.items():
            if spec.kind != "section":
                name = f"{section}.{key}" if section else key
                stages = "all" if len(spec.stages) == 4 else ", ".join(str(stage) for stage in spec.stages)
                needed = " (required)" if spec.required else ""
                yield f"`{name}`", spec.type_text + needed, stages, spec.meaning


def _table(header: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (header, ("---",) * len(header), *rows)]


def _rows(rows: list[tuple[str, str, str]], width: int = 110) -> list[str]:
    left = max(len(name) for name, _, _ in rows) + 2
    lines = []
    for name, default, description in rows:
        text = textwrap.wrap(f"{description} ({default})", width - left - 2)
        lines += [f"  {name:<{left}}{text[0]}", *(" " * (left + 2) + line for line in text[1:])]
    return lines


if __name__ == "__main__":
    print(configs_markdown(), end="")
