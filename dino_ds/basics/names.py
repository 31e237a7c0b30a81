"""Text for error messages: the names nearest to a mistyped one, values as YAML has them, hints on missing files."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterable
from pathlib import Path

MODEL_FORMS = "a run folder or one of its checkpoints, a file of weights, a Hugging Face folder or a timm name"
"""The ways to name a model."""
BEST_TEACHER = "best_teacher.safetensors"
"""The file in a run folder with the teacher that was the best by one metric."""
_MOST_QUOTED = 100
MOST_PROBLEMS = 100
"""Most problems reported for one file: finding the nearest names for more takes too long, and nobody reads them."""


@functools.cache
def words_elsewhere(section: str) -> dict[str, str]:
    """Each word of a section of elsewhere.yaml -> its answer; the key of one command's option is "COMMAND OPTION"."""
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast, where it is built in
    content = yaml.load(Path(__file__).with_name("elsewhere.yaml").read_text(encoding="utf-8"), loader)
    return {
        f"{entry['command']} {word}" if "command" in entry else word: entry["answer"]
        for entry in content[section]
        for word in entry["words"].split()
    }


def as_written(value: object) -> str:
    """A value as it is written in a YAML file, for an error: `[32, 64]`, and text in quotes."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(unquoted, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {unquoted(part)}' for key, part in value.items())}}}"
    if isinstance(value, str) and len(value) > _MOST_QUOTED:
        return f"{value[: _MOST_QUOTED // 2]!r}... ({len(value)} characters)"
    return repr(value)


def unquoted(value: object) -> str:
    """A value as it is written in a YAML file; unlike in `as_written`, text has no quotes."""
    if value is None:
        return "null"
    return value if isinstance(value, str) else as_written(value)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The words " Did you mean a, b or c?" for the nearest of `known`, or "" if nothing is near."""
    return suggestion(nearest(name, known))


def suggestion(near: list[str]) -> str:
    return f" Did you mean {_listed(near)}?" if near else ""


def _listed(words: list[str]) -> str:
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def nearest(name: str, known: Iterable[str], count: int = 3, cutoff: float = 0.6, slack: float = 0.08) -> list[str]:
    """At most `count` of `known`, the nearest first: likeness >= `cutoff` and within `slack` of the best.

    Dotted names are compared whole and by their last part, so that `lr` finds `optimizer.lr`; three or more letters
    that begin a known name are near it, so that `run` finds `run_dir`.
    """
    if len(name) > _MOST_QUOTED:
        return []  # a word of thousands of letters is no slip, and takes seconds to compare
    scores = {other: _likeness(name, other) for other in known}
    best = max(scores.values(), default=0.0)
    ranked = sorted(scores, key=lambda other: -scores[other])
    return [other for other in ranked if scores[other] >= max(cutoff, best - slack)][:count]


def _likeness(name: str, other: str) -> float:
    def ratio(a: str, b: str) -> float:
        return difflib.SequenceMatcher(None, a.lower().replace("-", "_"), b.lower()).ratio()

    leaf = other.rsplit(".", 1)[-1]
    begins = len(name) > 2 and (other.startswith(name) or leaf.startswith(name))
    by_leaf = ratio(name.rsplit(".", 1)[-1], leaf)
    return max(ratio(name, other), 0.95 * by_leaf if by_leaf > 0.7 else 0.0, 0.8 if begins else 0.0)


def missing_file(path: str, endings: tuple[str, ...]) -> str:
    """The sentence about a missing file, with the nearest files of its folder that have one of these endings."""
    folder = Path(path).parent
    if not folder.is_dir():
        return f"{path} does not exist: there is no folder {folder}."
    beside = sorted(p.name for p in folder.iterdir() if p.name.endswith(endings))
    stems = {name.rsplit(".", 1)[0]: name for name in beside}
    match = sorted((stem for stem in stems if stem.startswith(Path(path).stem)), key=len)[:3]
    match = match or difflib.get_close_matches(Path(path).stem, stems, 1, 0.4)
    if match:
        files = [str(folder / stems[stem]) for stem in match]
        return f"{path} does not exist. Did you mean {_listed(files)}?"
    there = f"has {', '.join(beside[:8])}" if beside else f"has no {' or '.join(endings)} file"
    return f"{path} does not exist: {folder.absolute()} {there}."


def sidecar_of(weights: Path) -> Path:
    """The JSON next to a file of weights: teacher.json for teacher.safetensors, but vit.pth.json for vit.pth."""
    return weights.with_suffix(".json") if weights.suffix == ".safetensors" else Path(f"{weights}.json")


def step_name(step: int) -> str:
    """The name of the folder for the checkpoint or the pictures of a step."""
    return f"step_{step:08d}"
