"""The command line: what it refuses before anything starts, and what it hands to `train`."""

from __future__ import annotations

import importlib.util
import inspect
import os
import re
import signal
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

import dino_ds.cli.main as cli
from dino_ds import __version__
from dino_ds.basics.names import words_elsewhere
from dino_ds.cli.main import _surely_lacks_fp16, function_of
from dino_ds.config.ds_schema import KEYS
from dino_ds.config.loading import load_recipe, recipe_names, recipe_options
from dino_ds.config.stages import TrainOptions
from dino_ds.engine import process
from dino_ds.engine.process import fp16_supported
from dino_ds.errors import CheckpointError
from dino_ds.models.specs.backbones import BACKBONES
from dino_ds.options.commands import COMMANDS, TRAIN, help_text
from dino_ds.options.definition import Command

ROOT = Path(__file__).parents[2]
RANKS = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    found: list[tuple[Any, ...]] = []
    stub = types.ModuleType("dino_ds.train")
    stub.train = lambda options, **files: found.append((options, files))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "dino_ds.train", stub)
    monkeypatch.setattr(cli, "check_torchvision", lambda: None)
    monkeypatch.setattr("dino_ds.cli.main.check_may_begin", lambda *_: None)  # the folders here hold no runs
    monkeypatch.setattr(process, "tell_other_machines", lambda _: None)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return found


@pytest.fixture
def errors(calls: list[Any], capsys: pytest.CaptureFixture[str]) -> Callable[..., list[str]]:
    def _errors(*argv: str, code: int = 2) -> list[str]:
        with pytest.raises(SystemExit) as exit_:
            cli.main(list(argv))
        out, err = capsys.readouterr()
        assert exit_.value.code == code and not out and not calls and "Traceback" not in err
        lines = err.splitlines()
        assert all(line.startswith("dino_ds: error: ") for line in lines)
        return [line.removeprefix("dino_ds: error: ") for line in lines]

    return _errors


def test_values_reach_train_as_they_were_written(calls: list[Any]):
    words = "--local_rank=0 --config quickstart --data.source=mine:Source --data.root=/a,b/[1]'x\" --optimizer.lr 1e-3"
    words += " --ds.gradient_clipping 0.5 --max_steps 7 --run_dir 1e3 --resume --log_every 1 --crops.global_scale 0.3,1"
    cli.main(["train", *words.split()])
    ((options, files),) = calls
    recipe, ds, path = files["recipe"], files["ds"], files["ds_path"]
    assert recipe.data.source == "mine:Source" and recipe.data.root == "/a,b/[1]'x\""
    assert recipe.optimizer.lr == 1e-3 and recipe.log_every == 1 and recipe.crops.global_scale == (0.3, 1.0)
    assert ds["gradient_clipping"] == 0.5
    assert Path(path).name == "zero0_fp32.json" and Path(path).is_file()
    assert not files["request"].names_ds_config and files["request"].ds == {"gradient_clipping": "0.5"}
    assert options == TrainOptions(run_dir="1e3", max_steps=7, resume=True)


def test_resume_is_a_switch_that_may_say_from_where(calls: list[Any], tmp_path: Path):
    for words in ("--resume auto", "--resume 500", "--resume --seed 1"):
        cli.main(f"train --config quickstart --run_dir {tmp_path}/run {words}".split())
    assert [(options.resume, type(options.resume)) for options, _ in calls] == [("auto", str), (500, int), (True, bool)]


def test_a_recipe_to_edit_is_written_and_nothing_is_trained(calls: list[Any], tmp_path: Path, capsys):
    cli.main(["train", "--config", "small", "--optimizer.lr", "1e-3", "--print", f"{tmp_path}/mine.yaml"])
    assert not calls and f"dino-ds train --config {tmp_path}/mine.yaml" in capsys.readouterr().out
    assert load_recipe(f"{tmp_path}/mine.yaml", {}) == load_recipe("small", {"optimizer.lr": "1e-3"})


def test_run_folder_is_named_after_the_recipe(calls: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text("data: {source: photos}")
    cli.main(["train", "--config", str(tmp_path / "mine.yaml")])
    cli.main(["train", "--config", "quickstart"])
    cli.main(["train", "--config", "quickstart", "--run_dir=~/runs/a"])  # bash leaves this ~ as it is
    assert [options.run_dir for options, _ in calls] == ["runs/mine", "runs/quickstart", f"{Path.home()}/runs/a"]


@pytest.mark.parametrize(
    ("there", "words", "folder", "note"),
    [
        ("quickstart-x quickstart-02 other", "", "quickstart", ""),
        ("quickstart", "", "quickstart-2", "runs/quickstart holds a run, which --resume --run_dir runs/quickstart"),
        ("quickstart quickstart-2 quickstart-10", "", "quickstart-11", "runs/quickstart-10 holds a run"),
        ("quickstart", "--resume", "quickstart", ""),
        ("quickstart quickstart-2", "--resume", "quickstart-2", "the newest of 2"),
        ("", "--resume auto", "quickstart", ""),
    ],
)
def test_a_start_takes_its_own_folder_and_a_resume_the_newest(there, words, folder, note, calls, tmp_path, monkeypatch):
    """By what holds a run: of two starts of one recipe none meets the other's folder, unless that is named."""
    monkeypatch.chdir(tmp_path)
    for name in there.split():
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "config.yaml").write_text("format: 1\nseed: 0\n")
    (tmp_path / "runs/quickstart-99").mkdir(parents=True)  # it holds none
    cli.main(["train", "--config", "quickstart", *words.split()])
    ((options, files),) = calls
    assert options.run_dir == f"runs/{folder}"
    assert [note in line for line in files["request"].notes] == ([True] if note else [])


def test_a_resume_without_a_recipe_continues_by_the_folder_s_own(calls, tmp_path, monkeypatch):
    """Also where the folder is not named, or by its shipped recipe alone, which names no images: the launcher, which
    adds its name, and its ranks read one recipe."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/vits16").mkdir(parents=True)
    (tmp_path / "runs/vits16/config.yaml").write_text("format: 1\ndata: {source: photos}\nseed: 7\n")
    for words in ("--resume", "--resume --run_dir runs/vits16", "--config vits16 --resume"):
        cli.main(["train", *words.split()])
    assert [(options.run_dir, files["recipe"].seed) for options, files in calls] == [("runs/vits16", 7)] * 3
    assert all(files["request"].config is None for _, files in calls)


def test_on_several_machines_the_ranks_choose_no_folder(calls, errors, tmp_path, monkeypatch):
    """Each would look by itself, through its own cache of a network disk: the first name, or the one that is given."""
    monkeypatch.chdir(tmp_path)
    for name, value in (RANKS | {"LOCAL_SIZE": "2"}).items():
        monkeypatch.setenv(name, value)
    for name in ("quickstart", "quickstart-2"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "config.yaml").touch()
    (line,) = errors("train", "--config", "quickstart", "--resume")
    assert "on several machines name the one to resume, --run_dir runs/quickstart-2" in line
    cli.main(["train", "--config", "quickstart"])
    assert calls.pop()[0].run_dir == "runs/quickstart"  # which is refused when all ranks are there
    monkeypatch.setenv("LOCAL_SIZE", "4")
    cli.main(["train", "--config", "quickstart"])
    assert calls.pop()[0].run_dir == "runs/quickstart-3"


OWN_EVALS = ("knn", "ridge", "statistics")


@pytest.mark.parametrize(
    ("words", "source", "evals", "notes"),
    [
        ("--config cifar10 --data.root {imgs}", "folder", "auto", ["data.source is folder, not cifar10"]),
        ("--config cifar10 --data.root {set}", "cifar10", "auto", []),
        ("--config quickstart_dinov3 --data.source folder --data.root {imgs}", "folder", ("statistics",), ["left out"]),
        ("--config quickstart --data.root {imgs} --eval.root {imgs}", "folder", OWN_EVALS, ["data.source"]),
    ],
)
def test_images_that_are_named_are_taken_whatever_the_recipe_s_are(words, source, evals, notes, calls, tmp_path):
    """Evaluations for the images of the recipe are left out, which is said; what the command line names stays."""
    places = {name: tmp_path / name for name in ("imgs", "set")}
    images = ("imgs/train/a/1.jpg", "imgs/list.txt", *(f"imgs/{number}.png" for number in range(70)))
    for file in (*images, "set/cifar-10-batches-py/data_batch_1", "set/example.png"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    words = f"--run_dir {tmp_path}/run --data.global_batch 64 {words.format(**places)}"
    cli.main(["train", *words.split()])
    ((_, files),) = calls
    assert files["recipe"].data.source == source and files["recipe"].eval.evals == evals
    said = files["request"].notes
    assert len(said) == len(notes) and all(note in line for note, line in zip(notes, said, strict=True))


@pytest.fixture
def users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder of a user with images, a run and files that he may take for either."""
    monkeypatch.chdir(tmp_path)
    for file in ("imgs/cats/1.jpg", "run/config.yaml"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_bytes(b"x" * (file != "run/config.yaml"))
    return tmp_path


NEITHER = "is neither timm's nor a class of yours as module:Class. The nearest are"


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("train --model.backbone resnet5", f"--model.backbone: 'resnet5' {NEITHER} resnet50, "),
        ("train --micro_batch 4", "--micro_batch: unknown option: it belongs to the ds JSON: train_micro_batch_size_"),
        ("train --crops 2", "--crops: unknown option: this is a section of the recipe: set crops.global_size, "),
        *((f"train --print new {w}", "--print writes what --config and keys") for w in ("--resume", "--from runs/a")),
        ("train optimizer.lr=1e-3", "unexpected 'optimizer.lr=1e-3': options are written --key value; a value with"),
        ("train --config", "--config has no value: write --config VALUE"),
        ("train --ds_config a.json --deepspeed_config b.json", "--ds_config is given twice: 'a.json' and 'b.json'"),
        ("train --data.root {imgs}/*.jpg", "no file matches data.root {imgs}/*.jpg: a pattern names files that list"),
        ("trian", "'trian' is not a command: dino-ds --help lists them. Did you mean train?"),
        ("advise x --model.in_chans 4", "--model.in_chans: an option of dino-ds train; dino-ds advise goes by the"),
        ("shard --root a", "no out is given: dino-ds shard --root X --out X, folder of the shards"),
        ("eval a knn", "unexpected 'knn': options are written --key value; as images (--root) it does not exist"),
        ("train --resume {run}", "'{run}' has no option before it: write --data.root {run}, or --resume --run_dir "),
        ("embed x {run} --out a.npy", "'{run}' has no option before it: write --root {run}, or model {run} first"),
    ],
)
def test_wrong_words_stop_before_torch_is_loaded(typed: str, says: str, users, errors: Callable[..., list[str]]):
    given = {"imgs": f"{users}/imgs", "run": f"{users}/run"}
    (line,) = errors(*typed.format(**given).split())
    assert line.startswith(says.format(**given)) and len(line) < 500
    assert not (users / "new").exists()


@pytest.mark.parametrize(
    ("typed", "option"),
    [
        ("train {imgs} --run_dir {imgs}/r", "data.root"),
        ("look-data --out x.png {imgs}", "data.root"),
        *((f"{command} MODEL {{imgs}}", "root") for command in ("eval", "pictures", "embed --out a.npy", "curate")),
        ("shard {imgs} --out shards", "root"),
    ],
)
def test_a_word_after_the_command_s_own_is_the_images(typed: str, option: str, tmp_path: Path, capsys):
    (images := tmp_path / "imgs").mkdir()
    _, request = cli.parse(typed.format(imgs=images).split())
    word = next(word for word in typed.format(imgs=images).split() if word.startswith(str(images)))
    assert (request.recipe | request.options)[option] == word
    assert capsys.readouterr().err == f"dino_ds: {word} is read as --{option} {word}\n"


def test_where_an_export_goes_and_images_lie_is_looked_at_before_torch_is_loaded(monkeypatch, errors):
    monkeypatch.setattr(cli, "check_torchvision", lambda: pytest.fail("torch was loaded"))
    (line,) = errors("embed", "a", "--root", "/no/images", "--out", "b.npy")
    assert line.startswith("/no/images does not exist")
    (line,) = errors("export", "a", "--format", "onnx", "--out", "b")
    assert line == "--out b does not end in .onnx, as such files must: rename it"
    if not importlib.util.find_spec("onnxscript"):
        assert errors("export", "a", "--format", "onnx") == ["onnxscript is not installed: pip install 'dino_ds[onnx]'"]
    (line,) = errors("export", "a", "--format", "timm", "--out", str(ROOT))
    assert line == f"{ROOT} is there already: remove it, or name another with --out"


@pytest.mark.parametrize(
    "words", ["eval {}", "report {}", "train --resume --run_dir {}", "train --from {} --run_dir {}-x"]
)
def test_a_misspelt_run_folder_gets_its_neighbor(words: str, errors: Callable[..., list[str]], tmp_path: Path):
    for name in ("quickstart", "quickstart_of_images"):  # the second is no run
        (tmp_path / name).mkdir()
    (tmp_path / "quickstart/config.yaml").write_text("seed: 0\n")
    (line,) = errors(*words.format(*[f"{tmp_path}/quikstart"] * 2).split(), code=2 if "report" in words else 3)
    assert line.endswith(f" Did you mean {tmp_path}/quickstart?")


def test_batch_arithmetic_is_checked_with_the_launcher_s_world_size(errors, monkeypatch):
    for name, value in (RANKS | {"WORLD_SIZE": "3"}).items():
        monkeypatch.setenv(name, value)
    (line,) = errors("train", "--data.root", "/x")
    assert line.startswith("global batch 512 is not a multiple of ranks 3 x accumulation 1 = 3;")


@pytest.mark.parametrize(
    ("rank", "local_rank", "start"), [("0", "0", "dino_ds: "), ("2", "0", "dino_ds: HOST: "), ("3", "1", "")]
)
def test_one_rank_a_node_speaks(rank, local_rank, start, calls, capsys, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    monkeypatch.setattr(cli.socket, "gethostname", lambda: "HOST")
    monkeypatch.setattr(cli.time, "sleep", (waited := list[float]()).append)
    with pytest.raises(SystemExit) as exit_:
        cli.main(["nope"])
    assert exit_.value.code == 2 and bool(waited) == (not start)
    err = capsys.readouterr().err
    assert err.startswith(f"{start}error: 'nope' is not a command") if start else not err


def test_exit_codes_debug_and_ctrl_c(calls, capsys, monkeypatch: pytest.MonkeyPatch):
    for error, code, says in ((CheckpointError("torn"), 3, "torn"), (KeyboardInterrupt(), 130, "interrupted")):
        monkeypatch.setattr(sys.modules["dino_ds.train"], "train", Mock(side_effect=error))
        for debug in ([], ["--debug"]):
            with pytest.raises(SystemExit) as exit_:
                cli.main(["train", "--config", "quickstart", *debug])
            err = capsys.readouterr().err
            assert exit_.value.code == code and err.endswith(f"dino_ds: error: {says}\n")
            assert ("Traceback" in err) == bool(debug)


def test_a_bug_is_one_line_and_its_traceback_is_in_the_run_folder(calls, monkeypatch, capsys, tmp_path):
    """Exit code 1. With --debug, or where there is no run folder yet, it is not written down."""
    monkeypatch.setattr(sys.modules["dino_ds.train"], "train", lambda *a, **k: 1 / 0)
    folder = tmp_path / "run"
    folder.mkdir()
    argv = ["train", "--config", "quickstart", "--run_dir", str(folder)]
    for written, flags, traceback in ((False, [], False), (True, [], False), (True, ["--debug"], True)):
        if written:
            (folder / "config.yaml").touch()
        with pytest.raises(SystemExit) as exit_:
            cli.main([*argv, *flags])
        lines = capsys.readouterr().err.splitlines()
        assert exit_.value.code == 1
        assert lines[-1].startswith("dino_ds: error: ZeroDivisionError: division by zero (")
        assert (len(lines) > 1) == traceback
    assert "ZeroDivisionError" in (folder / "error-0.txt").read_text().splitlines()[-1]


@pytest.mark.slow
def test_help_and_checks_import_neither_torch_nor_deepspeed(tmp_path: Path):
    """What the command line, files and machine tell is answered in a second or two."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.yaml").touch()
    taken = f"train --data.root {tmp_path} --run_dir {tmp_path}/run"
    code = (
        "import sys\nfrom dino_ds.cli.main import main\n"
        "nowhere = 'train --data.root nowhere'\n"
        "for words in ('', '--help', 'train --help', 'train --epoch 3', nowhere, f'{nowhere} --ds_config nope.json', "
        f"'{taken}', 'find x.npy a.jpg', 'curate x.npy --clusters 3', 'export a --format onnx --out b', "
        "'eval nowhere/run'):\n"
        "    try: main(words.split())\n"
        "    except SystemExit as error: print('exit', error.code)\n"
        "print('heavy', sorted({'torch', 'deepspeed', 'torchvision', 'timm'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT).stdout
    assert out.startswith("usage: dino-ds ") and out.endswith("exit 2\n" * 7 + "exit 3\nheavy []\n")


def test_a_machine_that_surely_lacks_fp16_does(monkeypatch):
    has_fp16 = fp16_supported()
    monkeypatch.delitem(sys.modules, "torch")
    assert not (_surely_lacks_fp16() and has_fp16)


@pytest.mark.parametrize("command", COMMANDS.values(), ids=lambda command: command.name)
def test_every_command_has_a_page_and_a_function(command: Command):
    text = help_text([*command.name.split(), "--help", "all"])
    assert text.startswith(f"usage: dino-ds {command.name}") and max(map(len, text.splitlines())) <= 120
    assert all(f"--{option.name}" in text for option in command.all_options)
    assert all(f"--{option.name} " in text for option in recipe_options()) == command.takes_recipe
    assert ("--ds.KEY" in text) == command.takes_ds
    function = function_of(command.name)
    parameters = inspect.signature(function).parameters
    files = [*(["recipe"] if command.takes_recipe else []), *(["ds", "ds_path"] if command.takes_ds else [])]
    files += ["request"] if command.takes_request else []
    files += ["caller"] if command is TRAIN else []
    assert set(parameters) == {"options", *files}
    assert inspect.signature(function, eval_str=True).parameters["options"].annotation is command.options


def test_help_lists_every_key_and_every_recipe_by_its_purpose():
    help_all, first = help_text(["train", "--help", "all"]), help_text(["train", "--help"])
    assert all(f"  --ds.{name} " in help_all for name in KEYS)
    assert all(name in help_all for name in BACKBONES)
    recipes, others = words_elsewhere("recipes"), words_elsewhere("other_recipes")
    assert sorted(recipes | others) == recipe_names(), "elsewhere.yaml says what a recipe is for"
    assert all(purpose in help_all and purpose in first for purpose in recipes.values())
    assert all(purpose in help_all and purpose not in first for purpose in others.values())


def test_a_reader_that_leaves_ends_a_command_in_silence():
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "dino_ds", "--help"]
    ended = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, cwd=ROOT)
    os.close(writing)
    assert (ended.returncode, ended.stderr) == (-signal.SIGPIPE, b"")


@pytest.mark.parametrize(
    ("typed", "code", "do"),
    [
        ("predict imgs", 2, "dino-ds embed MODEL --root DIR"),
        ("train", 2, "--data.root FOLDER"),
        ("train --data.root imgs --eval.root imgz", 2, "Did you mean imgs?"),
        ("train --config quickstart --data.source photos --data.root imgs", 2, "say --data.source folder"),
        ("train --data.root imgs/cats/1.jpg", 2, "that it is in, imgs/cats"),
        ("train --data.root cifar10", 2, "--data.source cifar10 --data.root DIR --data.download true"),
        ("train --data.root https://huggingface.co/datasets/o/n/tree/main", 2, "hf download o/n --repo-type dataset"),
        ("train --data.root https://me:secret@h/a.tar", 2, "drivers find credentials by themselves"),
        ("train --data.root imgs --run_dir s3://b/run", 2, "keep a run on a disk"),
        ("train --data.root imgs --model.backbone facebook/dinov2-small", 2, "as vit_small_patch14_dinov2.lvd142m"),
        ("train --data.root imgs --model.init_from me/mine", 3, "hf download me/mine --local-dir DIR"),
        ("train --data.root imgs --config facebook/dino-vits16", 2, "--model.init_from"),
    ],
)
def test_mistakes_of_a_first_hour_are_answered_by_what_to_do(typed, code, do, users, errors: Callable[..., list[str]]):
    (line,) = errors(*typed.split(), code=code)
    assert do in line


def test_a_root_that_one_machine_lacks_is_said_by_all_ranks_together(calls: list[Any], monkeypatch: pytest.MonkeyPatch):
    for name, value in (RANKS | {"RANK": "2"}).items():
        monkeypatch.setenv(name, value)
    cli.main(["train", "--data.root", "/nowhere"])
    assert calls


def test_help_and_version_are_words_too(capsys: pytest.CaptureFixture[str]):
    for words in ([], ["help"], ["--help"]):
        cli.main(words)
        assert (text := capsys.readouterr().out) == help_text([]) + "\n"
        assert all(len(re.findall(rf"^  {name}  ", text, re.MULTILINE)) == 1 for name in COMMANDS)
    cli.main(["version"])
    assert capsys.readouterr().out == f"dino_ds {__version__}\n"


def test_a_place_that_may_not_be_entered_and_a_home_that_is_not_there_are_no_bugs(monkeypatch, capsys):
    """Python 3.11 asks the system whether a file is there, and raises where it may not know."""

    denied = PermissionError(13, "Permission denied", "theirs/run/config.yaml")
    monkeypatch.setattr(Path, "exists", Mock(side_effect=denied))
    with pytest.raises(SystemExit) as ended:
        cli.main(["report", "theirs/run"])
    assert ended.value.code == 2
    assert "theirs/run/config.yaml: permission denied; name another place" in capsys.readouterr().err
    monkeypatch.undo()
    with pytest.raises(SystemExit) as ended:
        cli.main(["report", "~nobody_of_that_name/run"])
    assert ended.value.code == 2 and "~nobody_of_that_name/run" in capsys.readouterr().err
