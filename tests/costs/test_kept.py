"""What a rehearsal found is kept where that is possible, and made anew where it is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from dino_ds.costs import kept


@pytest.mark.parametrize("place", ["no home", "a file", "not JSON", "another JSON", "nothing"])
def test_a_cache_that_can_not_be_used_is_done_without(place, tmp_path, monkeypatch):
    """Training starts in a container whose user has no home, and with a cache that something else has written to."""
    monkeypatch.setenv("DINO_DS_CACHE", "" if place == "no home" else str(tmp_path / "dino_ds"))
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    if place == "no home":
        monkeypatch.setattr(Path, "home", _no_home)
    elif place == "a file":
        (tmp_path / "dino_ds").write_text("")
    else:
        monkeypatch.setattr(kept, "_found", {})
        assert kept.kept({"place": place}, lambda: 2) == 2
        (file,) = (tmp_path / "dino_ds/steps").iterdir()
        file.write_text({"not JSON": "{", "another JSON": "[1]", "nothing": '{"found": null}'}[place])
    monkeypatch.setattr(kept, "_found", {})
    assert kept.kept({"place": place}, lambda: 3) == 3


def _no_home() -> None:
    raise RuntimeError("Could not determine home directory.")
