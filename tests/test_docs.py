"""What the documents say can be typed runs, in the order of the pages; and what they name is there."""

from __future__ import annotations

import ast
import json
import re
import shlex
import sys
from pathlib import Path

import pytest
import yaml
from PIL import Image

import dino_ds
from dino_ds.cli import main as cli
from dino_ds.cli.main import restored_process, restored_torch
from dino_ds.config.ds_config import load_ds_config
from dino_ds.config.ds_schema import PerformanceOptions
from dino_ds.config.evaluation import EVALUATIONS
from dino_ds.config.loading import load_recipe
from dino_ds.examples import finetune_classification, finetune_segmentation
from dino_ds.method.build import build_network
from dino_ds.options.commands import COMMANDS, TRAIN, find_command
from dino_ds.options.flags import parse_flags
from tests.examples.test_finetune import draw_images
from tests.printed_commands import commands_in, why_refused
from tests.run.harness import image_folder

REPOSITORY = Path(__file__).parent.parent
PAGES = [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
PAGES.append(REPOSITORY / "ds_configs/README.md")
_CALLS = "|".join(COMMANDS)


def _commands(text):
    """Commands in code blocks and in backquotes, continuation lines joined."""
    text = text.replace("\\\n", " ")
    blocks = "\n".join(re.findall(r"```[a-z]*\n(.*?)```", text, re.S)).splitlines()
    spans = re.findall(r"`([^`\n]+)`", text)
    return [line for line in (*blocks, *spans) if re.search(rf"dino_ds/train\.py |dino-ds ({_CALLS})( |$)", line)]


PAGE_COMMANDS = [(page.name, command) for page in PAGES for command in _commands(page.read_text())]


@pytest.mark.parametrize(("page", "line"), PAGE_COMMANDS)
def test_documented_commands_are_accepted(page, line):
    words = shlex.split(line.replace("…", "").partition(" > ")[0], comments=True)
    if "--help" in words:
        return
    first = next(i for i, word in enumerate(words) if word.endswith(("train.py", "dino-ds")))
    command, rest = find_command(words[first + 1 :]) or (TRAIN, words[first + 1 :])
    request = parse_flags(command, rest)
    load_recipe(request.options.get("config", command.recipe), request.recipe)
    if path := request.options.get("ds_config", command.ds_config):
        load_ds_config(str(REPOSITORY / path), request.ds)


def _texts_of_the_program():
    """Yield (where, text) of the literals of the package, HOLE for what is filled in, and of its files."""
    for path in (REPOSITORY / "dino_ds").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                for part in node.values:
                    part.lineno = 0
                text = "".join(part.value if isinstance(part, ast.Constant) else "HOLE" for part in node.values)
                yield f"{path}:{node.lineno}", text
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.lineno:
                yield f"{path}:{node.lineno}", node.value
    for answers in yaml.safe_load((REPOSITORY / "dino_ds/basics/elsewhere.yaml").read_text()).values():
        yield from (("elsewhere.yaml", str(answer)) for answer in answers.values())


def test_commands_in_the_program_s_texts_are_accepted():
    """They end at a punctuation mark or the line's end, so that all of it can be typed. What is filled in after a value
    may be options; these are looked at where they are printed."""
    lines = {(where, line) for where, text in _texts_of_the_program() for line in commands_in(text)}
    lines = {(where, line) for where, line in lines if not re.search(r" (?!-)\S+ HOLE$", line)}
    assert len(lines) > 20 and not [(where, line, why) for where, line in lines if (why := why_refused(line))]


def test_the_example_of_a_backbone_of_one_s_own_trains(tmp_path, monkeypatch):
    import torch

    page = (REPOSITORY / "docs/backbones.md").read_text()
    (code,) = re.findall(r"```python\n# my_backbone\.py\n(.*?)```", page, re.S)
    (tmp_path / "my_backbone.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    (line,) = (line for line in _commands(page) if "my_backbone" in line)
    small = {"head.prototypes": "16", "head.hidden": "16", "head.bottleneck": "8"}
    recipe = load_recipe(None, parse_flags(TRAIN, shlex.split(line)[2:]).recipe | small)
    backbone = build_network(recipe, PerformanceOptions()).backbone
    assert backbone.spec.width == 256 and backbone.spec.stride == 8
    crops = {"global": [torch.randn(2, 3, 48, 48)], "local": [torch.randn(2, 3, 32, 32)]}
    features = backbone(crops, patches=("global",))
    assert features["cls"].shape == (4, 256) and features["patches/global"].shape == (2, 36, 256)
    features["cls"].sum().backward()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", page.read_text()):
        if not target.startswith("http"):
            linked = page.parent / target if target else page
            assert linked.exists(), target
            assert not anchor or anchor in _anchors(linked.read_text()), f"{target}#{anchor}"


def _anchors(text):
    """Anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_table_of_evaluations_is_the_program_s():
    page = "".join((REPOSITORY / f"docs/{name}.md").read_text() for name in ("evaluations", "benchmarks"))
    named = set(re.findall(r"`([a-z_-]+)`", "".join(re.findall(r"^\| (`.*?) \|", page, re.M))))
    assert set(EVALUATIONS) <= named


IMAGE_PAGES = {"README.md": 4, "docs/quickstart.md": 4, "docs/your-data.md": 1, "docs/small-data.md": 1}
IMAGE_PAGES |= {"docs/features.md": 7, "docs/evaluations.md": 1, "docs/report.md": 4}
"""In the order of the README, with how many commands of each run."""
ELSEWHERE = re.compile(
    r"\b(RUN|ROOT|WEIGHTS|MODEL|FILE|vits16|vit_|rtx|dinov\d_|theirs|clusters:|wandb|trackio|bench|launch|profile"
    r"|eval\.(every|stop_after))"
    r"|[ '\"]/\w|\.pth|runs/(?!quickstart|mine|small)"
)
"""What names files, cards or weights that are not here, or takes minutes."""
_TRAIN = "--max_steps 2 --data.global_batch 16 --data.workers 0"
SHORT = {
    "train": f"{_TRAIN} --eval.every '0 steps' --eval.pictures_every '0 steps'",
    "eval": "--images 60 --workers 0",
    "embed": "--workers 0",
    "look-data": "--sample 100",
    "finetune_classification": "--epochs 1 --workers 0",
    "finetune_segmentation": "--epochs 1 --workers 0",
}


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reader")
    for kind in ("cats", "dogs"):
        image_folder(folder / "images" / kind, 70)
        Image.new("RGB", (40, 40)).save(folder / "images" / kind / "1.jpg")
    draw_images(folder / "birds")
    (folder / "birds/masked").rename(folder / "shapes")
    image_folder(folder / "birds/train/disc", 40)
    return folder


@pytest.mark.slow
def test_the_pages_run_in_their_order(here, monkeypatch, capsys):
    monkeypatch.chdir(here)
    monkeypatch.setattr(cli, "_exit", sys.exit)
    train = dino_ds.train
    monkeypatch.setattr(dino_ds, "train", lambda *given, **more: train(*given, max_steps=2, **more))
    (here / "dino_ds").symlink_to(REPOSITORY / "dino_ds")
    _run("train --config quickstart --run_dir runs/quickstart")  # as `make train` leaves it, in fewer steps
    done = set[str]()
    for name, count in IMAGE_PAGES.items():
        ran, names, page = 0, {"image": "images/cats/1.jpg"}, (REPOSITORY / name).read_text().replace("\\\n", " ")
        for language, block in re.findall(r"```(\w*)\n(.*?)```", page, re.S):
            if language == "python" and not block.startswith("# my_"):
                exec(block, names)
            for line in [] if language in ("python", "yaml") else block.splitlines():
                found = re.match(r"(?:dino-ds|python -m dino_ds\.examples\.(?=\w)) ?([^#]*)", line)
                if found and not ELSEWHERE.search(found[0]):
                    if found[1].strip() not in done:
                        _run(found[1])
                    done.add(found[1].strip())
                    ran += 1
        assert ran == count, name
    assert (here / "runs/mine/teacher.safetensors").is_file()
    assert "of the test images are right" in capsys.readouterr().out


def test_pages_and_their_pictures_have_the_figures_of_one_file():
    for name, groups in yaml.safe_load((REPOSITORY / "docs/numbers.yaml").read_text()).items():
        if name.endswith(".png"):
            assert json.loads(Image.open(REPOSITORY / "docs" / name).info["figures"]) == groups, f"draw {name} anew"
        for group in groups:
            for page in group["pages"]:
                numbers = set(re.findall(r"\d+\.\d+", (REPOSITORY / "docs" / page).read_text()))
                assert {str(figure) for figure in group["figures"].values()} <= numbers, (page, group)


def _run(line: str) -> None:
    words = shlex.split(line)
    short = SHORT.get(words[0], "").replace("2", "3" if "--resume" in words else "2")
    evaluates = bool({"--eval.val_share", "--resume"} & {*words})
    words += shlex.split(short.replace("0 steps", "9 steps", 1) if evaluates else short)
    program = {"finetune_classification": finetune_classification, "finetune_segmentation": finetune_segmentation}
    code: object = 0
    try:
        with restored_process(), restored_torch():
            program[words[0]].main(words[1:]) if words[0] in program else cli.main(words)
    except SystemExit as end:
        code = end.code
    assert not code, line
