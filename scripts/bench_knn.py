"""`python -m scripts.bench_knn`: the search and vote of k-NN beside faiss's exact index, and the features it takes."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import fire
import torch
import torch.nn.functional as F
from torch import Tensor

from dino_ds.basics.formatting import markdown_table, short
from dino_ds.data.multicrop import EvalCrop
from dino_ds.data.normalization import IMAGENET
from dino_ds.data.sources import PhotoPatches
from dino_ds.engine.distributed import usable_cores
from dino_ds.errors import ConfigError
from dino_ds.evals.classifiers import knn_accuracies, knn_votes, nearest
from dino_ds.evals.features import Reading, extract_features
from dino_ds.models.foreign import build_backbone
from dino_ds.models.specs.backbones import VITS
from dino_ds.options.definition import Result
from dino_ds.planning.measure import Timing, describe_host, host_line, time_interleaved

_CLASSES = 1000
_TEMPERATURE = 0.07
_PIXELS, _PATCH = 32, 8
_ROUNDS, _WARMUP = 5, 1
_CPU = torch.device("cpu")


def main(
    queries: int = 10000, bank: int = 50000, width: int = 192, k: int = 20, images: int = 10000, as_json: bool = False
) -> None:
    """On the CPU, with one thread (CPU time) and with all cores (wall time). Raises ConfigError."""
    if k > bank:
        raise ConfigError(f"--k {k} is more than the {bank} rows of the bank: lower it")
    threads, faiss = len(usable_cores()), _faiss()
    problem = _Problem(queries, bank, width, k, faiss)
    rows = [problem.measure(count) for count in sorted({1, threads})]
    torch.set_num_threads(threads)
    result: dict[str, Any] = {"queries": queries, "bank": bank, "width": width, "k": k, "searches": rows}
    result |= {"faiss": faiss.__version__ if faiss else None, "same_neighbors": problem.agreement()}
    result |= {"images": images, "patch_size": _PATCH, "pixels": _PIXELS, "threads": threads}
    wall, cpu = _features_seconds(images)
    result |= {"features_seconds": wall, "features_cpu_seconds": cpu, "host": describe_host()}
    Result(result, _page(result)).show(as_json)


def _faiss() -> Any:
    """The faiss module, or None if it is not installed."""
    try:
        import faiss
    except ImportError:
        return None
    return faiss


class _Problem:
    """Unit-length noise: no cluster helps any search."""

    def __init__(self, queries: int, bank: int, width: int, k: int, faiss: Any) -> None:
        generator = torch.Generator().manual_seed(0)
        self._queries, self._bank = (
            F.normalize(torch.randn(count, width, generator=generator), dim=1) for count in (queries, bank)
        )
        self._labels, self._wanted = (
            torch.randint(0, _CLASSES, (count,), generator=generator) for count in (bank, queries)
        )
        self._k, self._faiss = k, faiss

    def measure(self, threads: int) -> dict[str, Any]:
        """Seconds of each, by turns; ratios are theirs to ours: above 1 is faster than faiss."""
        torch.set_num_threads(threads)
        runs: dict[str, Callable[[], object]] = {"search": self._search, "search_and_vote": self._search_and_vote}
        if self._faiss:
            self._faiss.omp_set_num_threads(threads)
            runs |= {"faiss_search": self._faiss_search, "faiss_search_and_vote": self._faiss_search_and_vote}
        timings = time_interleaved(runs, _ROUNDS, _WARMUP, _CPU)
        row: dict[str, Any] = {"threads": threads, "clock": timings["search"].clock}
        row |= {f"{name}_seconds": timing.seconds for name, timing in timings.items()}
        if self._faiss:
            row |= {f"{name}_ratio": _ratio(timings, name) for name in ("search", "search_and_vote")}
        return row

    def agreement(self) -> float | None:
        """The share of neighbors that both find; None without faiss. Equal cosines may be taken in any order."""
        if not self._faiss:
            return None
        value, ours = self._search()
        cosines, theirs = self._faiss_search()
        # What only one of the two has found must be as near as the farthest neighbor, but for rounding.
        last = value[:, -1:] + 1e-6
        same = (ours[:, :, None] == theirs[:, None]).any(dim=2) | (value <= last)
        return float(same.float().mean()) if torch.allclose(value, cosines, atol=1e-5) else 0.0

    def _search(self) -> tuple[Tensor, Tensor]:
        return nearest(self._queries, self._bank, self._k)

    def _search_and_vote(self) -> object:
        return knn_accuracies(self._bank, self._labels, self._queries, self._wanted, [self._k], _TEMPERATURE)

    def _faiss_search(self) -> tuple[Tensor, Tensor]:
        index = self._faiss.IndexFlatIP(self._bank.shape[1])
        index.add(self._bank.numpy())
        value, place = index.search(self._queries.numpy(), self._k)
        return torch.from_numpy(value), torch.from_numpy(place)

    def _faiss_search_and_vote(self) -> object:
        value, place = self._faiss_search()
        votes = [
            knn_votes(cosines, self._labels[rows], _CLASSES, _TEMPERATURE).argmax(dim=1)
            for cosines, rows in zip(value.split(512), place.split(512), strict=True)
        ]
        return (torch.cat(votes) == self._wanted).float().mean()


def _ratio(timings: dict[str, Timing], name: str) -> float:
    return timings[f"faiss_{name}"].seconds / timings[name].seconds


def _features_seconds(images: int) -> tuple[float, float]:
    """Wall and CPU time from images in memory to features, preparation included, by a ViT-Ti with random weights."""
    source = PhotoPatches("train")
    arch = dataclasses.replace(VITS["vit_tiny_patch16_224"], patch_size=_PATCH)
    network = build_backbone(arch, _PIXELS).eval()
    indices = [i % len(source) for i in range(images)]
    wall, cpu = time.perf_counter(), time.process_time()
    reading = Reading(EvalCrop(_PIXELS, IMAGENET), workers=0, progress="")
    extract_features(network.features, source, indices, _CPU, reading)
    return time.perf_counter() - wall, time.process_time() - cpu


def _page(result: dict[str, Any]) -> str:
    lines = [
        f"bench knn: {result['queries']} x {result['bank']} features of width {result['width']}, k = {result['k']}; "
        f"faiss-cpu {result['faiss'] or 'is not installed (pip install faiss-cpu)'}",
        host_line(result["host"]) + "\n",
    ]
    table = [_row(row) for row in result["searches"]]
    lines.append(markdown_table(["seconds", "search", "faiss", "x", "search + vote", "faiss + vote", "x"], table))
    if result["same_neighbors"] is not None:
        lines.append(f"\nx: times faiss's speed; {result['same_neighbors']:.4%} of the neighbors are the same")
    wall, cpu = result["features_seconds"], result["features_cpu_seconds"]
    what = f"{result['images']} images of {result['pixels']} pixels by ViT-Ti, patches of {result['patch_size']} pixels"
    lines.append(f"features of {what}: {wall:.1f} s with {result['threads']} thread(s), {cpu:.1f} s of CPU time")
    return "\n".join(lines)


def _row(row: dict[str, Any]) -> list[str]:
    cells = [f"{row['threads']} thread(s), {row['clock']} time"]
    for name in ("search", "search_and_vote"):
        for key in (f"{name}_seconds", f"faiss_{name}_seconds", f"{name}_ratio"):
            cells.append(short(row[key]) if key in row else "–")
    return cells


if __name__ == "__main__":
    fire.Fire(main)
