"""Out of memory is told from other errors, and the line says what to change."""

from __future__ import annotations

import errno

import pytest
import torch

from dino_ds.cli import main as cli
from dino_ds.config.ds_config import change_ds_config, load_ds_config, resolve_ds_config
from dino_ds.config.loading import change_recipe, load_recipe
from dino_ds.errors import DataError, OutOfMemory, is_out_of_memory
from dino_ds.health.beat import Beat
from dino_ds.run.guards import MemoryGuard


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
        (RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed."), False),
        (OSError(errno.ENOSPC, "No space left"), False),
        (ValueError("out of memory is no value"), False),
    ],
    ids=str,
)
def test_what_is_out_of_memory(error, memory):
    assert is_out_of_memory(error) == memory


def _said(where: tuple[str, str], error: Exception, ds: str = "zero2_bf16", kind: str = "adamw") -> str:
    recipe, path = load_recipe("vits16", {"optimizer.kind": kind}), f"ds_configs/{ds}.json"
    beat = Beat()
    guard = MemoryGuard(beat)
    guard.expect(recipe, resolve_ds_config(load_ds_config(path, {}), path, 512, 4), 12.345)
    beat.enter(where[0], 7)
    beat.enter_part(where[1])
    with pytest.raises(OutOfMemory) as raised, guard.explain():
        raise error
    assert raised.value.exit_code == 7
    return str(raised.value)


@pytest.mark.parametrize(
    ("where", "error", "part", "flags"),
    [
        (("step", "student"), "CUDA", "the forward pass", "--ds.train_micro_batch_size_per_gpu 64 --ds.gradient_acc"),
        (("step", "backward"), "CPU", "the backward pass", "--ds.train_micro_batch_size_per_gpu 64 --ds.gradient_acc"),
        (("step", "optimizer"), "CUDA", "the optimizer", "--ds_config ds_configs/zero2_bf16_offload.json"),
        (("evaluate", ""), "CUDA", "evaluation", "--eval.bank_images 5000"),
        (("save", ""), "CPU", "saving", "--save_in_background false"),
        (("data", ""), "CPU", "loading", "fewer --data.workers"),
        (("data", ""), "CUDA", "loading", "--ds.train_micro_batch_size_per_gpu 64"),
    ],
)
def test_the_line_names_the_part_the_memory_and_the_setting(where, error, part, flags):
    said = _said(where, _of_torch(error))
    assert said.startswith(f"out of memory in {part} after step 7 (") and "12.35 GiB were predicted" in said
    assert " GiB are free on the host" in said and flags in said and "\n" not in said


def test_no_offload_is_named_that_the_optimizer_refuses():
    assert "offload" not in (said := _said(("step", "optimizer"), _of_torch("CUDA"), kind="muon"))
    assert "--ds_config ds_configs/zero3_bf16.json" in said


@pytest.mark.parametrize("ds", ["zero1_bf16", "zero2_bf16"])
def test_the_flags_it_names_exist_and_accumulate_in_fp32(ds):
    said = _said(("step", "loss"), MemoryError(), ds)
    words = f"--ds.{said.partition('--ds.')[2].partition(',')[0]}".split()
    flags = dict(zip(words[::2], words[1::2], strict=True))
    flags = {name.removeprefix("--ds."): value for name, value in flags.items()}
    changed = change_ds_config(load_ds_config(f"ds_configs/{ds}.json", {}), "x", flags)
    config = resolve_ds_config(changed, "x", 512, 4)
    assert config.micro_batch == 64 and config.raw["data_types"]["grad_accum_dtype"] == "fp32"
    change_recipe(load_recipe("vits16", {}), {"save_in_background": "false", "eval.every": "0 steps"})


def test_other_errors_pass():
    for error in (KeyError("x"), DataError("unreadable"), KeyboardInterrupt()):
        with pytest.raises(type(error)), MemoryGuard(Beat()).explain():
            raise error


def test_another_command_ends_with_the_code_of_memory_too(monkeypatch, capsys):
    monkeypatch.setattr(cli, "_dispatch", lambda *_: torch.empty(2**60, dtype=torch.uint8))
    with pytest.raises(SystemExit) as stopped:
        cli.main(["eval", "x"])
    assert stopped.value.code == 7
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("dino_ds: error: out of memory: ") and "are free on the host" in line
