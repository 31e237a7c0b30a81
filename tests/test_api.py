"""The Python API does what the commands do, from the same words, and leaves its process as it was."""

from __future__ import annotations

import ast
import gc
import inspect
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

import dino_ds
import dino_ds.train
from dino_ds.api import Run, _one_at_a_time
from dino_ds.cli import main as cli
from dino_ds.config.loading import load_recipe
from dino_ds.config.stages import Request
from dino_ds.errors import CheckpointError, ConfigError, DataError, Stopped
from dino_ds.options.commands import COMMANDS
from dino_ds.options.flags import parse_keywords
from dino_ds.run import guards
from tests.run.harness import TINY, image_folder, read_metrics

ROOT = Path(__file__).parent.parent
MEASURED = re.compile(r"second|wait|memory|fraction|_gib|rolling|throughput|host|cpu")
"""Names of what two runs of one command measure differently."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("api")
    image_folder(path / "images", 24, 3)
    image_folder(path / "test", 9, 3, seed=1)
    return path


@pytest.fixture(scope="module")
def recipe(folder):
    evaluated = {"eval.every": "3 steps", "eval.root": folder / "test"}
    return {**TINY, "data.root": folder / "images", **evaluated, "ds": {"dino_ds": {"deterministic": True}}}


@pytest.fixture(scope="module")
def run(folder, recipe):
    told = []
    found = dino_ds.train(
        ds_config="ds_configs/zero0_fp32.json",
        run_dir=folder / "run",
        max_steps=6,
        callbacks=[lambda *given: told.append(given)],
        **recipe,
    )
    return found, told


def _settled(lines):
    return [{name: value for name, value in line.items() if not MEASURED.search(name)} for line in lines]


def _state():
    return {
        "environment": dict(os.environ),
        "signals": [signal.getsignal(number) for number in signal.valid_signals()],
        "torch": (torch.are_deterministic_algorithms_enabled(), torch.get_num_threads(), torch.get_default_dtype()),
        "modes": (torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.backends.cudnn.allow_tf32),
        "random": torch.get_rng_state().tolist(),
        "group": torch.distributed.is_initialized(),
        "hook": threading.excepthook,
        "path": sys.path[:],
        "logging": (logging.root.level, logging.root.handlers, logging.root.filters),
        "threads": {thread.name for thread in threading.enumerate()} - {"tqdm_monitor"},
    }


def _engines():
    """Engines still in memory: a notebook keeps the last error, and the next training needs their memory."""
    from deepspeed.runtime.engine import DeepSpeedEngine

    return [thing for thing in gc.get_objects() if type(thing) is DeepSpeedEngine]


@contextmanager
def _other_defaults():
    torch.set_default_dtype(torch.float64)
    try:
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
            yield
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.slow
def test_a_run_of_python_is_the_run_of_the_command(folder, recipe, run):
    """Numbers and teacher agree to the last bit, also in a second call after a change of torch's defaults."""
    found, told = run
    words = [f"--{name}={value}" for name, value in recipe.items() if name != "ds"]
    ours = ["--ds_config", "ds_configs/zero0_fp32.json", "--ds.dino_ds.deterministic", "true", "--max_steps", "6"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cli, "_exit", sys.exit)
        cli.main(["train", "--run_dir", str(folder / "command"), *ours, *words])
    torch.use_deterministic_algorithms(False)
    expected = read_metrics(folder / "command")
    assert _settled(found.metrics) == _settled(expected) and len(expected) == 9
    assert told == [(line["step"], line) for line in found.metrics]
    with _other_defaults():
        before = _state()
        again = dino_ds.train(
            ds_config=Path("ds_configs/zero0_fp32.json"), run_dir=folder / "again", max_steps=np.int64(6), **recipe
        )
        assert _state() == before
    teachers = [(place / "teacher.safetensors").read_bytes() for place in (found.path, folder / "command", again.path)]
    assert teachers[0] == teachers[1] == teachers[2]


@pytest.mark.slow
def test_an_error_of_a_callback_stops_and_saves(recipe, run, tmp_path):
    """The error comes out of `train`, the callback is not called again, and the resumed run is as one never stopped."""

    def fail(step, metrics):
        told.append(step)
        if step == 2:
            raise SystemExit("of the callback")

    told: list[int] = []
    given = {"ds_config": "ds_configs/zero0_fp32.json", "run_dir": tmp_path / "run", "max_steps": 6, **recipe}
    with pytest.raises(SystemExit, match="of the callback") as kept:
        dino_ds.train(callbacks=[fail], **given)
    assert told == [0, 1, 2] and kept.traceback[-1].name == "fail" and not _engines()
    assert len(list((tmp_path / "run/checkpoints").glob("step_*"))) == 1
    done = dino_ds.train(resume=True, **given)
    assert not _engines()
    steps = [[line for line in _settled(one.metrics) if "loss" in line] for one in (done, run[0])]
    assert steps[0] == steps[1]


@pytest.fixture
def interruptible():
    """As in a terminal: what a shell's & has started ignores Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.slow
def test_ctrl_c_saves_and_a_second_one_does_not_wait(recipe, tmp_path, monkeypatch, interruptible):
    monkeypatch.setattr(guards, "FORWARDED_SECONDS", 0.05)

    def press(step, metrics, times=1):
        if step == 1:
            for _ in range(times):
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.1 if times > 1 else 0)

    given = {**recipe, "eval.every": "0 steps"}
    before = _state()
    with pytest.raises(Stopped, match=r"stopped by SIGINT at step \d; .* the same with resume=True") as info:
        dino_ds.train(run_dir=tmp_path / "once", callbacks=[press], **given)
    assert info.value.exit_code == 75
    with pytest.raises(KeyboardInterrupt) as kept:
        dino_ds.train(run_dir=tmp_path / "twice", callbacks=[lambda *line: press(*line, times=2)], **given)
    assert not (tmp_path / "twice/teacher.safetensors").exists() and not (tmp_path / "twice/lock").exists()
    assert kept.traceback and not _engines()
    assert _state() == before


def test_a_second_training_at_the_same_time_is_refused(tmp_path):
    """Both would draw from this process's generators: another run than the command's, and nobody would know."""
    with _one_at_a_time(), pytest.raises(ConfigError, match="this process is training already"):
        dino_ds.train("quickstart", run_dir=tmp_path / "second")
    with _one_at_a_time():
        assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_it_trains_in_a_thread_and_a_slow_callback_is_no_hang(recipe, tmp_path, monkeypatch):
    """Signals can't be handled there, and nothing ends the process that a run is part of."""
    asked, watchdog = [], guards.watchdog

    def note(*given):
        asked.append(given[-1])
        return watchdog(*given)

    monkeypatch.setattr(guards, "watchdog", note)
    given = {"run_dir": tmp_path / "run", "max_steps": 1, **recipe, "eval.every": "0 steps"}
    thread = threading.Thread(target=lambda: dino_ds.train(**given))
    thread.start()
    thread.join()
    assert (tmp_path / "run/teacher.safetensors").exists() and asked == [0.0]


def _printed(capsys, *words):
    capsys.readouterr()
    cli.main([*map(str, words), "--json"])
    return json.loads(capsys.readouterr().out)


@pytest.mark.slow
def test_the_other_functions_give_what_their_commands_print(folder, run, tmp_path, capsys):
    found, images, test = run[0], folder / "images", folder / "test"
    features, names, labels, classes = dino_ds.embed(found, images, workers=0)
    assert dino_ds.embed(found, images, tmp_path / "ours.npy", workers=0) == tmp_path / "ours.npy"
    facts = _printed(capsys, "embed", found.path, "--root", images, "--out", tmp_path / "theirs.npy", "--workers", 0)
    assert facts["shape"] == list(features.shape) and len(names) == 24 and classes == ["class0", "class1", "class2"]
    assert set(labels.tolist()) == {0, 1, 2} and names[0].endswith("class0/000.png")
    for name in ("ours", "theirs"):
        np.testing.assert_array_equal(np.load(tmp_path / f"{name}.npy"), features)
    given = {"evals": ["knn", "ridge"], "root": images, "test_root": test, "k": (3, 5), "workers": 0}
    ours = dino_ds.evaluate(found, **given)
    words = ("--evals", "knn,ridge", "--root", images, "--test_root", test, "--k", "3,5", "--workers", 0)
    theirs = _printed(capsys, "eval", found.path, *words)
    assert ours.keys() == theirs.keys() and ours["results"].keys() == {"knn", "ridge"}
    for name, result in theirs["results"].items():
        assert ours["results"][name]["results"] == result["results"]
    assert ours["metrics"] == theirs["metrics"] == {**result["results"], **theirs["results"]["knn"]["results"]}
    listed = [images / "class1/001.png", str(images / "class0/000.png")]
    assert dino_ds.embed(found, listed, workers=0).names == [str(path) for path in listed]
    assert dino_ds.report(found) == found.path / "report.html" == found.report()
    ours = dino_ds.plan("vitb16", gpu="a100-40g", gpus=4, **{"data.global_batch": 512})
    theirs = _printed(capsys, "plan", "--config=vitb16", "--gpu=a100-40g", "--gpus=4", "--data.global_batch=512")
    assert json.loads(json.dumps(ours)) == theirs
    assert dino_ds.load(found).width == found.load().width == features.shape[1]


def test_a_loaded_model_embeds_as_the_command_and_finds_what_is_similar(run, folder, tmp_path):
    """Rows are those of dino_ds.embed up to the rounding of other batches; a file's nearest is itself."""
    found, images = run[0] if isinstance(run, tuple) else run, folder / "images"
    model, wanted = dino_ds.load(found.path), dino_ds.embed(found, images, workers=0)
    known = model.embed(images, batch=5, workers=0)
    assert (known.names, known.classes) == (wanted.names, wanted.classes)
    assert (known.labels == wanted.labels).all()
    np.testing.assert_allclose(known.features, wanted.features, atol=1e-5)
    files = sorted(images.rglob("*.*"))[:3]
    nearest = model.similar(files[1], known, top=2)
    assert Path(nearest[0].name).name == files[1].name and nearest[0].cosine > 1 - 1e-6 > nearest[1].cosine
    (bad := tmp_path / "bad.png").write_bytes(b"no image")
    with pytest.warns(UserWarning, match="bad.png"):
        listed = model.embed([files[2], bad, files[0]], workers=0)
    assert np.isnan(listed.features[1]).all() and (listed.labels == -1).all()
    assert [near.row for near in model.similar(files[0], listed)] == [2, 0]
    with pytest.raises(ConfigError, match="numbers a row"):
        model.similar(files[0], listed._replace(features=listed.features[:, 1:]))


@pytest.mark.parametrize(
    ("given", "kind", "read"),
    [
        ({"run_dir": "~/runs/a"}, "options", {"run_dir": f"{Path.home()}/runs/a"}),
        ({"from_": "runs/x"}, "options", {"from": "runs/x"}),
        ({"config": ["vits16", Path("own.yaml")]}, "options", {"config": "vits16,own.yaml"}),
        ({"optimizer.lr": np.float32(0.5)}, "recipe", {"optimizer.lr": 0.5}),
        ({"crops": {"global_scale": (0.4, 1)}}, "recipe", {"crops.global_scale": (0.4, 1)}),
        ({"model": {"arguments": {"layers": [1, 1]}}}, "recipe", {"model.arguments": {"layers": (1, 1)}}),
        ({"ds": {"wandb": {"enabled": True}}}, "ds", {"wandb.enabled": True}),
    ],
    ids=str,
)
def test_values_of_python_stay_what_they_are(given, kind, read):
    assert parse_keywords(COMMANDS["train"], {"max_steps": None, **given}) == Request(**{kind: read})


def test_a_recipe_of_python_values_is_that_of_their_text():
    values = {
        "optimizer.lr": 1e-3, "length": 40, "crops.jitter": [0.4, 0.4, 0.2, 0.1], "data.mixture": {"a": 0.5, "b": 0.5},
        "model.backbone": "resnet50", "model.arguments": {"layers": [1, 1, 1, 1]}, "eval.evals": ["knn", "ridge"],
        "data.download": False,
    }  # fmt: skip
    texts = {
        **{name: str(value).lower() for name, value in values.items()}, "crops.jitter": "0.4,0.4,0.2,0.1",
        "data.mixture": "a=0.5,b=0.5", "model.arguments": '{"layers": [1, 1, 1, 1]}', "eval.evals": "knn,ridge",
    }  # fmt: skip
    assert load_recipe(None, parse_keywords(COMMANDS["train"], values).recipe) == load_recipe(None, texts)


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: dino_ds.plan(Run("old"), gpu="t4-16g"), ConfigError, r"is a run folder: its recipe is .*config\.yaml"),
        (lambda: dino_ds.embed("vit", []), ConfigError, "root is an empty list: give paths"),
        (lambda: dino_ds.embed("vit", [3]), ConfigError, "a list with a int"),
        (lambda: dino_ds.embed("vit", ["a\nb"]), ConfigError, "a line break or a tab"),
        (lambda: Run("oldd"), ConfigError, r"oldd is not a folder: give that of a run.*\. Did you mean .*old\?$"),
        (lambda: Run("old").metrics, ConfigError, r"old holds no metrics\.jsonl .*: give a run's folder$"),
        (lambda: Run("old").load(), CheckpointError, "old"),
        (lambda: Run("empty").report(), ConfigError, "empty is not a run folder"),
        (lambda: Run("odd").metrics, ConfigError, r"metrics\.jsonl has a damaged line .*: remove it"),
        (lambda: Run("deep").metrics, ConfigError, r"metrics\.jsonl has a damaged line .*: remove it"),
        (lambda: dino_ds.load(None), CheckpointError, "a NoneType is not the name of a model; give a run folder or"),
    ],
)
def test_what_names_no_images_and_no_run_is_refused_at_once(call, error, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("old", "empty", "odd", "deep"):
        (tmp_path / name).mkdir()
    (tmp_path / "old/config.yaml").touch()
    (tmp_path / "odd/metrics.jsonl").write_text('{"step": 1}\n{\n')
    (tmp_path / "deep/metrics.jsonl").write_text(f"{'[' * 100_000}\n")
    with pytest.raises(error, match=says):
        call()


@pytest.mark.parametrize(
    ("given", "error", "answer"),
    [
        ({"max_step": 3}, ConfigError, "Did you mean --max_steps"),
        ({"ds": {"zero_optimisation": {"stage": 1}}}, ConfigError, "zero_optimization"),
        ({"max_steps": object()}, ConfigError, "max_steps: a object can't be given; a value is text, a number"),
        ({"ds_config": {"zero_optimization": {}}}, ConfigError, "a dict is not a value; name a file"),
        ({"ds": "own.json"}, ConfigError, "--ds_config FILE names the DeepSpeed JSON"),
        ({"json": True}, ConfigError, "not an option in Python"),
        ({"config": "vits16", "data.root": "/is/not/there"}, DataError, "does not exist"),
        ({"callbacks": print}, ConfigError, "a list of functions"),
    ],
    ids=str,
)
def test_mistakes_get_the_command_s_answer_before_anything_is_written(given, error, answer, tmp_path):
    with pytest.raises(error, match=re.escape(answer)):
        dino_ds.train(**{"run_dir": tmp_path / "run", "config": "quickstart", **given})
    assert not list(tmp_path.iterdir())


def _calls():
    """Yield the calls in the pages' examples: page, function, the arguments that are written out."""
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.S):
            for node in ast.walk(ast.parse(block)):
                if isinstance(node, ast.Call) and re.fullmatch(r"dino_ds\.(?!load|Run)\w+", ast.unparse(node.func)):
                    function = getattr(dino_ds, ast.unparse(node.func).removeprefix("dino_ds."))
                    given = {key.arg: key.value for key in node.keywords if key.arg}
                    given |= dict(zip(inspect.signature(function).parameters, node.args, strict=False))
                    more = [ast.literal_eval(key.value) for key in node.keywords if not key.arg]
                    yield page.name, function, {name: _value(node) for name, node in given.items()} | dict(*more)


def _value(node):
    try:
        return ast.literal_eval(node)
    except ValueError:
        return "NAME"  # of a variable


@pytest.mark.parametrize(("page", "function", "given"), list(_calls()))
def test_documented_calls_are_accepted(page, function, given):
    command = COMMANDS[{"evaluate": "eval"}.get(function.__name__, function.__name__)]
    inspect.signature(function).bind(**given)
    given.pop("callbacks", None)
    request = parse_keywords(command, given)
    load_recipe(request.options.get("config", command.recipe), request.recipe)


def test_a_rank_of_a_launcher_is_refused(monkeypatch, tmp_path):
    for name, value in {"RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="one of several that a launcher has started"):
        dino_ds.train("quickstart", run_dir=tmp_path / "run")


@pytest.mark.slow
def test_nothing_is_imported_before_it_is_needed():
    code = "import sys, dino_ds; dino_ds.train, dino_ds.plan; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_train_is_the_function_beside_the_module_of_that_name():
    assert not any(inspect.ismodule(getattr(dino_ds, name)) for name in dino_ds.__all__)
    assert [name for name in dir(dino_ds) if not name.startswith("__")] == sorted(dino_ds.__all__)
