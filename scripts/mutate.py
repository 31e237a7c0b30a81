"""Do the tests notice? Changes lines of dino_ds one at a time, at random, and runs the test files that import them.

python -m scripts.mutate dino_ds/engine/schedules.py dino_ds/health --count 30 --seed 7      # in a checkout's root

A change: a comparison the other way round, a number one more, a sign, and/or, True/False, a statement left out. Each is
made in a copy of the checkout. What `make test` does not catch is tried once more with the whole tables of `make
test-all` (--whole): the difference is what the sampling costs.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path.cwd()
OPPOSITE: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.GtE, ast.GtE: ast.Lt, ast.Gt: ast.LtE, ast.LtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """One change of one file."""

    path: Path
    line: int
    old: str
    new: str
    source: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.old} -> {self.new}"


def changed(node: ast.AST) -> ast.AST | None:
    """The node with its meaning turned round; None if there is nothing to turn."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in OPPOSITE:
        return ast.Compare(node.left, [OPPOSITE[type(node.ops[0])](), *node.ops[1:]], node.comparators)  # type: ignore
    if isinstance(node, ast.BinOp) and type(node.op) in OPPOSITE:
        return ast.BinOp(node.left, OPPOSITE[type(node.op)](), node.right)  # type: ignore[arg-type]
    if isinstance(node, ast.BoolOp):
        return ast.BoolOp(OPPOSITE[type(node.op)](), node.values)  # type: ignore[arg-type]
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        return ast.Constant(not node.value)
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        return ast.Constant(node.value + 1)
    if isinstance(node, (ast.Expr, ast.Assign, ast.AugAssign, ast.Raise)):
        documentation = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        return None if documentation else ast.Pass()
    return None


def mutants_of(path: Path) -> Iterator[Mutant]:
    """All changes inside the functions of a file."""
    source = path.read_text()
    lines = source.encode().splitlines(keepends=True)
    starts = [sum(map(len, lines[:i])) for i in range(len(lines))]
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    seen = set()
    for node in (inner for function in functions for part in function.body for inner in ast.walk(part)):
        new = changed(node)
        if new is None or id(node) in seen:
            continue
        seen.add(id(node))
        start = starts[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]
        end = starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]
        old, text = source.encode()[start:end].decode(), ast.unparse(new)
        text = text if isinstance(new, (ast.Pass, ast.Constant)) else f"({text})"
        whole = source.encode()[:start].decode() + text + source.encode()[end:].decode()
        if ast.dump(ast.parse(whole)) != ast.dump(ast.parse(source)):
            yield Mutant(path.relative_to(ROOT), node.lineno, old, text, whole)  # type: ignore[attr-defined]


def tests_of(path: Path) -> list[str]:
    """Test files that name the module, or import its name from its package."""
    module = ".".join(path.with_suffix("").parts)
    package, _, name = module.rpartition(".")
    found = []
    for test in sorted((ROOT / "tests").rglob("test_*.py")):
        text = test.read_text()
        imported = [line for line in text.splitlines() if line.startswith(f"from {package} import")]
        if module in text or any(name in line for line in imported):
            found.append(str(test.relative_to(ROOT)))
    return found


def is_caught(copy: Path, mutant: Mutant, marks: str, seconds: float) -> bool:
    """Whether a test fails, or hangs, with this change."""
    (copy / mutant.path).write_text(mutant.source)
    try:
        return not passes(copy, tests_of(mutant.path), marks, seconds)
    finally:
        shutil.copy(ROOT / mutant.path, copy / mutant.path)


def passes(copy: Path, tests: list[str], marks: str, seconds: float) -> bool:
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", marks, *tests]
    environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(command, cwd=copy, capture_output=True, text=True, timeout=seconds, env=environment)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode in (0, 5)  # 5: none of them is selected


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="+", type=Path)
    parser.add_argument("--count", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--marks", default="not full", help="what to run, as pytest's -m")
    parser.add_argument("--whole", default="full or not full", help="what to run of the mutants left; '' for nothing")
    parser.add_argument("--seconds", type=float, default=600, help="of one run of the tests; longer counts as caught")
    options = parser.parse_args()
    files = [f for path in options.paths for f in (sorted(path.rglob("*.py")) if path.is_dir() else [path])]
    every = [m for f in files if tests_of(f.resolve().relative_to(ROOT)) for m in mutants_of(f.resolve())]
    chosen = random.Random(options.seed).sample(every, min(options.count, len(every)))
    caught = later = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "checkout"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv", "runs", "__pycache__"))
        tests = sorted({test for mutant in chosen for test in tests_of(mutant.path)})
        if not passes(copy, tests, options.marks, 10 * options.seconds):
            raise SystemExit(f"these fail without any change: pytest -m '{options.marks}' {' '.join(tests)}")
        for mutant in chosen:
            found = is_caught(copy, mutant, options.marks, options.seconds)
            whole = not found and options.whole and is_caught(copy, mutant, options.whole, options.seconds)
            caught, later = caught + found, later + bool(whole)
            print("caught  " if found else "by whole" if whole else "MISSED  ", mutant, flush=True)
    print(f"{caught} of {len(chosen)} caught by -m '{options.marks}', {later} more by -m '{options.whole}'")


if __name__ == "__main__":
    main()
