"""A request to stop is obeyed wherever it finds the ranks; out of memory is told with what to change."""

from __future__ import annotations

import errno
import json
import os
import pty
import signal
import sys
import time
from unittest import mock

import pytest
import torch

from dino_ds.cli import main as cli
from dino_ds.config import ds_config, loading
from dino_ds.errors import OutOfMemory, is_out_of_memory
from dino_ds.evals import classifiers
from dino_ds.health.beat import Beat
from dino_ds.run import guards, metrics
from tests.ranks import run_on_ranks
from tests.run.harness import image_folder, log_of, read_metrics, train_tiny


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return image_folder(tmp_path_factory.mktemp("images"), 24, 3)


def _asked_to_stop_in_a_fit(root, run, changes):
    """Rank 1, as a classifier's fit begins after step 2."""
    original = classifiers._fit

    def fit(*values):
        if os.environ["RANK"] == "1" and (run / "evaluations.json").exists():  # those of step 0
            os.kill(os.getpid(), signal.SIGTERM)
            while not values[-1]():
                time.sleep(0.01)
        return original(*values)

    with mock.patch.object(classifiers, "_fit", fit):
        return train_tiny(root, run, changes=changes)


def test_the_fit_of_a_classifier_is_not_waited_for(images, tmp_path):
    run, test = tmp_path / "run", image_folder(tmp_path / "test", 9, 3, seed=1)
    changes = {"eval.evals": "linear", "eval.every": "2 steps", "eval.root": str(test), "length": "4 steps"}
    changes["log_every"] = "10"
    assert run_on_ranks(_asked_to_stop_in_a_fit, images, run, changes) == ["stopped"] * 2
    assert "stopped  by SIGTERM (rank 1) at step 2; saved step 2." in log_of(run)
    assert json.loads((run / "evaluations.json").read_text())["linear"]["step"] == 0
    assert [line["step"] for line in read_metrics(run) if "eval/linear" in line] == [0]
    assert [line["step"] for line in read_metrics(run) if "loss" in line] == [2]  # the saved step has a line
    assert run_on_ranks(train_tiny, images, run, resume=True, changes=changes) == [None, None]


@pytest.mark.parametrize("of_a_program", [False, True])
@pytest.mark.parametrize("ignored", [False, True])
def test_the_end_of_a_terminal_stops_the_run_unless_nohup_ignores_it(ignored, of_a_program):
    """Once: Ctrl-C reaches all processes of a terminal, and a launcher forwards another signal to its ranks."""
    handler, before = signal.SIG_IGN if ignored else signal.SIG_DFL, signal.getsignal(signal.SIGHUP)
    beat, asked = Beat(), []

    def end_at_once(*_):
        asked.append("end at once")
        raise SystemExit  # of the thread that hears signals

    wanted = guards.CallersStopRequests(beat) if of_a_program else guards.StopRequests(beat, asked.append, end_at_once)
    signal.signal(signal.SIGHUP, handler)
    try:
        with wanted as stop:
            stop.install(lambda: asked.append("ask"))
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGHUP)
                until = time.monotonic() + (0.1 if ignored else 10)
                while not stop.why and time.monotonic() < until:
                    time.sleep(0.01)
        assert signal.getsignal(signal.SIGHUP) is handler
    finally:
        signal.signal(signal.SIGHUP, before)
    assert (stop.why, asked) == (("", []) if ignored else ("SIGHUP", ["ask"]))


def test_a_closed_terminal_does_not_keep_a_run_from_saving(tmp_path, monkeypatch):
    """Later lines are in log.txt only; the process' own output goes nowhere once a stop was requested."""
    there, here = pty.openpty()
    kept = os.dup(2)
    log = metrics.RunLog(tmp_path, 0)
    try:
        os.dup2(here, 2)
        with monkeypatch.context() as patch, open(2, "w", closefd=False) as terminal:
            patch.setattr(sys, "stderr", terminal)
            os.close(there)
            log.info("saved")
            stop = guards.StopRequests(Beat(), print, print)
            stop.install(lambda: None)
            stop.request("SIGHUP")
            assert os.write(2, b"stopped") == 7
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(here)
        log.close()
    assert (tmp_path / "log.txt").read_text().endswith("saved\n")


def _of_torch(kind: str) -> Exception:
    """The real words of a CPU's allocator, and those of CUDA's."""
    if kind == "CUDA":
        return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total ...")
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**60, dtype=torch.uint8)
    return raised.value


@pytest.mark.parametrize(
    ("error", "memory"),
    [
        (_of_torch("CUDA"), True),
        (_of_torch("CPU"), True),
        (MemoryError(), True),
        (OSError(errno.ENOMEM, "fork"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (OSError(errno.ENOSPC, "No space left"), False),
        (ValueError("out of memory is no value"), False),
    ],
    ids=str,
)
def test_what_is_out_of_memory(error, memory):
    assert is_out_of_memory(error) == memory


def _said(where: str, error: Exception, ds: str = "zero2_bf16", kind: str = "adamw") -> str:
    recipe, path = loading.load_recipe("vits16", {"optimizer.kind": kind}), f"ds_configs/{ds}.json"
    beat = Beat()
    guard = guards.MemoryGuard(beat)
    guard.run = recipe, ds_config.resolve_ds_config(ds_config.load_ds_config(path, {}), path, 512, 4), 12.345
    phase, _, part = where.partition(" ")
    beat.enter(phase, 7)
    beat.enter_part(part)
    with pytest.raises(OutOfMemory) as raised, guard.explain():
        raise error
    assert raised.value.exit_code == 7
    return str(raised.value)


@pytest.mark.parametrize(
    ("where", "error", "part", "flags", "kind"),
    [
        ("step student", "CUDA", "the forward pass", "--ds.train_micro_batch_size_per_gpu 64 --ds.gradient_", "adamw"),
        ("step optimizer", "CUDA", "the optimizer", "--ds_config ds_configs/zero2_bf16_offload.json", "adamw"),
        ("step optimizer", "CUDA", "the optimizer", "--ds_config ds_configs/zero3_bf16.json", "muon"),  # can't offload
        ("evaluate ", "CUDA", "evaluation", "--eval.bank_images 5000", "adamw"),
        ("save ", "CPU", "saving", "--save_in_background false", "adamw"),
        ("data ", "CPU", "loading", "fewer --data.workers", "adamw"),
    ],
)
def test_the_line_names_the_part_the_memory_and_the_setting(where, error, part, flags, kind):
    said = _said(where, _of_torch(error), kind=kind)
    assert ("offload" in said) == ("offload" in flags)
    assert said.startswith(f"out of memory in {part} after step 7 (") and "12.35 GiB were predicted" in said
    assert " GiB are free on the host" in said and flags in said and "\n" not in said


@pytest.mark.parametrize("ds", ["zero1_bf16", "zero2_bf16"])
def test_the_flags_it_names_exist_and_accumulate_in_fp32(ds):
    said = _said("step loss", MemoryError(), ds)
    words = f"--ds.{said.partition('--ds.')[2].partition(',')[0]}".split()
    flags = {name.removeprefix("--ds."): value for name, value in zip(words[::2], words[1::2], strict=True)}
    changed = ds_config.change_ds_config(ds_config.load_ds_config(f"ds_configs/{ds}.json", {}), "x", flags)
    config = ds_config.resolve_ds_config(changed, "x", 512, 4)
    assert config.micro_batch == 64 and config.raw["data_types"]["grad_accum_dtype"] == "fp32"


def test_another_command_ends_with_the_code_of_memory_too(monkeypatch, capsys):
    monkeypatch.setattr(cli, "_dispatch", lambda *_: torch.empty(2**60, dtype=torch.uint8))
    with pytest.raises(SystemExit) as stopped:
        cli.main(["eval", "x"])
    assert stopped.value.code == 7
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("dino_ds: error: out of memory: ") and "are free on the host" in line
