"""The commands a user types, as whole processes: deepspeed, torchrun, one process; stops, resumes and typing errors."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from dino_ds.ports import find_free_port
from tests.ranks import run_on_ranks
from tests.training.harness import REPOSITORY, TINY, image_folder, losses_of, train_tiny

pytestmark = pytest.mark.slow

BIN = Path(sys.executable).parent
SCRIPT = "dino_ds/train.py"
OPTIONS = [part for name, value in TINY.items() for part in (f"--{name}", value)]


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return image_folder(tmp_path_factory.mktemp("images"))


def _environment():
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return {**environment, "PATH": f"{BIN}:{environment['PATH']}", "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}


def _start(command, cwd=REPOSITORY):
    return subprocess.Popen(
        [str(part) for part in command],
        cwd=cwd,
        env=_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def _run(command, cwd=REPOSITORY, seconds=180):
    process = _start(command, cwd)
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        pytest.fail(f"no end after {seconds} s:\n{output[-3000:]}")
    return process.returncode, output


def _deepspeed(port, *flags):
    return ["deepspeed", "--master_port", port, "--num_gpus", "2", SCRIPT, *flags]


def _torchrun(port, *flags):
    return ["torchrun", "--master_port", port, "--nproc_per_node", "2", SCRIPT, *flags]


@pytest.fixture(scope="module")
def deepspeed_run(images, tmp_path_factory):
    """The project's own command, from a clone."""
    run = tmp_path_factory.mktemp("deepspeed") / "run"
    flags = ["--ds_config", "ds_configs/zero2_fp32.json", "--data.root", images, "--run_dir", run, *OPTIONS]
    code, output = _run(_deepspeed(find_free_port(), *flags, "--max_steps", 4))
    assert code == 0, output[-3000:]
    return run, output


def test_deepspeed_launcher_trains_and_says_where_everything_is(deepspeed_run):
    run, output = deepspeed_run
    assert [step for step, _ in losses_of(run)] == [1, 2, 3, 4]
    assert str(run / "teacher.safetensors") in output
    assert "Traceback" not in output


def test_console_script_on_one_process_from_another_folder(deepspeed_run, images, tmp_path):
    """Two ranks equal one: losses to 1e-5. The default ds config is found beside the package."""
    code, output = _run(["dino-ds", "train", "--data.root", images, *OPTIONS, "--max_steps", 4], cwd=tmp_path)
    assert code == 0, output[-3000:]
    ours, theirs = losses_of(tmp_path / "runs/vits16"), losses_of(deepspeed_run[0])
    assert [loss for _, loss in ours] == pytest.approx([loss for _, loss in theirs], rel=1e-5)


def _wait_for_steps(run, process, steps=3, seconds=120):
    end = time.time() + seconds
    while time.time() < end and process.poll() is None:
        if (run / "metrics.jsonl").exists() and len(losses_of_partial(run)) >= steps:
            return
        time.sleep(0.2)
    os.killpg(process.pid, signal.SIGKILL)
    pytest.fail(f"no {steps} steps in {seconds} s:\n{process.communicate()[0][-3000:]}")


def losses_of_partial(run):
    """Whole lines of a file that is being written."""
    return [line for line in (run / "metrics.jsonl").read_text().split("\n")[:-1] if '"loss"' in line]


@pytest.mark.parametrize("launcher", ["deepspeed", "torchrun", pytest.param("one", marks=pytest.mark.full)])
def test_ctrl_c_saves_and_resume_goes_on(launcher, images, tmp_path):
    """Ctrl-C in a terminal: SIGINT to every process of the group. The run goes on where it was."""
    run = tmp_path / "run"
    options = dict(TINY, length="100000 steps")
    flags = [part for name, value in options.items() for part in (f"--{name}", value)]
    flags = ["--ds_config", "ds_configs/zero1_fp32.json", "--data.root", images, "--run_dir", run, *flags]
    command = {"deepspeed": _deepspeed, "torchrun": _torchrun, "one": lambda _, *f: ["dino-ds", "train", *f]}[launcher]
    process = _start(command(find_free_port(), *flags))
    _wait_for_steps(run, process)
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=180)
    last = losses_of(run)[-1][0]
    assert process.returncode != 0
    assert "--resume" in (run / "log.txt").read_text(), output[-3000:]
    assert (run / "checkpoints/latest").read_text() == f"step_{last:08d}\n"
    resumed = run_on_ranks(train_tiny, images, run, "zero1_fp32.json", last + 2, True, {"length": "100000 steps"})
    assert set(resumed) == {None}
    assert [step for step, _ in losses_of(run)] == list(range(1, last + 3))


def test_sigterm_to_the_deepspeed_command_alone_saves_and_leaves_no_orphans(images, tmp_path):
    """`timeout`, `scancel` and `docker stop` signal only the command, which DeepSpeed lets die without its children."""
    run = tmp_path / "run"
    options = dict(TINY, length="100000 steps")
    flags = [part for name, value in options.items() for part in (f"--{name}", value)]
    process = _start(_deepspeed(find_free_port(), "--data.root", images, "--run_dir", run, *flags))
    _wait_for_steps(run, process)
    children = psutil.Process(process.pid).children(recursive=True)
    process.terminate()
    _, alive = psutil.wait_procs(children, timeout=120)
    for orphan in alive:
        orphan.kill()
    assert not alive
    assert (run / "checkpoints/latest").read_text() == f"step_{losses_of(run)[-1][0]:08d}\n"
    assert "the end of the launcher" in (run / "log.txt").read_text()


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (["--optimizer.learning_rate", "1"], ["--optimizer.learning_rate", "--optimizer.lr"]),
        pytest.param(
            ["--ds_config", "ds_configs/zero2_fp16.json"],
            ["no fp16", "zero2_bf16.json"],
            marks=pytest.mark.skipif(
                torch.ops.mkldnn._is_mkldnn_fp16_supported(), reason="this CPU has fp16 units: nothing to refuse"
            ),
        ),
    ],
    ids=lambda value: value[0] if value[0].startswith("--") else "",
)
def test_typing_errors_are_one_line_before_anything_starts(flags, parts, images, tmp_path):
    options = dict(zip(OPTIONS[::2], OPTIONS[1::2], strict=True))
    given = {"--data.root": str(images), "--run_dir": str(tmp_path / "run"), **options}
    given.update(dict(zip(flags[::2], flags[1::2], strict=True)))
    code, output = _run(["dino-ds", "train", *(part for pair in given.items() for part in pair)])
    assert code == 2, output
    lines = [line for line in output.splitlines() if "error" in line]
    assert len(lines) == 1 and all(part in lines[0] for part in parts), output
    assert "Traceback" not in output
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("launcher_flags", "script_flags", "part"),
    [
        pytest.param(["--hostfile", "nope.txt"], [], "nope.txt does not exist", marks=pytest.mark.full),
        ([], ["--ds_config", "nope.json"], "nope.json"),
    ],
    ids=["hostfile", "ds_config"],
)
def test_errors_under_the_launcher(launcher_flags, script_flags, part, images, tmp_path):
    command = ["deepspeed", "--master_port", find_free_port(), *launcher_flags, "--num_gpus", "2", SCRIPT]
    code, output = _run([*command, "--data.root", images, "--run_dir", tmp_path / "run", *script_flags])
    assert code != 0
    assert sum(part in line and "dino_ds: error" in line for line in output.splitlines()) == 1, output[-3000:]
    assert "Traceback" not in output
    assert not (tmp_path / "run").exists()
