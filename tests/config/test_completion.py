"""The script of `dino-ds completion`, asked by bash itself."""

from __future__ import annotations

import functools
import shutil
import subprocess

import pytest

from dino_ds.config.loading import recipe_options
from dino_ds.config.recipe_files import recipe_names
from dino_ds.options.commands import COMMANDS
from dino_ds.options.completion import bash, fish


@pytest.fixture
def tab(tmp_path):
    """What bash offers for the last of the words, in a folder with two files."""
    (tmp_path / "complete.bash").write_text(bash())
    (tmp_path / "work/my images").mkdir(parents=True)
    (tmp_path / "work/mine.yaml").touch()

    def _tab(*words):
        given = " ".join(f"'{word}'" for word in ("dino-ds", *words))
        code = f"COMP_WORDS=({given}) COMP_CWORD={len(words)}; _dino_ds"
        program = f'source {tmp_path}/complete.bash; {code}; printf "%s\\n" "${{COMPREPLY[@]}}"'
        found = subprocess.run(
            ["bash", "--norc", "-c", program], cwd=tmp_path / "work", check=True, capture_output=True, text=True
        )
        assert not found.stderr
        return found.stdout.split("\n")[:-1]

    return _tab


def test_commands_options_choices_and_files_are_completed(tab):
    assert tab("tr") == ["train"] and {"eval", "embed"} == set(tab("e")) - {"export"}
    assert set(tab("")) == {name.split()[0] for name in COMMANDS}
    assert tab("bench", "st") == ["step"]
    crops = {f"--{option.name}" for option in recipe_options() if option.name.startswith("crops.")}
    assert set(tab("train", "--cro")) == crops and tab("eval", "m", "--cro") == [""]
    assert tab("train", "--ds.gradient_cl") == ["--ds.gradient_clipping"]
    assert tab("export", "runs/a", "--format", "ti") == ["timm"]
    assert tab("train", "--config", "vits") == ["vits16"] and set(tab("train", "--config", "")) == set(recipe_names())
    assert tab("train", "--config", "mi") == ["mine.yaml"]
    assert tab("train", "--crops.augment", "low") == ["low_res"] == tab("train", "--crops.augment", "=", "low")
    assert tab("train", "--data.root", "my") == ["my images"]
    assert tab("launch", "--ranks", "2", "--", "--data.ro") == ["--data.root"]


def test_no_python_is_started(tab, monkeypatch):
    """Nor any other program: where bash finds none, a TAB offers the same."""
    asked = (("tr",), ("train", "--crops."), ("train", "--config", "vits"), ("train", "--data.root", "my"))
    offered = [tab(*words) for words in asked]
    monkeypatch.setattr(subprocess, "run", functools.partial(subprocess.run, executable=shutil.which("bash")))
    monkeypatch.setenv("PATH", "/nowhere")
    assert all(offered) and [tab(*words) for words in asked] == offered and "/" not in bash().replace("/dev/null", "")


@pytest.mark.parametrize(("shell", "script"), [("zsh", bash("zsh")), ("fish", fish())])
def test_scripts_of_other_shells_are_read_by_them(shell, script, tmp_path):
    if shutil.which(shell) is None:
        pytest.skip(f"needs {shell}")
    (tmp_path / "script").write_text(script)
    subprocess.run([shell, "-n" if shell == "zsh" else "--no-execute", tmp_path / "script"], check=True)
