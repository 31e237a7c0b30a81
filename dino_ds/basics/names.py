"""Text about names, for messages: the nearest to a mistyped one, values as YAML has them, missing files, weights."""

from __future__ import annotations

import difflib
import functools
import os
import re
from collections.abc import Iterable
from pathlib import Path

SIZES = {"s": "small", "b": "base", "l": "large", "h": "huge", "g": "giant", "7b": "7b"}  # as in timm's names
MODEL_FORMS = "a run folder or one of its checkpoints, a file of weights, a Hugging Face folder or a timm name"
BEST_TEACHER = "best_teacher.safetensors"  # the file in a run folder with the teacher that was the best by one metric
_MOST_QUOTED = 100


@functools.cache
def words_elsewhere(section: str) -> dict[str, str]:
    """Word -> its text in `section` of elsewhere.yaml, such as what to type in place of another program's option."""
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast, where it is built in
    content = yaml.load(Path(__file__).with_name("elsewhere.yaml").read_text(encoding="utf-8"), loader)
    return {word: answer for words, answer in content[section].items() for word in words.split()}


def as_written(value: object) -> str:
    """A value as it is written in a YAML file, for an error: `[32, 64]`; text in quotes, except inside lists."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(unquoted, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {unquoted(part)}' for key, part in value.items())}}}"
    if isinstance(value, str) and len(value) > _MOST_QUOTED:
        return f"{value[: _MOST_QUOTED // 2]!r}... ({len(value)} characters)"
    return repr(value)


def unquoted(value: object) -> str:
    """A value as it is written in a YAML file; unlike in `as_written`, text has no quotes."""
    return "null" if value is None else value if isinstance(value, str) else as_written(value)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The words " Did you mean a, b or c?" for the nearest of `known`, or "" if nothing is near."""
    return suggestion(nearest(name, known))


def suggestion(near: list[str]) -> str:
    return f" Did you mean {' or '.join([', '.join(near[:-1]), near[-1]] if len(near) > 1 else near)}?" if near else ""


def nearest(name: str, known: Iterable[str]) -> list[str]:
    """The names of `known` that are most like `name`, three at most; dotted names count by their last part too."""
    if len(name) > _MOST_QUOTED:
        return []  # a word of thousands of letters is no slip, and takes seconds to compare
    words, leaf = name.lower().replace("-", "_"), name.rpartition(".")[2].lower().replace("-", "_")
    scores = dict[str, float]()
    for other in known:
        whole = difflib.SequenceMatcher(None, words, other.lower()).ratio()
        of_leaf = difflib.SequenceMatcher(None, leaf, other.rpartition(".")[2].lower()).ratio()
        scores[other] = max(whole, 0.95 * of_leaf)
    least = max(0.7, max(scores.values(), default=0.0) - 0.08)
    return sorted((other for other, score in scores.items() if score >= least), key=lambda other: -scores[other])[:3]


def missing_file(path: str, endings: tuple[str, ...]) -> str:
    """The sentence about a missing file, with the nearest files of its folder that have one of these endings."""
    folder = Path(path).parent
    if not folder.is_dir():
        return f"{path} does not exist: there is no folder {folder}."
    beside = {file.stem: file for file in sorted(folder.iterdir()) if file.name.endswith(endings)}
    if near := nearest(Path(path).stem, beside):
        return f"{path} does not exist.{suggestion([str(beside[stem]) for stem in near])}"
    there = ", ".join(file.name for file in [*beside.values()][:8]) or f"no {' or '.join(endings)} file"
    return f"{path} does not exist: {folder.absolute()} has {there}."


def sidecar_of(weights: Path) -> Path:
    """The JSON next to a file of weights: teacher.json for teacher.safetensors, but vit.pth.json for vit.pth."""
    return weights.with_suffix(".json") if weights.suffix == ".safetensors" else Path(f"{weights}.json")


def step_name(step: int) -> str:
    """The name of the folder for the checkpoint or the pictures of a step."""
    return f"step_{step:08d}"


def hub_id(text: str) -> str | None:
    """The repository on the Hugging Face Hub, OWNER/NAME, that `text` looks like; None for another text or a path."""
    name = re.sub(r"^(hf://|hf[-_]hub:|https?://(www\.)?huggingface\.co/)?(datasets/)?", "", text).rstrip("/")
    # "runs/mine" is a run that is missing.
    looks_so = re.fullmatch(r"(?!runs/)[A-Za-z0-9][\w.-]*/[\w.-]+", name) is not None
    is_network = re.search(r"vit-(ti|s|b|l|h|g|7b)/\d+$", name.lower()) is not None  # a paper's ViT-S/16
    return name if looks_so and not is_network and not Path(name).parent.is_dir() else None


def weights_elsewhere(text: str) -> str | None:
    """How to get the weights that `text` names on a hub, in words; None if it names none, or is a path that exists."""
    if os.path.lexists(os.path.expanduser(text)):
        return None
    repository = hub_id(text)
    known = _timm_name(repository or text)
    if repository is None:
        return f"that is torch.hub's name: timm has these weights as {known}" if known else None
    of_timm = f"that is a name of the Hugging Face Hub: timm has these weights as {known}; or"
    fetch = f"hf download {repository} --local-dir DIR, then give DIR"
    return f"{of_timm if known else f'if {repository} is on the Hugging Face Hub:'} {fetch}"


def _timm_name(name: str) -> str | None:
    owner, _, model = name.rpartition("/")
    if owner == "timm":
        return model
    if owner not in ("", "facebook"):
        return None
    if m := re.fullmatch(r"dinov2_vit([sblg])14(_reg)?(_lc)?", model):
        return f"vit_{SIZES[m[1]]}_patch14_{'reg4_' if m[2] else ''}dinov2.lvd142m"
    if m := re.fullmatch(r"dinov2(-with-registers)?-(small|base|large|giant)", model):
        return f"vit_{m[2]}_patch14_{'reg4_' if m[1] else ''}dinov2.lvd142m"
    if m := re.fullmatch(r"dinov3[-_]vit(s|b|l|h|7b)16(plus)?(?:-pretrain-(lvd1689m|sat493m))?", model):
        return f"vit_{SIZES[m[1]]}{'_plus' if m[2] else ''}_patch16_dinov3.{m[3] or 'lvd1689m'}"
    if m := re.fullmatch(r"dinov3[-_]convnext[-_](tiny|small|base|large)(?:-pretrain-lvd1689m)?", model):
        return f"convnext_{m[1]}.dinov3_lvd1689m"
    if m := re.fullmatch(r"dino[-_]vit([sb])(8|16)", model):
        return f"vit_{SIZES[m[1]]}_patch{m[2]}_224.dino"
    return None


def advise_saved(folder: str) -> str:
    """The remedy for a folder that save_to_disk of Hugging Face's datasets has written; "" for any other folder."""
    saved = Path(folder)
    has_state, has_splits = (os.path.isfile(saved / name) for name in ("state.json", "dataset_dict.json"))
    if not has_splits and not (has_state and next(saved.glob("*.arrow"), None)):
        return ""
    saved = saved / "SPLIT" if has_splits else saved
    convert = f"import datasets; datasets.load_from_disk({str(saved)!r}).to_parquet('images.parquet')"
    why = "was written by save_to_disk of Hugging Face's datasets, whose Arrow files are not read"
    return f'{why}: type python -c "{convert}", then give images.parquet'
