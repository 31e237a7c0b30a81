"""Published runs of fully sharded data parallelism on growing numbers of GPUs, to hold our link model against.

PyTorch's FSDP, which sends what ZeRO 3 sends, with language models and no teacher. Sources: MosaicML llm-foundry
`scripts/train/benchmarking/README.md` (A100 40 GB, 1600 Gbit/s a node, pure bf16; H100 80 GB, bf16, gradients reduced
in FP32; sequences of 2048); PyTorch torchtitan `benchmarks/llama3_h100_202412_torchtitan.md` (Llama 3.1 8B, H100,
400 Gbit/s a GPU, sequences of 8192).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from dino_ds.costs.communication import Traffic
from dino_ds.planning.gpus import GPUS
from dino_ds.planning.speed import Cluster, exposed_seconds, waiting_share


@dataclass(frozen=True)
class Published:
    """tokens: of a GPU and step; rates: GPUs -> tokens/s of each, the micro-batch being the same; reduced: bytes of a
    gradient on the wire."""

    name: str
    gpu: str
    weights: float
    layers: int
    tokens: int
    rates: dict[int, float]
    reduced: int = 2


PUBLISHED = (
    Published("MPT 125M, A100", "a100-40g", 0.1253e9, 12, 26 * 2048, {16: 130535, 32: 127122, 64: 125234, 128: 123936}),
    Published("MPT 350M, A100", "a100-40g", 0.356e9, 24, 18 * 2048, {16: 55413, 32: 53811, 64: 52689, 128: 51934}),
    Published("MPT 760M, A100", "a100-40g", 0.7605e9, 24, 12 * 2048, {16: 29607, 32: 29648, 64: 29344, 128: 28940}),
    Published("MPT 3B, A100", "a100-40g", 2.652e9, 32, 6 * 2048, {32: 9914, 64: 9736, 128: 9538}),
    Published("MPT 7B, A100", "a100-40g", 6.659e9, 32, 18 * 2048, {32: 3725, 64: 3665, 128: 3623}),
    Published("MPT 1B, H100", "h100-80g", 1.316e9, 24, 20 * 2048, {16: 46037, 32: 45130, 64: 44402}, 4),
    Published("MPT 13B, H100", "h100-80g", 12.85e9, 40, 2 * 2048, {8: 4792, 16: 4767, 32: 4811, 64: 4800}, 4),
    Published("Llama 8B, H100", "h100-80g", 8.03e9, 32, 2 * 8192, {8: 5762, 128: 5605}, 4),
)


def simulate(run: Published) -> dict[int, float]:
    """GPUs -> the rate as a part of that at the smallest number, by our model; computation is what the smallest run
    took, less what our model says it waited."""
    smallest = min(run.rates)
    measured = run.tokens / run.rates[smallest]
    compute = measured
    for _ in range(20):
        compute = measured - (_step_seconds(run, smallest, compute) - compute)
    first = _step_seconds(run, smallest, compute)
    return {gpus: first / _step_seconds(run, gpus, compute) for gpus in run.rates}


def measured_share(run: Published) -> dict[int, float]:
    """GPUs -> the published rate as a part of that at the smallest number."""
    smallest = run.rates[min(run.rates)]
    return {gpus: rate / smallest for gpus, rate in run.rates.items()}


def _step_seconds(run: Published, gpus: int, compute: float) -> float:
    card = GPUS[run.gpu]
    cluster = Cluster(card, 8, max(1, gpus // 8), card.network)
    gathered = Traffic("weights", "all-gather", round(2 * run.weights), run.layers, gpus, "micro-batch")
    traffic = [
        gathered,
        dataclasses.replace(gathered, name="weights again"),
        Traffic("gradients", "reduce-scatter", round(run.reduced * run.weights), run.layers, gpus, "backward"),
    ]
    return (compute + exposed_seconds(traffic, cluster, compute, 2 / 3 * compute)) * (1 + waiting_share(cluster))
