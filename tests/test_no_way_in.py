"""No code path runs what a file holds: calls that could are forbidden, or listed here with the reason."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FORBIDDEN = {
    "eval", "exec", "compile", "__import__",
    "os.system", "os.popen", "os.execvp", "os.execv", "os.spawnv", "subprocess.getoutput", "subprocess.getstatusoutput",
    "pickle.load", "pickle.loads", "pickle.Unpickler", "pickle._Unpickler", "dill.load", "cloudpickle.load",
    "joblib.load", "marshal.loads",
    "shelve.open", "pandas.read_pickle", "yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.full_load",
    "torch.load", "torch.hub.load", "torch.jit.load", "torch.package.PackageImporter", "shutil.unpack_archive",
    "tempfile.mktemp", "logging.config.listen", "code.interact", "importlib.import_module", "runpy.run_path",
}  # fmt: skip
METHODS = {"extractall", "extract", "unsafe_load"}  # forbidden methods, whatever their object is
ALLOWED = {
    ("dino_ds/basics/names.py", "yaml.load"): "with SafeLoader in C, a file of the package",
    ("dino_ds/config/loading.py", "yaml.load"): "with a loader derived from SafeLoader; test_payloads.py gives it tags",
    ("dino_ds/data/batches.py", "pickle.loads"): "what a loader process of this run has sent through its own pipe",
    ("dino_ds/basics/own_code.py", "importlib.import_module"): "what the user has typed: hostile/test_named_code.py",
    ("dino_ds/planning/doctor.py", "importlib.import_module"): "packages of a fixed list: do they load?",
    ("dino_ds/planning/measure.py", "importlib.import_module"): "a function named by the process that started this one",
}


def _names(tree: ast.AST) -> dict[str, str]:
    """Imported names of a file and what they stand for: `from os import system as s` -> {"s": "os.system"}."""
    known = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            whole = [(a.asname, a.name) if a.asname else (a.name.split(".")[0],) * 2 for a in node.names]
            known |= dict(whole)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            known |= {(a.asname or a.name): f"{node.module}.{a.name}" for a in node.names}
    return known


def _full_name(node: ast.expr, known: dict[str, str]) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_full_name(node.value, known)}.{node.attr}"
    return known.get(node.id, node.id) if isinstance(node, ast.Name) else "?"


def _findings(source: str) -> list[tuple[int, str]]:
    """(line, what) of every use of something forbidden, called or only mentioned."""
    tree = ast.parse(source)
    known, found = _names(tree), []
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    words = [(call.func, word) for call in calls for word in call.keywords if word.arg == "weights_only"]
    safe = [function for function, word in words if getattr(word.value, "value", None) is True]
    for node in ast.walk(tree):
        if isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Load) and node not in safe:
            name = _full_name(node, known)
            if name in FORBIDDEN:
                found.append((node.lineno, name))
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Attribute) and node.func.attr in METHODS:
                found.append((node.lineno, node.func.attr))
            for word in node.keywords:
                value = getattr(word.value, "value", "not a constant")
                wanted = {"shell": False, "weights_only": True, "allow_pickle": False}
                if word.arg in wanted and value is not wanted[word.arg]:
                    found.append((node.lineno, f"{word.arg}={ast.unparse(word.value)}"))
    return found


@pytest.mark.slow
def test_nothing_runs_what_a_file_holds():
    found, used = [], set()
    for path in [*(ROOT / "dino_ds").rglob("*.py"), *(ROOT / "launch").rglob("*.py"), ROOT / "setup.py"]:
        name = str(path.relative_to(ROOT))
        for line, what in _findings(path.read_text()):
            if (name, what) in ALLOWED:
                used.add((name, what))
            else:
                found.append(f"{name}:{line}: {what}")
    assert not found, "\n".join(found)
    assert used == ALLOWED.keys(), f"no longer there: {ALLOWED.keys() - used}"


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("import torch\nsafe = False\ntorch.load('x', weights_only=safe)", "weights_only=safe"),
        ("import torch\nf = torch.load", "torch.load"),
        ("import numpy as np\nnp.load('x', allow_pickle=True)", "allow_pickle=True"),
        ("import subprocess\nsubprocess.run('x', shell=True)", "shell=True"),
        ("archive.extractall()", "extractall"),
    ],
)
def test_the_search_finds_them(source, what):
    assert what in [name for _, name in _findings(source)]


def test_what_reads_files_is_younger_than_its_known_holes():
    """torch before 2.10 runs code in spite of weights_only (CVE-2025-32434, CVE-2026-24747); pyarrow before 14.0.1
    unpickles what a file says (CVE-2023-47248); Pillow before 12.1.1 writes out of bounds (CVE-2026-25990)."""
    project = (ROOT / "pyproject.toml").read_text()
    assert all(f'"{bound}"' in project for bound in ("torch>=2.11", "pyarrow>=15", "pillow>=12.3"))


def test_shell_scripts_evaluate_nothing():
    scripts = [*ROOT.glob("launch/**/*.sh"), *ROOT.glob(".ci/*")]
    for script in scripts:
        words = script.read_text().split()
        assert not {"eval", "source"} & set(words), script
