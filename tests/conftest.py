"""Marks that follow from what a test does; two processes share the tests; only tests marked `gpu` see a GPU."""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import itertools
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import pytest
import torch

from dino_ds.errors import UserError
from dino_ds.health.beat import Event
from dino_ds.options.definition import Result
from tests.printed_commands import commands_in, why_refused

STARTS_RANKS = {("tests.ranks", "run_on_ranks"), ("tests.faults.jobs", "start"), ("tests.engine.harness", "build_step")}
NOT_FAST = ("ranks", "slow", "faults", "full", "gpu")
TAKEN = os.environ.get("DINO_DS_TESTS_TAKEN", "")
"""A folder that the two processes of `make test` share: a file in it for each file of tests that one has taken."""


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Lists of images that tests make do not stay in the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DINO_DS_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


USERS_FILES = (
    *("runs/quickstart/config.yaml", "runs/vits16/config.yaml", "images/cats/1.jpg", "train/cats/1.jpg", "test/1.jpg"),
    *("config.yaml", "ds_config.json", "data", "teacher.safetensors", "quickstart", "hosts", "notes.py"),
)
"""Names that a newcomer's folders and files have, in the clone too: some that our options take, and some of ours."""


@pytest.fixture(scope="session", autouse=True)
def users_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The working folder of all tests: full of a user's things, as the clone is that they are started in."""
    folder, before = tmp_path_factory.mktemp("users"), Path.cwd()
    for name in USERS_FILES:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("a user's")
    os.chdir(folder)
    yield folder
    os.chdir(before)


@pytest.fixture(autouse=True)
def _leaves_the_users_folder_as_it_is(users_folder: Path) -> Iterator[None]:
    """No test may write next to a user's things, or go on in another folder than it began in."""
    there = sorted(os.listdir(users_folder))
    yield
    os.chdir(users_folder)
    assert sorted(os.listdir(users_folder)) == there, "written into the working folder: take tmp_path"


@pytest.fixture(autouse=True)
def _printed_commands_are_accepted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The command line accepts each command in a result, an error or a line of a log that a test has made."""
    refused = dict[str, str]()

    def check(*texts: object) -> None:
        lines = (line for text in texts if isinstance(text, str) for line in commands_in(text))
        refused.update((line, why) for line in lines if (why := why_refused(line)))

    for shown in (Result, UserError):
        made = shown.__init__

        def wrapped(self: Any, *texts: Any, _made: Any = made, **more: Any) -> None:
            _made(self, *texts, **more)
            check(*texts, *more.get("notes", ()), *getattr(self, "notes", ()))

        monkeypatch.setattr(shown, "__init__", wrapped)
    made_event = Event.__new__

    def event(cls: type[Event], line: str, *kind: Any, **facts: Any) -> Event:
        check(line)
        return made_event(cls, line, *kind, **facts)

    monkeypatch.setattr(Event, "__new__", event)
    yield
    assert not refused, "a command that is printed, and refused"


def pytest_configure(config: pytest.Config) -> None:
    """Hide a GPU from all tests but `gpu`: two ranks would share it, and CPU tensors would meet its own."""
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`-m gpu` and `-m "numerical ..."` import no file without such a test: that takes long, and some need packages
    that an image for GPUs lacks."""
    mark = config.option.markexpr.partition(" ")[0]
    if mark not in ("gpu", "numerical") or not collection_path.name.startswith("test_"):
        return None
    return f"mark.{mark}" not in collection_path.read_text() or None


def pytest_unconfigure() -> None:
    gc.unfreeze()  # else bindings of C++ report all that is left at exit as leaked


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        fixtures = [fixture.func for name in item._fixtureinfo.name2fixturedefs.values() for fixture in name]
        parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
        code = [value for value in (*fixtures, *parameters) if isinstance(value, FunctionType | type)]
        if _mentions_ranks(item.cls, item.function, *code):
            item.add_marker("ranks")
        if not any(item.get_closest_marker(mark) for mark in NOT_FAST):
            item.add_marker("fast")
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a GPU, and pytest -m gpu"))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Freeze the objects of imports and collection: each full garbage collection over them would take half a second."""
    gc.collect()
    gc.freeze()
    if TAKEN:
        session.items[:] = _ranks_first(session.items)


def _ranks_first(items: list[pytest.Item]) -> list[pytest.Item]:
    """With tests that start ranks: these, then the files of all others from the last to the first."""
    ranks, others = ([item for item in items if _has_ranks(item) == has] for has in (True, False))
    files = [list(tests) for _, tests in itertools.groupby(others, lambda item: item.path)]
    return [*ranks, *itertools.chain(*(reversed(files) if ranks else files))]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    """Leave out the tests of a file that the other process of `make test` has taken, but for those with ranks."""
    return None if not TAKEN or _has_ranks(item) or _take(item.path) else True


@functools.cache
def _take(path: Path) -> bool:
    with contextlib.suppress(FileExistsError):
        (Path(TAKEN) / str(path).replace(os.sep, "_")).touch(exist_ok=False)
        return True
    return False


def _has_ranks(item: pytest.Item) -> bool:
    return item.get_closest_marker("ranks") is not None


@functools.cache
def _mentions_ranks(cls: type | None, *code: Any) -> bool:
    """Whether the code of a test, its fixtures and their helpers below tests/ mentions what starts ranks."""
    todo, seen = list(code), set[int]()
    while todo:
        value = inspect.unwrap(todo.pop())
        if id(value) in seen or not isinstance(value, FunctionType | type) or not _is_ours(value):
            continue
        seen.add(id(value))
        if (value.__module__, value.__qualname__) in STARTS_RANKS:
            return True
        todo += vars(value).values() if isinstance(value, type) else _mentioned(value, cls)
    return False


def _is_ours(value: FunctionType | type) -> bool:
    return value.__module__.startswith("tests.")


def _mentioned(function: FunctionType, cls: type | None) -> Iterable[Any]:
    """Objects that names in a function can stand for: globals, attributes of modules, methods, closures."""
    names, scope = set(_names(function.__code__)), function.__globals__
    found = [scope[name] for name in names & scope.keys()]
    modules = [value for value in (*found, *map(sys.modules.get, names)) if isinstance(value, ModuleType)]
    owners = [module for module in modules if module.__name__.startswith("tests")]
    owners += [value for value in (*scope.values(), cls) if isinstance(value, type) and _is_ours(value)]
    for owner in owners:
        found += [getattr(owner, name) for name in names if hasattr(owner, name)]
    return [*found, *(cell.cell_contents for cell in function.__closure__ or ())]


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
