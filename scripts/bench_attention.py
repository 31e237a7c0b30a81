"""`python -m scripts.bench_attention`: the plain formula, each kernel of SDPA and varlen at the lengths in use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fire
import torch
from torch import Tensor

from dino_ds.config.crops import crop_sizes
from dino_ds.config.loading import load_recipe
from dino_ds.config.recipe import Recipe
from dino_ds.engine.device import device
from dino_ds.models.attention import Attention, chosen_kernel
from dino_ds.models.packing import Packing
from dino_ds.models.specs.backbones import ViTSpec
from dino_ds.options.definition import Result
from dino_ds.planning.measure.host import about, heading
from dino_ds.planning.measure.tables import markdown_table
from dino_ds.planning.measure.timing import time_interleaved
from dino_ds.planning.measure.trial import begin

LOOPS = 10
"""Calls in a timed run: one alone would measure the clock."""
IMPLEMENTATIONS = {
    "naive": ("naive", "auto"),
    "sdpa auto": ("sdpa", "auto"),
    **{f"sdpa {backend}": ("sdpa", backend) for backend in ("math", "flash", "efficient", "cudnn")},
    "varlen": ("varlen", "auto"),
}


def main(
    config: str = "vitti16", batch: int | None = None, steps: int = 5, threads: int = 1, as_json: bool = False
) -> None:
    """Forward and backward of one block's attention without its linear layers; bf16 on a GPU, else FP32."""
    measure(load_recipe(config, {}), begin(batch, threads, "bench attention"), steps, as_json)


def measure(recipe: Recipe, batch: int, steps: int, as_json: bool) -> None:
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    shapes = _shapes(recipe, batch)
    cases = {
        (name, shape): _Case(recipe, implementation, backend, groups, dtype)
        for shape, groups in shapes.items()
        for name, (implementation, backend) in IMPLEMENTATIONS.items()
    }
    skipped = {key: case.why_not() for key, case in cases.items()}
    runs: dict[str, Callable[[], object]] = {}
    for (name, shape), case in cases.items():
        if skipped[name, shape] is None:
            runs |= {f"{name}|{shape}|forward": case.forward, f"{name}|{shape}|both": case.forward_and_backward}
    timings = time_interleaved(runs, steps, 2, device())
    rows = []
    for name, shape in cases:
        row: dict[str, Any] = {"name": name, "shape": shape, "skipped": skipped[name, shape]}
        for kind in ("forward", "both"):
            timing = timings.get(f"{name}|{shape}|{kind}")
            row[f"{kind}_ms"] = None if timing is None else 1000 * timing.seconds / LOOPS
        rows.append(row)
    result = about(recipe, batch) | {"attention": rows, "dtype": str(dtype).removeprefix("torch.")}
    result["auto_is"] = _automatic(recipe, dtype)
    Result(result, _page(result, list(shapes))).show(as_json)


def _shapes(recipe: Recipe, batch: int) -> dict[str, list[tuple[int, int]]]:
    """Name -> groups (sequences, tokens) of a packing: the sizes alone, then together as the step has them."""
    arch = recipe.model.spec()
    assert isinstance(arch, ViTSpec)
    sizes = [(group.count * batch, arch.tokens(group.size)) for group in recipe.groups if group.student]
    shapes = {f"{sequences} x {tokens}": [(sequences, tokens)] for sequences, tokens in sizes}
    return shapes | ({"both": sizes} if len(sizes) > 1 else {})


class _Bare(Attention):
    """Attention without its linear layers."""

    def attend(self, qkv: Tensor, packing: Packing) -> Tensor:
        """qkv (tokens, 3d) -> (tokens, d)."""
        if self.implementation == "varlen":
            return self._one_kernel((qkv,), packing, packing)
        return self._size_by_size((qkv,), packing, packing, ())


class _Case:
    def __init__(
        self, recipe: Recipe, implementation: str, backend: str, groups: list[tuple[int, int]], dtype: torch.dtype
    ) -> None:
        arch = recipe.model.spec()
        assert isinstance(arch, ViTSpec)
        self._attention = _Bare(arch.width, arch.heads, implementation, backend)
        self._packing = Packing.of(groups, device())
        tokens = sum(sequences * n for sequences, n in groups)
        self._qkv = torch.randn(tokens, 3 * arch.width, device=device(), dtype=dtype, requires_grad=True)
        self._grad = torch.randn(tokens, arch.width, device=device(), dtype=dtype)

    def why_not(self) -> str | None:
        """The kernel's error where it does not run, or None if it does."""
        if self._attention.implementation == "varlen" and not torch.cuda.is_available():
            return "a CUDA kernel, and there is no GPU"
        try:
            self.forward_and_backward(loops=1)
        except (RuntimeError, NotImplementedError) as error:
            return str(error).partition(". ")[0].splitlines()[0]
        return None

    def forward(self) -> None:
        for _ in range(LOOPS):
            self._attention.attend(self._qkv, self._packing)

    def forward_and_backward(self, loops: int = LOOPS) -> None:
        for _ in range(loops):
            torch.autograd.grad(self._attention.attend(self._qkv, self._packing), self._qkv, self._grad)


def _automatic(recipe: Recipe, dtype: torch.dtype) -> dict[str, str]:
    """Which kernel torch takes by itself, by the number of tokens."""
    arch = recipe.model.spec()
    assert isinstance(arch, ViTSpec)
    tokens = {arch.tokens(size) for size in crop_sizes(recipe.groups)}
    return {str(n): chosen_kernel(arch.heads, arch.width // arch.heads, n, dtype, device()) for n in sorted(tokens)}


def _page(result: dict[str, Any], shapes: list[str]) -> str:
    found = {(row["name"], row["shape"]): row for row in result["attention"]}
    header = ["ms", *(f"{shape}, {kind}" for shape in shapes for kind in ("forward", "forward + backward"))]
    rows = []
    for name in IMPLEMENTATIONS:
        cells = [name]
        for shape in shapes:
            row = found[name, shape]
            cells += ["–", "–"] if row["skipped"] else [f"{row['forward_ms']:.3g}", f"{row['both_ms']:.3g}"]
        rows.append(cells)
    reasons = {row["name"]: row["skipped"] for row in result["attention"] if row["skipped"]}
    automatic = ", ".join(f"{kernel} at {tokens} tokens" for tokens, kernel in result["auto_is"].items())
    lines = [heading("bench attention", result), markdown_table(header, rows), ""]
    lines += [f"{name} skipped: {reason}" for name, reason in reasons.items()]
    return "\n".join([*lines, f"{result['dtype']}; sequences x tokens of one block; auto is {automatic}"])


if __name__ == "__main__":
    fire.Fire(main)
