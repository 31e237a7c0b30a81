"""The planner's table of graphics cards: vendors' figures, and one marked assumption.

Dense TFLOP/s of bf16 (fp16 where there is no bf16) with FP32 accumulation, memory bandwidth and links are NVIDIA's:
data sheets of T4, V100, A10, A100, A6000, L4, L40S, H100, H200 and HGX B200; whitepapers of the GeForce cards (Turing,
Ampere GA102, Ada, Blackwell). `memory_gib` is what torch finds on such a card, as its out-of-memory errors print it:
less than the number on the box.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from dino_ds.basics.names import did_you_mean, suggestion
from dino_ds.errors import ConfigError


@dataclass(frozen=True)
class Gpu:
    """tflops: dense, 10^12/s; bandwidth: of its memory, link: to the other GPUs of its node, each way, pcie: to the
    host, each way, network: of its node with 8 of them, each way; all 10^9 bytes/s.

    matmul_share: ASSUMED part of `tflops` that the matrix products of a training step reach. From published runs of
    comparable networks: docs/scaling.md.
    """

    name: str
    memory_gib: float
    tflops: float
    bandwidth: float
    link: float
    pcie: float
    network: float
    matmul_share: float
    bf16: bool = True


# Nodes as vendors sell them: DGX-1 4 x 100 Gbit/s, DGX A100 8 x 200, DGX H100 and later 8 x 400; others 100 Gbit/s.
_ETHERNET = 12.5
_GEN3, _GEN4, _GEN5 = 16.0, 32.0, 64.0
_VOLTA, _AMPERE, _GEFORCE, _HOPPER = 0.40, 0.46, 0.55, 0.31

GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        Gpu("rtx3070-8g", 7.7, 40.6, 448, _GEN4, _GEN4, _ETHERNET, _GEFORCE),
        Gpu("rtx4060-8g", 7.6, 30.2, 272, _GEN4 / 2, _GEN4 / 2, _ETHERNET, _GEFORCE),
        Gpu("rtx3080-10g", 9.7, 59.5, 760, _GEN4, _GEN4, _ETHERNET, _GEFORCE),
        Gpu("rtx2080ti-11g", 10.7, 53.8, 616, _GEN3, _GEN3, _ETHERNET, _GEFORCE, bf16=False),
        Gpu("rtx5070-12g", 11.4, 61.7, 672, _GEN5, _GEN5, _ETHERNET, _GEFORCE),
        Gpu("rtx3060-12g", 11.6, 25.5, 360, _GEN4, _GEN4, _ETHERNET, _GEFORCE),
        Gpu("rtx3080-12g", 11.6, 61.3, 912, _GEN4, _GEN4, _ETHERNET, _GEFORCE),
        Gpu("rtx4070-12g", 11.6, 58.3, 504, _GEN4, _GEN4, _ETHERNET, _GEFORCE),
        Gpu("t4-16g", 14.5, 65.0, 320, _GEN3, _GEN3, _ETHERNET, 0.35, bf16=False),
        Gpu("v100-16g", 15.7, 125.0, 900, 150, _GEN3, 50, _VOLTA, bf16=False),
        Gpu("rtx4080-16g", 15.6, 97.5, 717, _GEN4, _GEN4, _ETHERNET, _GEFORCE),
        Gpu("a10-24g", 22.0, 125.0, 600, _GEN4, _GEN4, _ETHERNET, 0.35),
        Gpu("l4-24g", 22.0, 121.0, 300, _GEN4 / 2, _GEN4 / 2, _ETHERNET, 0.35),
        Gpu("rtx3090-24g", 23.6, 71.0, 936, _GEN4, _GEN4, _ETHERNET, _GEFORCE),
        Gpu("rtx4090-24g", 23.6, 165.2, 1008, _GEN4, _GEN4, _ETHERNET, _GEFORCE),
        Gpu("v100-32g", 31.7, 125.0, 900, 150, _GEN3, 50, _VOLTA, bf16=False),
        Gpu("rtx5090-32g", 31.3, 209.5, 1792, _GEN5, _GEN5, _ETHERNET, _GEFORCE),
        Gpu("a100-40g", 39.4, 312.0, 1555, 300, _GEN4, 200, _AMPERE),
        Gpu("l40s-48g", 44.4, 362.0, 864, _GEN4, _GEN4, _ETHERNET, 0.35),
        Gpu("a6000-48g", 47.4, 154.8, 768, _GEN4, _GEN4, _ETHERNET, _AMPERE),
        Gpu("a100-80g", 79.1, 312.0, 2039, 300, _GEN4, 200, _AMPERE),
        Gpu("h100-80g", 79.1, 989.0, 3350, 450, _GEN5, 400, _HOPPER),
        Gpu("h200-141g", 139.7, 989.0, 4800, 450, _GEN5, 400, _HOPPER),
        Gpu("b200-180g", 178.3, 2250.0, 7670, 900, _GEN5, 400, _HOPPER),
    )
}


def find_gpu(name: str) -> Gpu:
    """Find a card by its name in the table. Raises ConfigError with the nearest names."""
    if name not in GPUS:
        known = f"there is {', '.join(GPUS)}, or give --memory_gib"
        inside = suggestion([gpu for gpu in GPUS if name.lower() in gpu][:3]) if len(name) > 1 else ""
        raise ConfigError(f"--gpu {name}: this card is not in the table: {known}.{inside or did_you_mean(name, GPUS)}")
    return GPUS[name]


def similar_gpu(memory_gib: float, bf16: bool = True) -> Gpu:
    """The card of the table with the nearest memory, with `memory_gib` in its place: speed as of that card."""
    cards = [gpu for gpu in GPUS.values() if gpu.bf16 == bf16] or [*GPUS.values()]
    nearest = min(cards, key=lambda gpu: abs(gpu.memory_gib - memory_gib))
    return dataclasses.replace(nearest, memory_gib=memory_gib)


def named_gpu(name: str | None, memory_gib: float | None) -> Gpu:
    """A card of the table, with `memory_gib` if that is given; without a name the one with the nearest memory.

    Raises ConfigError.
    """
    if name is not None:
        card = find_gpu(name)
        return card if memory_gib is None else dataclasses.replace(card, memory_gib=memory_gib)
    if memory_gib is None:
        raise ConfigError(f"no GPU is given: --gpu NAME ({', '.join(GPUS)}) or --memory_gib N")
    return similar_gpu(memory_gib)
