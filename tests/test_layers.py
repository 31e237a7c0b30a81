"""Imports point downwards only, those inside functions too; packages of one layer don't know each other."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable
from pathlib import Path

from scripts.measures import PACKAGE, closure_of, count_lines, import_cycles, long_signatures, parse

CLOSURE_OF_TRAIN = 103
"""Files that importing train.py may bring in, without those that it asks for in functions."""
CLOSURE_OF_THE_LOOP = (38, 8_500)
"""Files and lines that importing run/loop.py may bring in."""
_KERNEL = "a Triton kernel takes pointers and strides one by one"
LONG_SIGNATURES = {f"data/photometric_triton.py:{name}": _KERNEL for name in ("sum_gray", "color", "blur")}
"""Functions of more than six parameters, and why."""
KIND_QUESTIONS = 8
"""Times that the package may ask of which kind a backbone or its spec is."""
TRAINING = [
    {"__init__", "errors", "basics", "models.specs", "engine.schedules"},
    {"config"},
    {"method.specs"},
    {"config.recipe", "config.loading", "config.stages", "engine.distributed", "health"},
    {"data", "models", "checkpoint"},
    {"weights", "engine"},
    {"method"},
    {"run"},
    {"train"},
]
"""The packages that train, from the lowest layer to the highest; a module that lies in another layer than the rest of
its package is named with it."""
AROUND = [
    {"options"},
    {"costs"},
    {"evals"},
    {"planning.measure"},
    {"report", "planning"},
    {"commands", "examples"},
    {"cli"},
    {"__main__", "api"},
]
"""The packages that look at runs, weights and machines."""
ASKED_FOR_BY_TRAINING = {"train": {"planning"}, "_build_periodic_tasks": {"evals", "report"}}
"""Functions of train.py -> packages around training that they import: the choice of a ds config, periodic tasks."""
LAYERS = [*TRAINING, *AROUND]
LOWEST = LAYERS[0]
"""Packages whose modules may import each other."""


def _package(dotted: str) -> str:
    """The package in LAYERS that a module lies in, or the module itself: engine for engine.masters."""
    parts = dotted.split(".")
    names = [".".join(parts[:n]) for n in (2, 1)]
    return next((name for name in names if any(name in packages for packages in LAYERS)), parts[0])


def _imports(path: Path) -> set[str]:
    """Packages of dino_ds that a file imports anywhere, but for what it does only when run as a script."""
    body = parse(path).body
    return _imports_in(node for node in body if not (isinstance(node, ast.If) and "__main__" in ast.unparse(node.test)))


def _imports_in(body: Iterable[ast.AST]) -> set[str]:
    found = set()
    for node in (n for top in body for n in ast.walk(top)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "dino_ds":
            module = node.module.removeprefix("dino_ds").lstrip(".")
            found.update(_package(f"{module}.{a.name}" if module else _attribute(a.name)) for a in node.names)
        elif isinstance(node, ast.Import):
            found.update(_package(a.name.removeprefix("dino_ds.")) for a in node.names if a.name.startswith("dino_ds."))
    return found


def _attribute(name: str) -> str:
    return name if (PACKAGE / name).is_dir() or (PACKAGE / f"{name}.py").is_file() else "__init__"


def _layer(package: str) -> int:
    layers = [i for i, packages in enumerate(LAYERS) if package in packages]
    assert len(layers) == 1, f"give the package {package!r} one place in LAYERS"
    return layers[0]


def test_imports_point_downwards():
    wrong = []
    for path in sorted(PACKAGE.rglob("*.py")):
        package = _package(".".join(path.relative_to(PACKAGE).with_suffix("").parts))
        if path == PACKAGE / "__init__.py":
            continue  # dino_ds.load is imported when it is asked for
        asked = set().union(*ASKED_FOR_BY_TRAINING.values()) if path == PACKAGE / "train.py" else set()
        for other in _imports(path) - asked:
            is_own = other.partition(".")[0] == package.partition(".")[0] and _layer(other) == _layer(package)
            if not is_own and not {other, package} <= LOWEST and _layer(other) >= _layer(package):
                wrong.append(f"{path.relative_to(PACKAGE)} (layer {_layer(package)}) imports {other} ({_layer(other)})")
    assert not wrong, wrong


def test_two_functions_of_training_import_what_is_around_it():
    around = {name.partition(".")[0] for names in AROUND for name in names}
    functions = [node for node in parse(PACKAGE / "train.py").body if isinstance(node, ast.FunctionDef)]
    asked = {function.name: _imports_in([function]) & around for function in functions}
    assert {name: names for name, names in asked.items() if names} == ASKED_FOR_BY_TRAINING
    assert not _imports_in(n for n in parse(PACKAGE / "train.py").body if n not in functions) & around
    assert len(closure_of(PACKAGE / "train.py", around)) <= CLOSURE_OF_TRAIN


def test_no_module_of_ours_is_imported_by_a_string():
    """Search, editors and mypy follow imports alone; users' own names come from recipes."""
    texts = [(path, node.value) for path in PACKAGE.rglob("*.py") for node in ast.walk(parse(path)) if _is_text(node)]
    modules = [(path, re.fullmatch(r"(?:dino_ds\.)?([a-z_.]+):\w+", text)) for path, text in texts]
    assert not [
        (path.name, match[0])
        for path, match in modules
        if match and PACKAGE.joinpath(*match[1].split(".")).with_suffix(".py").is_file()
    ]


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def test_no_module_hides_one_of_the_standard_library_s():
    """The launcher puts dino_ds/ first on sys.path."""
    names = {path.stem for path in PACKAGE.glob("*.py")} | {path.name for path in PACKAGE.iterdir() if path.is_dir()}
    assert not names & set(sys.stdlib_module_names)


def test_files_stay_small():
    long = [p.name for p in PACKAGE.rglob("*.py") if len(p.read_text().splitlines()) > 500]
    assert not long


def test_the_loop_brings_in_no_more_than_it_needs():
    found = closure_of(PACKAGE / "run/loop.py")
    files, lines = CLOSURE_OF_THE_LOOP
    assert len(found) <= files
    assert count_lines(found) <= lines


def test_no_two_classes_have_one_name():
    """But those that users of the Python API see beside those that they stand for."""
    names = [
        node.name
        for path in PACKAGE.rglob("*.py")
        for node in parse(path).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]
    assert {name for name in names if names.count(name) > 1} == {"Run", "Backbone"}


def test_no_file_imports_itself_through_others():
    assert import_cycles() == []


def test_no_function_takes_more_than_six_parameters():
    assert long_signatures().keys() == LONG_SIGNATURES.keys()


def test_the_page_names_every_package_in_its_layer():
    page = (PACKAGE.parent / "docs/flow.md").read_text().partition("\n## Where things live\n")[2].partition("\n## ")[0]
    layers = re.findall(r"^\d+\. (.*(?:\n +.*)*)", page, re.M)
    named = [set(re.findall(r"`([\w/]+)`", re.sub(r"\([^()]*\)", "", layer))) for layer in layers]
    assert named == [{name.replace(".", "/") for name in packages - {"__init__"}} for packages in LAYERS]


def test_a_spec_is_asked_for_answers_not_for_its_kind():
    """`isinstance` on kinds of backbone needs an edit for each further kind; BackboneSpec has the questions to ask."""
    kinds = {"BackboneSpec", "ViTSpec", "ForeignSpec", "VisionTransformer", "ForeignBackbone"}
    found = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "issubclass", "type"):
                asked = {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}
                found += [f"{path.relative_to(PACKAGE)}:{node.lineno}"] if asked & kinds else []
    assert len(found) <= KIND_QUESTIONS, found


def test_gram_anchoring_and_a_distillation_s_source_stand_in_few_files():
    """They are described by their specs; whoever names them elsewhere works it out again."""
    for words in (r"(\b|_)(gram|Gram|GRAM)(\b|_|[A-Z])", r"teacher\.source"):
        assert len([path for path in PACKAGE.rglob("*.py") if re.search(words, path.read_text())]) <= 10
