"""What a rehearsal found is kept where that is possible, and made anew where it is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from dino_ds.costs import step_costs


@pytest.fixture
def ask(tmp_path, monkeypatch):
    """Asks as a new process would; each answer counts how often one was made."""
    monkeypatch.setenv("DINO_DS_CACHE", str(tmp_path / "dino_ds"))
    calls = []

    def ask(about="this"):
        monkeypatch.setattr(step_costs, "_known", {})
        return step_costs.kept({"about": about}, dict[str, int], lambda: calls.append(about) or {"n": len(calls)})["n"]

    return ask


@pytest.mark.parametrize("place", ["no home", "a file"])
def test_a_folder_that_can_not_be_used_is_done_without(place, ask, tmp_path, monkeypatch):
    """Training starts in a container whose user has no home."""
    if place == "no home":
        monkeypatch.setenv("DINO_DS_CACHE", "")
        monkeypatch.setenv("XDG_CACHE_HOME", "")
        monkeypatch.setattr(Path, "home", _no_home)
    else:
        (tmp_path / "dino_ds").write_text("")
    assert ask() == 1


def _no_home() -> None:
    raise RuntimeError("Could not determine home directory.")


def test_it_is_kept_by_what_was_asked_and_by_the_code(ask, monkeypatch):
    assert [ask(), ask(), ask("that"), ask()] == [1, 1, 2, 1]
    monkeypatch.setattr(step_costs, "_versions", lambda: ["other"])
    assert ask() == 3
