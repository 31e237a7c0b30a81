"""What a rehearsal found is kept where that is possible, and made anew where it is not."""

from __future__ import annotations

import pytest

from dino_ds.costs import kept


@pytest.mark.parametrize("place", ["no home", "a file", "not JSON", "another JSON"])
def test_a_cache_that_can_not_be_used_is_done_without(place, tmp_path, monkeypatch):
    """Training starts in a container whose user has no home, and with a cache that something else has written to."""
    monkeypatch.setenv("XDG_CACHE_HOME", "" if place == "no home" else str(tmp_path))
    if place == "no home":
        monkeypatch.setattr(kept.Path, "home", _no_home)
    elif place == "a file":
        (tmp_path / "dino_ds").write_text("")
    else:
        monkeypatch.setattr(kept, "_found", {})
        assert kept.kept({"place": place}, lambda: 2) == 2
        (file,) = (tmp_path / "dino_ds/steps").iterdir()
        file.write_text("{" if place == "not JSON" else "[1]")
    monkeypatch.setattr(kept, "_found", {})
    assert kept.kept({"place": place}, lambda: 3) == 3


def _no_home() -> None:
    raise RuntimeError("Could not determine home directory.")
