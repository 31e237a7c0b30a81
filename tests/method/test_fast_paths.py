"""A fast path that fails or differs is left out, said in a line; one that has passed is not compared again."""

from __future__ import annotations

import functools

import pytest
import torch
from torch.utils._pytree import tree_map

from dino_ds.basics.ranges import TAKEN
from dino_ds.config.ds_config import load_ds_config
from dino_ds.engine.process import init_distributed
from dino_ds.method import dino, fast_paths
from dino_ds.method.build import build_network, build_objective
from dino_ds.method.fast_paths import FAST_PATHS, Case, FastPath, settle
from dino_ds.models import blocks, fused
from dino_ds.models.attention import Attention
from dino_ds.planning.measure import resolve
from tests.planning.measure.tiny import tiny_ds, tiny_recipe

OTHER = {"objective.koleo_weight": "0.1"}
GPU = torch.device("cuda", 0)


def _case(device=GPU, ds=None, **changes) -> Case:
    init_distributed()
    recipe, config = resolve(tiny_recipe(**changes), ds or tiny_ds(0), "test.json", 4)
    objective = build_objective(recipe, torch.device("cpu"))
    return Case(recipe, config, device, functools.partial(build_network, objective=objective))


@pytest.fixture
def compared(monkeypatch, tmp_path):
    """Three made-up fast paths beside one that no run uses, on a card without a GPU; the names of those compared."""
    names = []

    def compare(case, name):
        names.append(name)
        if name == "raises":
            raise RuntimeError("no kernel image is available\nfor execution on the device")
        return {"differs": 0.2, "right": 0.01, "is NaN": float("nan")}[name]

    names_used = ("raises", "differs", "is NaN", "right")
    used = [FastPath(name, f"where {name}", "plain", 0.1, lambda _: True, compare) for name in names_used]
    idle = FastPath("idle", "nowhere", "plain", 0.1, lambda _: False, compare)
    monkeypatch.setattr(fast_paths, "FAST_PATHS", (*used, idle))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
    monkeypatch.setenv("DINO_DS_CACHE", str(tmp_path / "cache"))
    yield names
    TAKEN.clear()


def test_what_fails_or_differs_is_left_out_and_said(compared):
    assert settle(_case()).notes == [
        "slower: plain in place of where raises: no kernel image is available for execution on the device",
        "slower: plain in place of where differs: results differ by 2.0e-01",
        "slower: plain in place of where is NaN: results differ by nan",
    ]
    assert compared == ["raises", "differs", "is NaN", "right"]
    assert {"right", "idle"} == TAKEN


def test_what_has_passed_is_compared_again_only_for_another_card_run_or_version(compared, monkeypatch):
    case = _case()
    settle(case)
    compared.clear()
    settle(case)
    assert compared == ["raises", "differs", "is NaN"]
    for of, name, value in ((torch.cuda, "get_device_name", str), (fast_paths, "hash_code", lambda: "edited")):
        with monkeypatch.context() as patch:
            patch.setattr(of, name, value)
            compared.clear()
            settle(case)
            assert "right" in compared
    compared.clear()
    other = _case(**OTHER)
    settle(other)
    assert "right" in compared
    case.proof(fast_paths.EVERY).touch()
    compared.clear()
    assert not settle(other).notes and not compared


def test_nothing_is_compared_without_a_gpu_or_with_fast_paths_false(compared):
    case = _case(torch.device("cpu"))
    assert settle(case).performance == case.config.performance
    assert not settle(case).notes
    off = load_ds_config("zero1_bf16", {"dino_ds.fast_paths": "false"})
    assert [note.rpartition(": ")[2] for note in settle(_case(ds=off)).notes] == ["dino_ds.fast_paths is false"] * 4
    assert not TAKEN
    assert not compared


@pytest.mark.slow
def test_a_wrong_attention_is_found(monkeypatch):
    """Where one fast path computes as its plain form the results are equal to the bit; a wrong kernel is found."""
    (path,) = (path for path in FAST_PATHS if path.name == "varlen")
    case = _case(torch.device("cpu"), tiny_ds(1, bf16={"enabled": True}, dino_ds={"attention": "varlen"}), **OTHER)
    for factor, right in ((1.0, True), (0.7, False)):
        kernel = lambda self, *arguments, factor=factor: factor * self._size_by_size(*arguments, ())  # noqa: E731
        monkeypatch.setattr(Attention, "_one_kernel", kernel)
        assert (path.compare(case, "varlen") == 0) == right == (not path.problem(case))


@pytest.mark.slow
@pytest.mark.parametrize(("module", "name"), [(dino, "_add_softmax"), (blocks, "_summed_and_normed")])
def test_a_wrong_fused_function_is_found(module, name, monkeypatch):
    """Of Sinkhorn-Knopp and of a teacher's blocks; right ones differ by roundings of FP32."""
    case, plain = _case(torch.device("cpu"), tiny_ds(1, bf16={"enabled": True})), getattr(module, name).function
    monkeypatch.setattr(dino, "fuses", lambda _: "fused" in TAKEN)
    monkeypatch.setattr(blocks, "fuses_in_block", lambda _: "fused" in TAKEN and bool(fused._training))
    for function in (dino._add_exp, dino._add_softmax, blocks._normed, blocks._summed_and_normed):
        monkeypatch.setitem(function.__dict__, "_compiled", function.function)
    for factor in (1.0, 0.7):
        wrong = lambda *inputs, factor=factor: tree_map(lambda tensor: factor * tensor, plain(*inputs))  # noqa: E731
        monkeypatch.setitem(getattr(module, name).__dict__, "_compiled", wrong)
        assert (fast_paths._compare_results(case, "fused") < 1e-4) == (factor == 1.0)
