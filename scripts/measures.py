"""How large dino_ds is and how its files hang together: `python -m scripts.measures [--json]`.

All but the recipe's keys is read from the source. An import counts wherever it stands: inside a function and
under TYPE_CHECKING too.
"""

from __future__ import annotations

import ast
import functools
import json
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "dino_ds"
STARTS = ("run/loop.py", "train.py")
AROUND = ("evals", "planning", "report")
"""Packages that training imports in functions: they are left out of what the STARTS bring in."""
MOST_PARAMETERS = 6
PRONOUNS = ("found", "one", "own", "place", "given", "what", "theirs")


@functools.cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def source_files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def count_lines(paths: Iterator[Path] | list[Path] | set[Path]) -> int:
    return sum(len(path.read_text().splitlines()) for path in paths)


def count_words(pages: list[Path]) -> int:
    return sum(len(page.read_text().split()) for page in pages)


@functools.cache
def imports_of(path: Path) -> frozenset[Path]:
    """The files of dino_ds that a file imports; `from dino_ds.x import y` is x/y.py where that is a module.

    Imports for type checkers alone are left out, as are all of the package itself: who imports it has not yet asked for
    the functions that it offers.
    """
    if path == PACKAGE / "__init__.py":
        return frozenset()
    names: list[str] = []
    tree = parse(path)
    tree.body = [
        node for node in tree.body if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
    ]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    found = (_file_of(name) for name in names if name.split(".")[0] == "dino_ds")
    return frozenset(file for file in found if file is not None and file != path)


def _file_of(name: str) -> Path | None:
    """The module of this dotted name, or the one that defines its last part."""
    for parts in (name.split("."), name.split(".")[:-1]):
        base = ROOT.joinpath(*parts)
        for file in (base.with_suffix(".py"), base / "__init__.py"):
            if parts and file.is_file():
                return file
    return None


def closure_of(start: Path, left_out: Collection[str] = ()) -> set[Path]:
    """The file itself and all that it imports, directly or through others, but files of the packages in `left_out`."""
    found, left = set[Path](), [start]
    while left:
        path = left.pop()
        if path not in found:
            found.add(path)
            left += [file for file in imports_of(path) if file.relative_to(PACKAGE).parts[0] not in left_out]
    return found


def import_cycles() -> list[list[str]]:
    """Groups of files each of which imports the others, directly or not."""
    reached = {path: closure_of(path) for path in source_files()}
    groups = {frozenset(other for other in reached[path] if path in reached[other]) for path in reached}
    return sorted(sorted(map(_name, group)) for group in groups if len(group) > 1)


def long_signatures() -> dict[str, int]:
    """Functions of more than MOST_PARAMETERS parameters, `self` and `cls` left out, as "run/loop.py:run"."""
    return {
        f"{_name(path)}:{name}": count
        for path in source_files()
        for name, count in _parameters(parse(path))
        if count > MOST_PARAMETERS
    }


def _parameters(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, int]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            arguments = child.args
            names = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
            yield prefix + child.name, len(names) - (names[:1] in (["self"], ["cls"]))
        inner = f"{prefix}{child.name}." if isinstance(child, ast.FunctionDef | ast.ClassDef) else prefix
        yield from _parameters(child, inner)


def _name(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def count_pronouns(paths: list[Path]) -> int:
    """Variables and parameters named by one of PRONOUNS, which say nothing of the thing."""
    nodes = [node for path in paths for node in ast.walk(parse(path))]
    stored = [node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    return sum(name in PRONOUNS for name in [*stored, *(node.arg for node in nodes if isinstance(node, ast.arg))])


@functools.cache
def weigh() -> dict[str, int]:
    """What tests/test_weight.py has ceilings for."""
    from dino_ds.config.recipe import Recipe
    from dino_ds.config.schema import options_of

    pages, notes = [*(ROOT / "docs").glob("*.md"), ROOT / "README.md"], list((ROOT / "docs/notes").glob("*.md"))
    return {
        "package lines": count_lines(source_files()),
        "package files": len(source_files()),
        "test lines": count_lines(list((ROOT / "tests").rglob("*.py"))),
        "recipe keys": len(options_of(Recipe)),
        "words of pages": count_words(pages),
        "words of notes": count_words(notes),
        "variables named by a pronoun": count_pronouns(source_files()),
    }


def measure() -> dict[str, Any]:
    closures = {start: closure_of(PACKAGE / start, AROUND) for start in STARTS}
    return {
        "weight": weigh(),
        "closures": {name: {"files": len(c), "lines": count_lines(c)} for name, c in closures.items()},
        "cycles": import_cycles(),
        "long_signatures": long_signatures(),
    }


def page(found: Mapping[str, Any]) -> str:
    lines = [f"{name}: {count:,}" for name, count in found["weight"].items()]
    for name, size in found["closures"].items():
        lines.append(f"importing {name} brings in {size['files']} files, {size['lines']:,} lines")
    lines.append(f"import cycles: {len(found['cycles'])}")
    lines += [f"  {', '.join(cycle)}" for cycle in found["cycles"]]
    lines.append(f"functions of more than {MOST_PARAMETERS} parameters: {len(found['long_signatures'])}")
    lines += [f"  {count:3} {name}" for name, count in found["long_signatures"].items()]
    return "\n".join(lines)


if __name__ == "__main__":
    print(json.dumps(measure(), indent=1) if "--json" in sys.argv[1:] else page(measure()))
