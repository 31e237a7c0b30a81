"""data.source module:Class: the example of the docs, and what is said of a class that is none."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from dino_ds.config.loading import load_recipe
from dino_ds.data.sources import build_source
from dino_ds.errors import ConfigError, DataError, UserError
from tests.data.test_image_set import Own
from tests.data.test_loader import batches
from tests.run.harness import image_folder

DOCS = Path(__file__).parent.parent.parent / "docs/data.md"
GOOD = "def __len__(self): return 3\n    def load(self, i): pass\n    def name(self, i): return str(i)\n"


def test_the_example_of_the_docs_runs(write_module, tmp_path):
    (code,) = re.findall(r"```python\n# (?:my_module\.py)\n(.*?)```", DOCS.read_text(), re.S)
    assert sum(bool(line) for line in code.splitlines()) <= 15
    write_module("my_module", code)
    root = image_folder(tmp_path / "images", 8, classes=2)
    broken = sorted(root.rglob("*.png"))[3]
    broken.write_bytes(b"broken")
    recipe = load_recipe(None, {"data.source": "my_module:MySource", "data.root": str(root)})
    source = build_source(recipe.data.source, recipe.data.root, "train", recipe.data.download)
    assert len(source) == 8 and source.labels is None and source.classes is None
    [batch] = batches(1, source=source)
    assert sorted(batch.indices.tolist()) == list(range(8))
    assert batch.bad and all(str(broken) in text for text in batch.bad)


@pytest.mark.parametrize(
    ("source", "text", "message"),
    [
        ("absent_module:A", None, r"there is no absent_module on Python's path or in .*set PYTHONPATH"),
        ("mod:A", "import absent_thing", r"it needs absent_thing, which is not installed"),
        ("mod:A", "1 / 0", r"importing mod fails: ZeroDivisionError: division by zero"),
        ("mod:Imagse", "class Images: pass", r"has no class Imagse\. Did you mean Images\?"),
        ("mod:A", "class A:\n    def load(self, i): pass", r"it lacks __len__, name"),
        ("subprocess:Popen", None, r"Popen is not a source of images: it lacks __len__, load, name"),
        (
            "mod:A",
            f"class A:\n    def __init__(self): pass\n    {GOOD}",
            r"can't be built from data\.root R: TypeError",
        ),
        (
            "mod:A",
            f"class A:\n    def __init__(self, r): pass\n    {GOOD}".replace("return 3", "return 0"),
            "no images",
        ),
        (
            "mod:A",
            f"class A:\n    def __init__(self, r): pass\n    {GOOD}".replace("str(i)", "None"),
            r"mod:A\.name gave None; it must give a text",
        ),
        (
            "mod:A",
            f"class A:\n    def __init__(self, r): pass\n    {GOOD}".replace("str(i)", "('a', 'b')[i]"),
            r"can't be built from data\.root R: IndexError: tuple index out of range",
        ),
        (
            "mod:A",
            f"class A:\n    def __init__(self, r): self.f = open(__file__)\n    {GOOD}",
            r"open files .* in load",
        ),
        ("mod:A", f"class A:\n    labels = [0]\n    def __init__(self, r): pass\n    {GOOD}", r"3 images and 1 labels"),
        *(
            (
                "mod:A",
                f"class A:\n    labels, classes = {labels}, 'ab'\n    def __init__(self, r): pass\n    {GOOD}",
                r"mod:A\.labels must be whole numbers, the place of each image's class in mod:A\.classes \(0 to 1\)",
            )
            for labels in ([-1, 1, 2], ["a", "b", "a"])
        ),
    ],
)
def test_what_is_wrong_with_a_class_is_one_line(write_module, source, text, message):
    if text is not None:
        write_module("mod", text)
    with pytest.raises(UserError, match=message) as caught:
        build_source(source, "R", "train", False)
    assert "\n" not in str(caught.value) and isinstance(caught.value, ConfigError | DataError)


@pytest.mark.parametrize("source", ["mod:", ":A", "mod:A:B", "a b:C", "mod.A", "../mod:A", "mod:A()"])
def test_the_recipe_refuses_what_is_no_name(source):
    with pytest.raises(ConfigError, match="nor a class of yours as module:Class"):
        load_recipe(None, {"data.source": source})


def test_a_class_of_a_notebook_is_refused(monkeypatch):
    """Loader processes could not import it; one of a main script they can."""
    main = sys.modules["__main__"]
    monkeypatch.setattr(main, "Mine", Own, raising=False)
    assert len(build_source("__main__:Mine", "train", "train", False)) > 0
    monkeypatch.setattr(main, "__file__", "<stdin>")
    with pytest.raises(ConfigError, match=r"data\.source __main__:Mine: .* put it into a .py file"):
        build_source("__main__:Mine", "train", "train", False)
